"""`kiln backfill`: history through the functions of the streams, into tables of its own; and what becomes of them."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from kiln.deploy.cli.exits import FAILED, OK, UsageError
from kiln.deploy.cli.options import (
    ConfigOption,
    JsonOption,
    StateOption,
    answers,
    lake_of,
    note_once,
    notes,
    settings_of,
)

commands = typer.Typer(
    name="backfill", no_args_is_help=True, help="Make history anew, compare it with live, swap it in."
)

RunArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the run.")]


@commands.command()
def run(
    low: Annotated[str, typer.Option("--from", metavar="TIME", help="Beginning of the range, ISO 8601; UTC.")],
    high: Annotated[str, typer.Option("--to", metavar="TIME", help="End of the range; not in the range.")],
    name: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run: a to z, 0 to 9 and -.")],
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]…", help="More files, where --source names a file.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            metavar="frames|kafka|FILE",
            help="Where frames come from: the table frames, Kafka, or files. Repeat the option for more files. "
            "Default: frames.",
        ),
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", metavar="T", help="How long a batch gathers updates [batch.window].")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            metavar="NAME",
            help="Read frames of this network alone. Of files: the network where a topic names none.",
        ),
    ] = None,
    as_of: Annotated[
        str | None,
        typer.Option("--as-of", metavar="TIME", help="Take the separators that were verified then. Default: now."),
    ] = None,
    publish: Annotated[
        bool,
        typer.Option(
            "--publish", help="Have the bridge publish the run's LIVE batches that nobody has published, each once."
        ),
    ] = False,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Make the tables of a range of time anew, beside the live ones, in the folder backfill/NAME of the lake.

    The command works while Kiln runs. Stopped or killed, the same command goes on. A run that is done stays as it is.
    """
    settings = settings_of(config, state)
    import json

    from kiln.deploy.run.backfill import run_backfill
    from kiln.deploy.screens.backfill_run import ProgressFormatter, describe_outcome, encode_outcome
    from kiln.pipelines.app.backfill_run import BackfillRequest, parse_source, parse_time
    from kiln.pipelines.backfill.run import RunProgress

    def time_of(option: str, text: str) -> int:
        try:
            return parse_time(text)
        except ValueError as error:
            raise UsageError(f"{option} {text}: expected {error}") from None

    begin, end = time_of("--from", low), time_of("--to", high)
    if begin >= end:
        raise UsageError(f"--from {low} --to {high}: the range ends before it begins")
    texts = [*(source or ()), *(files or ())]
    try:
        kind, paths = parse_source(texts)
    except ValueError as error:
        raise UsageError(f"--source {' '.join(texts)}: expected {error}") from None
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
    request = BackfillRequest(
        name,
        begin,
        end,
        source=kind,
        files=tuple(Path(each) for each in paths),
        window=None if window is None else _length(window),
        network=network,
        as_of=None if as_of is None else time_of("--as-of", as_of),
        publish=publish,
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
        answers().print(describe_outcome(outcome, publish), soft_wrap=True)


@commands.command("list")
def backfill_list(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """List the runs: range, source, state, rows by table, and when."""
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
    """Compare a run with live over the run's range, by table, day and separator, to the CID.

    The command shows the first differences in words. The exit code is 1 if something differs. The command needs no
    Java.
    """
    settings = settings_of(config, state)
    from kiln.deploy.screens.backfill import encode_diff, print_diff
    from kiln.pipelines.backfill.run_diff import diff_run
    from kiln.pipelines.backfill.runs import get_run

    lake, out = lake_of(settings), notes()
    run = get_run(lake, name)
    if not run.is_done:
        out.print(f"run {name} is not done: what it has not reached counts as only live", style="yellow")
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
        typer.Option("--replace", help="Also where live heard messages that the files, or Kafka, did not hold."),
    ] = False,
    only_frames: Annotated[
        bool,
        typer.Option("--only-frames", help="Only add the run's frames to live's, for a later run from frames."),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Also where another machine, which is gone, has begun a swap in this lake."),
    ] = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Put the run's rows in the place of live's, over the run's range.

    Kiln may run meanwhile. A swap that was cut short goes on when the command is typed again. The command needs no
    Java.
    """
    settings = settings_of(config, state)
    from kiln.pipelines.backfill.runs import get_run, lock_run
    from kiln.pipelines.backfill.swap import FileSwap
    from kiln.pipelines.backfill.swap_runs import add_frames, swap_run

    if replace and only_frames:
        raise UsageError("--replace --only-frames: --only-frames replaces nothing")
    lake, out = lake_of(settings), notes()
    get_run(lake, name)
    with lock_run(settings.state, name, swap=True):
        run = get_run(lake, name)
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
        out.print(f"run {name} is swapped in. To see for yourself, type kiln backfill diff {name}")


@commands.command("drop")
def backfill_drop(name: RunArgument, state: StateOption = None, config: ConfigOption = None) -> None:
    """Remove the tables of a run. What was swapped in stays. The account keeps that there was a run."""
    settings = settings_of(config, state)
    from kiln.pipelines.backfill.runs import drop_run, get_run_unless_dropped, lock_run

    lake, out = lake_of(settings), notes()
    get_run_unless_dropped(lake, name)
    with lock_run(settings.state, name):
        dropped = drop_run(lake, name, _now)
    out.print(f"run {name} is dropped" if dropped else f"run {name} was dropped before: nothing to do")


def _now() -> int:
    return time.time_ns() // 1000


def _length(text: str) -> timedelta:
    from kiln.conf.settings.durations import parse_duration

    try:
        length = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--window {text}: expected {error}") from None
    if not length:
        raise UsageError(f"--window {text}: expected more than nothing")
    return length
