"""`kiln backfill`: history through the functions of the streams, into tables of its own; and what becomes of them."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from deploy.cli.exits import FAILED, OK
from deploy.cli.options import ConfigOption, JsonOption, StateOption, answers, lake_of, notes, settings_of

commands = typer.Typer(
    name="backfill", no_args_is_help=True, help="Make history anew, compare it with live, swap it in."
)

RunArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the run.")]


@commands.command("list")
def backfill_list(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """List the runs: range, source, state, rows by table, and when."""
    settings = settings_of(config, state)
    from deploy.history.runs import listed
    from deploy.show.backfill import render_runs, runs_json

    found = listed(lake_of(settings), settings.state)
    if as_json:
        print(runs_json(found))
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
    from deploy.history.diff import diff
    from deploy.history.runs import the_run
    from deploy.show.backfill import diff_json, print_diff

    lake, out = lake_of(settings), notes()
    run = the_run(lake, name)
    if not run.done:
        out.print(f"run {name} is not done: what it has not reached counts as only live", style="yellow")
    found = diff(lake, run, lambda words: out.print(words, style="dim"))
    if as_json:
        print(diff_json(found))
    else:
        print_diff(found, answers())
    raise typer.Exit(OK if all(each.equal for each in found) else FAILED)


@commands.command("swap")
def backfill_swap(name: RunArgument, state: StateOption = None, config: ConfigOption = None) -> None:
    """Put the run's rows in the place of live's, over the run's range.

    Kiln may run meanwhile. A swap that was cut short goes on when the command is typed again. The command needs no
    Java.
    """
    settings = settings_of(config, state)
    from deploy.history.runs import held, the_run
    from deploy.history.swap import swap
    from pipelines.history.swap import Exchange

    lake, out = lake_of(settings), notes()
    the_run(lake, name)
    with held(settings.state, name, swap=True):
        run = the_run(lake, name)
        exchange = Exchange(lake, durable=settings.durability == "power")
        done = swap(lake, run, exchange, _now, lambda words: out.print(words, style="dim"))
    if done is None:
        out.print(f"run {name} is swapped in already: nothing to do")
    else:
        out.print(f"run {name} is swapped in. To see for yourself, type kiln backfill diff {name}")


@commands.command("drop")
def backfill_drop(name: RunArgument, state: StateOption = None, config: ConfigOption = None) -> None:
    """Remove the tables of a run. What was swapped in stays. The account keeps that there was a run."""
    settings = settings_of(config, state)
    from deploy.history.runs import drop, held, the_run_if_left

    lake, out = lake_of(settings), notes()
    the_run_if_left(lake, name)
    with held(settings.state, name):
        dropped = drop(lake, name, _now)
    out.print(f"run {name} is dropped" if dropped else f"run {name} was dropped before: nothing to do")


def _now() -> int:
    return time.time_ns() // 1000
