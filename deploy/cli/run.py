"""`kiln run`, `kiln job` and `kiln bridge`: run all of Kiln, one query, or only the bridge."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kiln.conf.process.extras import read_version, require_extras
from kiln.deploy.cli.options import (
    FAILED,
    OK,
    ConfigOption,
    StateOption,
    UsageError,
    answers,
    lake_of,
    length_of,
    note_once,
    notes,
    settings_of,
)

if TYPE_CHECKING:
    from kiln.conf.settings.model import JobName, Settings
    from kiln.deploy.run.network import Source

commands = typer.Typer()


@commands.command()
def run(
    duration: Annotated[
        str | None,
        typer.Option("--for", metavar="DURATION", help="Capture for this long, such as 60s. Default: until Ctrl-C."),
    ] = None,
    catch_up: Annotated[
        bool, typer.Option("--catch-up", help="Process all records in Kafka without a bridge, then stop.")
    ] = False,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(
            "--bootstrap",
            metavar="ADDR",
            help="Address of a bootstrap peer (/ip4/…/tcp/…/p2p/…). Repeatable.",
        ),
    ] = None,
    no_network: Annotated[
        bool, typer.Option("--no-network", help="Run without a bridge, on records that other programs write to Kafka.")
    ] = False,
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="NAME", help="Network name, as in /ceramic/NAME [env: KILN_NETWORK]."),
    ] = None,
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Run broker, bridge, all queries and a status screen.

    After --for DURATION, the bridge stops capturing, and the queries process the captured records (for at most
    run.drain). Without a bootstrap peer, Kiln starts a demo network on this machine and publishes its batches there.
    """
    require_extras("bridge", "spark")
    if duration is not None and catch_up:
        raise UsageError("--for and --catch-up cannot be combined. Pass one of them; --catch-up stops by itself")
    length = None if duration is None else length_of(duration)
    settings = settings_of(config, state, network)
    from kiln.conf.settings.addresses import check_tcp_of_peer

    for address in bootstrap or ():
        try:
            check_tcp_of_peer(address)
        except ValueError as error:
            raise UsageError(f'--bootstrap "{address}": {error}') from error
    if bootstrap:
        settings = settings.model_copy(
            update={"bridge": settings.bridge.model_copy(update={"bootstrap": tuple(bootstrap)})}
        )
    # synthetic Ceramic messages must not reach a real network
    elsewhere = settings.bridge.bootstrap or settings.bep50.enabled or not settings.is_ceramic
    source: Source = "network" if elsewhere else "demo" if settings.traffic.enabled else "none"
    source = "none" if no_network or catch_up else source
    raise typer.Exit(_run(settings, settings.queries, length, catch_up, source, maintain=True))


def _run(
    settings: Settings,
    names: Sequence[JobName],
    length: timedelta | None,
    catch_up: bool,
    source: Source,
    *,
    maintain: bool = False,
) -> int:
    from kiln.deploy.run.application import run_application
    from kiln.deploy.run.screen import open_view
    from kiln.deploy.run.summary import read_row_counts, render_summary

    console = answers()
    before = read_row_counts(lake_of(settings))
    with open_view(console) as view:
        outcome = run_application(
            settings, view, names=names, duration=length, catch_up=catch_up, source=source, maintain=maintain
        )
    command = command_line(sys.argv[0], settings)
    summary = render_summary(outcome, lake_of(settings), before, command, is_ceramic=settings.is_ceramic)
    console.print(summary, soft_wrap=True)
    return FAILED if outcome.error else OK


@commands.command()
def job(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Query: archive, updates, batch or sink.")],
    state: StateOption = None,
    config: ConfigOption = None,
) -> None:
    """Run one query as a Spark application, until Ctrl-C."""
    require_extras("bridge", "spark")
    query, settings = _job_name(name), settings_of(config, state)
    from kiln.schemas.queries import CERAMIC_QUERIES

    if not settings.is_ceramic and query in CERAMIC_QUERIES:
        raise UsageError(
            f'the query {query} needs a Ceramic network, but network.kind is "gossip". Run archive or sink instead'
        )
    raise typer.Exit(_run(settings, (query,), length=None, catch_up=False, source="none"))


def _job_name(name: str) -> JobName:
    from kiln.conf.settings.keys import suggest_key
    from kiln.schemas.queries import QUERIES

    for query in QUERIES:
        if query == name:
            return query
    hint = suggest_key(name, QUERIES) or f". Pass one of {', '.join(QUERIES)}"
    raise UsageError(f"there is no query {name}{hint}")


@commands.command()
def bridge(state: StateOption = None, config: ConfigOption = None) -> None:
    """Run only the bridge between network and Kafka, until Ctrl-C.

    The bridge connects to the peers in the setting bridge.bootstrap. While the Kafka broker is unreachable, the bridge
    stores frames on disk.
    """
    require_extras("bridge")
    settings = settings_of(config, state)
    from kiln.bridge.app.main import run as run_bridge
    from kiln.conf.process.exporter import Exporter
    from kiln.deploy.ops.bridge_monitor import BridgeMonitor
    from kiln.deploy.stack.kafka_broker import start_broker_eventually

    out = notes()
    status_file = settings.bridge_dir / "status.json"
    monitor = BridgeMonitor(status_file, settings.network.name, read_version(), settings.broker.client_options)
    endpoint = Exporter(settings.monitor.host_and_port, monitor, settings.monitor.hosts)
    with start_broker_eventually(settings, note_once(out)), endpoint as exporter:
        note = f"the bridge starts; its status is in {status_file}. Ctrl-C stops it"
        out.print(exporter.error or note, style="dim")
        run_bridge(settings)


def command_line(program: str, settings: Settings) -> str:
    """Format a `kiln sql` command line for the user's shell: with the path of `program` if `kiln` is not on PATH, and
    with `--state` unless the state folder is the default or comes from KILN_STATE."""
    name = "kiln" if shutil.which("kiln") else os.path.relpath(program)
    default = Path("state").absolute()
    state = (
        ""
        if settings.state == default or os.environ.get("KILN_STATE")
        else f" --state {shlex.quote(str(settings.state))}"
    )
    return f"{name} sql{state}"
