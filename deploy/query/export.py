"""Export of a lake into one DuckDB file, which plain DuckDB and its drivers (JDBC, ODBC) open without Kiln.

The tables are copied, and the views of kiln.schemas.delta.views are views over the copies. The table `kiln_export`
records the version of each table. The file is written under another name and renamed when it is complete, so readers
see either the old export or the new one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import duckdb

from kiln.conf.process.errors import KilnError
from kiln.conf.process.files import to_disk
from kiln.conf.settings.keys import suggest_key
from kiln.deploy.query.ask import Answer, AsOf, Row, describe_absence, limit_memory, open_table
from kiln.pipelines.delta.duckdb_tables import add_empty_tables, create_views, quote_name, quote_text
from kiln.pipelines.delta.lake import Lake, build_missing_files_error
from kiln.schemas.delta.layout import LAYOUTS, Layout
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import View, views

if TYPE_CHECKING:
    from deltalake import DeltaTable

RECORD: Final = "kiln_export"
"""name of a table in the export, with a row for each copied table"""
_RECORD_COLUMNS: Final = {
    "table_name": "VARCHAR",
    "version": "BIGINT",
    "rows": "BIGINT",
    "since": "TIMESTAMPTZ",
    "exported_at": "TIMESTAMPTZ",
}
_STORAGE: Final = "v1.0.0"
"""oldest DuckDB version that can read the file; BI tools may come with older drivers than ours"""


_MEMORY: Final = 1 << 30
"""bytes of memory that DuckDB may use; with more, it would only keep blocks that are already written"""


class ExportError(KilnError):
    """The lake cannot be exported. An earlier export file is left unchanged."""


def export_lake(
    lake: Lake,
    target: Path,
    progress: Callable[[str], None],
    *,
    names: Collection[str] = (),
    since: datetime | None = None,
    as_of: AsOf | None = None,
) -> Answer:
    """Copy tables and views of a lake into a DuckDB file, and replace an earlier export of that name.

    Args:
        target: Path of the DuckDB file.
        progress: Called with progress messages.
        names: Tables and views to export, by default all. The tables that a named view reads are also exported, and
            so are the views that read only exported tables.
        since: Copy only rows from this time on, in tables with a time column. By default, all rows are copied.
        as_of: Version or time of the tables, by default the newest.

    Returns:
        The rows of `kiln_export`.

    Raises:
        ExportError: The file cannot be written or must not be replaced, or a name is unknown.
        LakeError: A table cannot be read.
        NoSuchVersionError: A table does not have that version.
    """
    target = target.resolve()
    _check_target(target)
    wanted = _select_tables(lake, names)
    left_out = frozenset(lake.tables()).difference(wanted)
    tables = {name: table for name in wanted if (table := open_table(lake, name, as_of)) is not None}
    if not tables:
        absent = "" if as_of is None or not wanted else describe_absence(lake, wanted[0], as_of)
        raise ExportError(absent or f"there are no tables to export in {lake.path}. kiln run creates them")
    with _translate_file_errors(target), TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        file = Path(folder) / "new.duckdb"  # the file name is also the name of the catalog while Kiln writes it
        export = _Export(lake, target, file, tables, left_out, as_of, progress)
        rows = export.copy_tables(since)
        export.create_views()
        if target.exists():
            shutil.copymode(target, file)
        to_disk(file)
        _check_target(target)  # another program may have opened it meanwhile
        os.replace(file, target)
        to_disk(target.parent)
    return Answer(tuple(_RECORD_COLUMNS), rows)


def _check_target(target: Path) -> None:
    """Check that a file may be replaced: it does not exist, or is an export that no program is writing to.

    Raises:
        ExportError: The file must not be replaced.
    """
    if not target.parent.is_dir():
        raise ExportError(f"cannot write {target}: there is no folder {target.parent}. Create it, or pass another path")
    wal = target.with_name(f"{target.name}.wal")
    if wal.exists():  # DuckDB would apply it to the new file
        raise ExportError(
            f"cannot replace {target}: {wal.name} next to it has changes of another program. Close that program. "
            f"Then open {target} with DuckDB, which applies the changes, or remove {target} and {wal.name}"
        )
    if not target.exists():
        return
    refusal = f"cannot replace {target}: it is not an export of Kiln. Pass another path, or remove it"
    if not target.is_file():
        raise ExportError(refusal)
    with target.open("rb") as file:
        if file.read(12)[8:] != b"DUCK":  # duckdb.org/docs/internals/storage
            raise ExportError(refusal)
    try:
        with duckdb.connect(str(target), read_only=True) as connection:
            known = connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = ?", [RECORD]).fetchall()
    except duckdb.Error as error:
        reason = str(error).split("\n")[0]
        raise ExportError(
            f"cannot replace {target}: {reason}. Close the program that has it open for writing, or pass another path. "
            "Programs that only read the file need not be closed"
        ) from error
    if not known:
        raise ExportError(refusal)


def _select_tables(lake: Lake, names: Collection[str]) -> tuple[str, ...]:
    """Select the existing tables of these names and views, all by default.

    Raises:
        ExportError: A name is unknown, or there is no such table yet.
    """
    existing = lake.tables()
    if not names:
        return existing
    wanted: set[str] = set()
    for name in names:
        if name in existing:
            wanted.add(name)
        elif name in views():
            wanted.update(views()[name].tables)
        elif name in TABLES:
            raise ExportError(f"there is no table {name} in {lake.path} yet. Tables: {', '.join(existing)}")
        else:
            near = suggest_key(name, (*existing, *views()))
            known = ", ".join((*existing, *views()))
            raise ExportError(f"there is no table {name} in {lake.path}{near or '.'} Tables and views: {known}")
    return tuple(name for name in existing if name in wanted)


@contextmanager
def _translate_file_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"cannot write {target}: {error.strerror}. Pass another path, or fix the cause") from error


@dataclass(frozen=True)
class _Export:
    """An export in progress: a temporary file, and the tables to copy into it."""

    lake: Lake
    target: Path
    file: Path
    tables: Mapping[str, DeltaTable]
    """the tables to copy, open"""
    left_out: frozenset[str]
    """tables of the lake that are not copied; views that read them are not exported"""
    as_of: AsOf | None
    progress: Callable[[str], None]

    def copy_tables(self, since: datetime | None) -> list[Row]:
        """Copy the tables, write the table `kiln_export`, and return its rows."""
        now = datetime.now(UTC)
        record: list[Row] = []
        with self._connect() as connection:
            sources = dict(self.tables)
            if since is not None and "batch_tips" in sources and "batches" in self.left_out:
                batches = open_table(self.lake, "batches", self.as_of)
                sources |= {} if batches is None else {"batches": batches}
            create_views(connection, self.lake, sources)
            for number, (name, table) in enumerate(self.tables.items(), 1):
                version = table.version()
                self.progress(f"{name}: copying version {version} (table {number} of {len(self.tables)}) …")
                condition = "" if since is None else _build_condition(name, since, sources)
                copy = f"CREATE TABLE main.{quote_name(name)} AS SELECT * FROM temp.{quote_name(name)} {condition}"
                (count,) = _execute_interruptibly(connection, copy).fetchall()[0]
                record.append((name, version, count, since if condition else None, now))
            columns = ", ".join(f"{column} {kind}" for column, kind in _RECORD_COLUMNS.items())
            connection.execute(f"CREATE TABLE main.{RECORD} ({columns})")
            connection.executemany(f"INSERT INTO main.{RECORD} VALUES (?, ?, ?, ?, ?)", record)
        return record

    def create_views(self) -> None:
        """Create the views over the copied tables, and the comments of tables, columns and views."""
        with self._connect() as connection:  # a new connection, without the names of the lake's tables
            created = [view for view in views().values() if self._create_view(connection, view)]
            connection.begin()
            for view in created:
                connection.execute(f"COMMENT ON VIEW {view.name} IS {quote_text(view.sentence)}")
            for name in self.tables.keys() & TABLES.keys():
                connection.execute(f"COMMENT ON TABLE {name} IS {quote_text(TABLES[name].comment)}")
                there = connection.table(name).columns
                for column in TABLES[name].columns:
                    if column.name in there:
                        comment = quote_text(column.comment)
                        connection.execute(f"COMMENT ON COLUMN {name}.{column.name} IS {comment}")
            connection.commit()
            connection.execute("CHECKPOINT")  # DuckDB raises no error of the checkpoint that it makes on closing

    def _create_view(self, connection: duckdb.DuckDBPyConnection, view: View) -> bool:
        """Create a view in the file. Return false if a table of the view is not exported, or lacks columns."""
        if self.left_out.intersection(view.tables):
            return False
        try:
            connection.execute(f"CREATE VIEW {view.name} AS {add_empty_tables(view.duckdb, view.tables, self.tables)}")
        except (duckdb.BinderException, duckdb.CatalogException) as error:
            # a table has other columns than Kiln's, or is named like the view
            reason = str(error).split("\n")[0]
            self.progress(f"the view {view.name} is not exported: {reason}")
            return False
        return True

    @contextmanager
    def _connect(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Connect to the file, and raise DuckDB's errors as errors of the export.

        Raises:
            ExportError: The file cannot be written, or a column has a type that DuckDB cannot store.
            MissingFilesError: A file of a table is missing.
            KeyboardInterrupt: A signal has interrupted a statement.
        """
        limit = ""
        try:
            with duckdb.connect(str(self.file), config={"storage_compatibility_version": _STORAGE}) as connection:
                connection.execute("SET TimeZone = 'UTC'")
                connection.execute(f"SET temp_directory = {quote_text(f'{self.file.parent}/spilled')}")
                limit = limit_memory(connection, _MEMORY)
                yield connection
        except duckdb.OutOfMemoryException as error:
            raise ExportError(
                f"cannot export to {self.target}: out of memory. DuckDB may use {limit} of memory, and most of the "
                f"free space in {self.target.parent} for temporary files. Free memory or disk space, or export less "
                "(--tables, --since)"
            ) from error
        except (duckdb.Error, OSError, RuntimeError) as error:
            reason = str(error).split("\n")[0]
            if "interrupted" in reason.lower():  # DuckDB's exception for a signal during a statement
                raise KeyboardInterrupt from error
            if isinstance(error, RuntimeError) and not isinstance(error, duckdb.Error):
                raise
            if str(self.file.parent) not in reason:
                for name, table in self.tables.items():
                    if missing := build_missing_files_error(self.lake, name, table):
                        raise missing from error
                raise ExportError(f"cannot export the tables in {self.lake.path}: {reason}") from error
            free = shutil.disk_usage(self.target.parent).free
            cause = reason.rpartition(": ")[2]
            raise ExportError(
                f"cannot write {self.target}: {cause}. {free:,} bytes are free on this disk. Make room, pass a path "
                "on another disk, or export less (--tables, --since)"
            ) from error


def _execute_interruptibly(connection: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyConnection:
    """Execute a statement in a thread, so that Ctrl-C can interrupt it.

    In the main thread, DuckDB would handle the signal only after it has copied the table.
    """
    with ThreadPoolExecutor(1) as thread:
        execution = thread.submit(connection.execute, sql)
        try:
            return execution.result()
        except KeyboardInterrupt:
            connection.interrupt()
            raise


def _build_condition(name: str, since: datetime, sources: Collection[str]) -> str:
    """Build the WHERE clause for a table's rows since a time; empty if the table has no time column."""
    start = f"TIMESTAMPTZ {quote_text(since.isoformat())}"
    age = LAYOUTS.get(name, Layout()).age
    if age is not None:
        return f"WHERE {quote_name(age)} >= {start}"
    if name == "batch_tips" and "batches" in sources:  # a row is as old as its batch
        age = LAYOUTS["batches"].age
        return f"WHERE batch_cid IN (SELECT batch_cid FROM temp.batches WHERE {age} >= {start})"
    return ""
