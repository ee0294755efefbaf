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


def encode_maintenance(tables: Sequence[TableMaintenance], *, as_lines: bool) -> str:
    """Encode results as a JSON array with an object for each table, or as a line of JSON for each table."""
    objects = [_encode_table(each) for each in tables]
    if as_lines:
        return "\n".join(json.dumps(each) for each in objects)
    return json.dumps(objects, indent=2)


def _encode_table(each: TableMaintenance) -> dict[str, object]:
    pairs = asdict(each.result)
    record: dict[str, object] = {"table": pairs["table"]}
    for name in ("files", "size", "entries"):
        record |= {f"{name}_before": pairs[name][0], f"{name}_after": pairs[name][1]}
    return record | {
        "rewritten_bytes": pairs["rewritten"],
        "expired_rows": pairs["expired_rows"],
        "removed_files": pairs["garbage"][0],
        "removed_bytes": pairs["garbage"][1],
        "steps": list(pairs["words"]),
        "left_alone": pairs["left_alone"],
        "seconds": round(each.seconds, 3),
        "error": each.error,
    }


def render_maintenance(tables: Sequence[TableMaintenance], *, done: bool) -> Group:
    """Render a row for each table, before → after, and the errors below.

    Args:
        tables: Results of the maintenance, or predicted ones.
        done: False for predictions, which are rendered with the reason of each step.
    """
    grid = Table(box=None, pad_edge=False)
    for name in ("table", "files", "bytes", "log entries", "rewritten", "expired rows", "removed", "s"):
        grid.add_column(name, justify="left" if name == "table" else "right")
    for each in tables:
        result = each.result
        if result.left_alone or each.error:
            grid.add_row(result.table, "skipped", "", "", "", "", "", f"{each.seconds:.1f}")
            continue
        files, size = result.garbage
        grid.add_row(
            result.table,
            _format_change(*result.files),
            _format_change(*map(decimal, result.size)),
            _format_change(*result.entries),
            decimal(result.rewritten) if result.rewritten else "",
            f"{result.expired_rows:,}" if result.expired_rows else "",
            f"{files:,} files, {decimal(size)}" if files else "",
            f"{each.seconds:.1f}",
        )
    lines: list[Table | Text] = [grid]
    for each in tables:
        if each.result.left_alone:
            lines.append(Text(f"{each.result.table} was skipped: {each.result.left_alone}"))
        if each.error:
            lines.append(Text(each.error, "red"))
        if not done:
            lines += [Text(f"{each.result.table}: {words}", "dim") for words in each.result.words]
    if not done:
        lines.append(Text("Nothing was changed. To run these steps: kiln maintain", "bold"))
    return Group(*lines)


def format_maintenance_line(tables: Sequence[TableMaintenance]) -> str:
    """Format the changes of one maintenance run as one line."""
    parts = [
        f"{each.result.table} {_format_change(*each.result.files)} files"
        for each in tables
        if each.result.rewritten or each.result.expired_rows or each.result.garbage[0]
    ]
    errors = [each.error for each in tables if each.error]
    return "; ".join([*(parts or ["nothing to do"]), *errors])


def _format_change(before: int | str, after: int | str) -> str:
    texts = [f"{each:,}" if isinstance(each, int) else each for each in (before, after)]
    return texts[0] if before == after else " → ".join(texts)
