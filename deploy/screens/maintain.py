"""`kiln maintain` on the screen and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from kiln.deploy.ops.maintenance import TableMaintenance


def encode_maintenance(cared: Sequence[TableMaintenance], *, as_lines: bool) -> str:
    """As a JSON array of objects, one for each table, or as a line for each table."""
    objects = [_encode_table(each) for each in cared]
    if as_lines:
        return "\n".join(json.dumps(each, ensure_ascii=False) for each in objects)
    return json.dumps(objects, indent=2, ensure_ascii=False)


def _encode_table(each: TableMaintenance) -> dict[str, object]:
    pairs = asdict(each.cared)
    told: dict[str, object] = {"table": pairs["table"]}
    for name in ("files", "size", "entries"):
        told |= {f"{name}_before": pairs[name][0], f"{name}_after": pairs[name][1]}
    return told | {
        "rewritten_bytes": pairs["rewritten"],
        "expired_rows": pairs["expired_rows"],
        "removed_files": pairs["garbage"][0],
        "removed_bytes": pairs["garbage"][1],
        "steps": list(pairs["words"]),
        "left_alone": pairs["left_alone"],
        "seconds": round(each.seconds, 3),
        "error": each.error,
    }


def render_maintenance(cared: Sequence[TableMaintenance], *, done: bool) -> Group:
    """A line for each table, before → after; below, what went wrong. `done` False: what is to be done, with reasons."""
    shown = Table(box=None, pad_edge=False)
    for name in ("table", "files", "bytes", "log entries", "written anew", "old rows", "removed", "s"):
        shown.add_column(name, justify="left" if name == "table" else "right")
    for each in cared:
        it = each.cared
        if it.left_alone or each.error:
            shown.add_row(it.table, "left as it is", "", "", "", "", "", f"{each.seconds:.1f}")
            continue
        shown.add_row(
            it.table,
            _format_change(*it.files),
            _format_change(*map(decimal, it.size)),
            _format_change(*it.entries),
            decimal(it.rewritten) if it.rewritten else "",
            f"{it.expired_rows:,}" if it.expired_rows else "",
            f"{it.garbage[0]:,} files, {decimal(it.garbage[1])}" if it.garbage[0] else "",
            f"{each.seconds:.1f}",
        )
    lines: list[Table | Text] = [shown]
    for each in cared:
        if each.cared.left_alone:
            lines.append(Text(f"{each.cared.table} is left as it is: {each.cared.left_alone}"))
        if each.error:
            lines.append(Text(each.error, "red"))
        if not done:
            lines += [Text(f"{each.cared.table}: {words}", "dim") for words in each.cared.words]
    if not done:
        lines.append(Text("Nothing was changed. To do this, type kiln maintain", "bold"))
    return Group(*lines)


def format_maintenance_line(cared: Sequence[TableMaintenance]) -> str:
    """One line for one time: what changed."""
    parts = [
        f"{each.cared.table} {each.cared.files[0]:,} → {each.cared.files[1]:,} files"
        for each in cared
        if each.cared.rewritten or each.cared.expired_rows or each.cared.garbage[0]
    ]
    errors = [each.error for each in cared if each.error]
    return "; ".join([*(parts or ["nothing to do"]), *errors])


def _format_change(before: int | str, after: int | str) -> str:
    shown = [f"{each:,}" if isinstance(each, int) else each for each in (before, after)]
    return shown[0] if before == after else " → ".join(shown)
