"""The lake as delta-rs sees it: which tables there are, and one of them opened. No Java, no Spark."""

from pathlib import Path

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from conf.errors import KilnError


class LakeError(KilnError):
    """A table of the lake cannot be read; the message names it."""


def tables_in(lake: Path) -> tuple[str, ...]:
    """Names of the Delta tables in a lake folder, sorted; none when the folder does not exist."""
    if not lake.is_dir():
        return ()
    return tuple(sorted(path.parent.name for path in lake.glob("*/_delta_log")))


def open_table(lake: Path, name: str) -> DeltaTable:
    """A table of the lake. LakeError: it cannot be read."""
    try:
        return DeltaTable(str(lake / name))
    except (DeltaError, OSError) as error:
        raise LakeError(f"table {name} in {lake} cannot be read: {error}") from error
