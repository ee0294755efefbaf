"""The functions and files of Kiln that one record goes through (kit.record_walks): each more is one more that a reader
has to open."""

from __future__ import annotations

import pytest

from kit import engines
from kit.record_walks import WALKS

needs_core = pytest.mark.skipif(engines.core_is_missing(), reason="no native core to follow a record through")


@pytest.mark.parametrize(
    ("name", "functions", "files"),
    [
        ("frame → messages row", 53, 17),
        pytest.param("frame → messages row, native core", 17, 6, marks=needs_core),
        ("update → batch", 18, 9),
    ],
)
def test_a_record_does_not_go_round_about(name: str, functions: int, files: int) -> None:
    walk = WALKS[name]()
    assert len(walk.functions) <= functions, walk.functions
    assert len(walk.files) <= files, walk.files
