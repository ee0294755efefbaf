"""kiln.pipelines.backfill.separator_windows against the plain model of the log (decision 1), and where windows begin
(decision 21)."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from kiln.pipelines.backfill.separator_windows import SeparatorWindows
from kiln.pipelines.batch.offset_range import WindowKey
from kiln.schemas.wire.cid import cid_text, compute_cid
from kit.log_model import Update, windows_of
from kit.plain_batcher import list_window_tips

KEY = WindowKey("n", "LIVE", "model", "k1")
STREAM = "kjzl6cwe1jw145as2el62s5k2n5xwij7snqu1mngluhpr05xy5wylfswe1zvq39"
T = 10
TIPS = [compute_cid(b"%d" % number) for number in range(40)]
Log = list[tuple[int, int]]
"""heard, clock; in the order of the log"""


def opened(log: Log, windows: SeparatorWindows, first: int = 0) -> list[tuple[int, frozenset[str]]]:
    """When each window opened, and its tips."""
    closed = [
        each
        for number, (heard, clock) in enumerate(log, first)
        for each in windows.add_update(heard, clock, STREAM, TIPS[number])
    ]
    closed += windows.close()
    return sorted(
        ((each.opened_at, frozenset(map(cid_text, list_window_tips(each)[STREAM]))) for each in closed),
        key=lambda window: (window[0], sorted(window[1])),
    )


def model(log: Log) -> list[tuple[int, frozenset[str]]]:
    owner = (KEY.network, KEY.origin, KEY.separator_key, KEY.separator_value)
    records: list[tuple[int, Update | None]] = [
        (clock, Update(owner, STREAM, cid_text(TIPS[number]), heard)) for number, (heard, clock) in enumerate(log)
    ]
    found = windows_of([*records, (10_000, None)], T)
    made = [(window.opened_at, frozenset(tip for _, tip in window.tips)) for window in found]
    return sorted(made, key=lambda window: (window[0], sorted(window[1])))


@st.composite
def logs(draw: st.DrawFn) -> Log:
    clock, log = 100, []
    for _ in range(draw(st.integers(1, 30))):
        clock += draw(st.integers(0, 12))
        log.append((clock - draw(st.integers(0, 15)), clock))
    return log


@given(logs())
def test_the_windows_are_those_of_the_model(log: Log) -> None:
    assert opened(log, SeparatorWindows(KEY, T, 0, 0)) == model(log)


@given(logs(), st.integers(0, 29))
def test_windows_are_right_from_the_first_window_of_live_on(log: Log, start: int) -> None:
    """A run that begins in the midst of windows gives those of live from where live opened one."""
    assume(len({min(heard, clock) for heard, clock in log}) == len(log))  # as good as always, in µs
    whole = model(log)
    start %= len(log)
    windows = SeparatorWindows(KEY, T, 0, 2**60)
    for at, _ in whole:
        windows.add_live_batch(at, at + T, "cid", at)
    found = opened(log[start:], windows, start)
    tips = {cid_text(TIPS[number]): number for number in range(len(log))}
    first_of = {min(tips[tip] for tip in window[1]): window for window in whole}
    begun = [number for number in first_of if number >= start]
    after = [first_of[number] for number in begun]
    assert [window for window in after if window not in found] == []


def test_a_window_of_another_length_is_no_place_to_begin() -> None:
    log = [(0, 0), (6, 6), (9, 9), (12, 12), (16, 16)]
    windows = SeparatorWindows(KEY, T, 0, 2**60)
    windows.add_live_batch(6, 6 + 2 * T, "cid", 6)
    assert [at for at, _ in opened(log, windows)] == [0, 12]
    windows = SeparatorWindows(KEY, T, 0, 2**60)
    windows.add_live_batch(6, 6 + T, "cid", 6)
    assert [at for at, _ in opened(log, windows)] == [0, 6, 16]
    assert windows.take_emitted_at(6, "cid") == 6
    assert windows.take_emitted_at(6, "another") is None
