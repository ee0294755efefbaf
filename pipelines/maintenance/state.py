"""Reader of a Delta table's state for maintenance: its files, its log, and files in its folder that it does not use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable

from kiln.conf.process.location import FileEntry, Location
from kiln.pipelines.delta.lake import Lake, list_delta_fields, locate_commit, locate_log
from kiln.pipelines.maintenance.plan import LogEntry, RemovedFiles, TableFile
from kiln.schemas.delta.layout import LAYOUTS, Layout
from kiln.schemas.delta.tables import TABLES

_DIGITS = 20
"""digits of the version in the name of each log file (PROTOCOL.md, Delta Log Entries)"""


@dataclass(frozen=True)
class TableState:
    """A Delta table at its newest version, and the contents of its folder."""

    name: str
    opened: DeltaTable
    files: tuple[TableFile, ...]
    """files of this version"""
    strays: tuple[FileEntry, ...]
    """Parquet files in the folder that this version does not use, listed before the version was read"""
    entries: tuple[LogEntry, ...]
    """commits in the log"""
    checkpoints: frozenset[int]
    """versions with a checkpoint in the log"""

    @property
    def newest_append(self) -> int | None:
        """Time of the newest file, µs; `None` if the table has no files."""
        return max((file.modified for file in self.files), default=None)


def read_state(lake: Lake, name: str) -> TableState:
    """Read the state of a table.

    Raises:
        LakeError: The table cannot be read.
    """
    on_disk = [file for file in lake.folder(name).files() if file.name.endswith(".parquet")]
    opened = lake.open(name)
    files = tuple(list_files(opened, LAYOUTS.get(name, Layout()).age))
    active = {file.path for file in files}
    entries, checkpoints = read_log(lake.folder(name))
    strays = tuple(stray for stray in on_disk if stray.name not in active)
    return TableState(name, opened, files, strays, tuple(entries), frozenset(checkpoints))


def describe_unsupported(lake: Lake, name: str, opened: DeltaTable) -> str | None:
    """Describe why Kiln must not change a table in maintenance, or return `None` if Kiln may change it."""
    table = TABLES.get(name)
    if table is None:
        return "it is not one of Kiln's tables"
    protocol, metadata = opened.protocol(), opened.metadata()
    if protocol.min_reader_version > 1 or protocol.min_writer_version > 2:
        return "it uses Delta features that Kiln does not support"
    if metadata.partition_columns:
        return "it has partition columns"
    fields = json.loads(opened.schema().to_json())["fields"]
    if [(field["name"], field["type"]) for field in fields] != list_delta_fields(table):
        return "its columns differ from those of this Kiln"
    return None


def list_files(opened: DeltaTable, age: str | None) -> Iterator[TableFile]:
    """List the files of a table version, with the least and greatest time in the column `age`.

    If `age` is `None`, the time of the file's commit stands for both.
    """
    adds = pa.table(opened.get_add_actions(flatten=True))
    unknown = [None] * adds.num_rows
    bounds = [
        adds[name].cast(pa.int64()).to_pylist() if name in adds.schema.names else unknown
        for name in (f"min.{age}", f"max.{age}")
    ]
    columns = (adds[name].to_pylist() for name in ("path", "size_bytes", "num_records", "modification_time"))
    for path, size, rows, modified, least, greatest in zip(*columns, *bounds, strict=True):
        modified_at = modified * 1_000
        least, greatest = (modified_at, modified_at) if age is None else (least, greatest)
        yield TableFile(unquote(path), size, rows or 0, modified_at, least, greatest)


def read_log(table: Location) -> tuple[list[LogEntry], set[int]]:
    """List the commits in a table's log, sorted by version, and the versions that have a single-file checkpoint."""
    entries: list[LogEntry] = []
    checkpoints: set[int] = set()
    for file in locate_log(table).files():
        version, _, kind = file.name.partition(".")
        if not version.isdigit() or len(version) != _DIGITS:
            continue
        if kind == "json":
            entries.append(LogEntry(int(version), file.modified))
        elif kind == "checkpoint.parquet":
            checkpoints.add(int(version))
    return sorted(entries, key=lambda entry: entry.version), checkpoints


def read_removed_files(table: Location, entries: Iterable[LogEntry], log_start: int | None) -> RemovedFiles:
    """Read from the log which data files its commits remove.

    Args:
        table: Folder of the table.
        entries: Commits in the log.
        log_start: Version at which the log will begin after trimming; `None` if it is not trimmed.
    """
    before_start: set[str] = set()
    after_start: set[str] = set()
    for entry in entries:
        removed = before_start if log_start is not None and entry.version <= log_start else after_start
        removed |= _read_removals(locate_commit(table, entry.version))
    return RemovedFiles(frozenset(before_start), frozenset(after_start))


def _read_removals(entry: Location) -> set[str]:
    data = entry.read()
    if b'"remove"' not in data:  # as in most commits
        return set()
    actions = map(json.loads, data.splitlines())
    return {unquote(action["remove"]["path"]) for action in actions if "remove" in action}
