"""`kiln recover`: detection and repair of damage."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kiln.conf.process.extras import require_extras
from kiln.deploy.cli.exits import FAILED, OK
from kiln.deploy.cli.options import ConfigOption, JsonOption, StateOption, answers, note_once, notes, settings_of

commands = typer.Typer()


@commands.command()
def recover(
    yes: Annotated[bool, typer.Option("--yes", help="Repair the damage instead of listing it.")] = False,
    as_json: JsonOption = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Detect and repair power-loss damage and stale checkpoints.

    Topics that were deleted and created again are detected too. Without --yes the command changes nothing. Nothing is
    deleted: damaged files move to the folder set-aside of the state folder. Kiln must not run meanwhile. Exit code 1
    while damage is left.
    """
    require_extras("spark")
    settings = settings_of(config, state)
    from kiln.deploy.ops.recover import Recovery
    from kiln.deploy.screens.recovery import encode_recovery, render_recovery

    with Recovery(settings, note_once(notes())) as recovery:
        found = recovery.find()
        left = recovery.repair(found, time.time_ns() // 1_000) if yes else found
    if as_json:
        print(encode_recovery(found, left))
    else:
        answers().print(render_recovery(found, left), soft_wrap=True)
    raise typer.Exit(FAILED if left else OK)
