"""SQL over the lake with DuckDB: each Delta table is a view, read through delta-rs, and those of deploy.sql.views are there
as well. Reads only; needs no Java.

Values in JSON: times are ISO 8601 in UTC with microseconds, binary is lower-case hex (which `unhex` reads back),
numbers stay numbers however large, NaN and infinities are null, maps and structs are objects, intervals ISO 8601
durations.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import TextIO

import duckdb
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conf.errors import KilnError
from deploy.sql.views import VIEWS, with_empty
from pipelines.lake.lake import open_table, tables_in
from schemas.tables import TABLES

_ROWS_AT_ONCE = 2_048

Row = tuple[object, ...]


class SqlError(KilnError):
    """The query cannot be answered; the message says why, with the tables there are where that helps."""


class Answer:
    """The answer to a query: column names, and rows as they are read."""

    def __init__(self, columns: Sequence[str], batches: Iterable[pa.RecordBatch]) -> None:
        self.columns = tuple(columns)
        self._batches = batches

    def rows(self) -> Iterator[Row]:
        """Rows in the order of the columns. SqlError: the query failed while it ran."""
        try:
            for batch in self._batches:
                columns = [column.to_pylist(maps_as_pydicts="lossy") for column in batch.columns]
                yield from zip(*columns, strict=True)
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            raise SqlError(str(error)) from error


def ask(lake: Path, sql: str) -> Answer:
    """Run one query over the tables of a lake. SqlError: it is not one reading query, or it names what is not there."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    _check_statement(connection, sql)
    there = tables_in(lake)
    # Opening a table reads its log: only those the text speaks of, all where it speaks of none (`show tables`).
    words = {word.lower() for word in re.findall(r"\w+", sql)}
    views = [view for view in VIEWS.values() if view.name in words]
    named = words.union(*(view.tables for view in views))
    tables = [name for name in there if name in named]
    if not tables and not views:
        tables, views = list(there), list(VIEWS.values())
    for name in tables:
        connection.register(name, open_table(lake, name).to_pyarrow_dataset())
    for view in views:
        try:
            connection.execute(f"CREATE TEMP VIEW {view.name} AS {with_empty(view.select, view.tables, there)}")
        except duckdb.Error as error:
            # a table of other columns than Kiln's; that is nothing to who does not ask for the view
            if view.name in words:
                raise SqlError(f"{view.name}, over {' and '.join(view.tables)}: {error}") from error
    # A query reaches the lake's tables and nothing else: no files, no variables of this program.
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    try:
        reader = connection.sql(sql).to_arrow_reader(_ROWS_AT_ONCE)
    except duckdb.CatalogException as error:
        raise SqlError(_missing(str(error), lake, there)) from error
    except duckdb.Error as error:
        raise SqlError(str(error)) from error
    return Answer(reader.schema.names, reader)


def _check_statement(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise SqlError(str(error)) from error
    if len(statements) != 1:
        raise SqlError(f"one query at a time: there are {len(statements)} here")
    if statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise SqlError(f"the lake is read only here: {statements[0].type.name} is not possible, only queries are")


def _missing(message: str, lake: Path, there: Sequence[str]) -> str:
    found = re.search(r"Table with name (\S+) does not exist", message)
    if not found:
        return message
    name = found[1].strip('"')
    have = f"there are: {', '.join((*there, *VIEWS))}" if there else "there are no tables in it yet"
    if name in TABLES:
        return f"table {name} is not there yet: nothing has been written to it in {lake}; {have}"
    return f"there is no table {name} in {lake}; {have}"


# ---------------------------------------------------------------- output


def json_value(value: object) -> object:
    """A value of a row as JSON has it (see above)."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case bytes():
            return value.hex()
        case datetime():
            stamp = value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
            return stamp.isoformat(timespec="microseconds").replace("+00:00", "Z")
        case date() | time():
            return value.isoformat()
        case pa.MonthDayNano():
            return _iso_duration(value.months, value.days, value.nanoseconds)
        case Mapping():
            return {str(key): json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [json_value(item) for item in value]
    return str(value)


def _iso_duration(months: int, days: int, nanoseconds: int) -> str:
    seconds = Decimal(nanoseconds).scaleb(-9).normalize()
    day_part = f"{f'{months}M' if months else ''}{f'{days}D' if days else ''}"
    return f"P{day_part}T{seconds:f}S"


def write_json(answer: Answer, out: TextIO) -> None:
    """The answer as a JSON array of objects, a row a line, written as it is read."""
    names = distinct(answer.columns)
    before = "[\n"
    for row in answer.rows():
        record = {name: json_value(value) for name, value in zip(names, row, strict=True)}
        out.write(before + json.dumps(record, ensure_ascii=False))
        before = ",\n"
    out.write("[]\n" if before == "[\n" else "\n]\n")


def distinct(names: Iterable[str]) -> tuple[str, ...]:
    """The names, with `_2`, `_3` … put to those that come again: an object has each key once."""
    out: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in out:
            count += 1
            candidate = f"{name}_{count}"
        out.append(candidate)
    return tuple(out)


def cell(value: object) -> str:
    """A value as a cell of the table on screen shows it."""
    match value:
        case None:
            return "-"
        case datetime():
            stamp = value.astimezone(UTC) if value.tzinfo else value
            return stamp.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        case bytes():
            return value.hex() if len(value) <= 32 else f"{value[:16].hex()}… ({len(value):,} B)"
        case float():
            return f"{value:,.3f}".rstrip("0").rstrip(".") if abs(value) < 1e15 else repr(value)
        case bool():
            return "true" if value else "false"
        case dict() | list() | tuple() | pa.MonthDayNano():
            shown = json_value(value)
            return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
    return str(value)


def print_table(answer: Answer, console: Console, limit: int) -> None:
    """The first `limit` rows, and a line that says so when there are more.

    A table; where that would not fit the terminal, each row on lines of its own, so that ids stay whole.
    """
    rows: list[Row] = []
    more = False
    for row in answer.rows():
        if len(rows) == limit:
            more = True
            break
        rows.append(row)
    cells = [[cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(answer.columns, *cells, strict=True)]
    width = sum(widths) + 3 * (len(widths) - 1)
    if not console.is_terminal:
        console.width = max(console.width, width)
    if width <= console.width or not rows:
        console.print(_table(answer.columns, rows, cells))
    else:
        _print_records(answer.columns, cells, console)
    count = (
        f"first {len(rows):,} rows; --json prints all" if more else f"{len(rows):,} row{'' if len(rows) == 1 else 's'}"
    )
    console.print(Text(f"({count})", style="dim"))


def _table(columns: Sequence[str], rows: Sequence[Row], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(header_style="bold", pad_edge=False, show_edge=False)
    for number, name in enumerate(columns):
        right = bool(rows) and all(isinstance(row[number], int | float | Decimal | None) for row in rows)
        table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _print_records(columns: Sequence[str], cells: Sequence[Sequence[str]], console: Console) -> None:
    names = max(map(len, columns))
    for number, row in enumerate(cells, 1):
        console.print(Text(f"── {number} " + "─" * max(0, console.width - len(f"── {number} ")), style="dim"))
        for name, value in zip(columns, row, strict=True):
            text = Text.assemble((f"{name:<{names}}", "bold"), "  ", value)
            console.print(text, soft_wrap=len(value) + names + 2 > console.width)
