"""Errors that a user can understand, with the exit status of each kind. Every room may import this file."""

from collections.abc import Iterable


class KilnError(Exception):
    """An error that a user can act upon: the command prints its message, and exits with `exit_code`."""

    exit_code = 1


class PrerequisiteError(KilnError):
    """A prerequisite is missing: an extra, Java, jars, a free port, a broker."""

    exit_code = 3


class SettingsError(KilnError, ValueError):
    """The settings are invalid; `problems` contains a line for each error: source, value, and what is expected."""

    exit_code = 2

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))
