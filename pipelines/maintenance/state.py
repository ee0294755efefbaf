"""What is known of a table and of its folder. Reads only."""

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
    """A table at its newest version. `strays` were looked for before that version was read."""

    name: str
    opened: DeltaTable
    files: tuple[TableFile, ...]
    strays: tuple[UntrackedFile, ...]
    entries: tuple[LogEntry, ...]
    checkpoints: frozenset[int]

    @property
    def newest_append(self) -> int | None:
        """When rows came last, µs."""
        return max((file.modified for file in self.files), default=None)


def read_state(lake: Lake, name: str) -> TableState:
    """LakeError: the table cannot be read."""
    there = _list_parquet_files(lake.folder(name))
    opened = lake.open(name)
    files = tuple(list_files(opened, LAYOUTS.get(name, Layout()).age))
    active = {file.path for file in files}
    entries, checkpoints = read_log(lake.folder(name))
    strays = tuple(stray for stray in there if stray.name not in active)
    return TableState(name, opened, files, strays, tuple(entries), frozenset(checkpoints))


def describe_unsupported(lake: Lake, name: str, opened: DeltaTable) -> str | None:
    """Why Kiln must not write this table, in words; None: Kiln may."""
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
    """The files of a version, with the range of the column `age`; without one, with the time they came."""
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
    """The commits in the log of a table's folder, by version, and the versions that have a checkpoint of one file."""
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
    """The files that the entries take out of the table. Those that are out of it at the version `begins` already are
    apart."""
    past: set[str] = set()
    kept: set[str] = set()
    for entry in entries:
        found = past if begins is not None and entry.version <= begins else kept
        found |= _read_removals(locate_commit(table, entry.version))
    return RemovedFiles(frozenset(past), frozenset(kept))


def _read_removals(entry: Location) -> set[str]:
    """The files that a commit takes out of its table. Most take none, so most are not parsed."""
    said = entry.read()
    if b'"remove"' not in said:
        return set()
    actions = map(json.loads, said.splitlines())
    return {unquote(action["remove"]["path"]) for action in actions if "remove" in action}


def _list_parquet_files(table: Location) -> list[UntrackedFile]:
    return [UntrackedFile(*found) for found in table.files() if found.name.endswith(".parquet")]
