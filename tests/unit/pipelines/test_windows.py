"""kiln.pipelines.batch.windows against a model of ten lines that shares nothing with it (decisions 1 and 7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kiln.pipelines.batch.offset_range import WindowKey
from kiln.pipelines.batch.windows import PartitionWindows
from kiln.schemas.kafka.topics import MAX_EPOCH_WRITERS
from kit.plain_batcher import list_window_tips

T, G = 10, 4

KEYS = (
    WindowKey("mainnet", "LIVE", "model", "ka"),
    WindowKey("mainnet", "LIVE", "model", "kb"),
    WindowKey("mainnet", "LIVE", "controller", "ka"),
    WindowKey("mainnet", "REPLAY", "model", "ka"),
    WindowKey("testnet-clay", "LIVE", "model", "ka"),
)


class Update(NamedTuple):
    key: WindowKey
    stream: str
    tip: bytes
    heard: int


class Entry(NamedTuple):
    """A record of the log; with no update it is a tick. `length`, `grace`: T and G of who reads it."""

    stamp: int
    update: Update | None
    length: int = T
    grace: int = G


class Emitted(NamedTuple):
    """A batch, and the index of the record at which it came out."""

    at: int
    key: WindowKey
    opened_at: int
    closes_at: int
    tips: frozenset[tuple[str, bytes]]


def model(log: Sequence[Entry]) -> set[Emitted]:
    """What decision 1 says, one separator at a time, with the whole log at hand."""
    clock = list(accumulate((entry.stamp for entry in log), max))
    batches: set[Emitted] = set()
    for key in KEYS:
        rest = [(n, entry.update) for n, entry in enumerate(log) if entry.update and entry.update.key == key]
        while rest:
            (first, (_, _, _, t0)), length, grace = rest[0], log[rest[0][0]].length, log[rest[0][0]].grace
            by_clock = next((n for n, now in enumerate(clock) if now >= clock[first] + length + grace), len(log))
            by_event_time = next((n for n, update in rest if update.heard >= t0 + length), len(log))
            end = min(by_clock, by_event_time)
            tips = frozenset((update.stream, update.tip) for n, update in rest if n < end)
            rest = [(n, update) for n, update in rest if n >= end]
            if end < len(log):
                batches.add(Emitted(end, key, t0, t0 + length, tips))
    return batches


def read(log: Iterable[tuple[int, Entry]], windows: PartitionWindows) -> list[Emitted]:
    """The log, numbered, through the windows, in the order in which batches come out."""
    emitted = []
    for n, entry in log:
        closed = windows.advance(entry.stamp)
        if entry.update:
            closed += windows.add(*entry.update)
        for window in closed:
            tips = frozenset((stream, tip) for stream, tips in list_window_tips(window).items() for tip in tips)
            emitted.append(Emitted(n, window.key, window.opened_at, window.closes_at, tips))
    return emitted


def new(state: bytes = b"") -> PartitionWindows:
    return PartitionWindows(T, state, G)


updates = st.builds(
    Update,
    st.sampled_from(KEYS),
    st.sampled_from(("s1", "s2", "s3")),
    st.sampled_from((b"t1", b"t2", b"t3")),
    st.integers(-5, 60),
)
free = st.builds(Entry, st.integers(0, 60), st.none() | updates, st.just(T), st.just(G))


@st.composite
def paced(draw: st.DrawFn) -> list[Entry]:
    """A log whose clock mostly goes on, in steps that meet the ends of windows, and sometimes back; what it holds was
    heard up to a window before."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from((0, 0, 1, 3, T - 1, T, T + G, -1, -T)),
                st.sampled_from((0, 0, 1, 3, T - 1, T, T + 1)),
                st.none() | updates,
            )
        )
    )
    stamps = accumulate((step for step, _, _ in steps), initial=1_000)
    return [
        Entry(stamp, update and update._replace(heard=stamp - ago))
        for stamp, (_, ago, update) in zip(stamps, steps, strict=False)
    ]


logs = st.lists(free, max_size=40) | paced()


@given(logs)
@example([Entry(5, Update(KEYS[0], "s1", b"t1", 5)), Entry(19, Update(KEYS[0], "s1", b"t1", 5)), Entry(33, None)])
@example([Entry(5, Update(KEYS[0], "s1", b"t1", 5)), Entry(5, Update(KEYS[0], "s1", b"t1", 15)), Entry(33, None)])
def test_windows_are_those_of_the_model(log: list[Entry]) -> None:
    emitted = read(enumerate(log), new())
    assert len(emitted) == len(set(emitted))
    assert set(emitted) == model(log)


@given(logs, st.sets(st.integers(0, 40)))
def test_micro_batches_and_restarts_change_nothing(log: list[Entry], cuts: set[int]) -> None:
    whole = new()
    expected = read(enumerate(log), whole)

    numbered = list(enumerate(log))
    state, emitted = b"", []
    for start, end in pairwise([0, *sorted(cut for cut in cuts if cut < len(log)), len(log)]):
        windows = new(state)
        emitted += read(numbered[start:end], windows)
        state = windows.dump()

    # the order as well, as it is the order in Kafka
    assert emitted == expected
    assert state == (whole.dump() if log else new().dump())


@given(st.lists(logs, min_size=2, max_size=3))
def test_partitions_do_not_meet(partitions: list[list[Entry]]) -> None:
    windows = [new() for _ in partitions]
    emitted: list[list[Emitted]] = [[] for _ in partitions]
    for n in range(max(map(len, partitions))):
        for log, own, out in zip(partitions, windows, emitted, strict=True):
            out += read([(n, entry) for entry in log[n : n + 1]], own)
    assert [set(out) for out in emitted] == [model(log) for log in partitions]


@given(st.lists(st.tuples(st.integers(1, 2 * T), st.integers(0, T), st.lists(free, max_size=8)), max_size=6))
def test_a_window_keeps_the_length_and_grace_it_was_opened_with(runs: list[tuple[int, int, list[Entry]]]) -> None:
    log = [entry._replace(length=length, grace=grace) for length, grace, entries in runs for entry in entries]
    numbered = enumerate(log)
    state, emitted = b"", []
    for length, grace, entries in runs:
        windows = PartitionWindows(length, state, grace)
        emitted += read([next(numbered) for _ in entries], windows)
        state = windows.dump()
    assert set(emitted) == model(log)


def test_a_shorter_window_opened_later_closes_first() -> None:
    windows = PartitionWindows(100)
    windows.advance(1_000)
    windows.add(KEYS[0], "s1", b"t1", 1_000)
    windows = PartitionWindows(10, windows.dump())
    windows.advance(1_001)
    windows.add(KEYS[1], "s2", b"t2", 1_001)
    assert [closed.key for closed in windows.advance(1_011)] == [KEYS[1]]
    assert [closed.key for closed in windows.advance(1_100)] == [KEYS[0]]


def closed_by(windows: PartitionWindows, stamp: int) -> dict[WindowKey, dict[str, set[bytes]]]:
    return {closed.key: list_window_tips(closed) for closed in windows.advance(stamp)}


def test_each_network_origin_and_separator_has_windows_of_its_own() -> None:
    windows = PartitionWindows(T)
    windows.advance(0)
    for n, key in enumerate(KEYS):
        windows.add(key, "stream", b"tip %d" % n, 0)
    assert closed_by(windows, T) == {key: {"stream": {b"tip %d" % n}} for n, key in enumerate(KEYS)}


def test_a_window_that_closed_leaves_nothing_in_the_state() -> None:
    """CIP-123: "Remove the temporary values". No other state is as small as that of a log without an update."""
    windows, without = PartitionWindows(T), PartitionWindows(T)
    for key in KEYS:
        windows.add(key, "s1", b"t1", 0)
    windows.add(KEYS[0], "s1", b"t2", T)  # ends the first by an update, the others end by log time
    assert len(windows.advance(2 * T)) == len(KEYS)
    without.advance(2 * T)
    assert len(windows) == 0
    assert windows.dump() == without.dump()


def test_a_tip_counts_once_in_a_window_and_again_in_the_next() -> None:
    windows = PartitionWindows(T)
    for stamp in (100, 105, 109):
        assert not windows.advance(stamp)
        windows.add(KEYS[0], "s1", b"t1", stamp)
    assert closed_by(windows, 110) == {KEYS[0]: {"s1": {b"t1"}}}
    windows.add(KEYS[0], "s1", b"t1", 110)
    assert closed_by(windows, 120) == {KEYS[0]: {"s1": {b"t1"}}}


def test_all_that_comes_at_once_is_parted_by_when_it_was_heard() -> None:
    """A catch-up: one stamp for all, and still the windows of event time, as soon as the next one begins."""
    windows = PartitionWindows(T)
    windows.advance(1_000)
    ended = [windows.add(KEYS[0], "s1", b"t%d" % heard, heard) for heard in (103, 112, 113, 122, 123)]
    assert [[(each.opened_at, list_window_tips(each)) for each in closed] for closed in ended] == [
        [],
        [],
        [(103, {"s1": {b"t103", b"t112"}})],
        [],
        [(113, {"s1": {b"t113", b"t122"}})],
    ]
    (last,) = windows.advance(1_010)
    assert (last.opened_at, last.closes_at, list_window_tips(last)) == (
        123,
        133,
        {"s1": {b"t123"}},
    )


def test_what_was_heard_before_the_first_is_late_but_in() -> None:
    windows = PartitionWindows(T)
    windows.advance(103)
    windows.add(KEYS[0], "s1", b"t1", 100)
    assert windows.add(KEYS[0], "s1", b"t2", 40) == []
    (closed,) = windows.advance(113)
    assert (closed.opened_at, closed.closes_at) == (100, 110)
    assert list_window_tips(closed) == {"s1": {b"t1", b"t2"}}


def test_the_clock_ends_a_window_t_and_g_after_its_first_update_was_written() -> None:
    windows = new()
    windows.advance(103)
    windows.add(KEYS[0], "s1", b"t1", 90)
    assert windows.advance(103 + T + G - 1) == []
    windows.add(KEYS[0], "s1", b"t2", 99)
    (closed,) = windows.advance(103 + T + G)
    assert (closed.opened_at, closed.closes_at) == (90, 100)
    assert list_window_tips(closed) == {"s1": {b"t1", b"t2"}}


def test_a_window_that_an_update_ended_is_not_ended_again_by_the_clock() -> None:
    windows = PartitionWindows(T)
    windows.advance(100)
    windows.add(KEYS[0], "s1", b"t1", 100)
    windows.advance(105)
    assert len(windows.add(KEYS[0], "s1", b"t2", 110)) == 1
    assert windows.advance(110) == []  # where the first would have ended
    assert closed_by(windows, 115) == {KEYS[0]: {"s1": {b"t2"}}}


def test_a_stamp_that_goes_back_does_not_move_the_clock() -> None:
    windows = PartitionWindows(T)
    windows.advance(100)
    windows.advance(40)
    windows.add(KEYS[0], "s1", b"t1", 40)
    assert windows.advance(109) == []
    (closed,) = windows.advance(110)
    assert closed.opened_at == 40


def test_ticks_flush_separators_that_fell_silent() -> None:
    windows = PartitionWindows(1_000_000)
    empty = len(windows.dump())
    for n, key in enumerate(KEYS):
        windows.advance(1_000 * n)
        windows.add(key, "s1", b"t1", 1_000 * n)
    state, flushed = windows.dump(), []
    assert len(PartitionWindows(1_000_000, state)) == len(KEYS)
    for tick in range(100_000, 1_300_000, 100_000):  # each in a micro-batch of its own
        windows = PartitionWindows(1_000_000, state)
        flushed += [closed.key for closed in windows.advance(tick)]
        state = windows.dump()
    assert flushed == list(KEYS)
    assert len(PartitionWindows(1_000_000, state)) == 0
    assert len(state) <= empty + 8  # the clock alone is left


# ---------------------------------------------------------------- repeats

arrivals = st.lists(
    st.tuples(st.sampled_from(("q1", "q2")), st.integers(0, 3), st.sampled_from(("m1", "m2", "m3"))), max_size=30
)


def is_repeat(before: Sequence[tuple[str, int, str]], query: str, batch: int, message: str) -> bool:
    """It came before, of the same writer, none of whose newer epochs has begun."""
    run = [(number, text) for writer, number, text in before if writer == query]
    return (batch, message) in run and batch == max(number for number, _ in run)


@given(arrivals, st.sets(st.integers(0, 30)))
def test_repeats_are_those_of_the_newest_epoch(log: list[tuple[str, int, str]], restarts: set[int]) -> None:
    windows = PartitionWindows(T)
    for n, arrival in enumerate(log):
        if n in restarts:
            windows = PartitionWindows(T, windows.dump())
        assert windows.guard.is_duplicate(*arrival) == is_repeat(log[:n], *arrival)


@pytest.mark.parametrize(
    ("before", "arrival", "expected"),
    [
        pytest.param([], ("q", 5, "m"), False, id="first"),
        pytest.param([("q", 5, "m")], ("q", 5, "m"), True, id="same epoch"),
        pytest.param([("q", 5, "m")], ("q", 5, "other"), False, id="same epoch, another message"),
        pytest.param([("q", 5, "m")], ("q", 6, "m"), False, id="newer epoch"),
        pytest.param([("q", 5, "m")], ("q", 4, "m"), False, id="older epoch"),
        pytest.param([("q", 5, "m"), ("q", 4, "m")], ("q", 5, "m"), True, id="an older epoch forgets nothing"),
        pytest.param([("q", 5, "m"), ("q", 4, "m")], ("q", 4, "m"), False, id="an older epoch is not remembered"),
        pytest.param([("q", 5, "m")], ("new", 0, "m"), False, id="a new query starts afresh"),
        pytest.param([("q", 5, "m"), ("new", 0, "m")], ("new", 0, "m"), True, id="and then remembers"),
        pytest.param([("q", 5, "m"), ("bridge", 7, "x")], ("q", 5, "m"), True, id="two writers in turn"),
        pytest.param(
            [("q", 5, "m"), *((f"q{n}", 1, "x") for n in range(MAX_EPOCH_WRITERS))],
            ("q", 5, "m"),
            False,
            id="long gone",
        ),
    ],
)
def test_repeats(before: list[tuple[str, int, str]], arrival: tuple[str, int, str], expected: bool) -> None:
    windows = PartitionWindows(T)
    for earlier in before:
        windows.guard.is_duplicate(*earlier)
    assert windows.guard.is_duplicate(*arrival) is expected


def test_ids_of_past_epochs_are_not_kept() -> None:
    windows = PartitionWindows(T)
    for message in range(1_000):
        windows.guard.is_duplicate("q", 1, f"m{message}")
    full = len(windows.dump())
    windows.guard.is_duplicate("q", 2, "m")
    assert full > 16_000
    assert len(windows.dump()) < 100


@given(logs, arrivals)
def test_equal_states_are_equal_bytes(log: list[Entry], seen: list[tuple[str, int, str]]) -> None:
    windows = new()
    read(enumerate(log), windows)
    for arrival in seen:
        windows.guard.is_duplicate(*arrival)
    assert new(windows.dump()).dump() == windows.dump()
