"""kiln.pipelines.batch.log_time: log time over micro-batches, restarts and repeats."""

from __future__ import annotations

from pathlib import Path

from kiln.conf.process.location import parse_location
from kiln.pipelines.batch.log_time import LogTimeFile


def test_the_clock_goes_on_over_micro_batches_and_restarts_and_never_back(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    clock = LogTimeFile(parse_location(path))
    assert clock.read_start(0) == {}
    clock.advance(0, {0: 30, 1: 5})
    assert clock.read_start(1) == {0: 30, 1: 5}
    clock.advance(1, {0: 10, 2: 7})
    assert LogTimeFile(parse_location(path)).read_start(2) == {0: 30, 1: 5, 2: 7}


def test_a_micro_batch_that_is_repeated_finds_the_clock_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    clock = LogTimeFile(parse_location(path))
    clock.advance(0, {0: 30})
    clock.advance(1, {0: 90})
    again = LogTimeFile(parse_location(path))
    assert again.read_start(1) == {0: 30}
    again.advance(1, {0: 90})
    assert again.read_start(2) == {0: 90}


def test_a_micro_batch_without_updates_moves_nothing(tmp_path: Path) -> None:
    clock = LogTimeFile(parse_location(tmp_path / "clock.json"))
    clock.advance(0, {0: 30})
    clock.advance(1, {})
    assert clock.read_start(2) == {0: 30}
