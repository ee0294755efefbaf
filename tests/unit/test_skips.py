"""tests/conftest.py: the reasons of skipped tests, counted by cause, and which of them a machine may have."""

from __future__ import annotations

import pytest

import conftest
from conftest import Requirement, summarize_skips


def test_skips_are_counted_by_the_part_that_is_absent_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        "Go toolchain": Requirement("go", lambda: False, "install Go"),
        "browser": Requirement("chromium", lambda: True, "run `make tools`"),
    }
    monkeypatch.setattr(conftest, "REQUIREMENTS", parts)
    reasons = ["no go toolchain to build A with", "the browser is not there", "no go toolchain to build B with"]
    assert summarize_skips(reasons) == [
        "   2 skipped: without go: install Go",
        "   1 skipped: the browser is not there",  # it is there: a fault of the test
    ]
