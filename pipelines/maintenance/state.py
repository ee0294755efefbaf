"""State of a table and its folder. Reads only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable

from kiln.conf.process.location import Location
from kiln.pipelines.delta.lake import Lake, list_delta_fields, locate_commit, locate_log
from kiln.pipelines.maintenance.plan import LogEntry, RemovedFiles, TableFile, UntrackedFile
from kiln.schemas.delta.layout import LAYOUTS, Layout
from kiln.schemas.delta.tables import TABLES

_DIGITS = 20
"""of the version in the name of each file of the log (PROTOCOL.md, Delta Log Entries)"""


@dataclass(frozen=True)
class TableState:
    """A table at its newest version. The untracked files were listed before that version was read."""

    name: str
    opened: DeltaTable
    files: tuple[TableFile, ...]
    strays: tuple[UntrackedFile, ...]
    entries: tuple[LogEntry, ...]
    checkpoints: frozenset[int]

    @property
    def newest_append(self) -> int | None:
        """Time of the newest append, µs."""
        return max((file.modified for file in self.files), default=None)


def read_state(lake: Lake, name: str) -> TableState:
    """Read the state of a table.

    Raises:
        LakeError: The table cannot be read.
    """
    on_disk = _list_parquet_files(lake.folder(name))
    opened = lake.open(name)
    files = tuple(list_files(opened, LAYOUTS.get(name, Layout()).age))
    active = {file.path for file in files}
    entries, checkpoints = read_log(lake.folder(name))
    strays = tuple(stray for stray in on_disk if stray.name not in active)
    return TableState(name, opened, files, strays, tuple(entries), frozenset(checkpoints))


def describe_unsupported(lake: Lake, name: str, opened: DeltaTable) -> str | None:
    """Describe why Kiln must not write this table, or return `None` if it may."""
    table = TABLES.get(name)
    if table is None:
        return "it is no table of Kiln's"
    protocol, metadata = opened.protocol(), opened.metadata()
    if protocol.min_reader_version > 1 or protocol.min_writer_version > 2:
        return "it uses features of Delta that Kiln does not"
    if metadata.partition_columns:
        return "it has partition columns"
    fields = json.loads(opened.schema().to_json())["fields"]
    if [(each["name"], each["type"]) for each in fields] != list_delta_fields(table):
        return "it has other columns than this Kiln's"
    return None


def list_files(opened: DeltaTable, age: str | None) -> Iterator[TableFile]:
    """List the files of a version with the bounds of the column `age`, or with their commit time if there is none."""
    adds = pa.table(opened.get_add_actions(flatten=True))
    unknown = [None] * adds.num_rows
    ends = [
        adds[each].cast(pa.int64()).to_pylist() if each in adds.schema.names else unknown
        for each in (f"min.{age}", f"max.{age}")
    ]
    columns = (adds[each].to_pylist() for each in ("path", "size_bytes", "num_records", "modification_time"))
    for path, size, rows, modified, least, greatest in zip(*columns, *ends, strict=True):
        came = modified * 1_000
        least, greatest = (came, came) if age is None else (least, greatest)
        yield TableFile(unquote(path), size, rows or 0, came, least, greatest)


def read_log(table: Location) -> tuple[list[LogEntry], set[int]]:
    """List the commits in the log, by version, and the versions that have a single-file checkpoint."""
    entries: list[LogEntry] = []
    checkpoints: set[int] = set()
    for found in locate_log(table).files():
        version, _, kind = found.name.partition(".")
        if not version.isdigit() or len(version) != _DIGITS:
            continue
        if kind == "json":
            entries.append(LogEntry(int(version), found.modified))
        elif kind == "checkpoint.parquet":
            checkpoints.add(int(version))
    return sorted(entries, key=lambda entry: entry.version), checkpoints


def read_removed_files(table: Location, entries: Iterable[LogEntry], begins: int | None) -> RemovedFiles:
    """Read the files that the entries remove, apart for those up to the version `begins`."""
    past: set[str] = set()
    kept: set[str] = set()
    for entry in entries:
        removed = past if begins is not None and entry.version <= begins else kept
        removed |= _read_removals(locate_commit(table, entry.version))
    return RemovedFiles(frozenset(past), frozenset(kept))


def _read_removals(entry: Location) -> set[str]:
    """Read the files that a commit removes. Most remove none, so most are not parsed."""
    data = entry.read()
    if b'"remove"' not in data:
        return set()
    actions = map(json.loads, data.splitlines())
    return {unquote(action["remove"]["path"]) for action in actions if "remove" in action}


def _list_parquet_files(table: Location) -> list[UntrackedFile]:
    return [UntrackedFile(*found) for found in table.files() if found.name.endswith(".parquet")]
