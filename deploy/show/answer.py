"""The answer to a query on the screen and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import TextIO

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.sql.ask import Answer, Row


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
