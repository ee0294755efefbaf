"""Query results on the screen, as JSON and as CSV.

*JSON:* times are ISO 8601 in UTC with microseconds. Binary is lower-case hex, which `unhex` reads back. Numbers of any
size are numbers; NaN and infinities are null. Maps and structs are objects. Intervals are ISO 8601 durations in
seconds, with 30 days for a month. Output is ASCII. Other characters are escaped, so that no value can control the
terminal.

*CSV* (RFC 4180, with a header): values as in JSON; maps, lists and structs are JSON text. Null and empty text are empty
cells. Control characters are escaped as on the screen, so that a row is one line; only JSON has the exact text.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, TextIO

from kiln.deploy.query.ask import Answer, Row
from kiln.schemas.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def format_cell(value: object) -> str:
    """Format a value for a table cell, on one line and with control characters escaped."""
    return printable(_format_value(value))


def _format_value(value: object) -> str:
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
        case dict() | list() | tuple():
            shown = encode_value(value)
            return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
    return str(value)


def print_table(answer: Answer, console: Console, limit: int) -> None:
    """Print the first `limit` rows, and a line with the number of rows.

    Rows that are wider than the terminal are printed with one column per line, so that no id is cut.
    """
    from rich.text import Text

    rows: list[Row] = []
    more = False
    for row in answer.rows():
        if len(rows) == limit:
            more = True
            break
        rows.append(row)
    cells = [[format_cell(value) for value in row] for row in rows]
    columns = tuple(map(printable, answer.columns))
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    width = sum(widths) + 3 * (len(widths) - 1)
    if not console.is_terminal:
        console.width = max(console.width, width)
    if width <= console.width or not rows:
        console.print(_build_table(columns, rows, cells))
    else:
        _print_records(columns, cells, console)
    count = (
        f"first {len(rows):,} rows; --json prints all" if more else f"{len(rows):,} row{'' if len(rows) == 1 else 's'}"
    )
    console.print(Text(f"({count})", style="dim"))


def _build_table(columns: Sequence[str], rows: Sequence[Row], cells: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", pad_edge=False, show_edge=False)
    for number, name in enumerate(columns):
        right = bool(rows) and all(isinstance(row[number], int | float | Decimal | None) for row in rows)
        table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _print_records(columns: Sequence[str], cells: Sequence[Sequence[str]], console: Console) -> None:
    from rich.text import Text

    names = max(map(len, columns))
    for number, row in enumerate(cells, 1):
        console.print(Text(f"── {number} " + "─" * max(0, console.width - len(f"── {number} ")), style="dim"))
        for name, value in zip(columns, row, strict=True):
            text = Text.assemble((f"{name:<{names}}", "bold"), "  ", value)
            console.print(text, soft_wrap=len(value) + names + 2 > console.width)


def encode_value(value: object) -> object:
    """Convert a value to JSON types: a time to ISO 8601 in UTC, bytes to hex, NaN and infinities to null."""
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
        case timedelta():
            seconds = Decimal(value // timedelta(microseconds=1)).scaleb(-6).normalize()
            return f"PT{seconds:f}S"
        case Mapping():
            return {str(key): encode_value(item) for key, item in value.items()}
        case list() | tuple():
            return [encode_value(item) for item in value]
    return str(value)


def write_json(answer: Answer, out: TextIO) -> None:
    """Write the rows as a JSON array with an object per line. Each row is written as soon as it is read."""
    names = make_distinct(answer.columns)
    delimiter = "[\n"
    for row in answer.rows():
        record = {name: encode_value(value) for name, value in zip(names, row, strict=True)}
        out.write(delimiter + json.dumps(record))
        delimiter = ",\n"
    out.write("[]\n" if delimiter == "[\n" else "\n]\n")


def make_distinct(names: Iterable[str]) -> tuple[str, ...]:
    """Append `_2`, `_3` … to repeated names, because a JSON object has each key only once."""
    out: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in out:
            count += 1
            candidate = f"{name}_{count}"
        out.append(candidate)
    return tuple(out)


def write_csv(answer: Answer, out: TextIO) -> None:
    """Write a header and the rows as CSV. Each row is written as soon as it is read."""
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(map(printable, answer.columns))
    for row in answer.rows():
        writer.writerow([_encode_cell(value) for value in row])


def _encode_cell(value: object) -> str | int | float | None:
    match encode_value(value):
        case None:
            return None
        case bool(flag):
            return "true" if flag else "false"
        case int() | float() as number:
            return number
        case str(text):
            return printable(text)
        case nested:
            return json.dumps(nested)
