"""kiln.pipelines.batch.log_time: the clock of the log over micro-batches, restarts and repeats."""

from __future__ import annotations

from pathlib import Path

from kiln.conf.process.location import location
from kiln.pipelines.batch.log_time import LogTimeFile


def test_the_clock_goes_on_over_micro_batches_and_restarts_and_never_back(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    clock = LogTimeFile(location(path))
    assert clock.before(0) == {}
    clock.move(0, {0: 30, 1: 5})
    assert clock.before(1) == {0: 30, 1: 5}
    clock.move(1, {0: 10, 2: 7})
    assert LogTimeFile(location(path)).before(2) == {0: 30, 1: 5, 2: 7}


def test_a_micro_batch_that_is_repeated_finds_the_clock_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    clock = LogTimeFile(location(path))
    clock.move(0, {0: 30})
    clock.move(1, {0: 90})
    again = LogTimeFile(location(path))
    assert again.before(1) == {0: 30}
    again.move(1, {0: 90})
    assert again.before(2) == {0: 90}


def test_a_micro_batch_without_updates_moves_nothing(tmp_path: Path) -> None:
    clock = LogTimeFile(location(tmp_path / "clock.json"))
    clock.move(0, {0: 30})
    clock.move(1, {})
    assert clock.before(2) == {0: 30}
