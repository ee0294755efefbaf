"""Query results on the screen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kiln.deploy.query.answer_json import encode_value
from kiln.deploy.query.ask import Answer, Row
from kiln.schemas.printable import printable


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

    If a table does not fit the terminal, prints each column of a row on its own line, so that ids stay whole.
    """
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
