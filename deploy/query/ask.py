"""Read-only SQL over the lake with DuckDB.

There is a view for each Delta table (kiln.pipelines.delta.duckdb_tables), and the views of kiln.schemas.delta.views.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import duckdb

from kiln.conf.process.errors import KilnError
from kiln.conf.settings.keys import suggest_key
from kiln.deploy.query.as_of import AsOf, open_table
from kiln.pipelines.delta.duckdb_tables import add_empty_tables, allow_only, create_views
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import View, views

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 2_048
_MOST_SPILLED = "8GB"

Row = tuple[object, ...]


class SqlError(KilnError):
    """A query fails. The message has the reason, and for an unknown table the names of the existing ones."""


class Answer:
    """Result of a query: column names, and rows that are read on demand."""

    def __init__(self, columns: Sequence[str], batches: Iterable[pa.RecordBatch]) -> None:
        self.columns = tuple(columns)
        self._batches = batches

    def rows(self) -> Iterator[Row]:
        """Read the rows.

        Raises:
            SqlError: The query fails at run time.
        """
        import pyarrow as pa

        try:
            for batch in self._batches:
                columns = [column.to_pylist(maps_as_pydicts="lossy") for column in batch.columns]
                yield from zip(*columns, strict=True)
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            raise SqlError(str(error)) from error


class _Cursor(Answer):
    """Result of a connection's query, read as Python values without pyarrow."""

    def __init__(self, columns: Sequence[str], connection: duckdb.DuckDBPyConnection) -> None:
        super().__init__(columns, ())
        self._connection = connection

    def rows(self) -> Iterator[Row]:
        try:
            while rows := self._connection.fetchmany(_ROWS_AT_ONCE):
                yield from rows
        except (duckdb.Error, OSError) as error:
            raise SqlError(str(error)) from error


def query_lake(lake: Lake, sql: str, as_of: AsOf | None = None) -> Answer:
    """Run a query over the tables of a lake, optionally at an earlier version.

    Raises:
        SqlError: The text is not one read-only query, or it names an unknown table or column.
        LakeError: A table cannot be read.
        NoSuchVersionError: A table does not have that version.
    """
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    # by default, queries larger than memory spill without limit to `.tmp` in the current folder
    connection.execute(f"SET temp_directory = '{_quote(tempfile.gettempdir())}/kiln-sql-{os.getpid()}'")
    connection.execute(f"SET max_temp_directory_size = '{_MOST_SPILLED}'")
    _check_statement(connection, sql)
    there = lake.tables()
    names, wanted = find_named_tables(sql, there)
    speaks_of_some = bool(names or wanted)
    if not speaks_of_some:
        names, wanted = there, tuple(views().values())
    tables = {name: table for name in names if (table := open_table(lake, name, as_of)) is not None}
    there = tuple(name for name in there if name in tables or name not in names)
    files = create_views(connection, lake, tables, reads_rows=speaks_of_some)
    for view in wanted:
        try:
            connection.execute(f"CREATE TEMP VIEW {view.name} AS {add_empty_tables(view.duckdb, view.tables, there)}")
        except duckdb.Error as error:
            # the table has other columns than Kiln's, which only matters if the query names the view
            if speaks_of_some:
                raise SqlError(f"{view.name}, over {' and '.join(view.tables)}: {error}") from error
    allow_only(connection, files)
    try:
        connection.execute(sql)
        columns = [(str(column[0]), str(column[1])) for column in connection.description or ()]
        titles = [title for title, _ in columns]
        if any("INTERVAL" in kind for _, kind in columns):  # which has months, as Python's timedelta has not
            connection.abort()
            return Answer(titles, connection.sql(sql).to_arrow_reader(_ROWS_AT_ONCE))
    except duckdb.CatalogException as error:
        raise SqlError(_explain_missing_table(str(error), lake, there)) from error
    except duckdb.Error as error:
        raise SqlError(str(error)) from error
    return _Cursor(titles, connection)


def _quote(path: str) -> str:
    return path.replace("'", "''")


def _check_statement(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise SqlError(str(error)) from error
    if len(statements) != 1:
        raise SqlError(f"cannot run {len(statements)} statements. Pass one query")
    if statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise SqlError(f"cannot run {statements[0].type.name}: the lake is read-only. Pass a query")


def find_named_tables(sql: str, there: Sequence[str]) -> tuple[tuple[str, ...], tuple[View, ...]]:
    """Find the tables and views that a query may read, as opening a table is slow: it reads the table's log.

    Returns:
        The existing tables and the views that the text names, with those that the views read. Each view comes after
        the views that it reads.
    """
    words = {word.lower() for word in re.findall(r"\w+", sql)}
    wanted: set[str] = set()
    for view in reversed(views().values()):
        if view.name in words or view.name in wanted:
            wanted.update((view.name, *view.views))
    chosen = tuple(view for view in views().values() if view.name in wanted)
    named = words.union(*(view.tables for view in chosen))
    return tuple(name for name in there if name in named), chosen


def read_view_columns() -> dict[str, tuple[str, ...]]:
    """Read the column names of each view."""
    with duckdb.connect() as connection:
        for view in views().values():
            connection.execute(f"CREATE TEMP VIEW {view.name} AS {add_empty_tables(view.duckdb, view.tables, ())}")
        return {name: tuple(connection.table(name).columns) for name in views()}


def _explain_missing_table(message: str, lake: Lake, there: Sequence[str]) -> str:
    match = re.search(r"Table with name (\S+) does not exist", message)
    if not match:
        return message
    name = match[1].strip('"')
    near = "" if name in TABLES else suggest_key(name, (*there, *views()))
    existing = f"Tables and views: {', '.join((*there, *views()))}" if there else "The lake has no tables yet"
    yet = " yet" if name in TABLES else ""
    return f"there is no table {name} in {lake.path}{yet}{near or '.'} {existing}"
