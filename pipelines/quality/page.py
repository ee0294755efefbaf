"""Generator of the lists in docs/quality.md: Kiln's expectations, and the suites.

Run `python -m kiln.pipelines.quality.page docs/quality.md` to rebuild them.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Final

from kiln.pipelines.quality.suites import EXPECTATIONS, FOLDER, SuiteCheck, read_suites

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
    lines += ["Their level is `error`, except where *warn* follows. Each file has the hints.", ""]
    lines += ["| table | owner | SQL over whole tables | expectations of the suite |", "| --- | --- | --- | --- |"]
    for table, group in groupby(
        sorted(read_suites([FOLDER]), key=lambda check: check.table), key=lambda check: check.table
    ):
        checks = list(group)
        tables = [_render_check(check) for check in checks if check.sql]
        columns = [_render_check(check) for check in checks if not check.sql]
        suite = f"[{table}.yaml](../conf/quality/{table}.yaml): {', '.join(columns)}"
        lines.append(f"| `{table}` | {checks[0].owner} | {', '.join(tables) or '–'} | {suite} |")
    return "\n".join([*lines, ""])


def _render_check(check: SuiteCheck) -> str:
    name = f"`{_escape_cell(check.name)}`"
    link = f"[{name}](../conf/quality/{Path(check.location).name})" if check.sql else name
    return link if check.level == "error" else f"{link} *warn*"


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


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(insert_lists(target.read_text(encoding="utf-8")), encoding="utf-8")
