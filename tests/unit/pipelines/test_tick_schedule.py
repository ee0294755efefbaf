"""kiln.pipelines.batch.tick_schedule: when log time is advanced, over a log that is played (decision 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.pipelines.batch.offset_range import WindowKey
from kiln.pipelines.batch.tick_schedule import TickSchedule
from kiln.pipelines.batch.windows import PartitionWindows

KEY = WindowKey("mainnet", "LIVE", "model", "ka")
REST = 6_000  # ms
T = 1_000


@dataclass
class Partition:
    """A partition of the log, its broker, and the ticker's look at it every 100 ms. Times in ms."""

    schedule: TickSchedule = field(default_factory=lambda: TickSchedule(T, REST))
    now: int = 1_000_000
    """by the broker's clock"""
    uptime: int = 50_000
    """by the ticker's"""
    log: list[tuple[int, bool]] = field(default_factory=list)  # stamp, whether it is a tick

    def append(self, *, tick: bool) -> int:
        self.log.append((self.now, tick))
        return len(self.log) - 1

    def look(self) -> bool:
        """One round of the ticker; whether it ticked."""
        self.now += 100
        self.uptime += 100
        if not self.schedule.is_due(len(self.log), self.uptime):
            return False
        offset = self.append(tick=True)
        self.schedule.record_tick(offset, self.now, self.uptime)
        return True

    @property
    def at_rest(self) -> bool:
        return not self.schedule.is_due(len(self.log), self.uptime) and self.schedule.next_at == inf

    def until_quiet(self) -> int:
        """ms until no tick is due any more."""
        began = self.uptime
        while not self.at_rest:
            self.look()
            assert self.uptime - began < 100_000, "it never rests"
        return self.uptime - began

    @property
    def open_windows(self) -> int:
        """What a reader of the log has open at its end."""
        windows = PartitionWindows(T)
        for stamp, tick in self.log:
            windows.advance(stamp)
            if not tick:
                windows.add(KEY, "stream", b"tip", stamp)
        return len(windows)


def test_a_tick_comes_at_once_where_windows_end_and_at_rest_and_then_none() -> None:
    partition = Partition()
    partition.until_quiet()
    first = partition.log[0][0]
    assert [stamp - first for stamp, _ in partition.log] == [0, T, REST]
    assert not any(partition.look() for _ in range(100))


def test_the_windows_of_each_writing_end_with_a_tick_of_their_own_and_no_more_come() -> None:
    """As `updates` writes: something each second. One tick both tells of a writing and ends the windows of the last."""
    partition = Partition()
    partition.look()
    ticks = 0
    for _ in range(30):
        partition.append(tick=False)
        ticks += sum(partition.look() for _ in range(10))
        assert partition.open_windows <= 1
    assert ticks <= 32


def test_a_window_is_open_for_no_longer_than_a_look_after_its_end() -> None:
    partition = Partition()
    partition.until_quiet()
    partition.append(tick=False)
    written = partition.now
    while partition.open_windows:
        partition.look()
    assert T <= partition.now - written <= T + 100


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


def test_a_tick_that_the_broker_stamps_too_early_is_followed_by_others() -> None:
    """The ticker's clock is quicker than the broker's."""
    partition = Partition()
    partition.look()
    partition.append(tick=False)
    partition.look()
    partition.now -= 350
    while partition.open_windows:
        assert partition.uptime < 60_000
        partition.look()


def test_ticks_slow_down_while_the_clock_of_the_broker_trails_by_days() -> None:
    partition = Partition()
    partition.look()
    partition.now += 3 * 86_400_000
    partition.append(tick=False)
    partition.look()
    partition.now -= 3 * 86_400_000
    before = len(partition.log)
    for _ in range(10 * 60 * 10):  # looks of ten minutes
        partition.look()
    assert 10 * 60 / 10 - 1 <= len(partition.log) - before <= 10 * 60 / 10 + 2, "a tick each ten seconds"
    partition.now += 3 * 86_400_000  # the clock was wrong, and is corrected
    partition.until_quiet()
    assert partition.open_windows == 0


def test_a_record_that_comes_between_look_and_tick_is_noticed() -> None:
    partition = Partition()
    partition.until_quiet()
    partition.append(tick=False)
    assert partition.schedule.is_due(len(partition.log), partition.uptime)
    partition.append(tick=False)  # after the look, before the tick
    offset = partition.append(tick=True)
    partition.schedule.record_tick(offset, partition.now, partition.uptime)
    at = partition.now
    partition.until_quiet()
    assert partition.log[-1][0] - at >= REST


@given(st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 3)), max_size=12))
def test_no_window_is_open_when_it_rests(traffic: list[tuple[int, int]]) -> None:
    partition = Partition()
    for pause, records in traffic:
        for _ in range(pause // 100):
            partition.look()
            assert not partition.at_rest or partition.open_windows == 0
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
    """With what log time says already. Else ticks would rest for as long as the clock was ahead."""
    before = Partition()
    before.append(tick=False)
    clock = before.now
    partition = Partition(TickSchedule(T, REST, clock), before.now - ahead, log=before.log)
    partition.append(tick=False)
    assert partition.open_windows == 1
    assert partition.look()
    assert partition.schedule.log_time - partition.schedule.stamp == ahead - 100
    partition.now += ahead - 1_000  # nobody waits for each tick
    partition.until_quiet()
    assert partition.open_windows == 0
    assert partition.schedule.log_time == partition.schedule.stamp > clock
