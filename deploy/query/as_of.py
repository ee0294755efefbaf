"""Time travel of Delta tables, by version or by timestamp."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.lake import Lake

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
    try:
        if isinstance(as_of, datetime):
            # delta-rs loads the first version for any earlier time
            first = min((each["timestamp"] for each in table.history()[-1:]), default=0)
            if first > as_of.timestamp() * 1000:
                return None
        elif as_of > newest:
            raise NoSuchVersionError(f"table {name} has no version {as_of}. Its newest version is {newest}")
        table.load_as_version(as_of)
    except (DeltaError, OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise NoSuchVersionError(
            f"cannot read table {name} as of {as_of}: {reason}. Its newest version is {newest}; table maintenance "
            "removes old ones"
        ) from error
    return table
