"""Quarantine on the screen and as JSON: counts, rows with their bytes, and the result of a drop.

No byte of a row reaches a terminal unescaped: text is `printable`, and the rest is hex.
"""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kiln.deploy.ops.quarantine.dropping import DropResult
from kiln.deploy.ops.quarantine.picking import GROUPS, By, QuarantineRow, ReasonCount
from kiln.deploy.query.answer import format_cell
from kiln.deploy.query.answer_json import encode_value
from kiln.schemas.faults import FAULTS
from kiln.schemas.printable import printable

_LINE: Final = 16
"""bytes per line of hex"""
_READABLE: Final = 0.9
"""share of readable characters from which data is shown as text"""

_REMEDIES: Final = {(fault.stage, fault.reason): fault.what_to_do for fault in FAULTS}


def render_counts(counts: Sequence[ReasonCount], by: By) -> RenderableType:
    """Render counts as a table."""
    if not counts:
        return Text("no rows")
    table = Table(header_style="bold", pad_edge=False, show_edge=False)
    for name in GROUPS[by]:
        table.add_column(name.replace("_", " "), overflow="fold")
    table.add_column("rows", justify="right")
    for name in ("oldest", "newest"):
        table.add_column(name)
    for each in counts:
        table.add_row(*map(Text, map(format_cell, (*each.of, each.rows, each.oldest, each.newest))))
    return Group(table, Text(f"({sum(each.rows for each in counts):,} rows)", style="dim"))


def encode_counts(counts: Iterable[ReasonCount], by: By) -> str:
    """Encode counts as a JSON array of objects."""
    return _encode_objects(
        dict(zip(GROUPS[by], each.of, strict=True)) | {"rows": each.rows, "oldest": each.oldest, "newest": each.newest}
        for each in counts
    )


def render_row(row: QuarantineRow, limit: int) -> RenderableType:
    """Render a row with one value per line, and the remedy for its reason.

    Args:
        row: The row.
        limit: Maximum number of data bytes shown; 0 for all.
    """
    lines = [Text(f"── {printable(row.stage)}: {printable(row.reason)}", "bold")]
    for name, value in zip(QuarantineRow._fields[2:-1], row[2:-1], strict=True):
        if value is not None:
            lines.append(Text.assemble((f"{name:<15}", "dim"), "  ", format_cell(value)))
    lines += [Text(line) for line in format_data(row.data, limit)]
    if remedy := _REMEDIES.get((row.stage, row.reason)):
        lines.append(Text(f"→ {remedy}", "dim"))
    return Group(*lines, "")


def encode_rows(rows: Iterable[QuarantineRow]) -> str:
    """Encode rows as a JSON array of objects, with all data as hex."""
    return _encode_objects(row._asdict() for row in rows)


def format_data(data: bytes, limit: int) -> Iterator[str]:
    """Format bytes as lines of text if most of them are text, else as hex and ASCII."""
    shown = data[:limit] if limit else data
    more = f"… {len(data) - len(shown):,} more of {len(data):,} bytes; --bytes 0 shows all" if limit < len(data) else ""
    text = getincrementaldecoder("utf-8")("replace").decode(shown, final=len(shown) == len(data))
    if shown and "�" not in text and sum(map(_is_plain, text)) >= _READABLE * len(text):
        yield printable(text)
    else:
        yield from _format_hex(shown)
    if limit and more:
        yield more
    if not data:
        yield "no bytes"


def _is_plain(character: str) -> bool:
    return character.isprintable() or character in "\n\t"


def _format_hex(data: bytes) -> Iterator[str]:
    for at in range(0, len(data), _LINE):
        line = data[at : at + _LINE]
        ascii_part = "".join(chr(each) if 0x20 <= each < 0x7F else "." for each in line)
        yield f"{at:08x}  {line.hex(' '):<{3 * _LINE - 1}}  {ascii_part}"


def encode_drop(done: DropResult) -> str:
    """Encode the result of a drop as a JSON object."""
    return json.dumps(done._asdict())


def _encode_objects(objects: Iterable[dict[str, object]]) -> str:
    return json.dumps([{name: encode_value(value) for name, value in each.items()} for each in objects], indent=1)
