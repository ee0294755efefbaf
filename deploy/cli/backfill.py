"""`kiln backfill`: rebuild, compare and swap the tables of a time range."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Annotated

import typer

from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.exits import FAILED, OK, UsageError
from kiln.deploy.cli.options import (
    ConfigOption,
    JsonOption,
    StateOption,
    answers,
    lake_of,
    length_of,
    note_once,
    notes,
    settings_of,
)

commands = typer.Typer(
    name="backfill", no_args_is_help=True, help="Rebuild, compare and swap the tables of a time range."
)

RunArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the run.")]


@commands.command()
def run(
    low: Annotated[str, typer.Option("--from", metavar="TIME", help="Start of the range, ISO 8601; UTC.")],
    high: Annotated[str, typer.Option("--to", metavar="TIME", help="End of the range, exclusive.")],
    name: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run: a to z, 0 to 9 and -.")],
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]…", help="Further files for --source FILE.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            metavar="frames|kafka|FILE",
            help="Source of frames: the table frames, Kafka, or files, folders and - (stdin). Default: frames.",
        ),
    ] = None,
    window: Annotated[str | None, typer.Option("--window", metavar="T", help="Window length [batch.window].")] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            metavar="NAME",
            help="Only frames of this network. For files: the network of topics that name none.",
        ),
    ] = None,
    as_of: Annotated[
        str | None,
        typer.Option("--as-of", metavar="TIME", help="Use separators as verified at this time. Default: now."),
    ] = None,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Rebuild the tables for a time range, next to the live tables.

    The tables of the run are in backfill/NAME of the lake. The command works while Kiln runs. Repeat it to resume a
    stopped run; a completed run is not changed.
    """
    require_extras("spark")
    settings = settings_of(config, state)
    import json

    from kiln.conf.settings.keys import suggest_key
    from kiln.deploy.run.backfill import run_backfill
    from kiln.deploy.screens.backfill_run import ProgressFormatter, describe_outcome
    from kiln.pipelines.app.backfill_run import BackfillRequest, parse_source, parse_time
    from kiln.pipelines.backfill.run import RunProgress, encode_outcome

    def time_of(option: str, text: str) -> int:
        try:
            return parse_time(text)
        except ValueError as error:
            raise UsageError(f"{option} {text}: expected {error}") from None

    begin, end = time_of("--from", low), time_of("--to", high)
    if begin == end:
        raise UsageError(f"--from {low} --to {high}: the range is empty, because --to is exclusive. Pass a later --to")
    if begin > end:
        raise UsageError(f"--from {low} --to {high}: the range ends before it starts")
    texts = [*(source or ()), *(files or ())]
    try:
        kind, paths = parse_source(texts)
    except ValueError as error:
        raise UsageError(f"--source {' '.join(texts)}: expected {error}") from None
    for path in paths:
        if str(path) != "-" and not path.exists():
            raise UsageError(f"{path}: no such file or folder{suggest_key(str(path), ('frames', 'kafka'))}")
    request = BackfillRequest(
        name,
        begin,
        end,
        source=kind,
        files=tuple(Path(each) for each in paths),
        window=None if window is None else length_of(window, "--window"),
        network=network,
        as_of=None if as_of is None else time_of("--as-of", as_of),
    )
    out, pace = notes(), ProgressFormatter()
    with out.status("…") as shown:

        def report(progress: RunProgress) -> None:
            words = pace.format(progress)
            shown.update(words)
            if not out.is_terminal:
                out.print(words, soft_wrap=True)

        outcome = run_backfill(settings, request, note_once(out), report)
    if as_json:
        print(json.dumps(encode_outcome(outcome)))
    else:
        answers().print(describe_outcome(outcome), soft_wrap=True)


@commands.command("list")
def backfill_list(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """List runs with range, source, state and row counts."""
    require_extras("lake")
    settings = settings_of(config, state)
    from kiln.deploy.screens.backfill import encode_runs, render_runs
    from kiln.pipelines.backfill.runs import list_runs

    found = list_runs(lake_of(settings), settings.state)
    if as_json:
        print(encode_runs(found))
    else:
        answers().print(render_runs(found), soft_wrap=True)


@commands.command("diff")
def backfill_diff(
    name: RunArgument, as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None
) -> None:
    """Compare a run with the live tables in its range.

    The comparison is by table, day and separator, down to the CID, and lists the first differences. Exit code 1 if
    anything differs. Requires no Java.
    """
    require_extras("lake")
    settings = settings_of(config, state)
    from kiln.deploy.screens.backfill import encode_diff, print_diff
    from kiln.pipelines.backfill.run_diff import diff_run
    from kiln.pipelines.backfill.runs import get_run

    lake, out = lake_of(settings), notes()
    run = get_run(lake, name)
    if not run.is_done:
        out.print(f"run {name} is not complete: rows that it has not reached count as only live", style="yellow")
    found = diff_run(lake, run, lambda words: out.print(words, style="dim"))
    if as_json:
        print(encode_diff(found))
    else:
        print_diff(found, answers())
    raise typer.Exit(OK if all(each.is_equal for each in found) else FAILED)


@commands.command("swap")
def backfill_swap(
    name: RunArgument,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace live rows even if the source lacks live messages."),
    ] = False,
    only_frames: Annotated[
        bool,
        typer.Option("--only-frames", help="Only add the frames of the run to the live table."),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Continue a swap that another, lost machine started."),
    ] = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Replace the live rows in the run's time range with the run's rows.

    Kiln may run meanwhile. Repeat the command to resume an interrupted swap. Requires no Java.
    """
    require_extras("lake")
    settings = settings_of(config, state)
    from kiln.pipelines.backfill.runs import get_run, lock_run
    from kiln.pipelines.backfill.swap import FileSwap
    from kiln.pipelines.backfill.swap_runs import add_frames, swap_run
    from kiln.pipelines.runtime.table_ages import check_tables

    if replace and only_frames:
        raise UsageError("--replace and --only-frames: choose one; --only-frames replaces nothing")
    lake, out = lake_of(settings), notes()
    get_run(lake, name)
    with lock_run(settings.state, name, swap=True):
        run = get_run(lake, name)
        check_tables(lake, settings.checkpoints_root)
        exchange = FileSwap(lake, durable=settings.durability == "power")

        def say(words: str) -> None:
            out.print(words, style="dim")

        if only_frames:
            added = add_frames(lake, run, exchange, say)
            out.print(f"live has the frames of run {name}" if added else f"live had the frames of run {name} already")
            return
        by = f"{socket.gethostname()}:{settings.state}"
        done = swap_run(lake, run, exchange, _now, say, replace=replace, by=by, take_over=take_over)
    if done is None:
        out.print(f"run {name} is swapped in already: nothing to do")
    else:
        out.print(f"run {name} is swapped in. To compare it with the live tables, type kiln backfill diff {name}")


@commands.command("drop")
def backfill_drop(name: RunArgument, state: StateOption = None, config: ConfigOption = None) -> None:
    """Delete the tables of a run.

    Rows that were swapped in stay, and backfill_runs keeps the events of the run.
    """
    require_extras("lake")
    settings = settings_of(config, state)
    from kiln.pipelines.backfill.run_log import check_name
    from kiln.pipelines.backfill.runs import NoRunError, drop_run, get_run_unless_dropped, lock_run
    from kiln.pipelines.backfill.sources import delete_streams

    lake, out = lake_of(settings), notes()
    streams = settings.state / "backfill" / check_name(name)
    try:
        get_run_unless_dropped(lake, name)
    except NoRunError:
        if not streams.is_dir():
            raise
        with lock_run(settings.state, name):
            delete_streams(streams)
        out.print(f"run {name} had not begun: the input that was saved for it is deleted")
        return
    with lock_run(settings.state, name):
        dropped = drop_run(lake, name, _now)
        delete_streams(streams)
    out.print(f"run {name} is dropped" if dropped else f"run {name} was dropped before: nothing to do")


def _now() -> int:
    return time.time_ns() // 1000
