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
    """As a JSON array of objects."""
    return json.dumps([asdict(check) for check in checks], indent=2)


def render_checks(checks: Sequence[DoctorCheck]) -> RenderableType:
    """The checks for the screen, and a last line that says how it stands."""
    marks = {"ok": ("ok", "green"), "warn": ("!", "yellow"), "fail": ("✕", "bold red")}
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in checks:
        mark, colour = marks[check.level]
        found = Text(printable(check.found))
        if check.what_to_do:
            found.append(f"\n→ {check.what_to_do}", "bold" if check.level == "fail" else "")
        table.add_row(Text(mark, colour), Text(check.name), found)
    bad = sum(check.level == "fail" for check in checks)
    last = Text(f"{bad} in the way", "bold red") if bad else Text("nothing is in the way", "green")
    return Group(table, "", last)
