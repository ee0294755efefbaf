"""kiln.pipelines.batch.log_time: log time over micro-batches, restarts and repeats."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from kiln.conf.process.location import parse_location
from kiln.pipelines.batch.log_time import LogTimeFile
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.sink.transform import read_log_times
from kit.small_lake import append


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


def test_a_query_without_its_clock_goes_on_from_its_table(tmp_path: Path) -> None:
    """The checkpoint that `kiln recover` makes has no clock file."""
    lake, at = Lake(str(tmp_path / "lake")), datetime(2025, 1, 1, tzinfo=UTC)
    lake.create(("updates",))
    append(lake, "updates", [{"log_partition": 1, "log_time": at + timedelta(seconds=each)} for each in (3, 1)])
    clock = LogTimeFile(parse_location(tmp_path / "clock.json"), lambda: read_log_times(lake))
    assert clock.read_start(0) == {1: int(at.timestamp() + 3) * 1_000_000}
    clock.advance(0, {0: 30, 1: 5})
    assert clock.read_start(1) == {0: 30, 1: int(at.timestamp() + 3) * 1_000_000}
