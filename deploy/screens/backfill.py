"""`kiln backfill list` and `kiln backfill diff` on the screen and as JSON. Times are ISO 8601 in UTC."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kiln.deploy.query.answer import format_cell
from kiln.deploy.query.answer_json import encode_value
from kiln.pipelines.backfill.run_diff import MAX_EXAMPLES, RowDifference, TableDiff
from kiln.pipelines.backfill.runs import RunSummary
from kiln.schemas.printable import printable

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PLACES = 20
"""Days and separators of a table that are shown."""

_COLORS: Mapping[str, str] = {
    "running": "cyan",
    "swapping": "cyan",
    "interrupted": "yellow",
    "swap interrupted": "red",
    "done": "green",
    "swapped": "green",
    "dropped": "dim",
}


# ---------------------------------------------------------------- list


def encode_runs(runs: Sequence[RunSummary]) -> str:
    """As a JSON array of objects."""
    return json.dumps(
        [
            {
                "name": run.name,
                "from": _encode_time(run.range_from),
                "to": _encode_time(run.range_to),
                "source": run.source,
                "state": run.state,
                "rows": run.rows,
                "begun_at": _encode_time(run.begun_at),
                "last_at": _encode_time(run.last_at),
            }
            for run in runs
        ],
        indent=1,
    )


def render_runs(runs: Sequence[RunSummary]) -> Text:
    """For the screen."""
    if not runs:
        return Text("no run yet. To begin one, type kiln backfill run --from T --to T --run NAME")
    text = Text()
    for run in runs:
        rows = ", ".join(f"{name} {count:,}" for name, count in run.rows.items() if count)
        text.append(run.name, "bold").append("  ").append(run.state, _COLORS[run.state])
        text.append(f"  {_format_time(run.range_from)} to {_format_time(run.range_to)}, from {run.source}\n")
        text.append(f"  begun {_format_time(run.begun_at)}, last told of {_format_time(run.last_at)}\n", "dim")
        if run.state != "dropped":
            text.append(f"  {rows or 'no rows'}\n", "dim")
    text.rstrip()
    return text


# ---------------------------------------------------------------- diff


def encode_diff(found: Sequence[TableDiff]) -> str:
    """As a JSON object with an entry for each table (docs/design/contracts.md, Commands)."""
    return json.dumps(
        {
            each.table: {
                "same": each.same,
                "only_live": each.only_live,
                "only_run": each.only_run,
                "differ": each.differ,
                "places": [
                    {name: encode_value(value) for name, value in place._asdict().items()} for place in each.groups
                ],
                "first": [
                    {"key": _encode_row(one.key), "live": _encode_row(one.live), "run": _encode_row(one.run)}
                    for one in each.examples
                ],
            }
            for each in found
        },
        indent=1,
    )


def print_diff(found: Sequence[TableDiff], console: Console) -> None:
    """For the screen: a line for each table; then, of each that differs, where, and the first differences."""
    table = Table(header_style="bold", pad_edge=False, show_edge=False)
    table.add_column("table")
    for name in ("same", "only live", "only run", "differ"):
        table.add_column(name, justify="right")
    for each in found:
        counts = (each.same, each.only_live, each.only_run, each.differ)
        table.add_row(each.table, *(f"{count:,}" for count in counts), style="" if each.is_equal else "yellow")
    console.print(table)
    for each in found:
        if not each.is_equal:
            console.print(_render_table_diff(each), soft_wrap=True)
    if all(each.is_equal for each in found):
        console.print(Text("the run equals live", "green"))


def _render_table_diff(found: TableDiff) -> RenderableType:
    lines = [Text(f"\n{found.table}", "bold")]
    for place in found.groups[:_PLACES]:
        name = "" if place.separator is None else f" {printable(place.separator)}"
        lines.append(
            Text(
                f"  {place.day}{name}: {place.only_live:,} only live, {place.only_run:,} only run, {place.same:,} same"
            )
        )
    if len(found.groups) > _PLACES:
        lines.append(Text(f"  and {len(found.groups) - _PLACES:,} more; --json has all", "dim"))
    lines += [Text(f"  · {describe_difference(each)}") for each in found.examples]
    shown = sum((each.live is not None) + (each.run is not None) for each in found.examples)
    if shown < found.only_live + found.only_run:
        lines.append(Text(f"  these are the first {MAX_EXAMPLES}", "dim"))
    return Group(*lines)


def describe_difference(found: RowDifference) -> str:
    """One difference in words: the key, and who has the row, or which columns differ."""
    key = " ".join(f"{name} {format_cell(value)}" for name, value in found.key.items())
    if found.live is not None and found.run is not None:
        columns = "; ".join(
            f"{name}: live {format_cell(found.live[name])}, run {format_cell(found.run[name])}"
            for name in found.columns
        )
        return f"{key}: {columns}"
    row = found.live if found.live is not None else found.run
    said = ", ".join(f"{name} {format_cell(value)}" for name, value in (row or {}).items() if value is not None)
    return f"{key}: only {'live' if found.run is None else 'the run'} has it{f' ({said})' if said else ''}"


def _encode_row(row: Mapping[str, object] | None) -> dict[str, object] | None:
    return None if row is None else {name: encode_value(value) for name, value in row.items()}


def _encode_time(micros: int | None) -> object:
    return None if micros is None else encode_value(_EPOCH + timedelta(microseconds=micros))


def _format_time(micros: int | None) -> str:
    return "-" if micros is None else f"{_EPOCH + timedelta(microseconds=micros):%Y-%m-%d %H:%M:%S}"
