"""`kiln broker stop`: stop an embedded broker that outlived its Kiln."""

from __future__ import annotations

from typing import Annotated

import typer

from kiln.conf.process.errors import KilnError
from kiln.deploy.cli.options import ConfigOption, StateOption, loaded

commands = typer.Typer(name="broker", no_args_is_help=True, help="Stop the embedded broker of a state folder.")


@commands.callback()
def broker() -> None:
    """Keep `stop` a subcommand: typer flattens a group with one command."""


@commands.command("stop")
def broker_stop(
    force: Annotated[
        bool, typer.Option("--force", help="Stop the broker of a running Kiln, which restarts it.")
    ] = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Stop the embedded broker that a killed Kiln left running.

    Without --force, the command fails if the broker belongs to a running Kiln. Exit code 0 also if no broker runs.
    """
    folder = loaded(config, state).settings.state
    from kiln.deploy.stack.embedded_broker import find_running_broker, read_owner, stop_running

    address = find_running_broker(folder)
    keeper = read_owner(folder)
    if address is None:
        print(f"no embedded broker runs in {folder}")
        return
    if keeper is not None and not force:
        raise KilnError(
            f"the broker of {folder} belongs to a running Kiln (process {keeper}). Stop that Kiln, which stops its "
            "broker. With --force the broker stops now, and that Kiln starts it again"
        )
    stop_running(folder)
    print(f"stopped the embedded broker of {folder}, which was at {address}")
    if keeper is not None:
        print(f"the running Kiln (process {keeper}) starts it again")
