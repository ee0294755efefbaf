"""`kiln broker stop`: the embedded broker, where it goes on without a Kiln."""

from __future__ import annotations

from typing import Annotated

import typer

from kiln.conf.process.errors import KilnError
from kiln.deploy.cli.options import ConfigOption, StateOption, loaded

commands = typer.Typer(name="broker", no_args_is_help=True, help="Stop the embedded broker of a state folder.")


@commands.callback()
def broker() -> None:
    """Keeps `stop` a command of its own: typer makes a group with one command into that command."""


@commands.command("stop")
def broker_stop(
    force: Annotated[
        bool, typer.Option("--force", help="Stop the broker although a Kiln runs that started it and keeps it.")
    ] = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Stop the embedded broker that a killed Kiln left in the state folder.

    A Kiln that runs stops its broker itself, so the command refuses then. The exit code is 0 also when no broker runs.
    """
    folder = loaded(config, state).settings.state
    from kiln.deploy.stack.broker_owner import read_owner
    from kiln.deploy.stack.embedded_broker import find_running_broker, stop_running

    address = find_running_broker(folder)
    keeper = read_owner(folder)
    if address is None:
        print(f"no embedded broker runs in {folder}")
        return
    if keeper is not None and not force:
        raise KilnError(
            f"the broker of {folder} belongs to a Kiln that runs (process {keeper}). Stop that Kiln, which stops its "
            "broker. With --force the broker stops now, and that Kiln starts it again"
        )
    stop_running(folder)
    print(f"stopped the embedded broker of {folder}, which was at {address}")
    if keeper is not None:
        print(f"the Kiln that runs (process {keeper}) starts it again")
