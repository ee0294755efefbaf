"""What a user of Kiln may change: `kiln.toml` (read by `conf.settings`), the pinned jars, the broker's settings."""

from collections.abc import Iterable


class KilnError(Exception):
    """Something a user can understand and act upon: the command prints it as it is and exits with `exit_code`."""

    exit_code = 1


class PrerequisiteError(KilnError):
    """What Kiln needs around it is missing: Java, jars, a free port, a broker."""

    exit_code = 3


class SettingsError(KilnError, ValueError):
    """The settings cannot be used; `problems` has a line for each fault: where, what, what is expected."""

    exit_code = 2

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
