"""`kiln backfill`: history into tables of a run's own."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.exits import UsageError
from deploy.cli.options import ConfigOption, JsonOption, StateOption, answers, note_once, notes, settings_of

commands = typer.Typer()
backfill = typer.Typer(no_args_is_help=True, help="Run history through the functions of the streams.")
commands.add_typer(backfill, name="backfill")


@backfill.command()
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
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Make the tables of a range of time anew, beside the live ones, in the folder backfill/NAME of the lake.

    The command works while Kiln runs. Stopped or killed, the same command goes on. A run that is done stays as it is.
    """
    settings = settings_of(config, state)
    import json

    from deploy.run.backfill import run_backfill
    from deploy.show.backfill import Pace, as_object, told
    from pipelines.backfill import Request, parse_source, parse_time
    from pipelines.history.run import Progress

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
    request = Request(
        name,
        begin,
        end,
        source=kind,
        files=tuple(Path(each) for each in paths),
        window=None if window is None else _length(window),
        network=network,
        as_of=None if as_of is None else time_of("--as-of", as_of),
    )
    out, pace = notes(), Pace()
    with out.status("…") as shown:

        def report(progress: Progress) -> None:
            words = pace.words(progress)
            shown.update(words)
            if not out.is_terminal:
                out.print(words, soft_wrap=True)

        outcome = run_backfill(settings, request, note_once(out), report)
    if as_json:
        print(json.dumps(as_object(outcome)))
    else:
        answers().print(told(outcome), soft_wrap=True)


def _length(text: str) -> timedelta:
    from conf.settings.durations import parse_duration

    try:
        length = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--window {text}: expected {error}") from None
    if not length:
        raise UsageError(f"--window {text}: expected more than nothing")
    return length
