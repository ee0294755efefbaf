"""`kiln doctor` on the screen and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kiln.deploy.ops.doctor import DoctorCheck
from kiln.schemas.printable import printable


def encode_checks(checks: Sequence[DoctorCheck]) -> str:
    """Encode checks as a JSON array of objects."""
    return json.dumps([asdict(check) for check in checks], indent=2)


def render_checks(checks: Sequence[DoctorCheck]) -> RenderableType:
    """Render the checks for the screen, with the numbers of problems and warnings in the last line."""
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
    return Group(table, "", _summarize(checks))


def _summarize(checks: Sequence[DoctorCheck]) -> Text:
    failures, warnings = (sum(check.level == level for check in checks) for level in ("fail", "warn"))
    numbers = ((failures, "problem"), (warnings, "warning"))
    counts = [f"{count} {name}{'' if count == 1 else 's'}" for count, name in numbers if count]
    if not counts:
        return Text("no problems", "green")
    return Text(", ".join(counts), "bold red" if failures else "yellow")
