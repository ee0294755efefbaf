"""Errors that a user can understand, with the exit status of each kind."""

from collections.abc import Iterable


class KilnError(Exception):
    """An error that a user can act upon. The command prints its message, and exits with `exit_code`."""

    exit_code = 1


class PrerequisiteError(KilnError):
    """A prerequisite of the command is missing: an extra, Java, jars, a free port, a broker."""

    exit_code = 3


class SettingsError(KilnError, ValueError):
    """The settings are invalid. `problems` has a line for each error: source, key, value, and what is expected."""

    exit_code = 2

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
