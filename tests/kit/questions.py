"""SQL queries in the documents: each `kiln sql "…"` in a shell block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]

_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_SQL = re.compile(r'kiln sql((?: --\w+)*) "(.+?)"\s', re.DOTALL)
_TITLE = re.compile(r"^\*\*(.+?)\*\*", re.MULTILINE)


class Question(NamedTuple):
    """A SQL query on a page. `title` is the bold text above the query."""

    page: Path
    title: str
    sql: str
    both: bool
    """true if the query is for DuckDB and Spark, according to the page"""


def _questions(page: Path) -> list[Question]:
    text = page.read_text(encoding="utf-8")
    found: list[Question] = []
    for block in _BLOCK.finditer(text):
        above = text[: block.start()]
        titles = _TITLE.findall(above)
        last = above[above.rfind(f"**{titles[-1]}**") :] if titles else ""
        both = page.name == "SQL.md" and "(DuckDB only)" not in last
        for _, sql in _SQL.findall(block[1]):
            found.append(Question(page, titles[-1].rstrip(".:,") if titles else page.stem, sql.strip(), both))
    return found


QUESTIONS = [question for page in PAGES for question in _questions(page)]
