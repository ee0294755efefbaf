"""kiln.pipelines.backfill.deduplication: which copy of a message is kept, and which UPDATE is new, in history (decision
21)."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kiln.pipelines.backfill.deduplication import (
    FirstCopySelector,
    FramePosition,
    StreamHistory,
    match_signed,
    match_unsigned,
)

DAY = 86_400_000_000
A, B, C = (FramePosition(0, offset, 0) for offset in (1, 2, 3))


def kept(choice: FirstCopySelector[FramePosition], *copies: tuple[int, FramePosition]) -> list[FramePosition]:
    found = [place for at, place in copies if choice.offer(at, place, place)]
    return [*found, *choice.list_fallbacks()]


def test_the_first_copy_is_kept_where_live_has_none() -> None:
    assert kept(FirstCopySelector(match_signed(DAY)), (5, B), (6, A), (7, C)) == [B]


def test_the_copy_that_live_keeps_is_kept() -> None:
    choice: FirstCopySelector[FramePosition] = FirstCopySelector(match_signed(DAY))
    choice.add_live_choice(6, A)
    assert kept(choice, (5, B), (6, A), (7, C)) == [A]


def test_no_message_is_lost_where_live_s_copy_is_no_good_copy_today() -> None:
    choice: FirstCopySelector[FramePosition] = FirstCopySelector(match_signed(DAY))
    choice.add_live_choice(6, A)
    assert kept(choice, (5, B), (7, C)) == [B]


def test_what_is_kept_in_another_chunk_is_not_kept_here_but_a_message_of_another_day_is() -> None:
    choice: FirstCopySelector[FramePosition] = FirstCopySelector(match_signed(DAY))
    choice.add_known(0)
    assert kept(choice, (5, A), (DAY - 1, B), (DAY, C)) == [C]


def test_an_unsigned_message_may_come_again_after_its_horizon() -> None:
    same = match_unsigned(100)
    assert same(10, 90)
    assert same(90, 110), "the second way of cutting"
    assert not same(10, 190)
    assert kept(FirstCopySelector(same), (10, A), (60, B), (210, C)) == [A, C]


@given(st.lists(st.integers(0, 500), min_size=1), st.integers(1, 200))
def test_copies_that_are_kept_are_apart_and_the_others_are_near_one(times: list[int], remembered: int) -> None:
    choice: FirstCopySelector[int] = FirstCopySelector(match_signed(remembered))
    ordered = sorted(times)
    found = [at for number, at in enumerate(ordered) if choice.offer(at, FramePosition(0, number, 0), at)]
    assert all(abs(one - other) >= remembered for one in found for other in found if one is not other)
    assert all(any(abs(at - one) < remembered for one in found) for at in ordered)


class Announcement(NamedTuple):
    at: int
    separator: str | None
    is_live: bool = False


def times_of_updates(history: StreamHistory, *candidates: Announcement) -> list[int]:
    return [
        each.at
        for each in candidates
        if history.offer(each.at, "LIVE", each.separator, "tip", "author", is_live=each.is_live)
    ]


def test_an_update_is_new_once_in_a_day_for_each_claim() -> None:
    said = [
        Announcement(0, "a"),
        Announcement(5, "a"),
        Announcement(6, "b"),
        Announcement(DAY - 1, "a"),
        Announcement(DAY, "a"),
    ]
    assert times_of_updates(StreamHistory(DAY), *said) == [0, 6, DAY]


def test_what_live_stamped_is_new_and_what_is_near_it_is_none() -> None:
    history = StreamHistory(DAY)
    for at in (7, 9):
        history.add_update("LIVE", "a", "tip", at)
    live = [Announcement(7, "a", is_live=True), Announcement(9, "a", is_live=True)]
    assert times_of_updates(history, Announcement(5, "a"), *live, Announcement(10, "a"), Announcement(11, "b")) == [
        7,
        9,
        11,
    ]
    assert times_of_updates(history, Announcement(12, None)) == [], "one without separator repeats any"


def test_a_return_that_live_has_later_is_no_update_before() -> None:
    history = StreamHistory(DAY)
    for at in (1, 20):
        history.add_update("LIVE", "a", "tip", at)
    history.add_announcement("LIVE", "author", "another tip", 5)
    assert times_of_updates(history, Announcement(10, "a"), Announcement(20, "a", is_live=True)) == [20]
    missed = StreamHistory(DAY)
    missed.add_update("LIVE", "a", "tip", 1)
    missed.add_announcement("LIVE", "author", "another tip", 5)
    assert times_of_updates(missed, Announcement(10, "a"), Announcement(11, "a")) == [10]
