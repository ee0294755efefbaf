"""Time travel of Delta tables, by version or by timestamp."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.table_history import CommitTime, find_commit_at, find_first_commit

if TYPE_CHECKING:
    from deltalake import DeltaTable

AsOf = int | datetime
"""A version number, for every table, or a time with a time zone."""


class NoSuchVersionError(KilnError):
    """A table does not have the version, or has it no longer. The message names the table and its newest version."""


def parse_as_of(text: str) -> AsOf:
    """Parse a version (`12`) or an ISO 8601 time (`2026-11-01`, `2026-11-01T12:00:00Z`), in UTC by default.

    Raises:
        ValueError: The text is neither; the message has the expected forms.
    """
    if text.isdecimal():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("a version (12) or a time (2026-11-01, 2026-11-01T12:00:00Z)") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def open_table(lake: Lake, name: str, as_of: AsOf | None) -> DeltaTable | None:
    """Open a table, optionally at an earlier version.

    Returns:
        The table, or `None` if it did not exist at that time.

    Raises:
        LakeError: The table cannot be read.
        NoSuchVersionError: The table does not have that version.
    """
    table = lake.open(name)
    if as_of is None:
        return table
    from deltalake.exceptions import DeltaError

    newest = table.version()
    version = _find_version_at(lake, name, as_of) if isinstance(as_of, datetime) else as_of
    if version is None:
        return None
    if isinstance(as_of, datetime):
        version = min(version, newest)  # others commit meanwhile
    if version > newest:
        raise NoSuchVersionError(f"table {name} has no version {version}. Its newest version is {newest}")
    try:
        table.load_as_version(version)
    except (DeltaError, OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise NoSuchVersionError(
            f"cannot read table {name} as of {as_of}: {reason}. Its newest version is {newest}; table maintenance "
            "removes old ones"
        ) from error
    return table


def _find_version_at(lake: Lake, name: str, at: datetime) -> int | None:
    folder = lake.folder(name)
    if commit := find_commit_at(folder, int(at.timestamp() * 1_000)):
        return commit.version
    first = find_first_commit(folder)
    if first is None:
        raise NoSuchVersionError(
            f"the log of table {name} states no commit times. Pass a version instead of {at.isoformat()}"
        )
    if first.version:
        raise NoSuchVersionError(
            f"cannot read table {name} as of {at.isoformat()}: its log begins with version {first.version}, of "
            f"{_format_time(first)}, because table maintenance has removed older entries"
        )
    return None


def describe_absence(lake: Lake, name: str, as_of: AsOf | None) -> str:
    """Describe that a table of today did not exist at an earlier time; empty if that is not so."""
    if not isinstance(as_of, datetime):
        return ""
    table = next((known for known in lake.tables() if known.lower() == name.lower()), None)
    first = find_first_commit(lake.folder(table)) if table else None
    if first is None:
        return ""
    return f"table {name} did not exist at {as_of.isoformat()}: its first version is of {_format_time(first)}"


def _format_time(commit: CommitTime) -> str:
    return datetime.fromtimestamp(commit.at / 1_000, UTC).isoformat(timespec="milliseconds")
