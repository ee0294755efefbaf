"""kiln.pipelines.runtime.clocks: the time by which operators forget never goes back."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import SparkContext, TaskContext

from kiln.pipelines.runtime.clocks import MicroBatchClock, TrailingClock, describe_log_lag, get_batch_time

ROOT = Path(__file__).resolve().parents[3]


class Properties:
    """Local properties, as a SparkContext takes them and as a TaskContext gives them."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def setLocalProperty(self, key: str, value: str) -> None:  # noqa: N802 - as Spark calls it
        self._found[key] = value

    def getLocalProperty(self, key: str) -> str | None:  # noqa: N802 - as Spark calls it
        return self._found.get(key)


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> Properties:
    made = Properties()
    monkeypatch.setattr(TaskContext, "get", lambda: made)
    return made


LONG = iter(range(0, 2**62, 2**40)).__next__
"""So much has passed that the clock decides."""


def told(clock: MicroBatchClock, properties: Properties) -> int:
    clock.set_time(cast(SparkContext, properties))
    return get_batch_time()


def test_the_time_is_the_caller_s_and_never_goes_back(properties: Properties) -> None:
    times = iter([50, 70, 60, 10, 71])
    clock = MicroBatchClock(lambda: next(times), LONG, 0)
    assert [told(clock, properties) for _ in range(5)] == [50, 70, 70, 70, 71]


def test_it_begins_where_no_row_is_late(properties: Properties) -> None:
    times = iter([50, 120, 150])
    clock = MicroBatchClock(lambda: next(times), LONG, 130)
    assert [told(clock, properties) for _ in range(3)] == [130, 130, 150]


def test_it_goes_on_by_no_more_than_what_has_passed(properties: Properties) -> None:
    times, uptimes = iter([50, 60, 2_000_070, 2_000_080, 90, 100]), iter([0, 10, 20, 30, 40, 50])
    clock = MicroBatchClock(lambda: next(times), lambda: next(uptimes), 0)
    assert [told(clock, properties) for _ in range(6)] == [50, 60, 70, 80, 90, 100]


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**20)), min_size=1), st.integers(0, 2**62))
def test_a_clock_that_is_set_changes_no_order(steps: list[tuple[int, int]], least: int) -> None:
    """`steps`: what the clock says, and what has passed since the step before."""
    properties, now, passed = Properties(), iter(steps), iter(steps)
    uptime = 0

    def up() -> int:
        nonlocal uptime
        uptime += next(passed)[1]
        return uptime

    clock = MicroBatchClock(lambda: next(now)[0], up, least)
    before = None
    for wall, since in steps:
        clock.set_time(cast(SparkContext, properties))
        at = int(properties.getLocalProperty("kiln.seenAt") or "")
        assert at == max(least, wall) if before is None else before <= at <= before + since
        assert before is None or at == before or at <= wall
        before = at


def test_a_task_that_was_told_nothing_does_not_guess(properties: Properties, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="did not set the time"):
        get_batch_time()
    monkeypatch.setattr(TaskContext, "get", lambda: None)
    with pytest.raises(RuntimeError, match="did not set the time"):
        get_batch_time()


def test_no_query_takes_the_time_from_spark() -> None:
    """Spark's own clock goes back with the machine's."""
    own = {"current_timestamp", "now", "current_date", "localtimestamp", "unix_timestamp"}
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "pipelines").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in own and ast.unparse(node.value) in ("F", "functions")
    }
    assert found == set()


def test_a_clock_behind_log_time_is_told_with_since_when_until_it_has_passed_it() -> None:
    second, now = 1_000_000, 1_800_000_000_000_000
    clock = TrailingClock()
    clock.observe(now, now + second)
    assert clock.since is None
    clock.observe(now, now + 1_860 * second)
    clock.observe(now + 60 * second, now + 1_860 * second)
    assert clock.since == now
    assert describe_log_lag("kiln.updates", clock.now, clock.newest, clock.since) == (
        "the broker's clock is 1,800 s behind the newest timestamp in kiln.updates, since 2027-01-15 08:00:00 UTC: "
        "the clock was ahead when that timestamp was written. Until the clock reaches 2027-01-15 08:31:00 UTC, windows "
        "stay open and batches are late. Nothing is lost. If the broker's clock is wrong now, correct it; else wait"
    )
    clock.observe(now + 1_860 * second, now + 1_860 * second)
    assert clock.since is None
