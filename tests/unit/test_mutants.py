"""The breaks of `make mutants` change code, and nothing but code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutants.__main__ import ROOMS, choose_breaks, find_tests
from mutants.places import list_changes

SOURCE = '''
def take(self, number: int = 3) -> str:
    """Text with 1 < 2."""
    assert number != 4
    if number < 2 and not self.closed:
        self.close()
        return f"{number + 1}"
    return self.text
'''


def test_operators_conditions_numbers_calls_and_results_are_changed() -> None:
    changes = {(change.before, change.after) for change in list_changes(SOURCE)}
    assert changes == {
        ("3", "4"),
        ("2", "3"),
        ("number < 2", "(number <= 2)"),
        ("number < 2 and not self.closed", "(number < 2 or not self.closed)"),
        ("not self.closed", "bool(self.closed)"),
        ("self.close()", "pass"),
        ('return f"{number + 1}"', "return None"),
        ("return self.text", "return None"),
    }


@pytest.mark.slow
def test_each_break_is_another_program_that_tests_load(root: Path) -> None:
    breaks = choose_breaks(root, ROOMS, 12, seed=7)
    assert len({each.place for each in breaks}) == 12
    for each in breaks:
        source = (root / each.file).read_text("utf-8")
        assert ast.dump(ast.parse(each.change.apply(source))) != ast.dump(ast.parse(source)), each.place
        assert find_tests(root, each.file), each.place
    assert choose_breaks(root, ROOMS, 12, seed=7) == breaks
