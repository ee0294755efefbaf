"""The lake: where its Delta tables are, how they are opened and created, and the errors of tables that cannot be read.

All of this uses delta-rs, without Spark or Java. delta-rs is imported only where a table is opened, because its import
takes a tenth of the CPU time of a short query.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from kiln.conf.process.errors import KilnError
from kiln.conf.process.forks import refuse_fork
from kiln.conf.process.location import Location, parse_location, shorten_error
from kiln.schemas.delta.tables import TABLES, TABLES_VERSION, Column, Table

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable, Schema

_LOG = "_delta_log"
_VERSION = "kiln.version"
"""Property in the metadata of each table, with the version of its columns. Delta readers ignore it."""
_COMMIT_ATTEMPTS = 5


class LakeError(KilnError):
    """A table of the lake cannot be read or written, or the ranges of its frames cannot be stored."""


class SchemaChangedError(LakeError):
    """Another program has changed the columns of a table, so that Kiln cannot write to it."""


@dataclass(frozen=True)
class Lake:
    """The folder of the Delta tables, on a disk or in an object store. Each table has a folder in it."""

    path: str
    """path or URI of the folder"""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """storage options of delta-rs, which may contain secrets"""

    @classmethod
    def from_location(cls, root: Location) -> Lake:
        """Create the `Lake` of a folder."""
        return cls(root.uri, root.options)

    @property
    def root(self) -> Location:
        """Folder of the lake."""
        return parse_location(self.path, self.options)

    def folder(self, name: str) -> Location:
        """Return the folder of a table, which need not exist."""
        return self.root / name

    def table(self, name: str) -> str:
        """Return the URI of a table, as delta-rs and DuckDB take it. The table need not exist."""
        return self.folder(name).uri

    def locate_run(self, name: str) -> Lake:
        """Return the lake of a backfill run: a folder in this lake, with tables of the same names."""
        return Lake(f"{self.path}/backfill/{name}", self.options)

    def tables(self) -> tuple[str, ...]:
        """List the names of the existing tables, sorted."""
        return tuple(sorted(name for name in self.root.folders() if (self.folder(name) / _LOG).exists()))

    def has(self, name: str) -> bool:
        """Return true if a table exists.

        Raises:
            LakeError: The storage does not answer.
            ForkedProcessError: This process is a fork of one that has read a lake.
        """
        refuse_fork()
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            return DeltaTable.is_deltatable(self.table(name), self.storage_options)
        except (DeltaError, OSError) as error:
            raise LakeError(f"cannot check if table {name} exists in {self.path}: {shorten_error(error)}") from error

    def open(self, name: str, version: int | None = None) -> DeltaTable:
        """Open a version of a table, by default the newest.

        Raises:
            LakeError: The table cannot be read, or an older or a newer Kiln wrote it.
            ForkedProcessError: This process is a fork of one that has read a lake.
        """
        refuse_fork()
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            table = DeltaTable(self.table(name), version=version, storage_options=self.storage_options)
        except (DeltaError, OSError) as error:
            reason = _describe_log_fault(self.folder(name)) or shorten_error(error)
            raise LakeError(f"cannot read table {name} in {self.path}: {reason}") from error
        if name in TABLES:
            self._check_version(name, table)
        return table

    def _check_version(self, name: str, table: DeltaTable) -> None:
        version = table.metadata().configuration.get(_VERSION, "")
        if version == str(TABLES_VERSION):
            return
        newer = version.isdigit() and int(version) > TABLES_VERSION
        raise LakeError(
            f"table {name} in {self.path} has {f'version {version}' if version else 'no version'}, and this Kiln reads "
            f"version {TABLES_VERSION}. Use the {'newer' if newer else 'older'} Kiln that wrote the lake, or set "
            "another folder (lake.uri, or --state)"
        )

    def has_rows(self, name: str) -> bool:
        """Return true if a table exists and has a row."""
        return self.has(name) and bool(self.open(name).file_uris())

    def create(self, names: Iterable[str]) -> None:
        """Create the tables that are missing, and add missing columns to existing tables.

        delta-rs creates the tables, because it takes milliseconds for each, and Spark a second.

        Args:
            names: Names of Kiln's tables (`kiln.schemas.delta.tables`).

        Raises:
            LakeError: An existing table cannot be read, or an older or a newer Kiln wrote it.
            SchemaChangedError: Another program has changed the columns of an existing table.
        """
        from deltalake import DeltaTable

        for name in names:
            if self.has(name):
                self._add_columns(name)
                continue
            table = TABLES[name]
            DeltaTable.create(
                self.table(name),
                _build_schema([_build_field(column) for column in table.columns]),
                mode="ignore",
                name=name,
                description=table.comment,
                configuration={
                    "delta.checkpointInterval": "50",
                    "delta.dataSkippingStatsColumns": ",".join(list_stats_columns(table)),
                    "delta.deletedFileRetentionDuration": "interval 1 days",
                    _VERSION: str(TABLES_VERSION),
                },
                raise_if_key_not_exists=False,
                storage_options=self.storage_options,
            )
            self.sync_commits(name, 0, 0)
            for folder in (self.folder(name), self.root):
                folder.sync()

    def _add_columns(self, name: str) -> None:
        """Add the columns that an existing table lacks. All of them are nullable: a change that adds another
        column raises TABLES_VERSION, and `open` refuses the table."""
        from deltalake.exceptions import CommitFailedError

        for _ in range(_COMMIT_ATTEMPTS):
            table = self.open(name)
            self.check_columns(name, table.schema().to_json(), added_later=True)
            existing = {column.name for column in table.schema().fields}
            missing = [_build_field(column) for column in TABLES[name].columns if column.name not in existing]
            if not missing:
                return
            with suppress(CommitFailedError):  # a query appends to the table, or another Kiln adds the columns
                table.alter.add_columns(_build_schema(missing).fields)
                newest = self.open(name).version()
                self.sync_commits(name, newest, newest)
                return
        raise LakeError(
            f"cannot add columns to table {name} in {self.path}: in each of {_COMMIT_ATTEMPTS} tries, another process "
            "committed to it first. Start Kiln again"
        )

    def check_columns(self, name: str, schema: str, *, added_later: bool = False, exact: bool = False) -> None:
        """Check that Kiln can write to a table. Columns that Kiln does not know are allowed if they are nullable.

        Args:
            schema: Schema of the table as JSON (PROTOCOL.md, Schema Serialization Format).
            added_later: If true, nullable columns of Kiln may be missing, because `create` is about to add them.
            exact: If true, no unknown column may exist, because Kiln is about to rewrite rows without it.

        Raises:
            SchemaChangedError: Kiln cannot write to the table.
        """
        if fault := find_column_fault(name, schema, added_later=added_later, exact=exact):
            raise SchemaChangedError(
                f"cannot write to table {name} in {self.path}: {fault}. Another program has changed the columns. "
                f"Change the columns back, or restore a version from before the change ({self.table(name)})"
            )

    def sync_commits(self, name: str, first: int, last: int) -> None:
        """Sync the commits `first` to `last` of a table to disk, because neither delta-rs nor Spark syncs what it
        writes."""
        table = self.folder(name)
        for version in range(first, last + 1):
            locate_commit(table, version).sync()
        (table / _LOG).sync()

    def sync_files(self, name: str) -> None:
        """Sync all files of a table to disk."""
        folder = self.folder(name)
        if folder.folder is None:
            return
        for file in folder.files():
            (folder / file.name).sync()
        folder.sync()

    @property
    def storage_options(self) -> dict[str, str] | None:
        """The storage options as delta-rs takes them; None if there are none."""
        return dict(self.root.options) or None


def _describe_log_fault(table: Location) -> str:
    """Describe the files that are missing in the log of a table (PROTOCOL.md, Delta Log Entries). If none is missing,
    the result is empty."""
    log = locate_log(table)
    names = [file.name.split(".") for file in log.files()]
    commits = sorted(int(name[0]) for name in names if name[1:] == ["json"] and name[0].isdecimal())
    checkpoints = {int(name[0]) for name in names if name[1:2] == ["checkpoint"] and name[0].isdecimal()}
    start = max(checkpoints, default=-1)
    missing = sorted({*range(start + 1, max(commits, default=start) + 1)}.difference(commits))
    if missing:
        versions = f"version {missing[0]}" if len(missing) == 1 else f"versions {missing[0]} to {missing[-1]}"
        return f"its log lacks the commit of {versions}. Restore {log} from a backup"
    try:
        hint = json.loads((log / LAST_CHECKPOINT).read())
    except (OSError, ValueError):
        return ""
    version = hint.get("version") if isinstance(hint, dict) else None
    if version is None or version in checkpoints:
        return ""
    pointer = f"the file {LAST_CHECKPOINT}"
    remedy = f"Remove {pointer}" if table.folder is None else f"Run kiln recover --yes, which moves {pointer} away"
    return f"{log / LAST_CHECKPOINT} names a checkpoint of version {version}, which does not exist. {remedy}"


LAST_CHECKPOINT: Final = "_last_checkpoint"
"""File in the log that names its newest checkpoint (PROTOCOL.md, Last Checkpoint File)"""


def locate_log(table: Location) -> Location:
    """Return the folder of the log of a table. `table`: folder of the table."""
    return table / _LOG


def locate_commit(table: Location, version: int) -> Location:
    """Return the file of a commit (PROTOCOL.md, Delta Log Entries). `table`: folder of the table."""
    return locate_log(table) / f"{version:020}.json"


# Names of Spark DDL types in the Delta protocol (PROTOCOL.md, Schema Serialization Format), where they differ.
_DELTA_TYPES: dict[str, str | dict[str, object]] = {
    "int": "integer",
    "bigint": "long",
    "map<string,string>": {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True},
    "array<string>": {"type": "array", "elementType": "string", "containsNull": True},
}


def list_stats_columns(table: Table) -> list[str]:
    """List the columns of a table for which each file has least and greatest values, so that readers can skip files.

    These are the columns by which users filter. For the first 32 columns, Delta's default, the statistics would cost a
    third of the time of writing wide rows of text.
    """
    filtered = {"network", "type", "stream", "cid", "batch_cid", "separator_value"}
    return [
        column.name
        for column in table.columns
        if column.name in filtered or column.type in ("timestamp", "int", "bigint")
    ]


def list_delta_fields(table: Table) -> list[tuple[str, object]]:
    """List the columns of a table as the names and types of Delta's protocol."""
    return [(column.name, _DELTA_TYPES.get(column.type, column.type)) for column in table.columns]


def find_column_fault(name: str, schema: str, *, added_later: bool = False, exact: bool = False) -> str:
    """Describe the first difference that prevents Kiln from writing to a table. Without such a difference, and for a
    table that is not Kiln's, the result is empty. The arguments are those of `Lake.check_columns`."""
    if name not in TABLES:
        return ""
    fields = {field["name"]: field for field in json.loads(schema)["fields"]}
    table = TABLES[name]
    unknown = sorted(fields.keys() - {column.name for column in table.columns})
    for column, (_, kind) in zip(table.columns, list_delta_fields(table), strict=True):
        field = fields.get(column.name)
        if field is None:
            if added_later and column.nullable and not unknown:
                continue
            others = f", and Kiln does not know the column {', '.join(unknown)}" if unknown else ""
            return f"the column {column.name} is missing{others}"
        if field["type"] != kind:
            return f"the column {column.name} has the type {json.dumps(field['type'])}, not {json.dumps(kind)}"
        if field["metadata"].get(_PHYSICAL_NAME, column.name) != column.name:
            return f"the column {column.name} was renamed"
        if column.nullable and not field["nullable"]:
            return f"the column {column.name} no longer allows null"
    for column_name in unknown:
        if exact:
            return f"Kiln does not know the column {column_name}, and would rewrite the rows without it"
        if not fields[column_name]["nullable"]:
            return f"Kiln does not know the column {column_name}, which does not allow null"
    return ""


_PHYSICAL_NAME = "delta.columnMapping.physicalName"
"""Key in the metadata of a field for the name of its column in the files (PROTOCOL.md, Column Mapping)"""


def _build_schema(fields: list[dict[str, object]]) -> Schema:
    from deltalake import Schema

    return Schema.from_json(json.dumps({"type": "struct", "fields": fields}))


def _build_field(column: Column) -> dict[str, object]:
    return {
        "name": column.name,
        "type": _DELTA_TYPES.get(column.type, column.type),
        "nullable": column.nullable,
        "metadata": {"comment": column.comment},
    }


_BATCH_ROWS: Final = 65_536


def read_rows(table: DeltaTable, columns: Sequence[str], where: str = "true") -> Iterator[pa.RecordBatch]:
    """Read columns of the rows that match an SQL condition, at the open version of a table. Text has the type
    string_view.

    `DeltaTable.to_pyarrow_table` is not used, because it reads files through Python on Arrow's threads. If Python exits
    while such a thread closes a file, the process ends with SIGABRT ("terminate called without an active exception"),
    even if all work is done.

    Raises:
        LakeError: A file cannot be read.
    """
    import pyarrow as pa
    from deltalake import QueryBuilder
    from deltalake.exceptions import DeltaError

    query = QueryBuilder({"datafusion.execution.batch_size": str(_BATCH_ROWS)}).register("t", table)
    names = ", ".join(f'"{name}"' for name in columns)
    try:
        yield from pa.RecordBatchReader.from_stream(query.execute(f"SELECT {names} FROM t WHERE {where}"))
    except (DeltaError, OSError, pa.ArrowInvalid) as error:
        raise LakeError(f"cannot read the table {table.table_uri}: {shorten_error(error)}") from error


_COLUMN_MAPPING: Final = "columnMapping"
_MODE: Final = "delta.columnMapping.mode"


class MissingFilesError(LakeError):
    """Data files of a table are missing, because another program or table maintenance has removed them."""


def list_reader_features(table: DeltaTable) -> list[str]:
    """List the Delta features that a reader of a table needs (PROTOCOL.md, Table Features).

    A table with reader version 3 lists them. With version 2, the only such feature is column mapping.
    """
    protocol = table.protocol()
    if protocol.reader_features is not None:
        return sorted(protocol.reader_features)
    mode = table.metadata().configuration.get(_MODE, "none")
    return [_COLUMN_MAPPING] if protocol.min_reader_version > 1 and mode != "none" else []


def build_features_error(lake: Lake, name: str, features: list[str]) -> LakeError:
    """Build the error for a table with features that DuckDB cannot read."""
    return LakeError(
        f"cannot read table {name} in {lake.path}: it needs the Delta features {', '.join(features)}. Use a reader "
        "that has them, such as kiln sql --spark"
    )


def find_missing_files(lake: Lake, name: str, table: DeltaTable) -> list[str]:
    """List the missing files of an open table, relative to its folder. Files outside the folder are not checked."""
    folder = lake.folder(name)
    listed = {file.name for file in folder.files()}
    paths = [unquote(str(path)) for path in table.get_add_actions(flatten=False)["path"].to_pylist()]
    inside = [path for path in paths if "://" not in path and not PurePosixPath(path).is_absolute()]
    return [path for path in inside if path not in listed and not (folder / path).exists()]


def build_missing_files_error(lake: Lake, name: str, table: DeltaTable) -> MissingFilesError | None:
    """Build the error for missing files of an open table. Returns None if no file is missing."""
    missing = find_missing_files(lake, name, table)
    if not missing:
        return None
    others = f" and {len(missing) - 1:,} more files are" if len(missing) > 1 else " is"
    newest = lake.open(name).version()
    what = f"cannot read table {name} in {lake.path}: {missing[0]}{others} missing"
    if table.version() < newest:
        return MissingFilesError(
            f"{what} from version {table.version()}. Table maintenance removes files that only old versions have. Read "
            f"a later version, up to {newest}"
        )
    return MissingFilesError(
        f"{what}. Another program has removed files that Kiln had committed. Restore {lake.table(name)} from a backup; "
        "without a backup, see RUNBOOK, A table cannot be read"
    )
