"""`kiln broker stop`: stop a Kafka broker that a killed Kiln started and left running."""

from __future__ import annotations

from typing import Annotated

import typer

from kiln.conf.process.errors import KilnError
from kiln.deploy.cli.options import ConfigOption, StateOption, loaded

commands = typer.Typer(name="broker", no_args_is_help=True, help="Stop a Kafka broker that Kiln started.")


@commands.callback()
def broker() -> None:
    """Do nothing. Without this callback, typer would drop the word `stop`, because the group has one command."""


@commands.command("stop")
def broker_stop(
    force: Annotated[
        bool, typer.Option("--force", help="Stop the broker even if a running Kiln uses it. Kiln restarts it.")
    ] = False,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Stop the Kafka broker that a killed Kiln left running.

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
            f"the broker of {folder} belongs to a running Kiln (process {keeper}). Stop that Kiln, and its broker "
            "stops too. With --force, only the broker stops, and that Kiln restarts it"
        )
    stop_running(folder)
    print(f"stopped the embedded broker of {folder}, which was at {address}")
    if keeper is not None:
        print(f"the running Kiln (process {keeper}) restarts the broker")
