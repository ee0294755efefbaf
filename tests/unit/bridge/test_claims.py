"""Which claimed genesis is asked for next, in bounded memory: kiln.bridge.fetcher.claims."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.fetcher.claims import ClaimedStreams
from kiln.schemas.kafka.records import Coordinates, Epoch, SeparatorRecord, UpdateRecord, WantedRecord
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID

MODEL, OTHER = SeparatorRecord("model", "ka"), SeparatorRecord("model", "kb")


def claim(genesis: int, tip: int = 0, separator: SeparatorRecord = MODEL) -> WantedRecord:
    cid = compute_cid(b"genesis %d" % genesis)
    update = UpdateRecord(
        "clay",
        "LIVE",
        separator,
        "topic",
        StreamID(3, cid).text,
        f"tip {tip}",
        None,
        f"message {tip}",
        Epoch("updates", 0),
        Coordinates(0, tip, 0),
        1_700_000_000_000_000,
    )
    return WantedRecord("clay", cid_text(cid), "claim", 1_700_000_000_000_000, update=update, topic=separator)


def cid_of(genesis: int) -> str:
    return claim(genesis).cid


def turns(claimed: ClaimedStreams, now: int = 0) -> list[str]:
    """What is asked for until nothing is left to ask for now."""
    asked: list[str] = []
    while (cid := claimed.next_genesis(now)) is not None:
        asked.append(cid)
    return asked


def test_the_most_claimed_is_asked_for_first_and_nothing_twice_at_a_time() -> None:
    claimed = ClaimedStreams()
    for genesis in (1, 2, 3, 2, 3, 3):
        claimed.add(claim(genesis))
    assert claimed.next_genesis(0) == cid_of(3)
    claimed.add(claim(3))
    assert turns(claimed) == [cid_of(2), cid_of(1)]
    assert len(claimed) == 3


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 12))
def test_whoever_has_more_than_his_share_of_the_claims_has_a_place(said: list[int], most: int) -> None:
    """What Space-Saving promises: whoever has more than 1/most of all claims is remembered."""
    claimed = ClaimedStreams(most)
    for genesis in said:
        claimed.add(claim(genesis))
    counts = Counter(said)
    kept = turns(claimed)
    assert len(kept) == len(set(kept)) == min(most, len(counts))
    assert {cid_of(genesis) for genesis, count in counts.items() if count * most > len(said)} <= set(kept)
    assert claimed.evicted == 0 or len(counts) > most
    if len(counts) <= most:  # nobody gave way: the counts are true
        order = [genesis for cid in kept for genesis in counts if cid_of(genesis) == cid]
        assert [counts[genesis] for genesis in order] == sorted(counts.values(), reverse=True)


def test_newcomers_do_not_push_each_other_out_for_ever() -> None:
    """All places are taken, and two streams take turns: without the count of who gave way, each would be the least."""
    claimed = ClaimedStreams(3)
    for genesis in (1, 2, 3) * 3 + (4, 5) * 20:
        claimed.add(claim(genesis))
    assert {cid_of(4), cid_of(5)} <= set(turns(claimed))
    assert claimed.evicted == 2


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("cncfar")), max_size=80), st.integers(1, 4))
def test_whatever_happens_no_place_is_lost_and_none_is_taken_twice(steps: list[tuple[int, str]], most: int) -> None:
    """c: a claim; n: the next is asked for; f: the try fails; a: IPFS is away; r: a fetch goes on without it."""
    claimed = ClaimedStreams(most)
    asked: list[str] = []
    at_once = 0
    for now, (genesis, step) in enumerate(steps):
        if step == "c":
            claimed.add(claim(genesis))
        elif step == "n":
            cid = claimed.next_genesis(now)
            assert cid not in asked
            asked += [] if cid is None else [cid]
        elif asked:
            cid = asked.pop(genesis % len(asked))
            if step == "f":
                claimed.record_failure(cid, now + 3, final=False)
            elif step == "a":
                claimed.put_back(cid)
            else:
                claimed.defer(cid, now + 3)
        at_once = max(at_once, len(asked))
        assert len(claimed) <= most + at_once
    left = turns(claimed, len(steps) + 3)
    assert sorted({*left, *asked}) == sorted([*left, *asked])
    assert len(claimed) == len(left) + len(asked)
    for cid in (*left, *asked):
        assert claimed.pop_claims(cid) is not None
    assert len(claimed) == 0


def test_one_that_does_not_come_rests_behind_all_others_and_is_given_up_after_six_tries() -> None:
    claimed = ClaimedStreams()
    for genesis in (1, 1, 2):
        claimed.add(claim(genesis))
    for number in range(1, 6):
        for _ in range(10):
            assert claimed.next_genesis(100 * number) == cid_of(1)
            claimed.put_back(cid_of(1))  # IPFS is away: no try
        assert claimed.next_genesis(100 * number) == cid_of(1)
        assert not claimed.record_failure(cid_of(1), 100 * number + 100, final=False)
        if number == 1:
            assert claimed.next_genesis(100) == cid_of(2)
        assert claimed.next_genesis(100 * number + 99) is None
    assert claimed.next_genesis(600) == cid_of(1)
    assert claimed.record_failure(cid_of(1), 700, final=False)
    assert claimed.pop_claims(cid_of(1)) is None
    claimed.add(claim(1))
    assert claimed.next_genesis(600) == cid_of(1)
    assert claimed.record_failure(cid_of(1), 700, final=True)


def test_one_that_was_tried_gives_way_before_one_that_was_not() -> None:
    claimed = ClaimedStreams(2)
    claimed.add(claim(1))
    claimed.next_genesis(0)
    claimed.record_failure(cid_of(1), 100, final=False)
    for genesis in (2, 3):
        claimed.add(claim(genesis))
    assert claimed.evicted == 1
    assert turns(claimed, 100) == [cid_of(2), cid_of(3)]


def test_of_each_claim_the_first_update_is_remembered_and_too_many_are_counted() -> None:
    claimed = ClaimedStreams()
    separators = [SeparatorRecord("model", f"k{letter}") for letter in "abcde"]
    for tip, separator in enumerate((*separators, *separators)):
        claimed.add(claim(1, tip, separator))
    found = claimed.pop_claims(cid_of(1))
    assert found is not None
    firsts = [record.update for record in found.first_updates.values()]
    assert [update.tip for update in firsts if update is not None] == ["tip 0", "tip 1", "tip 2", "tip 3"]
    assert claimed.unrecorded == 2


def test_the_newest_tips_are_remembered_under_the_separator_that_they_claim() -> None:
    claimed = ClaimedStreams()
    for tip in range(40):
        claimed.add(claim(1, tip))
    found = claimed.pop_claims(cid_of(1))
    assert found is not None

    def has(tip: int, separator: SeparatorRecord) -> bool:
        update = claim(1, tip).update
        return update is not None and found.includes(update, separator)

    assert [tip for tip in range(40) if has(tip, MODEL)] == list(range(8, 40))
    assert not has(39, OTHER)
