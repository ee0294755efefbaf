"""Tables as they were: Delta's time travel, by version or by time."""

from __future__ import annotations

from datetime import UTC, datetime

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.lake import Lake

AsOf = int | datetime
"""A version, the same of every table; or a time with its zone."""


class NoSuchVersionError(KilnError):
    """A table has no such version, or no longer. The message names the table and its newest version."""


def parse_as_of(text: str) -> AsOf:
    """`12`, or a time in ISO 8601: `2026-11-01`, `2026-11-01T12:00:00Z`. A time without a zone is UTC. ValueError says
    what was expected."""
    if text.isdecimal():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("a version (12) or a time (2026-11-01, 2026-11-01T12:00:00Z)") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def open_table(lake: Lake, name: str, as_of: AsOf | None) -> DeltaTable | None:
    """A table as it is now, or as it was. None: at that time there was no such table.

    LakeError: the table cannot be read. NoSuchVersionError.
    """
    table = lake.open(name)
    if as_of is None:
        return table
    newest = table.version()
    try:
        if isinstance(as_of, datetime):
            # delta-rs takes the first version for any time before it
            first = min((each["timestamp"] for each in table.history()[-1:]), default=0)
            if first > as_of.timestamp() * 1000:
                return None
        elif as_of > newest:
            raise NoSuchVersionError(f"table {name} has no version {as_of}: its newest is {newest}")
        table.load_as_version(as_of)
    except (DeltaError, OSError, ValueError) as error:
        said = str(error).split("\n")[0]
        raise NoSuchVersionError(
            f"table {name} cannot be read as of {as_of}: {said}. Its newest version is {newest}; old versions go "
            "when the table is cleaned up"
        ) from error
    return table
