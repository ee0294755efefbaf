"""docs/security.md names tests that exist, and names one for each threat."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_test_that_the_page_names_exists() -> None:
    assert len(NAMED) > 20
    for file, name in NAMED:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), f"{file}::{name}"


def test_every_threat_has_a_defence_and_a_test() -> None:
    threats = PAGE.split("\n## Threats\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in threats.splitlines() if line.startswith("| ")]
    headings = [row for row in rows if row[0].strip() == "threat"]
    assert len(headings) == threats.count("\n### ")
    for row in rows:
        if row not in headings and row[0].strip() != "---":
            assert len(row) == 3, row
            assert row[1].strip(), row[0]
            assert re.search(r"`tests/[\w/]+\.py::\w+`", row[2]), row[0]
