"""`kiln doctor`: diagnose problems and suggest fixes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from kiln.deploy.cli.options import ENVIRONMENT, OK, ConfigOption, JsonOption, StateOption, answers, loaded

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kiln.deploy.ops.doctor_checks import DoctorCheck

commands = typer.Typer()


@commands.command()
def doctor(as_json: JsonOption = False, state: StateOption = None, config: ConfigOption = None) -> None:
    """Diagnose problems and suggest fixes.

    Checks Java, Spark, jars, packages, state folder, ports, disk, memory, broker, checkpoints, tables and IPFS node.
    Exit code 3 if a check fails.
    """
    settings = loaded(config, state).settings  # `settings_of` would fail for a state folder of another version
    from kiln.deploy.ops.doctor import run_checks

    checks = run_checks(settings)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        answers().print(render_checks(checks))
    raise typer.Exit(ENVIRONMENT if any(check.level == "fail" for check in checks) else OK)


def render_checks(checks: Sequence[DoctorCheck]) -> RenderableType:
    """Render the checks by group; the last line counts the problems and warnings."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from kiln.schemas.printable import printable

    marks = {"ok": ("ok", "green"), "warn": ("!", "yellow"), "fail": ("✕", "bold red")}
    table = Table.grid(padding=(0, 2, 0, 0))
    group = ""
    for check in checks:
        if check.group != group:
            group = check.group
            table.add_row("", Text(group, "bold"), "")
        mark, colour = marks[check.level]
        result = Text(printable(check.found))
        if check.what_to_do:
            result.append(f"\n→ {check.what_to_do}", "bold" if check.level == "fail" else "")
        table.add_row(Text(mark, colour), Text(check.name), result)
    failures, warnings = (sum(check.level == level for check in checks) for level in ("fail", "warn"))
    numbers = ((failures, "problem"), (warnings, "warning"))
    counts = [f"{count} {name}{'' if count == 1 else 's'}" for count, name in numbers if count]
    style = "bold red" if failures else "yellow" if warnings else "green"
    return Group(table, "", Text(", ".join(counts) or "no problems", style))
