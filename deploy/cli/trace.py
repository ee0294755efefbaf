"""`kiln trace`: show the path of one batch, stream, tip or message through Kiln."""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from kiln.deploy.cli.options import (
    ConfigOption,
    JsonOption,
    SampleOption,
    StateOption,
    answers,
    discard_output,
    lake_of,
    reading_settings,
)

if TYPE_CHECKING:
    from rich.console import Console

    from kiln.deploy.query.trace import StepAnswer, Trace

_LONG = re.compile(r"(?<![0-9A-Za-z])([0-9A-Za-z]{28,})(?![0-9A-Za-z])")
"""Matches ids to shorten: CIDs, StreamIDs, peer ids and hashes."""

_OMITTED = ("connection", "declared_length")
"""Columns that only JSON has. In the table for the terminal, the position identifies a frame."""

_POSITION = ("kafka_partition", "kafka_offset", "message_index")

commands = typer.Typer()


@commands.command()
def trace(
    id_: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="CID of a batch or tip, StreamID, message id, or PARTITION/OFFSET[/INDEX] in the topic kiln.frames.",
        ),
    ],
    as_json: JsonOption = False,
    sql: Annotated[bool, typer.Option("--sql", help="Show the SQL query of each step.")] = False,
    whole: Annotated[bool, typer.Option("--full-ids", help="Do not shorten ids.")] = False,
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=1, help="Maximum number of rows per step. --json prints all rows.")
    ] = 10,
    messages: Annotated[
        int,
        typer.Option(
            "--messages",
            metavar="N",
            min=1,
            help="Maximum number of messages shown with copies and frames, and of batches shown with publications.",
        ),
    ] = 25,
    sample: SampleOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Trace a batch, stream, tip or message through Kiln.

    Shows frames with their peers, copies with verdicts on signatures, separator, offset in kiln.updates, window, block,
    publications, and quarantined records. Each step is one SQL query of the tables; --sql prints the queries. Requires
    no Java.
    """
    settings = reading_settings(config, state, sample=sample)
    from kiln.deploy.query.trace import trace_subject
    from kiln.deploy.query.trace_ids import parse_id

    found = trace_subject(lake_of(settings), parse_id(id_), messages)
    try:
        if as_json:
            write_trace(found, sys.stdout)
        else:
            print_trace(found, answers(), rows, sql=sql, whole_ids=whole)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()  # the reader has enough, as in `kiln trace … | head`


def print_trace(trace: Trace, console: Console, limit: int, *, sql: bool, whole_ids: bool = False) -> None:
    """Print the title and at most `limit` rows of each step; if `sql` is true, also its query."""
    from rich.text import Text

    from kiln.deploy.query.answer import format_cell, print_table

    console.print(Text.assemble((trace.kind, "bold"), " ", trace.subject.text), soft_wrap=True)
    filled = True
    for number, answer in enumerate(trace.steps, 1):
        if filled or answer.cells or sql:  # steps without rows are printed without blank lines between them
            console.print()
        filled = bool(answer.cells)
        head = Text.assemble((f"{number}. ", "dim"), (answer.step.says, "bold" if filled else "dim"))
        console.print(head if filled else head.append(f": {answer.step.nothing}"), soft_wrap=True)
        if filled:
            compact, shared = _compact(answer, whole_ids=whole_ids)
            if shared:
                texts = "  ".join(f"{name} {format_cell(value)}" for name, value in shared.items())
                console.print(Text(f"in all rows: {texts}", style="dim"), soft_wrap=True)
            print_table(compact, console, limit)
        if sql:
            console.print(Text(indent(answer.step.sql, "   ", lambda _: True), style="dim"), soft_wrap=True)
    if not sql:
        console.print()
        hint = "--sql shows the query of each step; --json prints all rows, with full ids and bytes"
        console.print(Text(hint, style="dim"))


def _compact(answer: StepAnswer, *, whole_ids: bool) -> tuple[StepAnswer, dict[str, object]]:
    """Make the rows of a step narrower: shorten ids, join partition, offset and index, and omit empty columns.

    Returns:
        The rows, and the columns that were removed from them because all rows have the same value.
    """
    from kiln.deploy.query.trace import StepAnswer

    rows = []
    for cells in answer.cells:
        row = dict(zip(answer.columns, cells, strict=True))
        parts = [row.pop(name) for name in _POSITION if name in row]
        if parts:  # in the form that `kiln trace` accepts as an id
            row["position"] = "/".join(str(part) for part in parts if part is not None) or None
        rows.append({name: value if whole_ids else _shorten_ids(value) for name, value in row.items()})
    names = [name for name in rows[0] if name not in _OMITTED and any(row[name] is not None for row in rows)]
    common = {name for name in names if len(rows) > 1 and all(row[name] == rows[0][name] for row in rows)}
    shared = {name: rows[0][name] for name in names if name in common}
    columns = tuple(name for name in names if name not in common)
    days = {value.date() for row in rows for name in columns if isinstance(value := row[name], datetime)}
    if len(rows) > 1 and len(days) == 1:
        shared["day"] = days.pop()
        for row in rows:
            row.update({name: f"{time:%H:%M:%S.%f}"[:-3] for name, time in row.items() if isinstance(time, datetime)})
    return StepAnswer(answer.step, columns, [tuple(row[name] for name in columns) for row in rows]), shared


def _shorten_ids(value: object) -> object:
    match value:
        case str():
            return _LONG.sub(lambda long: f"{long[1][:8]}…{long[1][-5:]}", value)
        case bytes() if len(value) > 12:
            return f"{value[:6].hex()}… ({len(value):,} B)"
    return value


def write_trace(trace: Trace, out: TextIO) -> None:
    """Write the trace as JSON: `{"id": …, "kind": …, "steps": [{"step": …, "says": …, "sql": …, "rows": [{…}]}]}`."""
    from kiln.deploy.query.answer import encode_value

    steps = [
        {
            "step": answer.step.name,
            "says": answer.step.says,
            "sql": answer.step.sql,
            "rows": [dict(zip(answer.columns, map(encode_value, cells), strict=True)) for cells in answer.cells],
        }
        for answer in trace.steps
    ]
    out.write(json.dumps({"id": trace.subject.text, "kind": trace.kind, "steps": steps}, indent=1) + "\n")
