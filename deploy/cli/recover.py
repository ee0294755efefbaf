"""`kiln recover`: what is damaged or does not go together, and putting it right."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kiln.deploy.cli.exits import FAILED, OK
from kiln.deploy.cli.options import ConfigOption, JsonOption, StateOption, answers, note_once, notes, settings_of

commands = typer.Typer()


@commands.command()
def recover(
    yes: Annotated[bool, typer.Option("--yes", help="Do what the command says it would do.")] = False,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Find what a power cut has damaged, checkpoints older than their tables, and topics created again; repair them.

    Without --yes the command changes nothing. Nothing is deleted: files that are in the way go to the folder set-aside
    of the state folder. No Kiln may run meanwhile. The exit code is 1 while something is left to be put right.
    """
    settings = settings_of(config, state)
    from kiln.deploy.ops.recover import Recovery
    from kiln.deploy.screens.recovery import encode_recovery, render_recovery

    with Recovery(settings, note_once(notes())) as recovery:
        found = recovery.find()
        left = recovery.put_right(found, time.time_ns() // 1_000) if yes else found
    if as_json:
        print(encode_recovery(found, left))
    else:
        answers().print(render_recovery(found, left), soft_wrap=True)
    raise typer.Exit(FAILED if left else OK)
