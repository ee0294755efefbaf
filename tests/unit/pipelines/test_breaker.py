"""kiln.pipelines.decode.breaker: what stops a query, and what must not (decision 6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.pipelines.decode import breaker as module
from kiln.pipelines.decode.breaker import SAMPLES, AuthorTally, DecodeBreaker, DecodingBrokenError, check_samples
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.pubsub import PubsubMessage, read_message

GOOD = ("anna", "bert", "cleo", "dora", "emil")


def running(authors: int = 3, streak: int = 100) -> DecodeBreaker:
    """A breaker that has seen each of GOOD decode."""
    breaker = DecodeBreaker(authors, streak)
    breaker.observe(AuthorTally(author, 1, 0) for author in GOOD)
    return breaker


def test_it_trips_when_most_authors_stop_decoding() -> None:
    breaker = running()
    with pytest.raises(DecodingBrokenError, match=r"3 of 5 authors.*100"):
        breaker.observe(AuthorTally(author, 0, 100) for author in GOOD[:3])


def test_a_streak_may_take_many_micro_batches() -> None:
    breaker = running()
    for _ in range(9):
        breaker.observe(AuthorTally(author, 0, 10) for author in GOOD)
    breaker.observe(AuthorTally(author, 0, 9) for author in GOOD)
    with pytest.raises(DecodingBrokenError):
        breaker.observe(AuthorTally(author, 0, 1) for author in GOOD)


def test_one_loud_peer_does_not_trip_it() -> None:
    breaker = running()
    for _ in range(100):
        breaker.observe([AuthorTally(GOOD[0], 0, 1_000_000)])


def test_nor_does_one_that_is_alone() -> None:
    breaker = DecodeBreaker(3, 100)
    breaker.observe([AuthorTally("alone", 5, 0)])
    breaker.observe([AuthorTally("alone", 0, 1_000_000)])


def test_nor_does_a_crowd_of_new_authors_that_send_garbage_only() -> None:
    breaker = running()
    breaker.observe(AuthorTally(f"new {n}", 0, 1_000) for n in range(1_000))


def test_half_of_the_authors_are_not_most_of_them() -> None:
    breaker = DecodeBreaker(3, 100)
    breaker.observe(AuthorTally(f"author {n}", 1, 0) for n in range(6))
    breaker.observe(AuthorTally(f"author {n}", 0, 1_000) for n in range(3))
    with pytest.raises(DecodingBrokenError):
        breaker.observe([AuthorTally("author 3", 0, 1_000)])


def test_authors_that_send_good_and_bad_do_not_trip_it() -> None:
    breaker = running()
    for _ in range(100):
        breaker.observe(AuthorTally(author, 1, 1_000) for author in GOOD)


def test_a_good_message_ends_a_streak() -> None:
    breaker = running()
    for _ in range(10):
        breaker.observe(AuthorTally(author, 0, 99) for author in GOOD)
        breaker.observe(AuthorTally(author, 1, 0) for author in GOOD)


def test_a_micro_batch_with_nothing_in_it_changes_nothing() -> None:
    breaker = running()
    breaker.observe(AuthorTally(author, 0, 99) for author in GOOD)
    breaker.observe([])
    with pytest.raises(DecodingBrokenError):
        breaker.observe(AuthorTally(author, 0, 1) for author in GOOD)


def test_authors_of_long_ago_do_not_keep_it_from_tripping() -> None:
    breaker = DecodeBreaker(3, 100, forget_after=10)
    breaker.observe(AuthorTally(f"gone {n}", 1, 0) for n in range(1_000))
    for _ in range(10):
        breaker.observe(AuthorTally(author, 1, 0) for author in GOOD)
    with pytest.raises(DecodingBrokenError, match="5 of 5 authors"):
        breaker.observe(AuthorTally(author, 0, 100) for author in GOOD)


tallies = st.lists(
    st.builds(AuthorTally, st.sampled_from(GOOD), st.integers(0, 2), st.integers(0, 4)),
    max_size=5,
    unique_by=lambda t: t[0],
)


@given(st.lists(tallies, max_size=20), st.integers(1, 4), st.integers(1, 6))
def test_it_trips_as_documented_and_not_otherwise(history: list[list[AuthorTally]], authors: int, streak: int) -> None:
    breaker = DecodeBreaker(authors, streak)
    for n, newest in enumerate(history, start=1):
        past: dict[str, list[AuthorTally]] = {}
        for tally in (tally for micro_batch in history[:n] for tally in micro_batch):
            past.setdefault(tally.author, []).append(tally)
        decoded = [author for author, each in past.items() if any(tally.decoded for tally in each)]
        stopped = []
        for author in decoded:
            last = max(n for n, tally in enumerate(past[author]) if tally.decoded)
            if sum(tally.failed for tally in past[author][last + 1 :]) >= streak:
                stopped.append(author)
        if len(stopped) >= authors and len(stopped) > len(decoded) / 2:
            with pytest.raises(DecodingBrokenError):
                breaker.observe(newest)
            return
        breaker.observe(newest)


def test_the_samples_decode_as_what_they_are() -> None:
    check_samples()
    read = [(kind, read_message(text.encode())) for kind, text in SAMPLES]
    assert [kind for kind, _ in read] == [message.type for _, message in read if isinstance(message, PubsubMessage)]
    assert {kind for kind, _ in read} == {"UPDATE", "QUERY", "RESPONSE", "KEEPALIVE", "BATCH_UPDATE"}


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in SAMPLES}))
def test_a_build_that_reads_one_kind_no_more_says_which(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes, batch_typ: int = 3) -> PubsubMessage | Rejected:
        read = read_message(data, batch_typ)
        return Rejected("odd_reason") if isinstance(read, PubsubMessage) and read.type == kind else read

    monkeypatch.setattr(module, "read_message", broken)
    with pytest.raises(DecodingBrokenError, match=f"{kind}.*odd_reason"):
        check_samples()


def test_a_build_that_takes_one_kind_for_another_is_broken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes, batch_typ: int = 3) -> PubsubMessage | Rejected:
        return PubsubMessage("KEEPALIVE", ts=0)

    monkeypatch.setattr(module, "read_message", broken)
    with pytest.raises(DecodingBrokenError):
        check_samples()
