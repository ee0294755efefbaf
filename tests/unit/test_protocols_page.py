"""docs/protocols.md names tests that exist, at least one for each requirement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8")
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def requirements(section: str) -> list[list[str]]:
    """The cells of each row below the head of the section's table."""
    rows = [line.strip("|").split(" | ") for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return rows[2:]


@pytest.mark.parametrize(
    ("section", "least"), [("CIP-120", 25), ("CIP-123", 33), ("BEP 50", 29), ("Topic Table Extension", 17)]
)
def test_every_requirement_says_what_kiln_does_and_names_a_test_that_exists(section: str, least: int) -> None:
    rows = requirements(section)
    assert len(rows) >= least
    for row in rows:
        assert len(row) == 3, row
        assert row[1].strip(), row[0]
        named = NAMED.findall(row[2])
        assert named, row[0]
        for file, name in named:
            source = (ROOT / file).read_text(encoding="utf-8")
            definition = rf"^(async )?def {name}\(" if name else r"^def test_"
            assert re.search(definition, source, re.MULTILINE), f"{file}::{name}"


def test_every_row_has_a_number_of_its_own() -> None:
    numbers = [re.match(r" ([A-Z]\d+[a-z]?): ", row[0]) for section in SECTIONS for row in requirements(section)]
    assert all(numbers)
    assert len({found[1] for found in numbers if found}) == len(numbers)


def test_the_requirements_of_bep_50_are_those_of_its_tests() -> None:
    tests = (ROOT / "tests/unit/bridge/test_bep50_requirements.py").read_text(encoding="utf-8")
    numbers = {int(number) for number in re.findall(r"^def test_r(\d+)_", tests, re.MULTILINE)}
    listed = {int(found[1]) for row in requirements("BEP 50") if (found := re.match(r" R(\d+)[a-z]?:", row[0]))}
    assert listed == numbers
