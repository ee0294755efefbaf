"""The way of a thing, as `kiln trace` shows it: on the screen, and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.text import Text

from deploy.show.answer import print_table
from deploy.show.answer_json import json_value
from deploy.sql.ask import Answer, Row
from deploy.trace.follow import StepAnswer, Trace

_LONG = re.compile(r"(?<![0-9A-Za-z])([0-9A-Za-z]{28,})(?![0-9A-Za-z])")
"""Ids: CIDs, StreamIDs, peer ids, hashes."""


class _Shortened(Answer):
    """An answer whose long ids show only how they begin and end, and without the columns that have no value."""

    def __init__(self, answer: StepAnswer) -> None:
        filled = [
            place for place, _ in enumerate(answer.columns) if any(row[place] is not None for row in answer.cells)
        ]
        super().__init__([answer.columns[place] for place in filled], ())
        self._rows = [tuple(_short(row[place]) for place in filled) for row in answer.cells]

    def rows(self) -> Iterator[Row]:
        """As of `Answer`."""
        yield from self._rows


def _short(value: object) -> object:
    match value:
        case str():
            return _LONG.sub(lambda found: f"{found[1][:9]}…{found[1][-6:]}", value)
        case bytes() if len(value) > 12:
            return f"{value[:6].hex()}… ({len(value):,} B)"
    return value


def print_trace(trace: Trace, console: Console, limit: int, *, sql: bool, whole_ids: bool = False) -> None:
    """Each step: a sentence, at most `limit` rows, and with `sql` the question that gives them."""
    console.print(Text.assemble((trace.kind, "bold"), " ", trace.subject.text), soft_wrap=True)
    for number, answer in enumerate(trace.steps, 1):
        console.print()
        console.print(Text.assemble((f"{number}. ", "dim"), (f"{answer.step.says}.", "bold")), soft_wrap=True)
        if answer.cells:
            print_table(answer if whole_ids else _Shortened(answer), console, limit)
        else:
            console.print(Text(f"   {answer.step.nothing}", style="dim"))
        if sql:
            console.print(Text(_indented(answer.step.sql), style="dim"), soft_wrap=True)
    if not sql:
        console.print()
        console.print(
            Text("--sql shows the question behind each step, --json all rows with whole ids and bytes", style="dim")
        )


def _indented(sql: str) -> str:
    return "\n".join(f"   {line}" for line in sql.splitlines())


def write_trace(trace: Trace, out: TextIO) -> None:
    """As JSON: `{"id": …, "kind": …, "steps": [{"step": …, "says": …, "sql": …, "rows": [{…}]}]}`."""
    steps = [_step(answer) for answer in trace.steps]
    out.write(json.dumps({"id": trace.subject.text, "kind": trace.kind, "steps": steps}, indent=1) + "\n")


def _step(answer: StepAnswer) -> dict[str, object]:
    step = answer.step
    rows = [dict(zip(answer.columns, map(json_value, cells), strict=True)) for cells in answer.cells]
    return {"step": step.name, "says": step.says, "sql": step.sql, "rows": rows}
