"""Read-only SQL over the lake with DuckDB, at the newest or an earlier version of the tables. The command `\\d` lists
tables, views and columns.

A query can read each Delta table (kiln.pipelines.delta.duckdb_tables) and the views of kiln.schemas.delta.views.
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Final

import duckdb

from kiln.conf.process.errors import KilnError
from kiln.conf.process.forks import refuse_fork
from kiln.conf.settings.durations import parse_time
from kiln.conf.settings.keys import suggest_key
from kiln.pipelines.delta.duckdb_tables import add_empty_tables, allow_only, create_views, quote_text
from kiln.pipelines.delta.lake import Lake, build_missing_files_error
from kiln.pipelines.delta.table_history import CommitTime, find_commit_at, find_first_commit
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.delta.views import View, views
from kiln.schemas.printable import printable

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from rich.console import Console

AsOf = int | datetime
"""Version at which tables are read: a version number, the same for every table, or a time with a time zone."""


class NoSuchVersionError(KilnError):
    """A table does not have the requested version, or no longer has it."""


def parse_as_of(text: str) -> AsOf:
    """Parse a version (`12`) or an ISO 8601 time (`2026-11-01`, `2026-11-01T12:00:00Z`), in UTC by default.

    Raises:
        ValueError: The text is neither; the message has the expected forms.
    """
    if text.isdecimal():
        return int(text)
    try:
        return parse_time(text)
    except ValueError:
        raise ValueError("a version (12) or a time (2026-11-01, 2026-11-01T12:00:00Z)") from None


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
        version = min(version, newest)  # other processes may commit meanwhile
    if version > newest:
        raise NoSuchVersionError(f"table {name} has no version {version}. Its newest version is {newest}")
    try:
        table.load_as_version(version)
    except (DeltaError, OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise NoSuchVersionError(
            f"cannot read table {name} as of {as_of}: {reason}. Table maintenance removes old versions: pass a newer "
            f"one. The newest is {newest}"
        ) from error
    return table


def _find_version_at(lake: Lake, name: str, at: datetime) -> int | None:
    folder = lake.folder(name)
    if commit := find_commit_at(folder, int(at.timestamp() * 1_000)):
        return commit.version
    first = find_first_commit(folder)
    if first is None:
        raise NoSuchVersionError(
            f"the log of table {name} has no commit times. Pass a version number instead of {at.isoformat()}"
        )
    if first.version:
        raise NoSuchVersionError(
            f"cannot read table {name} as of {at.isoformat()}: its log begins with version {first.version}, from "
            f"{_format_time(first)}, because table maintenance has removed older entries. Pass a later time"
        )
    return None


def describe_absence(lake: Lake, name: str, as_of: AsOf | None) -> str:
    """Explain that a table was created after the time `as_of`.

    Returns:
        The explanation. Empty if `as_of` is not a time, or if the lake has no table of this name.
    """
    if not isinstance(as_of, datetime):
        return ""
    table = next((known for known in lake.tables() if known.lower() == name.lower()), None)
    first = find_first_commit(lake.folder(table)) if table else None
    if first is None:
        return ""
    created = _format_time(first)
    return f"table {name} did not exist at {as_of.isoformat()}: its first version is from {created}. Pass a later time"


def _format_time(commit: CommitTime) -> str:
    return datetime.fromtimestamp(commit.at / 1_000, UTC).isoformat(timespec="milliseconds")


_ROWS_AT_ONCE = 2_048
_MOST_SPILLED = "8GB"
_CATALOG = re.compile(r"\b(show|desc|describe|information_schema|(duckdb|pg|pragma|sqlite)_\w+)\b", re.IGNORECASE)
"""Words that occur in queries that list tables or columns. For such a query, all tables and views are opened."""

Row = tuple[object, ...]


class SqlError(KilnError):
    """A query is rejected or fails. If a table is unknown, the message lists the existing tables."""


class Answer:
    """Result of a query: column names, and rows. The rows may be read lazily, while they are iterated."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Row]) -> None:
        self.columns = tuple(columns)
        self._rows = rows

    def rows(self) -> Iterator[Row]:
        """Read the rows.

        Raises:
            SqlError: The query fails at run time.
        """
        return iter(self._rows)


def read_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """Read the rows of Arrow record batches.

    Raises:
        SqlError: The query fails at run time.
    """
    import pyarrow as pa

    try:
        for batch in batches:
            yield from zip(*(column.to_pylist(maps_as_pydicts="lossy") for column in batch.columns), strict=True)
    except pa.ArrowException as error:
        raise SqlError(str(error)) from error


def query_lake(lake: Lake, sql: str, as_of: AsOf | None = None) -> Answer:
    """Run a query over the tables of a lake, optionally at an earlier version.

    Raises:
        SqlError: The text is not one read-only query, or it names an unknown table or column.
        LakeError: A table cannot be read.
        NoSuchVersionError: A table does not have that version.
    """
    connection, tables = _connect(lake, sql, as_of)
    with tables.translate_errors():
        connection.execute(sql)
        titles = [str(column[0]) for column in connection.description or ()]
    chunks = iter(lambda: connection.fetchmany(_ROWS_AT_ONCE), [])
    return Answer(titles, tables.guard(chain.from_iterable(chunks)))


class QueryRelation:
    """A query that runs each time its rows are read, always on the same version of the tables."""

    def __init__(self, lake: Lake, sql: str, as_of: AsOf | None = None) -> None:
        """Check the query as `query_lake` does, with the same errors."""
        # the connection is stored, because a relation does not keep it open
        self._connection, self._tables = _connect(lake, sql, as_of)
        with self.translate_errors():
            self.relation = self._connection.sql(sql)

    def translate_errors(self) -> AbstractContextManager[None]:
        """Raise SqlError if the query fails, or MissingFilesError if a file of its tables is missing."""
        return self._tables.translate_errors()


def _connect(lake: Lake, sql: str, as_of: AsOf | None) -> tuple[duckdb.DuckDBPyConnection, _OpenTables]:
    """Connect to a database with the tables and views that a query names, and no access to other files."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    # by default, a query larger than memory spills to `.tmp` in the current folder, without a limit
    connection.execute(f"SET temp_directory = {quote_text(f'{tempfile.gettempdir()}/kiln-sql-{os.getpid()}')}")
    connection.execute(f"SET max_temp_directory_size = '{_MOST_SPILLED}'")
    _check_statement(connection, sql)
    there = lake.tables()
    names, wanted = find_named_tables(sql, there)
    speaks_of_some = bool(names or wanted)
    if not speaks_of_some and _CATALOG.search(sql):
        names, wanted = there, tuple(views().values())
    tables = {name: table for name in names if (table := open_table(lake, name, as_of)) is not None}
    there = tuple(name for name in there if name in tables or name not in names)
    files = create_views(connection, lake, tables, reads_rows=speaks_of_some)
    for view in wanted:
        try:
            connection.execute(f"CREATE TEMP VIEW {view.name} AS {add_empty_tables(view.duckdb, view.tables, there)}")
        except duckdb.Error as error:
            # a table may lack columns of the view, which matters only if the query names tables or views
            if speaks_of_some:
                raise SqlError(
                    f"cannot create the view {view.name} over {' and '.join(view.tables)}: {error}"
                ) from error
    memory_limit = limit_memory(connection)
    allow_only(connection, files)
    return connection, _OpenTables(lake, as_of, there, tables, memory_limit)


def limit_memory(connection: duckdb.DuckDBPyConnection, most: int | None = None) -> str:
    """Lower DuckDB's memory limit by the memory that this process already uses, but not below a quarter of the default.

    DuckDB's default limit is 80 % of the memory of the machine or container, and ignores what the process itself uses.
    With the default in a container of 256 MB, the kernel kills the process before DuckDB spills to disk.

    Args:
        most: Upper bound of the limit, in bytes; by default none.

    Returns:
        The new limit in DuckDB's format, such as `200.0 MiB`.
    """
    default = _read_memory_limit(connection)
    number, unit = default.split()
    limit = int(float(number) * 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(unit))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    limit = max(limit - used, limit // 4)
    connection.execute(f"SET memory_limit = '{limit if most is None else min(limit, most)}B'")
    return _read_memory_limit(connection)


def _read_memory_limit(connection: duckdb.DuckDBPyConnection) -> str:
    (limit,) = connection.execute("SELECT current_setting('memory_limit')").fetchall()[0]
    return str(limit)


@dataclass(frozen=True)
class _OpenTables:
    """The tables of a query, needed to explain errors of the query."""

    lake: Lake
    as_of: AsOf | None
    existing: tuple[str, ...]
    """names of all existing tables, including tables that the query does not name"""
    opened: Mapping[str, DeltaTable]
    memory_limit: str
    """DuckDB's memory limit, in DuckDB's format"""

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Raise errors of DuckDB as SqlError, or as LakeError if a file of a table is missing.

        Raises:
            ForkedProcessError: This process was forked after its parent had read a lake.
        """
        refuse_fork()
        try:
            yield
        except duckdb.OutOfMemoryException as error:
            raise SqlError(
                f"the query ran out of memory: DuckDB may use {self.memory_limit} of memory, and {_MOST_SPILLED} of "
                f"temporary files in {tempfile.gettempdir()}. Query fewer rows or columns, or give this machine or "
                "container more memory"
            ) from error
        except duckdb.CatalogException as error:
            raise SqlError(_explain_missing_table(str(error), self.lake, self.existing, self.as_of)) from error
        except (duckdb.Error, OSError, OverflowError) as error:  # OverflowError: an interval beyond a timedelta
            if not isinstance(error, _FAULTS_OF_A_QUERY):
                for name, table in self.opened.items():
                    if missing := build_missing_files_error(self.lake, name, table):
                        raise missing from error
            raise SqlError(str(error)) from error

    def guard(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield rows, and translate the errors of reading them."""
        with self.translate_errors():
            yield from rows


_FAULTS_OF_A_QUERY: Final = (duckdb.BinderException, duckdb.ParserException, duckdb.DataError)
"""Errors of the SQL or of values. Other errors may be due to a missing file of a table, which is then checked."""


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
    """Find the tables and views that a query may read. Only these are opened, because opening a table takes time.

    Args:
        there: Names of the existing tables.

    Returns:
        The existing tables and the views that the query names, with the tables and views that these views read. Each
        view comes after the views that it reads.
    """
    words = {word.lower() for word in re.findall(r"\w+", sql)}
    wanted: set[str] = set()
    for view in reversed(views().values()):
        if view.name in words or view.name in wanted:
            wanted.update((view.name, *view.views))
    chosen = tuple(view for view in views().values() if view.name in wanted)
    named = words.union(*(view.tables for view in chosen))
    text = sql.lower()
    return tuple(
        name for name in there if (name.lower() in named if re.fullmatch(r"\w+", name) else name.lower() in text)
    ), chosen


def read_view_columns() -> dict[str, dict[str, str]]:
    """Return the DuckDB type of each column, by view and column. No lake is needed."""
    with duckdb.connect() as connection:
        for view in views().values():
            connection.execute(f"CREATE TEMP VIEW {view.name} AS {add_empty_tables(view.duckdb, view.tables, ())}")
        tables = {name: connection.table(name) for name in views()}
        return {name: dict(zip(table.columns, map(str, table.types), strict=True)) for name, table in tables.items()}


def _explain_missing_table(message: str, lake: Lake, there: Sequence[str], as_of: AsOf | None) -> str:
    match = re.search(r"Table with name (\S+) does not exist", message)
    if not match:
        return message
    name = match[1].strip('"')
    if absence := describe_absence(lake, name, as_of):
        return absence
    near = "" if name in TABLES else suggest_key(name, (*there, *views()))
    existing = f"Tables and views: {', '.join((*there, *views()))}" if there else "The lake has no tables yet"
    yet = " yet" if name in TABLES else ""
    return f"there is no table {name} in {lake.path}{yet}{near or '.'} {existing}"


_COMMAND = re.compile(r"\\d\+?(?:\s+\"?(\w+)\"?)?\s*;?")


class Listing(Answer):
    """Tables, views or columns with descriptions. `heading` describes the table or view whose columns are listed."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Row], heading: str = "") -> None:
        super().__init__(columns, rows)
        self.heading = heading


def list_names(lake: Lake, command: str) -> Listing:
    r"""List tables and views (`\d`), or the columns of one (`\d NAME`).

    Raises:
        SqlError: The text is not one of these commands, or names no existing table or view.
        LakeError: The table cannot be read.
    """
    match = _COMMAND.fullmatch(command.strip())
    if match is None:
        raise SqlError(
            f"there is no command {command.strip()}. \\d lists the tables and views; \\d NAME lists the columns of NAME"
        )
    tables = lake.tables()
    if name := match[1]:
        if name in tables:
            return _list_table_columns(lake, name)
        if view := views().get(name):
            columns = [(column, kind.lower(), "") for column, kind in read_view_columns()[view.name].items()]
            return Listing(("column", "type", "description"), columns, f"{view.sentence} Grain: {view.grain}.")
        raise SqlError(
            f"there is no table or view {name}{suggest_key(name, (*tables, *views()))}; \\d lists all tables and views"
        )
    rows = [(table, "table", _shorten(_describe_table(table))) for table in tables]
    rows += [(view.name, "view", _shorten(view.sentence)) for view in views().values()]
    return Listing(("name", "kind", "description"), rows)


def print_listing(listing: Listing, console: Console) -> None:
    """Print a line for each name. Long lines wrap at the terminal's width."""
    from rich.text import Text

    if listing.heading:
        console.print(Text(printable(listing.heading)), soft_wrap=True)
    for name, kind, description in listing.rows():
        console.print(Text(printable(f"{name:<24} {kind:<10} {description}".rstrip())), soft_wrap=True)


def _list_table_columns(lake: Lake, name: str) -> Listing:
    comments = {column.name: column.comment for column in TABLES[name].columns} if name in TABLES else {}
    fields = [(field.name, str(field.type.type)) for field in lake.open(name).schema().fields]
    types = {column.name: column.type for column in TABLES[name].columns} if name in TABLES else {}
    rows = [(column, types.get(column, kind), comments.get(column, "")) for column, kind in fields]
    return Listing(("column", "type", "description"), rows, _describe_table(name))


def _describe_table(table: str) -> str:
    return f"{TABLES[table].comment}." if table in TABLES else "Kiln does not define this table."


def _shorten(sentences: str) -> str:
    return sentences.split(". ")[0].removesuffix(".")
