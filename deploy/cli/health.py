"""`kiln status` and `kiln doctor`: progress and diagnosis."""

from __future__ import annotations

from datetime import UTC, datetime

import typer

from kiln.deploy.cli.exits import ENVIRONMENT, OK
from kiln.deploy.cli.options import ConfigOption, JsonOption, StateOption, answers, loaded, settings_of

commands = typer.Typer()


@commands.command()
def status(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """Show topics, query progress and tables."""
    settings = settings_of(config, state)
    from kiln.deploy.ops.status import read_status
    from kiln.deploy.screens.status import encode_status, render_status

    found = read_status(settings)
    if as_json:
        print(encode_status(found))
    else:
        answers().print(render_status(found, datetime.now(UTC)))


@commands.command()
def doctor(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """Diagnose problems and suggest fixes.

    Checks Java, Spark, jars, packages, state folder, ports, disk, memory, broker, checkpoints, tables and IPFS node.
    Exit code 3 if a check fails.
    """
    settings = loaded(config, state).settings  # also of a state folder that this Kiln cannot use
    from kiln.deploy.ops.doctor import has_failures, run_checks
    from kiln.deploy.screens.doctor import encode_checks, render_checks

    checks = run_checks(settings)
    if as_json:
        print(encode_checks(checks))
    else:
        answers().print(render_checks(checks))
    raise typer.Exit(ENVIRONMENT if has_failures(checks) else OK)
