"""The functions and files of Kiln that one record goes through (kit.record_walks): each more is one more that a reader
has to open."""

from __future__ import annotations

import pytest

from kit.record_walks import WALKS


@pytest.mark.parametrize(("name", "functions", "files"), [("frame → messages row", 65, 19), ("update → batch", 22, 8)])
def test_a_record_does_not_go_round_about(name: str, functions: int, files: int) -> None:
    walk = WALKS[name]()
    assert len(walk.functions) <= functions, walk.functions
    assert len(walk.files) <= files, walk.files
