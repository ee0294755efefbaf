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
_MAX_GROUPS = 20
"""Number of days and separators of a table that are shown."""

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
    """Encode runs as a JSON array of objects."""
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
    """Render runs for the screen."""
    if not runs:
        return Text("no runs yet. To start one: kiln backfill run --from T --to T --run NAME")
    text = Text()
    for run in runs:
        rows = ", ".join(f"{name} {count:,}" for name, count in run.rows.items() if count)
        text.append(run.name, "bold").append("  ").append(run.state, _COLORS[run.state])
        text.append(f"  {_format_time(run.range_from)} to {_format_time(run.range_to)}, from {run.source}\n")
        text.append(f"  started {_format_time(run.begun_at)}, last progress {_format_time(run.last_at)}\n", "dim")
        if run.state != "dropped":
            text.append(f"  {rows or 'no rows'}\n", "dim")
    text.rstrip()
    return text


# ---------------------------------------------------------------- diff


def encode_diff(diffs: Sequence[TableDiff]) -> str:
    """Encode diffs as a JSON object with an entry for each table (docs/design/contracts.md, Commands)."""
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
            for each in diffs
        },
        indent=1,
    )


def print_diff(diffs: Sequence[TableDiff], console: Console) -> None:
    """Print a line for each table; for each table that differs, then print the days and the first differences."""
    table = Table(header_style="bold", pad_edge=False, show_edge=False)
    table.add_column("table")
    for name in ("same", "only live", "only run", "differ"):
        table.add_column(name, justify="right")
    for each in diffs:
        counts = (each.same, each.only_live, each.only_run, each.differ)
        table.add_row(each.table, *(f"{count:,}" for count in counts), style="" if each.is_equal else "yellow")
    console.print(table)
    for each in diffs:
        if not each.is_equal:
            console.print(_render_table_diff(each), soft_wrap=True)
    if all(each.is_equal for each in diffs):
        console.print(Text("the run equals the live tables", "green"))


def _render_table_diff(diff: TableDiff) -> RenderableType:
    lines = [Text(f"\n{diff.table}", "bold")]
    for group in diff.groups[:_MAX_GROUPS]:
        name = "" if group.separator is None else f" {printable(group.separator)}"
        counts = f"{group.only_live:,} only live, {group.only_run:,} only run, {group.same:,} same"
        lines.append(Text(f"  {group.day}{name}: {counts}"))
    if len(diff.groups) > _MAX_GROUPS:
        lines.append(Text(f"  and {len(diff.groups) - _MAX_GROUPS:,} more; --json has all", "dim"))
    lines += [Text(f"  · {describe_difference(each)}") for each in diff.examples]
    shown = sum((each.live is not None) + (each.run is not None) for each in diff.examples)
    if shown < diff.only_live + diff.only_run:
        lines.append(Text(f"  these are the first {MAX_EXAMPLES}", "dim"))
    return Group(*lines)


def describe_difference(found: RowDifference) -> str:
    """Describe a difference: the key, and the side that has the row, or the columns that differ."""
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
