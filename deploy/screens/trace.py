"""Output of `kiln trace` on the screen and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from textwrap import indent
from typing import TextIO

from rich.console import Console
from rich.text import Text

from kiln.deploy.query.answer import format_cell, print_table
from kiln.deploy.query.answer_json import encode_value
from kiln.deploy.query.ask import Answer, Row
from kiln.deploy.query.trace.follow import StepAnswer, Trace

_LONG = re.compile(r"(?<![0-9A-Za-z])([0-9A-Za-z]{28,})(?![0-9A-Za-z])")
"""Ids: CIDs, StreamIDs, peer ids, hashes."""


_OMITTED = ("connection", "declared_length")
"""Columns that only JSON shows, as the position identifies a frame."""

_POSITION = ("kafka_partition", "kafka_offset", "message_index")


class _CompactAnswer(Answer):
    """Result in a compact form: long ids are shortened, positions are one column, and values that all rows share, such
    as the day, are in `shared` instead of columns."""

    def __init__(self, answer: StepAnswer, *, whole_ids: bool) -> None:
        rows = [_merge_position(dict(zip(answer.columns, cells, strict=True))) for cells in answer.cells]
        rows = [{name: value if whole_ids else _shorten_ids(value) for name, value in row.items()} for row in rows]
        names = [name for name in rows[0] if name not in _OMITTED and any(row[name] is not None for row in rows)]
        common = {name for name in names if len(rows) > 1 and all(row[name] == rows[0][name] for row in rows)}
        super().__init__([name for name in names if name not in common], ())
        self.shared = {name: rows[0][name] for name in names if name in common}
        days = {value.date() for row in rows for name in self.columns if isinstance(value := row[name], datetime)}
        if len(rows) > 1 and len(days) == 1:
            self.shared["day"] = days.pop()
            rows = [
                {name: f"{each:%H:%M:%S.%f}"[:-3] if isinstance(each, datetime) else each for name, each in row.items()}
                for row in rows
            ]
        self._rows = [tuple(row[name] for name in self.columns) for row in rows]

    def rows(self) -> Iterator[Row]:
        """Return the rows, as `Answer.rows`."""
        yield from self._rows


def _merge_position(row: dict[str, object]) -> dict[str, object]:
    """Merge the columns of the position to one text, which `kiln trace` accepts as an id."""
    parts = [row.pop(name) for name in _POSITION if name in row]
    position = "/".join(str(part) for part in parts if part is not None)
    return {**row, **({"position": position or None} if parts else {})}


def _shorten_ids(value: object) -> object:
    match value:
        case str():
            return _LONG.sub(lambda found: f"{found[1][:8]}…{found[1][-5:]}", value)
        case bytes() if len(value) > 12:
            return f"{value[:6].hex()}… ({len(value):,} B)"
    return value


def print_trace(trace: Trace, console: Console, limit: int, *, sql: bool, whole_ids: bool = False) -> None:
    """Print each step: its title, at most `limit` rows, and with `sql` its query."""
    console.print(Text.assemble((trace.kind, "bold"), " ", trace.subject.text), soft_wrap=True)
    filled = True
    for number, answer in enumerate(trace.steps, 1):
        if filled or answer.cells or sql:  # steps without rows are printed without blank lines between them
            console.print()
        filled = bool(answer.cells)
        head = Text.assemble((f"{number}. ", "dim"), (answer.step.says, "bold" if filled else "dim"))
        console.print(head if filled else head.append(f": {answer.step.nothing}"), soft_wrap=True)
        if filled:
            compact = _CompactAnswer(answer, whole_ids=whole_ids)
            if compact.shared:
                shared = "  ".join(f"{name} {format_cell(value)}" for name, value in compact.shared.items())
                console.print(Text(f"all: {shared}", style="dim"), soft_wrap=True)
            print_table(compact, console, limit)
        if sql:
            console.print(Text(indent(answer.step.sql, "   ", lambda _: True), style="dim"), soft_wrap=True)
    if not sql:
        console.print()
        console.print(Text("--sql shows the query of each step, --json all rows with whole ids and bytes", style="dim"))


def write_trace(trace: Trace, out: TextIO) -> None:
    """Write the trace as JSON: `{"id": …, "kind": …, "steps": [{"step": …, "says": …, "sql": …, "rows": [{…}]}]}`."""
    steps = [_encode_step(answer) for answer in trace.steps]
    out.write(json.dumps({"id": trace.subject.text, "kind": trace.kind, "steps": steps}, indent=1) + "\n")


def _encode_step(answer: StepAnswer) -> dict[str, object]:
    step = answer.step
    rows = [dict(zip(answer.columns, map(encode_value, cells), strict=True)) for cells in answer.cells]
    return {"step": step.name, "says": step.says, "sql": step.sql, "rows": rows}
