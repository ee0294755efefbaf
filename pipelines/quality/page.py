"""Generator of the lists in docs/quality.md: Kiln's expectations, and the suites.

Run `python -m kiln.pipelines.quality.page docs/quality.md` to rebuild them.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Final

from kiln.pipelines.quality.catalogue import EXPECTATIONS
from kiln.pipelines.quality.results import fill_range
from kiln.pipelines.quality.suites import FOLDER, read_suites

_BEGIN: Final = "<!-- Made by `python -m kiln.pipelines.quality.page docs/quality.md`: do not edit it here. -->"
_END: Final = "<!-- End of what is made. -->"


def render_lists() -> str:
    """Render the lists as Markdown."""
    lines = ["### Kiln's own expectations", "", "| expectation | arguments | description |", "| --- | --- | --- |"]
    for expectation in EXPECTATIONS.values():
        if not expectation.is_stock:
            arguments = ", ".join(
                f"`{name}`" if name in expectation.required else f"[`{name}`]" for name in expectation.arguments
            )
            lines.append(f"| `{expectation.name}` | {arguments or 'none'} | {_escape_cell(expectation.description)} |")
    stock = ", ".join(f"`{expectation.name}`" for expectation in EXPECTATIONS.values() if expectation.is_stock)
    lines += [
        "",
        "A suite may also use these expectations of Great Expectations, with their own arguments:",
    ]
    lines += ["", f"{stock}.", "", "### The checks", ""]
    for table, checks in groupby(
        sorted(read_suites([FOLDER]), key=lambda check: check.table), key=lambda check: check.table
    ):
        lines += [f"#### {table}", "", "| expectation | level | owner | hint |", "| --- | --- | --- | --- |"]
        for check in checks:
            if check.sql:
                link = f"[`{check.name}`](../conf/quality/{Path(check.location).name})"
                lines.append(f"| {link} | {check.level} | {check.owner} | {_escape_cell(fill_range(check.hint))} |")
                continue
            arguments = ", ".join(f"{name}: {_format_value(value)}" for name, value in check.arguments.items())
            name = f"`{check.expectation}`" + (f"<br>{_escape_cell(arguments)}" if arguments else "")
            lines.append(f"| {name} | {check.level} | {check.owner} | {_escape_cell(fill_range(check.hint))} |")
        lines.append("")
    return "\n".join(lines)


def insert_lists(page: str) -> str:
    """Replace the lists in a page.

    Raises:
        ValueError: The page has no markers for the lists.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page lacks the markers of the lists. Add these two lines: {_BEGIN} and {_END}")
    return f"{before}{_BEGIN}\n\n{render_lists()}\n{_END}{after}"


def _format_value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(insert_lists(target.read_text(encoding="utf-8")), encoding="utf-8")
