"""Claims that are held against geneses: the fetcher without Kafka and IPFS (decision 20)."""

from __future__ import annotations

from msgspec import structs

from kiln.bridge.fetcher.attempts import BlockRequest, GenesisAnswer, IpfsUnavailable
from kiln.bridge.fetcher.fetch_queue import KnownAnswers
from kiln.bridge.fetcher.offsets import DoneOffsets
from kiln.bridge.fetcher.pending import FetchingOptions
from kiln.schemas.kafka.records import StreamRecord, decode_quarantine, decode_stream, decode_wanted
from kit.fetching import (
    MODEL,
    NETWORK,
    OTHER,
    START,
    UNAVAILABLE,
    Run,
    S,
    claim,
    disagreeing,
    genesis_cid,
    stream_of,
    wanted_update,
)


def test_a_false_claim_goes_to_quarantine_and_its_genesis_to_streams_and_no_update_is_released() -> None:
    run = Run()
    records = [claim(1, 0), claim(1, 1), claim(1, 2, MODEL, OTHER), claim(1, 3, None, MODEL)]
    run.take(*records)
    run.round()
    assert run.done_offsets.resume_offset == 4, "nothing waits for a claim"
    assert (run.pending.waiting_count, len(run.pending.claims)) == (0, 1)
    (ask,) = run.next()
    assert ask == BlockRequest("genesis", genesis_cid(1))
    assert [output.topic for output in run.answer(ask, GenesisAnswer(MODEL, None))] == 2 * ["quarantine"] + ["streams"]
    assert run.streams() == [StreamRecord(NETWORK, stream_of(1), MODEL, run.now)]
    assert [(fault.stage, fault.reason, decode_wanted(fault.data)) for fault in run.faults()] == [
        ("separator", "contradicts_genesis", record) for record in (records[0], records[2])
    ]
    assert run.faults()[0].detail == f"claimed model/{OTHER.value}; the genesis names model/{MODEL.value}"
    assert [output.key for output in run.written[:2]] == [b"0/0/1", b"0/2/1"], "the place of the update's message"
    assert (len(run.pending.claims), run.updates()) == (0, [])
    run.take(claim(1, 4))  # written before the answer was read
    (output,) = run.round()
    assert decode_quarantine(output.value).reason == "contradicts_genesis"
    assert run.next() == []


def test_what_an_update_waits_for_comes_before_claims_and_claims_take_half() -> None:
    run = Run(FetchingOptions(NETWORK, max_concurrent=4))
    run.take(*(claim(stream, stream) for stream in range(5)), claim(3, 9))
    first = run.next()
    assert [ask.cid for ask in first] == [genesis_cid(3), genesis_cid(0)], "the most claimed first"
    run.take(*(wanted_update(stream, stream) for stream in range(10, 13)))
    assert [ask.cid for ask in run.next()] == [genesis_cid(10), genesis_cid(11)]
    run.answer(first[0], GenesisAnswer(MODEL, None))
    assert [ask.cid for ask in run.next()] == [genesis_cid(12)]
    one = Run(FetchingOptions(NETWORK, max_concurrent=1))
    one.take(claim(0, 0), wanted_update(1, 1))
    assert [ask.cid for ask in one.next()] == [genesis_cid(1)]


def test_a_claim_that_cannot_be_checked_is_tried_six_times_and_keeps_nothing_else_from_being_asked_for() -> None:
    run = Run()
    run.take(claim(1, 0))
    tries: list[int] = []
    for _ in range(1_000):
        for ask in run.next():
            tries.append((run.now - START) // S)
            run.answer(ask, UNAVAILABLE)
        run.now += S
    assert tries == [0, 100, 200, 300, 400, 500]  # `forget` apart
    assert (run.written, len(run.pending.claims), run.pending.counts["claims_unchecked"]) == ([], 0, 1)
    run.take(claim(1, 1))
    (ask,) = run.next()
    run.answer(ask, UNAVAILABLE)
    run.take(wanted_update(1, 2))
    assert run.next() == [ask], "one try for a claim does not give the genesis up for an update that waits"


def test_claims_wait_while_ipfs_is_away_and_an_update_may_come_to_wait_for_the_same_genesis() -> None:
    run = Run()
    run.take(claim(1, 0), claim(2, 1))
    for ask in run.next():
        run.answer(ask, IpfsUnavailable("gone"))
    run.try_until(100, IpfsUnavailable("still gone"))
    run.take(wanted_update(1, 2))
    assert len(run.pending.claims) == 2
    run.now += 2 * S
    (ask,) = run.next()
    assert ask.cid == genesis_cid(1), "the one that something waits for"
    run.answer(ask, GenesisAnswer(MODEL, None))
    assert [update.message_id for update in run.updates()] == ["message 2"]
    assert [fault.reason for fault in run.faults()] == ["contradicts_genesis"]
    assert run.pending.queue.ipfs_error is None
    (ask,) = run.next()
    run.answer(ask, GenesisAnswer(OTHER, None))
    assert (len(run.pending.claims), len(run.faults()), run.pending.counts["claims_checked"]) == (0, 1, 2)


def test_a_run_counts_again_what_an_earlier_one_had_counted_and_not_checked() -> None:
    records = [claim(1, 0), wanted_update(2, 1), claim(3, 2), claim(4, 3)]
    first = Run(FetchingOptions(NETWORK, max_concurrent=4))
    first.take(*records)
    for ask in first.next():
        if ask.cid != genesis_cid(2):  # of 1 and 3, as claims take half
            first.answer(ask, GenesisAnswer(OTHER, None))
    first.round()
    first.round()
    assert first.done_offsets.resume_offset == 1
    # the process ends here

    known = KnownAnswers()
    for stream in (1, 3):
        known.streams[stream_of(stream)] = OTHER
    run = Run(memory=known)
    run.done_offsets = DoneOffsets(1, first.done_offsets.metadata(), 77)
    run.pending.start(0, run.done_offsets)
    run.take(*records)
    assert (run.pending.waiting_count, len(run.pending.claims)) == (1, 1)
    assert [ask.cid for ask in run.next()] == [genesis_cid(2), genesis_cid(4)]


def test_claims_that_disagree_wait_and_the_false_one_is_told_with_the_answer() -> None:
    run = Run()
    run.take(disagreeing(1, 0), disagreeing(2, 1))
    for ask, separator in zip(run.next(), (MODEL, OTHER), strict=True):
        run.answer(ask, GenesisAnswer(separator, None))
    assert [(update.separator, update.separator_source) for update in run.updates()] == [
        (MODEL, "genesis"),
        (OTHER, "genesis"),
    ]
    false = [fault.detail.split(";")[0] for fault in run.faults()]
    assert false == [f"claimed model/{OTHER.value}", f"claimed model/{MODEL.value}"]


def test_an_update_that_waited_is_not_released_where_its_claim_went_on_under_the_same_separator() -> None:
    run = Run()
    # the same tip: a true claim, and two whose claims disagree; and another tip
    run.take(claim(1, 0, MODEL), disagreeing(1, 0), disagreeing(1, 5))
    (ask,) = run.next()
    run.answer(ask, GenesisAnswer(MODEL, None))
    assert [update.message_id for update in run.updates()] == ["message 5"]
    assert run.pending.counts["already_released"] == 1
    assert run.done_offsets.resume_offset == 3
    (stream,) = run.streams()
    assert len(stream.waited) == 2


def test_a_genesis_with_no_separator_contradicts_no_claim() -> None:
    run = Run()
    run.take(claim(1, 0))
    (ask,) = run.next()
    (output,) = run.answer(ask, GenesisAnswer(None, "sep_missing"))
    assert decode_stream(output.value).without == "sep_missing"


def test_a_claim_with_the_genesis_of_another_stream_asks_for_nothing() -> None:
    run = Run()
    run.take(structs.replace(claim(1, 0), cid=genesis_cid(2)))
    run.round()
    assert [fault.reason for fault in run.faults()] == ["wanted_malformed"]
    assert run.next() == []
