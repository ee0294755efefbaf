"""Sequence numbers: they only ever rise, whatever the clock and the process do."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.libp2p.seqno import Seqno, SeqnoError

SECOND = 1_000_000_000


class Clock:
    def __init__(self, now: int) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def test_a_number_is_the_time_in_nanoseconds(tmp_path: Path) -> None:
    clock = Clock(1_700_000_000 * SECOND)
    seqno = Seqno(tmp_path / "seqno", clock)
    assert seqno.next() == 1_700_000_000 * SECOND
    clock.now += 5
    assert seqno.next_bytes() == (1_700_000_000 * SECOND + 5).to_bytes(8, "big")


def test_numbers_rise_while_the_clock_stands_or_goes_back(tmp_path: Path) -> None:
    clock = Clock(1000)
    seqno = Seqno(tmp_path / "seqno", clock)
    assert [seqno.next(), seqno.next()] == [1000, 1001]
    clock.now = 7
    assert seqno.next() == 1002


def test_after_a_crash_numbers_go_on_above_all_that_were_given(tmp_path: Path) -> None:
    clock = Clock(100 * SECOND)
    crashed = Seqno(tmp_path / "seqno", clock)
    clock.now += 9 * SECOND  # within what the first number reserves
    given_out = [crashed.next() for _ in range(3)]
    clock.now = 50 * SECOND
    assert Seqno(tmp_path / "seqno", clock).next() > max(given_out)


def test_after_a_clean_stop_nothing_is_skipped(tmp_path: Path) -> None:
    clock = Clock(100 * SECOND)
    with Seqno(tmp_path / "seqno", clock) as seqno:
        last = seqno.next()
    clock.now = 0
    assert Seqno(tmp_path / "seqno", clock).next() == last + 1


def test_the_file_is_written_once_in_the_reserved_time(tmp_path: Path) -> None:
    clock = Clock(100 * SECOND)
    path = tmp_path / "seqno"
    seqno = Seqno(path, clock)
    contents = set()
    for _ in range(25_000):  # 25 s of a thousand a second
        clock.now += SECOND // 1000
        seqno.next()
        contents.add(path.stat().st_ino)
    assert len(contents) <= 3 < 25_000


@pytest.mark.parametrize("content", [b"", b"-5\n", b"1_000", b"abc", b"\x00" * 19, b"9" * 25])
def test_a_damaged_file_is_named_and_not_taken_for_zero(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "seqno"
    path.write_bytes(content)
    with pytest.raises(SeqnoError, match="seqno"):
        Seqno(path, Clock(1))


def test_no_number_is_given_out_that_could_not_be_reserved(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    seqno = Seqno(folder / "seqno", Clock(1))
    folder.write_bytes(b"a file where the folder should be")
    with pytest.raises(SeqnoError, match="cannot write"):
        seqno.next()


def test_where_nothing_can_be_written_a_stop_is_in_peace_and_skips_what_was_reserved(tmp_path: Path) -> None:
    folder, away = tmp_path / "state", tmp_path / "away"
    seqno = Seqno(folder / "seqno", Clock(100 * SECOND))
    last = seqno.next()
    folder.rename(away)
    folder.write_bytes(b"a file where the folder should be")
    seqno.close()
    assert Seqno(away / "seqno", Clock(0)).next() > last


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("clock"), st.integers(0, 60 * SECOND)),
            st.tuples(st.just("next"), st.integers(1, 4)),
            st.tuples(st.sampled_from(["crash", "stop"]), st.just(0)),
        ),
        max_size=40,
    )
)
def test_any_history_of_clocks_crashes_and_stops_rises(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("seqno") / "seqno"
    clock = Clock(0)
    seqno = Seqno(path, clock)
    numbers: list[int] = []
    for what, amount in history:
        if what == "clock":
            clock.now = amount
        elif what == "next":
            numbers += [seqno.next() for _ in range(amount)]
        else:
            if what == "stop":
                seqno.close()
            seqno = Seqno(path, clock)
    assert all(a < b for a, b in pairwise(numbers))
