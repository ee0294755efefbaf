"""`kiln backfill`: rebuild the tables of a time range, compare them with the live tables, and replace live rows."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.options import (
    FAILED,
    OK,
    ConfigOption,
    JsonOption,
    StateOption,
    UsageError,
    answers,
    lake_of,
    length_of,
    micros_of,
    note_once,
    notes,
    settings_of,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from kiln.pipelines.backfill.run_diff import RowDifference, TableDiff
    from kiln.pipelines.backfill.runs import RunSummary

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_GROUPS = 20
"""Maximum number of groups that are shown for a table; a group has one day and one separator."""

_COLORS: Mapping[str, str] = {
    "running": "cyan",
    "swapping": "cyan",
    "interrupted": "yellow",
    "swap interrupted": "red",
    "done": "green",
    "swapped": "green",
    "dropping": "cyan",
    "drop interrupted": "red",
    "dropped": "dim",
}

commands = typer.Typer(
    name="backfill", no_args_is_help=True, help="Rebuild, compare or replace the rows of a time range."
)

RunArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the backfill run.")]


@commands.command()
def run(
    low: Annotated[
        str, typer.Option("--from", metavar="TIME", help="Start of the range (ISO 8601, default zone UTC).")
    ],
    high: Annotated[str, typer.Option("--to", metavar="TIME", help="End of the range, exclusive.")],
    name: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the new run: a to z, 0 to 9 and -.")],
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]…", help="More files, in addition to --source FILE.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            metavar="frames|kafka|FILE",
            help="Source of frames: the table frames, Kafka, or a capture file, folder or - (stdin). Default: frames.",
        ),
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", metavar="T", help="Window length. Default: the setting batch.window.")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            metavar="NAME",
            help="Only frames of this network. With files, the network of messages whose topic names no network.",
        ),
    ] = None,
    as_of: Annotated[
        str | None,
        typer.Option(
            "--as-of", metavar="TIME", help="Use only separators that were verified by this time. Default: now."
        ),
    ] = None,
    engine: Annotated[
        Literal["core", "python"],
        typer.Option("--engine", help="Decoder: core is the native core (Python if it is not built)."),
    ] = "core",
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Rebuild the tables for a time range, next to the live tables.

    The tables of the run are in the folder backfill/NAME of the lake. You can run the command while Kiln runs. Repeat
    it to resume an interrupted run; a completed run is not changed.
    """
    require_extras("spark")
    settings = settings_of(config, state)
    from kiln.conf.settings.keys import suggest_key
    from kiln.deploy.run.backfill import ProgressFormatter, describe_outcome, run_backfill
    from kiln.pipelines.app.backfill_run import build_terms, parse_source
    from kiln.pipelines.backfill.run import RunProgress, encode_outcome

    begin, end = micros_of(low, "--from"), micros_of(high, "--to")
    if begin == end:
        raise UsageError(f"--from {low} --to {high}: the range is empty, because --to is exclusive. Pass a later --to")
    if begin > end:
        raise UsageError(f"--from {low} --to {high}: the range ends before it starts. Pass a later --to")
    texts = [*(source or ()), *(files or ())]
    try:
        kind, paths = parse_source(texts)
    except ValueError as error:
        raise UsageError(f"--source {' '.join(texts)}: {error}") from None
    for path in paths:
        if str(path) != "-" and not path.exists():
            raise UsageError(f"{path}: no such file or folder{suggest_key(str(path), ('frames', 'kafka'))}")
    terms = build_terms(
        settings,
        name,
        begin,
        end,
        source=kind,
        files=paths,
        window=None if window is None else length_of(window, "--window"),
        network=network,
        as_of=None if as_of is None else micros_of(as_of, "--as-of"),
        engine=engine,
    )
    out, pace = notes(), ProgressFormatter()
    with out.status("…") as shown:

        def report(progress: RunProgress) -> None:
            words = pace.format(progress)
            shown.update(words)
            if not out.is_terminal:
                out.print(words, soft_wrap=True)

        outcome = run_backfill(settings, terms, note_once(out), report)
    if as_json:
        print(json.dumps(encode_outcome(outcome)))
    else:
        answers().print(describe_outcome(outcome), soft_wrap=True)


@commands.command("list")
def backfill_list(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """List backfill runs with range, source, state and row counts."""
    require_extras("lake")
    settings = settings_of(config, state)
    from kiln.pipelines.backfill.runs import list_runs

    runs = list_runs(lake_of(settings), settings.state)
    if as_json:
        objects = [
            {
                "name": run.name,
                "from": _encode_time(run.range_from),
                "to": _encode_time(run.range_to),
                "source": run.details.get("source", ""),
                "state": summary.state,
                "rows": summary.rows,
                "begun_at": _encode_time(run.events[0].happened_at),
                "last_at": _encode_time(run.events[-1].happened_at),
            }
            for summary in runs
            for run in (summary.run,)
        ]
        print(json.dumps(objects, indent=1))
    else:
        answers().print(_render_runs(runs), soft_wrap=True)


@commands.command("diff")
def backfill_diff(
    name: RunArgument, as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None
) -> None:
    """Compare a backfill run with the live tables in its range.

    Prints the number of equal and different rows by table, day and separator, and the first differing rows. Batches are
    equal if their CIDs are. Exit code 1 if anything differs. Requires no Java.
    """
    require_extras("lake")
    settings = settings_of(config, state)
    from kiln.pipelines.backfill.run_diff import diff_run
    from kiln.pipelines.backfill.runs import get_run

    lake, out = lake_of(settings), notes()
    run = get_run(lake, name)
    if not run.is_done:
        out.print(
            f'run {name} is not complete: live rows that it has not rebuilt yet count as "only live". To complete it, '
            "repeat its command: kiln backfill run … --run NAME",
            style="yellow",
            soft_wrap=True,
        )
    diffs = diff_run(lake, run, lambda words: out.print(words, style="dim"))
    if as_json:
        print(encode_diffs(diffs))
    else:
        _print_diffs(diffs, answers())
    raise typer.Exit(OK if all(diff.is_equal for diff in diffs) else FAILED)


@commands.command("swap")
def backfill_swap(
    name: RunArgument,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Swap even if this removes live messages that the run lacks."),
    ] = False,
    only_frames: Annotated[
        bool,
        typer.Option("--only-frames", help="Only add the run's frames to the live table frames, and replace no row."),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Continue a swap that another machine, now gone, has started."),
    ] = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Replace the live rows in the run's time range with the run's rows.

    You can run the command while Kiln runs. Repeat it to resume an interrupted swap. Requires no Java.
    """
    require_extras("lake")
    settings = settings_of(config, state)
    from kiln.pipelines.backfill.runs import get_run, lock_run
    from kiln.pipelines.backfill.swap import FileSwap
    from kiln.pipelines.backfill.swap_runs import add_frames, swap_run
    from kiln.pipelines.runtime.table_ages import check_tables

    if replace and only_frames:
        raise UsageError(
            "--replace and --only-frames cannot be combined: --only-frames replaces no row. Pass one of them"
        )
    lake, out = lake_of(settings), notes()
    get_run(lake, name)
    with lock_run(settings.state, name, swap=True):
        run = get_run(lake, name)
        check_tables(lake, settings.checkpoints_root)
        exchange = FileSwap(lake, durable=settings.durability == "power")

        def say(words: str) -> None:
            out.print(words, style="dim")

        if only_frames:
            are = "are now" if add_frames(lake, run, exchange, say) else "were already"
            out.print(f"the frames of run {name} {are} in the live table frames")
            return
        by = f"{socket.gethostname()}:{settings.state}"
        done = swap_run(lake, run, exchange, _now, say, replace=replace, by=by, take_over=take_over)
    if done is None:
        out.print(f"nothing to do: the rows of run {name} are in the live tables already")
    else:
        out.print(f"the rows of run {name} are now in the live tables. To check: kiln backfill diff {name}")


@commands.command("drop")
def backfill_drop(name: RunArgument, state: StateOption = None, config: ConfigOption = None) -> None:
    """Delete the tables of a backfill run.

    Rows that kiln backfill swap has put into the live tables stay. The table backfill_runs keeps the run's history.
    """
    require_extras("lake")
    settings = settings_of(config, state)
    from kiln.pipelines.backfill.run_log import check_name
    from kiln.pipelines.backfill.runs import NoRunError, drop_run, get_newest_run, lock_run
    from kiln.pipelines.backfill.sources import delete_streams

    lake, out = lake_of(settings), notes()
    streams = settings.state / "backfill" / check_name(name)
    try:
        get_newest_run(lake, name)
    except NoRunError:
        if not streams.is_dir():
            raise
        with lock_run(settings.state, name):
            delete_streams(streams)
        out.print(f"run {name} had not begun: deleted the input that was saved for it")
        return
    with lock_run(settings.state, name):
        dropped = drop_run(lake, name, _now)
        delete_streams(streams)
    out.print(f"deleted the tables of run {name}" if dropped else f"nothing to do: run {name} was dropped before")


def _now() -> int:
    return time.time_ns() // 1000


# ---------------------------------------------------------------- list


def _render_runs(runs: Sequence[RunSummary]) -> Text:
    from rich.text import Text

    if not runs:
        return Text("no backfill runs yet. To start one: kiln backfill run --from TIME --to TIME --run NAME")
    text = Text()
    for summary in runs:
        run, state = summary.run, summary.state
        rows = ", ".join(f"{name} {count:,}" for name, count in summary.rows.items() if count)
        text.append(run.name, "bold").append("  ").append(state, _COLORS[state])
        source = run.details.get("source", "")
        text.append(f"  {_format_time(run.range_from)} to {_format_time(run.range_to)}, from {source}\n")
        begun, last = run.events[0].happened_at, run.events[-1].happened_at
        text.append(f"  started {_format_time(begun)}, last progress {_format_time(last)}\n", "dim")
        if state != "dropped":
            text.append(f"  {rows or 'no rows'}\n", "dim")
    text.rstrip()
    return text


# ---------------------------------------------------------------- diff


def encode_diffs(diffs: Sequence[TableDiff]) -> str:
    """Encode the diffs as a JSON object whose keys are tables (docs/design/contracts.md, Commands)."""
    from kiln.deploy.query.answer import encode_value

    def encode_row(row: Mapping[str, object] | None) -> dict[str, object] | None:
        return None if row is None else {name: encode_value(value) for name, value in row.items()}

    return json.dumps(
        {
            diff.table: {
                "same": diff.same,
                "only_live": diff.only_live,
                "only_run": diff.only_run,
                "differ": diff.differ,
                "places": [encode_row(group._asdict()) for group in diff.groups],
                "first": [
                    {"key": encode_row(one.key), "live": encode_row(one.live), "run": encode_row(one.run)}
                    for one in diff.examples
                ],
            }
            for diff in diffs
        },
        indent=1,
    )


def _print_diffs(diffs: Sequence[TableDiff], console: Console) -> None:
    """Print a line for each table. Then print counts by day and the first differences of each table that differs."""
    from rich.text import Text

    from kiln.deploy.ops.formatting import build_table

    table = build_table(["table"], ["same", "only live", "only run", "differ"])
    for diff in diffs:
        counts = (diff.same, diff.only_live, diff.only_run, diff.differ)
        table.add_row(diff.table, *(f"{count:,}" for count in counts), style="" if diff.is_equal else "yellow")
    console.print(table)
    for diff in diffs:
        if not diff.is_equal:
            console.print(_render_table_diff(diff), soft_wrap=True)
    if all(diff.is_equal for diff in diffs):
        console.print(Text("in its range, the run equals the live tables", "green"))


def _render_table_diff(diff: TableDiff) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from kiln.pipelines.backfill.run_diff import MAX_EXAMPLES
    from kiln.schemas.printable import printable

    lines = [Text(f"\n{diff.table}", "bold")]
    for group in diff.groups[:_MAX_GROUPS]:
        name = "" if group.separator is None else f" {printable(group.separator)}"
        counts = f"{group.only_live:,} rows only live, {group.only_run:,} only in the run, {group.same:,} equal"
        lines.append(Text(f"  {group.day}{name}: {counts}"))
    if len(diff.groups) > _MAX_GROUPS:
        lines.append(Text(f"  … {len(diff.groups) - _MAX_GROUPS:,} more days and separators; --json lists all", "dim"))
    lines += [Text(f"  · {describe_difference(one)}") for one in diff.examples]
    shown = sum((one.live is not None) + (one.run is not None) for one in diff.examples)
    if shown < diff.only_live + diff.only_run:
        lines.append(Text(f"  only the first {MAX_EXAMPLES} differences are shown", "dim"))
    return Group(*lines)


def describe_difference(difference: RowDifference) -> str:
    """Describe a difference: the key of the row, and the columns that differ or the side that lacks the row."""
    from kiln.deploy.query.answer import format_cell

    key = " ".join(f"{name} {format_cell(value)}" for name, value in difference.key.items())
    if difference.live is not None and difference.run is not None:
        columns = "; ".join(
            f"{name}: live {format_cell(difference.live[name])}, run {format_cell(difference.run[name])}"
            for name in difference.columns
        )
        return f"{key}: {columns}"
    row = difference.live if difference.live is not None else difference.run
    values = ", ".join(f"{name} {format_cell(value)}" for name, value in (row or {}).items() if value is not None)
    owner = "the live table" if difference.run is None else "the run"
    return f"{key}: only {owner} has it" + (f" ({values})" if values else "")


def _encode_time(micros: int) -> object:
    from kiln.deploy.query.answer import encode_value

    return encode_value(_EPOCH + timedelta(microseconds=micros))


def _format_time(micros: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=micros):%Y-%m-%d %H:%M:%S}"
