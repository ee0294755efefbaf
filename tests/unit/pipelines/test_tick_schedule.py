"""pipelines.logic.tick_schedule: when the log's clock is moved on, over a log that is played (decision 1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.logic.stretch import WindowKey
from pipelines.logic.tick_schedule import TickSchedule
from pipelines.logic.windows import PartitionWindows

KEY = WindowKey("mainnet", "LIVE", "model", "ka")
REST = 6_000  # ms
T = 1_000


@dataclass
class Partition:
    """A partition of the log, its broker, and the ticker's look at it every 100 ms. Times in ms."""

    schedule: TickSchedule = field(default_factory=lambda: TickSchedule(REST))
    now: int = 1_000_000
    log: list[tuple[int, bool]] = field(default_factory=list)  # stamp, whether it is a tick

    def append(self, *, tick: bool) -> int:
        self.log.append((self.now, tick))
        return len(self.log) - 1

    def look(self) -> bool:
        """One round of the ticker; whether it ticked."""
        self.now += 100
        if not self.schedule.due(len(self.log)):
            return False
        offset = self.append(tick=True)
        self.schedule.ticked(offset, self.now)
        return True

    def until_quiet(self) -> int:
        """Rounds until no tick is due."""
        rounds = 0
        while self.look():
            rounds += 1
            assert rounds < 1_000, "it never rests"
        return rounds

    @property
    def open_windows(self) -> int:
        """What a reader of the log has open at its end."""
        windows = PartitionWindows(T)
        for stamp, tick in self.log:
            windows.advance(stamp)
            if not tick:
                windows.add(KEY, "stream", b"tip", stamp)
        return len(windows)


def test_ticks_go_on_for_a_rest_and_then_pause() -> None:
    partition = Partition()
    assert partition.until_quiet() * 100 == pytest.approx(REST, abs=200)
    assert not any(partition.look() for _ in range(100))


def test_a_record_of_before_the_start_is_flushed() -> None:
    partition = Partition()
    partition.append(tick=False)
    assert partition.open_windows == 1
    partition.until_quiet()
    assert partition.open_windows == 0


def test_ticks_begin_again_with_a_new_record_and_last_a_rest_after_it() -> None:
    partition = Partition()
    partition.until_quiet()
    partition.now += 3_600_000
    partition.append(tick=False)
    at = partition.now
    partition.until_quiet()
    assert partition.log[-1][0] - at >= REST
    assert not any(partition.look() for _ in range(10))


def test_a_record_between_ticks_makes_them_last_longer() -> None:
    partition = Partition()
    for _ in range(30):
        partition.look()
    partition.append(tick=False)
    at = partition.now
    partition.until_quiet()
    assert partition.log[-1][0] - at >= REST


def test_a_record_that_comes_between_look_and_tick_is_noticed() -> None:
    partition = Partition()
    partition.until_quiet()
    partition.append(tick=False)
    assert partition.schedule.due(len(partition.log))
    partition.append(tick=False)  # after the look, before the tick
    offset = partition.append(tick=True)
    partition.schedule.ticked(offset, partition.now)
    at = partition.now
    partition.until_quiet()
    assert partition.log[-1][0] - at >= REST


@given(st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 3)), max_size=12))
def test_no_window_is_open_when_it_rests(traffic: list[tuple[int, int]]) -> None:
    partition = Partition()
    for pause, records in traffic:
        for _ in range(pause // 100):
            ticked = partition.look()
            assert ticked or partition.open_windows == 0
        for _ in range(records):
            partition.append(tick=False)
    partition.until_quiet()
    assert partition.open_windows == 0


def rest_after_a_step_back(step: int) -> int:
    """Windows open at rest, when the clock of the broker went back `step` ms after a record."""
    partition = Partition()
    for _ in range(100):
        partition.look()
    partition.append(tick=False)
    partition.now -= step
    partition.until_quiet()
    return partition.open_windows


@pytest.mark.parametrize("step", [100, 2_000, REST - T - 200])
def test_no_window_is_open_at_rest_though_the_clock_of_the_broker_went_back_a_little(step: int) -> None:
    assert rest_after_a_step_back(step) == 0


@pytest.mark.parametrize("step", [REST - T + 200, 20_000])
def test_no_window_is_open_at_rest_though_the_clock_of_the_broker_went_far_back(step: int) -> None:
    assert rest_after_a_step_back(step) == 0


@pytest.mark.parametrize("ahead", [REST + T, 1_801_000])
def test_no_window_is_open_at_rest_though_the_ticker_began_after_the_clock_of_the_broker_went_back(ahead: int) -> None:
    """With what the log's clock says already. Else ticks would rest for as long as the clock was ahead."""
    before = Partition()
    before.append(tick=False)
    clock = before.now
    partition = Partition(TickSchedule(REST, clock), before.now - ahead, before.log)
    partition.append(tick=False)
    assert partition.open_windows == 1
    assert partition.look()
    assert partition.schedule.clock - partition.schedule.stamp == ahead - 100
    partition.now += ahead - 1_000  # nobody waits for each tick
    partition.until_quiet()
    assert partition.open_windows == 0
    assert partition.schedule.clock == partition.schedule.stamp > clock
