"""Who waits for which block, and what is written then: the fetcher without Kafka and IPFS."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kiln.bridge.fetcher.attempts import (
    Answer,
    BatchAnswer,
    BlockRequest,
    FetchFailure,
    GenesisAnswer,
    IpfsUnavailable,
    fetch_block,
)
from kiln.bridge.fetcher.fetch_queue import KnownAnswers
from kiln.bridge.fetcher.offsets import MAX_RELEASING, DoneOffsets
from kiln.bridge.fetcher.pending import REPLAY, FetchingOptions, PendingFetches
from kiln.bridge.fetcher.wanted import KafkaPosition
from kiln.bridge.ipfs import Announcer, BlockRefusedError, BlockStore, BlockStoreUnavailableError, BlockUnavailableError
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.kafka.number_sets import MAX_METADATA
from kiln.deploy.ops.quarantine_replay import build_retry
from kiln.pipelines.batch.windows import PartitionWindows
from kiln.schemas.kafka.records import (
    BlockRecord,
    Epoch,
    SeparatorRecord,
    StreamRecord,
    UpdateRecord,
    WaitedTip,
    WantedRecord,
    decode_quarantine,
    decode_stream,
    decode_update,
    decode_wanted,
    encode,
)
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import compute_peer_id, peer_text
from kit.chance import new_key
from kit.fetching import (
    EVERYTHING,
    MODEL,
    NETWORK,
    OPTIONS,
    OTHER,
    START,
    UNAVAILABLE,
    Run,
    S,
    block_of,
    claim,
    genesis_cid,
    genesis_of,
    stream_of,
    wanted_batch,
    wanted_update,
)
from kit.memory_ipfs import Ipfs

# ---------------------------------------------------------------- updates


def test_updates_of_a_stream_share_a_fetch_and_go_on_in_their_order_before_the_answer() -> None:
    run = Run()
    run.take(*(wanted_update(1, number) for number in range(3)))
    (ask,) = run.next()
    assert ask == BlockRequest("genesis", genesis_cid(1))
    assert run.next() == []
    run.pending.add_answer(ask, GenesisAnswer(MODEL, None), run.now)
    due = run.pending.stage_writes(run.now)
    assert due.releasing == {0: {0, 1, 2}}
    first, streams, blocks = due.stages
    released = [decode_update(output.value) for output in first]
    assert [update.message_id for update in released] == ["message 0", "message 1", "message 2"]
    assert {(update.separator, update.separator_source) for update in released} == {(MODEL, "genesis")}
    assert {output.key for output in first} == {f"{NETWORK}/model/{MODEL.value}".encode()}
    (stream,) = streams
    assert stream.key == stream_of(1).encode()
    waited = tuple(WaitedTip("LIVE", update.tip) for update in released)
    assert decode_stream(stream.value) == StreamRecord(NETWORK, stream_of(1), MODEL, run.now, waited=waited)
    assert blocks == []
    assert run.done_offsets.resume_offset == 0  # until the broker has them
    run.pending.confirm_writes()
    assert run.done_offsets.resume_offset == 3


def test_geneses_that_no_peer_had_are_counted_with_the_updates_that_wait_for_them() -> None:
    run = Run()
    run.take(*(wanted_update(stream, number) for number, stream in enumerate((1, 1, 1, 2))))
    first, second = run.next()
    assert run.pending.queue.count_unanswered() == (0, 0)  # in flight
    run.answer(first, FetchFailure("block_unavailable", "nobody gave it", final=False))
    assert run.pending.queue.count_unanswered() == (1, 3)
    run.answer(second, IpfsUnavailable("it is off"))
    assert run.pending.queue.count_unanswered() == (1, 3)  # no peer was reached
    run.now += 10 * S
    for _ in range(2):  # one attempt tests whether IPFS is back
        for ask in run.next():
            run.answer(ask, GenesisAnswer(MODEL, None))
        run.now += 10 * S
    assert run.pending.queue.count_unanswered() == (0, 0)


def test_released_update_is_the_one_that_waited_with_a_separator_and_an_epoch_of_the_fetcher() -> None:
    run = Run()
    record = wanted_update(1, 5)
    run.take(record)
    (ask,) = run.next()
    run.answer(ask, GenesisAnswer(MODEL, None))
    (update,) = run.updates()
    assert record.update is not None
    assert update.epoch == Epoch(f"genesis/{NETWORK}/0", 1_001)
    assert (update.frame, update.tip, update.observed_at) == (
        record.update.frame,
        record.update.tip,
        record.update.observed_at,
    )


def test_stream_that_is_known_waits_for_nothing_and_is_not_told_again() -> None:
    run = Run()
    run.take(wanted_update(1, 0))
    (ask,) = run.next()
    run.answer(ask, GenesisAnswer(MODEL, None))
    run.take(wanted_update(1, 1))
    assert run.next() == []
    (output,) = run.round()
    assert (output.topic, decode_update(output.value).message_id) == ("updates", "message 1")
    assert len(run.streams()) == 1


def test_answer_and_a_later_update_in_one_round_keep_their_order() -> None:
    run = Run()
    run.take(wanted_update(1, 0), wanted_update(1, 1))
    (ask,) = run.next()
    run.pending.add_answer(ask, GenesisAnswer(MODEL, None), run.now)
    run.take(wanted_update(1, 2))
    run.round()
    assert [update.message_id for update in run.updates()] == ["message 0", "message 1", "message 2"]


def test_stream_without_a_separator_goes_on_without_one_and_is_counted_by_kind() -> None:
    run = Run()
    run.take(wanted_update(1, 0))
    (ask,) = run.next()
    update, stream = run.answer(ask, GenesisAnswer(None, "sep_missing"))
    assert update.key == stream_of(1).encode()
    assert decode_update(update.value).separator is None
    assert decode_update(update.value).separator_source == "genesis"
    assert (decode_stream(stream.value).separator, decode_stream(stream.value).without) == (None, "sep_missing")
    assert run.pending.counts["sep_missing"] == 1


def test_one_that_does_not_come_holds_up_no_other() -> None:
    run = Run()
    run.take(*(wanted_update(stream, stream) for stream in range(6)))
    for _ in range(3):  # two at once
        for ask in run.next():
            failed = ask.cid == genesis_cid(0)
            run.answer(ask, UNAVAILABLE if failed else GenesisAnswer(MODEL, None))
    assert [update.message_id for update in run.updates()] == [f"message {number}" for number in range(1, 6)]
    assert run.done_offsets.resume_offset == 0


def test_retries_leave_half_of_the_fetches_to_what_is_new() -> None:
    run = Run(FetchingOptions(NETWORK, max_concurrent=4, give_up_after=100 * S))
    run.take(*(wanted_update(stream, stream) for stream in range(4)))
    for ask in run.next():
        run.answer(ask, UNAVAILABLE)
    run.now += 5 * S
    assert len(run.next()) == 2
    run.take(wanted_update(9, 9), wanted_update(8, 8), wanted_update(7, 7))
    assert run.next() == [BlockRequest("genesis", genesis_cid(9)), BlockRequest("genesis", genesis_cid(8))]


def test_it_is_tried_again_with_pauses_that_grow_and_then_is_a_fault_of_each_update() -> None:
    run = Run()
    records = [wanted_update(1, 0), wanted_update(1, 1)]
    run.take(*records)
    tries: list[int] = []
    for _ in range(60):
        for ask in run.next():
            tries.append((run.now - START) // S)
            run.answer(ask, UNAVAILABLE)
        run.now += S
    assert tries == [0, 1, 3, 7, 15]
    faults = run.faults()
    assert [decode_wanted(fault.data) for fault in faults] == records
    assert {(fault.stage, fault.reason) for fault in faults} == {("fetch", "genesis_unavailable")}
    assert faults[0].detail == "the block was not found in 5 attempts over 15 s: nobody gave it"
    assert [output.key for output in run.written] == [b"0/0/1", b"0/1/1"]
    assert run.done_offsets.resume_offset == 2


def test_what_could_not_be_had_is_not_asked_for_again_until_it_is_forgotten() -> None:
    run = Run()
    run.take(wanted_update(1, 0))
    run.try_until(60, UNAVAILABLE)
    run.take(wanted_update(1, 1))
    assert run.next() == []
    assert len(run.round()) == 1
    run.now += 100 * S
    run.take(wanted_update(1, 2))
    (ask,) = run.next()
    run.answer(ask, GenesisAnswer(MODEL, None))
    assert [update.message_id for update in run.updates()] == ["message 2"]


def test_an_update_that_was_given_up_is_released_when_it_is_requested_again() -> None:
    run = Run()
    given_up = wanted_update(1, 0)
    run.take(given_up)
    run.try_until(60, UNAVAILABLE)
    run.now += 100 * S
    run.take(given_up)  # a repeat after a crash: it is given up already
    assert run.next() == []
    assert run.pending.counts["repeated"] == 1
    run.take(build_retry(given_up, run.now))  # as `kiln quarantine replay` writes it
    (ask,) = run.next()
    run.answer(ask, GenesisAnswer(MODEL, None))
    assert [update.message_id for update in run.updates()] == ["message 0"]


def test_what_can_never_be_had_is_not_tried_again() -> None:
    run = Run()
    run.take(wanted_update(1, 0))
    (ask,) = run.next()
    (output,) = run.answer(ask, FetchFailure("cid_hash_unsupported", "hash 0x1b", final=True))
    fault = decode_quarantine(output.value)
    assert (fault.reason, fault.detail) == ("cid_hash_unsupported", "hash 0x1b")
    run.now += 50 * S
    assert run.next() == []


def test_while_ipfs_is_away_all_waits_and_no_time_runs_out() -> None:
    run = Run()
    run.take(*(wanted_update(stream, stream) for stream in range(4)))
    for ask in run.next():
        run.answer(ask, IpfsUnavailable("no answer from http://127.0.0.1:5001"))
    assert run.pending.queue.ipfs_error == "no answer from http://127.0.0.1:5001"
    asked = 0
    for _ in range(1_000):
        for ask in run.next():
            asked += 1
            run.answer(ask, IpfsUnavailable("still"))
        run.now += S
    assert (asked, run.written) == (500, [])  # one at a time, each 2 s
    for _ in range(10):
        for ask in run.next():
            run.answer(ask, GenesisAnswer(MODEL, None))
        run.now += S
    assert run.pending.queue.ipfs_error is None
    assert len(run.updates()) == 4


def test_time_while_ipfs_is_away_does_not_count_as_tried() -> None:
    run = Run()
    run.take(wanted_update(1, 0))
    run.try_until(6, UNAVAILABLE)
    run.try_until(1_000, IpfsUnavailable("gone"))
    assert run.written == []
    run.try_until(60, UNAVAILABLE)
    (fault,) = run.faults()
    waited = int(fault.detail.split(" over ")[1].split(" s")[0])
    assert waited < 30


def without(record: WantedRecord, field: str) -> bytes:
    document = json.loads(encode(record))
    del document[field]
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        None,
        without(wanted_update(1, 0), "update"),
        encode(wanted_update(1, 0)).replace(genesis_cid(1).encode(), genesis_cid(2).encode()),
        encode(wanted_update(1, 0)).replace(stream_of(1).encode(), b"kabc"),
        without(wanted_batch(genesis_cid(1)), "separator"),
        encode(wanted_batch("x")).replace(b'"x"', b'"\\ud800"'),
        encode(wanted_batch("x")).replace(b'"message_id":', b'"massage":'),
    ],
    ids=[
        "not_json",
        "none",
        "no_update",
        "other_genesis",
        "no_stream",
        "no_separator",
        "half_a_character",
        "unknown_field",
    ],
)
def test_record_that_asks_for_nothing_is_quarantined(value: bytes | None) -> None:
    run = Run()
    run.take(value, wanted_update(1, 1))
    (output,) = run.round()
    fault = decode_quarantine(output.value)
    assert (output.key, fault.data) == (b"wanted/0/0", value or b"")
    assert (fault.stage, fault.reason) == ("wanted", "wanted_malformed")
    assert fault.detail.startswith("record 0/0 of wanted: ")
    assert run.next() == [BlockRequest("genesis", genesis_cid(1))]
    assert run.done_offsets.resume_offset == 1


def test_what_another_network_wants_is_left_alone() -> None:
    run = Run()
    record = encode(wanted_update(1, 0)).replace(b'{"network":"local-test"', b'{"network":"mainnet"')
    run.take(record)
    assert (run.next(), run.round(), run.done_offsets.resume_offset) == ([], [], 1)
    assert run.pending.counts["other_network"] == 1


# ---------------------------------------------------------------- batches


def test_block_of_a_batch_goes_on_after_the_streams_in_it() -> None:
    run = Run()
    cid, data = block_of(1, 2)
    run.take(wanted_batch(cid))
    (ask,) = run.next()
    assert ask == BlockRequest("batch", cid)
    assert run.answer(ask, BatchAnswer(data, (stream_of(1), stream_of(2)))) == []
    one, two = run.next()
    assert {one.cid, two.cid} == {genesis_cid(1), genesis_cid(2)}
    assert [output.topic for output in run.answer(one, GenesisAnswer(MODEL, None))] == ["streams"]
    assert [output.topic for output in run.answer(two, GenesisAnswer(OTHER, None))] == ["streams", "blocks"]
    assert run.blocks() == [BlockRecord(NETWORK, cid, run.now, MODEL, block=data)]
    assert [output.key for output in run.written if output.topic == "blocks"] == [cid.encode()]
    assert run.done_offsets.resume_offset == 1


def test_streams_that_cannot_be_had_in_time_hold_up_no_block() -> None:
    run = Run()
    cid, data = block_of(1, 2)
    run.take(wanted_batch(cid))
    (ask,) = run.next()
    run.answer(ask, BatchAnswer(data, (stream_of(1), stream_of(2))))
    one, two = run.next()
    run.answer(one, UNAVAILABLE)
    run.now += 5 * S
    assert [output.topic for output in run.round()] == ["blocks"]
    run.now += 60 * S
    assert run.next() == []  # nobody waits for the first any more
    assert [output.topic for output in run.answer(two, GenesisAnswer(MODEL, None))] == ["streams"]
    assert not run.pending.is_busy


def test_stream_of_a_batch_that_an_update_waits_for_too_is_still_asked_for_after_the_batch() -> None:
    run = Run()
    cid, data = block_of(1)
    run.take(wanted_batch(cid), wanted_update(1, 0))
    genesis, batch = run.next()
    run.answer(batch, BatchAnswer(data, (stream_of(1),)))
    run.answer(genesis, UNAVAILABLE)
    run.now += 5 * S
    run.round()
    (again,) = run.next()
    run.answer(again, GenesisAnswer(MODEL, None))
    assert [update.message_id for update in run.updates()] == ["message 0"]


def test_without_the_check_the_block_goes_on_at_once() -> None:
    run = Run(FetchingOptions(NETWORK, check_genesis=False))
    cid, data = block_of(1)
    run.take(wanted_batch(cid))
    (ask,) = run.next()
    (output,) = run.answer(ask, BatchAnswer(data, (stream_of(1),)))
    assert output.topic == "blocks"
    assert run.next() == []


def test_batch_of_no_interest_is_counted_and_left() -> None:
    run = Run()
    cid, _ = block_of(1)
    run.take(wanted_batch(cid), interests=["tenant", f"model/{OTHER.value}"])
    assert (run.next(), run.round(), run.done_offsets.resume_offset) == ([], [], 1)
    assert run.pending.counts["not_of_interest"] == 1
    run.take(wanted_batch(cid), interests=["model"])
    assert run.next() == [BlockRequest("batch", cid)]


def test_all_announcers_of_a_batch_are_known_and_a_proven_one_comes_first() -> None:
    run = Run()
    author, other = (peer_text(compute_peer_id(new_key())) for _ in range(2))
    proof, data = block_of(1)
    run.take(wanted_batch(proof, message=f"{other}/00"))
    run.answer(run.next()[0], BatchAnswer(data, ()))
    cid, _ = block_of(2)
    unsigned = structs.replace(wanted_batch(cid), peer="sender")
    signed = structs.replace(wanted_batch(cid, message=f"{author}/00ff"), peer="relay")
    run.take(unsigned, signed, signed, wanted_batch(cid, message=f"{other}/01"))
    announced = [Announcer(other, ""), Announcer("sender", "sender"), Announcer(author, "relay")]
    (ask,) = run.next()
    assert run.pending.queue.list_announcers(ask) == announced
    run.answer(ask, FetchFailure("block_unavailable", "no peer", final=False))
    run.now += 600 * S
    (ask,) = run.next()
    assert run.pending.queue.list_announcers(ask) == announced
    blocks = Ipfs()
    fetch_block(blocks, ask, 1, announcers=announced)
    assert blocks.announcers == {cid: announced}
    run.take(wanted_update(3, 1))
    (ask,) = run.next()
    assert run.pending.queue.list_announcers(ask) == []


def test_own_batch_that_comes_back_is_left_alone_whichever_author_it_has() -> None:
    run = Run(FetchingOptions(NETWORK, authors=lambda: {"12D3KooWnode", "12D3KooWauthor"}))
    cid, _ = block_of(1)
    run.take(wanted_batch(cid, message="12D3KooWauthor/00ff"), wanted_batch(cid, message="12D3KooWnode/00ff"))
    assert (run.next(), run.round(), run.done_offsets.resume_offset) == ([], [], 2)
    assert run.pending.counts["own"] == 2
    run.take(wanted_batch(cid, message="12D3KooWother/00ff"))
    assert run.next() == [BlockRequest("batch", cid)]


def test_batch_that_was_given_up_is_not_asked_for_again_until_it_is_forgotten() -> None:
    run = Run()
    cid, data = block_of(1)
    run.take(wanted_batch(cid))
    run.try_until(60, FetchFailure("block_unavailable", "nobody gave it", final=False))
    run.take(wanted_batch(cid, message="again"), wanted_batch(cid, OTHER), wanted_batch(cid, OTHER, "again"))
    assert run.next() == []
    run.round()
    # each separator has the reason once
    assert [(block.separator, block.reason) for block in run.blocks()] == [
        (MODEL, "block_unavailable"),
        (OTHER, "block_unavailable"),
    ]
    assert len(run.faults()) == 2
    assert run.done_offsets.resume_offset == 4
    run.now += 100 * S
    run.take(wanted_batch(cid, message="later"))
    (ask,) = run.next()
    run.answer(ask, BatchAnswer(data, ()))
    assert [block.block for block in run.blocks()] == [None, None, data]


def test_block_is_got_once_for_each_separator_it_is_announced_under() -> None:
    run = Run(FetchingOptions(NETWORK, check_genesis=False))
    cid, data = block_of(1)
    run.take(wanted_batch(cid), wanted_batch(cid, OTHER), wanted_batch(cid, message="of another peer"))
    (ask,) = run.next()
    run.answer(ask, BatchAnswer(data, ()))
    run.take(wanted_batch(cid))
    assert (run.next(), run.round()) == ([], [])
    assert [block.separator for block in run.blocks()] == [MODEL, OTHER]
    assert run.pending.counts["already_fetched"] == 2
    # who announces it first under a false one must not hide it from those who do so rightly
    run.take(wanted_batch(cid, SeparatorRecord("tenant", MODEL.value)))
    assert run.next() == [BlockRequest("batch", cid)]


def test_block_that_cannot_be_had_is_told_with_its_reason_and_quarantined() -> None:
    run = Run()
    cid, _ = block_of(1)
    run.take(wanted_batch(cid), wanted_batch(cid, message="of another peer"))
    run.try_until(60, FetchFailure("block_unavailable", "nobody gave it", final=False))
    (block,) = run.blocks()
    assert (block.block, block.reason, block.separator) == (None, "block_unavailable", MODEL)
    (fault,) = run.faults()
    assert (fault.reason, decode_wanted(fault.data)) == ("block_unavailable", wanted_batch(cid))
    assert [output.key for output in run.written] == [cid.encode()] * 2
    assert run.done_offsets.resume_offset == 2


def test_blocks_that_wait_for_their_streams_are_few() -> None:
    run = Run(FetchingOptions(NETWORK, max_concurrent=100, genesis_timeout=5 * S))
    for number in range(50):
        cid, _ = block_of(number)
        run.take(wanted_batch(cid))
    asks = run.next()
    assert len(asks) == 16
    for number, ask in enumerate(asks):
        run.answer(ask, BatchAnswer(b"", (stream_of(number),)))
    assert {ask.kind for ask in run.next()} == {"genesis"}
    run.now += 5 * S
    run.round()
    assert [ask.kind for ask in run.next()] == ["batch"] * 16


# ---------------------------------------------------------------- one fetch


class Held(FolderBlockStore):
    """Blocks in a dict; `error` is raised instead where it is set."""

    def __init__(self, *blocks: bytes) -> None:
        super().__init__(Path("nowhere"))
        self.blocks = {hashlib.sha256(block).digest(): block for block in blocks}
        self.error: Exception | None = None

    def get(self, cid: str, timeout: float, limit: int = 0, announcers: Sequence[Announcer] = ()) -> bytes:
        from kiln.bridge.ipfs import read_digest

        if self.error is not None:
            raise self.error
        try:
            return self.blocks[read_digest(cid)]
        except KeyError:
            raise BlockUnavailableError(f"{cid} is not here") from None


def signed(payload: bytes) -> bytes:
    return cbor2.dumps({"payload": compute_cid(payload), "signatures": []}, canonical=True)


def test_unsigned_and_signed_genesis() -> None:
    payload = genesis_of(1)
    envelope = signed(payload)
    blocks: BlockStore = Held(payload, envelope)
    assert fetch_block(blocks, BlockRequest("genesis", genesis_cid(1)), 1) == GenesisAnswer(MODEL, None)
    root = cid_text(compute_cid(envelope, 0x85))
    assert fetch_block(blocks, BlockRequest("genesis", root), 1) == GenesisAnswer(MODEL, None)
    half: BlockStore = Held(envelope)
    answer = fetch_block(half, BlockRequest("genesis", root), 1)
    assert isinstance(answer, FetchFailure)
    assert (answer.reason, answer.final) == ("genesis_unavailable", False)


def test_genesis_without_a_separator_says_why() -> None:
    block = genesis_of(1, None)
    answer = fetch_block(Held(block), BlockRequest("genesis", cid_text(compute_cid(block))), 1)
    assert answer == GenesisAnswer(None, "sep_missing")


@pytest.mark.parametrize(
    ("error", "kind", "answer"),
    [
        (BlockStoreUnavailableError("gone"), "genesis", IpfsUnavailable("gone")),
        (BlockUnavailableError("not found"), "batch", FetchFailure("block_unavailable", "not found", final=False)),
        (BlockRefusedError("block_too_large", "a lot"), "batch", FetchFailure("block_too_large", "a lot", final=True)),
    ],
)
def test_what_goes_wrong(error: Exception, kind: str, answer: Answer) -> None:
    blocks = Held()
    blocks.error = error
    assert fetch_block(blocks, BlockRequest("batch" if kind == "batch" else "genesis", genesis_cid(1)), 1) == answer


def test_block_that_is_no_batch(tmp_path: Path) -> None:
    blocks = FolderBlockStore(tmp_path)
    block = genesis_of(1)
    blocks.put(genesis_cid(1), block)
    answer = fetch_block(blocks, BlockRequest("batch", genesis_cid(1)), 1)
    assert isinstance(answer, FetchFailure)
    assert (answer.reason, answer.final) == ("block_malformed", True)
    cid, data = block_of(4, 5)
    blocks.put(cid, data)
    read = fetch_block(blocks, BlockRequest("batch", cid), 1)
    assert isinstance(read, BatchAnswer)
    assert (read.block, set(read.streams)) == (data, {stream_of(4), stream_of(5)})


def test_other_event_than_an_init_is_no_genesis() -> None:
    block = cbor2.dumps({"id": cbor2.CBORTag(42, b"\x00" + compute_cid(b"x")), "data": []}, canonical=True)
    answer = fetch_block(Held(block), BlockRequest("genesis", cid_text(compute_cid(block))), 1)
    assert isinstance(answer, FetchFailure)
    assert (answer.reason, answer.final) == ("genesis_not_init", True)


# ---------------------------------------------------------------- done_offsets


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "1700000000000000",
        '{"generation":1}',
        '{"generation":1,"read":1}',
        '{"generation":-1,"read":9}',
        '{"generation":1,"read":9,"unfinished":"b!!"}',
        '{"generation":1,"read":9,"open":"b!"}',
        '{"generation":1,"read":9,"unfinished":"g00","releasing":"g~~~~~"}',
    ],
)
def test_metadata_that_cannot_be_read_is_taken_as_none(text: str) -> None:
    done_offsets = DoneOffsets(5, text, 77)
    assert (done_offsets.generation, done_offsets.resume_offset, done_offsets.is_repeating) == (78, 5, False)
    assert done_offsets.add(5)


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 600)),
            st.tuples(st.just("skip"), st.integers(1, 5)),
            st.tuples(st.just("done"), st.integers(0, 1 << 30)),
            st.tuples(st.just("most"), st.integers(2, 40)),
            st.tuples(st.just("restart"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_ledger_keeps_what_is_done_over_restarts_in_few_bytes(
    steps: list[tuple[str, int]],
) -> None:
    done_offsets = DoneOffsets(0, "", 1)
    at, done, waiting = 0, set[int](), list[int]()
    taken, empty = Counter[int](), set[int]()

    def take(count: int) -> None:
        nonlocal at
        for _ in range(done_offsets.room(count)):
            while at in empty:
                at += 1
            fresh = done_offsets.add(at)
            assert fresh == (at not in done), at
            if fresh:
                taken[at] += 1
                waiting.append(at)
            at += 1

    for what, number in steps:
        if what == "take":
            take(number)
        elif what == "skip":
            empty |= {*range(at, at + number)} - taken.keys()  # offsets that Kafka gives to no record
        elif what == "done" and waiting:
            offset = waiting.pop(number % len(waiting))
            done_offsets.mark_done(offset)
            done.add(offset)
        elif what == "most":
            for offset in [offset for index, offset in enumerate(waiting) if index % number]:
                waiting.remove(offset)
                done_offsets.mark_done(offset)
                done.add(offset)
        elif what == "restart":
            place, metadata, generation = done_offsets.resume_offset, done_offsets.metadata(), done_offsets.generation
            done_offsets = DoneOffsets(place, metadata, 0)
            assert done_offsets.generation == generation + 1
            at, waiting = place, []
        going = set(waiting[:: max(1, len(waiting) // MAX_RELEASING + 1)])
        assert len(done_offsets.metadata(going)) <= MAX_METADATA
        again = DoneOffsets(done_offsets.resume_offset, done_offsets.metadata(going), 0)
        assert {offset for offset in waiting if again.can_release(offset)} == (going or set(waiting))
        assert done_offsets.resume_offset <= min(waiting, default=done_offsets.read)


def test_one_that_never_comes_and_many_that_do_need_few_bytes() -> None:
    done_offsets = DoneOffsets(0, "", 1)
    for offset in range(100_000):
        assert done_offsets.room(1) == 1
        done_offsets.add(offset)
        if offset % 1_000:
            done_offsets.mark_done(offset)
    assert done_offsets.resume_offset == 0
    assert len(done_offsets.metadata()) < 400


def test_as_many_as_can_be_written_wait_and_then_no_more_are_taken() -> None:
    done_offsets = DoneOffsets(0, "", 1)
    at = 0
    while room := done_offsets.room(500):
        for _ in range(room):
            done_offsets.add(at)
            if at % 3:
                done_offsets.mark_done(at)
            at += 1
    assert at >= 16_000
    assert len(done_offsets.metadata()) <= MAX_METADATA
    for offset in range(0, at, 3):
        done_offsets.mark_done(offset)
    assert done_offsets.room(500) == 500


def test_records_that_kafka_holds_no_longer_are_told() -> None:
    done_offsets = DoneOffsets(0, "", 1)
    for offset in range(10):
        done_offsets.add(offset)
    for offset in range(5, 10):
        done_offsets.mark_done(offset)
    again = DoneOffsets(done_offsets.resume_offset, done_offsets.metadata(), 0)
    assert again.record_lost_range(3) == 3
    assert again.resume_offset == 3
    assert [offset for offset in range(3, 12) if again.add(offset)] == [3, 4, 10, 11]


def test_records_that_kafka_let_go_unread_are_told_and_not_waited_for() -> None:
    done_offsets = DoneOffsets(0, "", 1)
    for offset in range(4):
        done_offsets.add(offset)
    done_offsets.mark_done(0)
    again = DoneOffsets(done_offsets.resume_offset, done_offsets.metadata(), 0)
    assert again.record_lost_range(1_000_000_000) == 3 + (1_000_000_000 - 4)
    assert (again.resume_offset, again.changed) == (1_000_000_000, True)
    assert again.record_lost_range(1_000_000_000) == 0
    assert again.add(1_000_000_000)
    assert len(again.metadata()) <= MAX_METADATA


# ---------------------------------------------------------------- exactly once


class Log:
    """`kiln.updates` behind the guard of the batcher: what it keeps, in the order of the log."""

    def __init__(self) -> None:
        self.windows = PartitionWindows(S)
        self.kept: list[UpdateRecord] = []
        self.repeats = 0

    def write(self, value: bytes) -> None:
        update = decode_update(value)
        if self.windows.guard.is_duplicate(update.epoch.query, update.epoch.batch, update.message_id):
            self.repeats += 1
        else:
            self.kept.append(update)


class _CrashError(Exception):
    """The process ends here."""


class Life:
    """So many records and commits until the process ends."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def step(self) -> None:
        if not self.steps:
            raise _CrashError
        self.steps -= 1


def _live(
    wanted: list[bytes],
    never: set[int],
    life: Life,
    log: Log,
    quarantine: set[bytes],
    told: dict[str, bytes],
    committed: tuple[int, str],
    fresh_generation: int,
    pace: Iterator[int],
) -> tuple[int, str]:
    """One run from what is committed; what is committed at its end."""
    memory = KnownAnswers()
    for stream, value in told.items():
        memory.streams[stream] = decode_stream(value).separator
    pending = PendingFetches(FetchingOptions(NETWORK, max_concurrent=2, give_up_after=5 * S, retry_after=2 * S), memory)
    done_offsets = DoneOffsets(*committed, fresh_generation)
    pending.start(0, done_offsets)
    at, now = max(0, committed[0] - REPLAY), START
    try:
        for _ in range(100):
            now += S
            for _ in range(min(pending.room(0, next(pace)), len(wanted) - at)):
                pending.add_record(KafkaPosition(0, at), wanted[at], EVERYTHING, now)
                at += 1
            for ask in pending.start_fetches(now):
                missing = any(genesis_cid(number) == ask.cid for number in never)
                pending.add_answer(ask, UNAVAILABLE if missing else GenesisAnswer(MODEL, None), now)
            due = pending.stage_writes(now)
            if not done_offsets.is_repeating and (done_offsets.changed or due.releasing):
                life.step()
                committed = (done_offsets.resume_offset, done_offsets.metadata(due.releasing.get(0, ())))
                done_offsets.mark_committed()
            for output in (output for stage in due.stages for output in stage):
                life.step()
                if output.topic == "updates":
                    log.write(output.value)
                elif output.topic == "streams":
                    told[output.key.decode()] = output.value
                elif (fault := decode_quarantine(output.value)).stage == "fetch":
                    quarantine.add(fault.data)
            pending.confirm_writes()
    except _CrashError:
        pass
    return committed


@given(
    streams=st.lists(st.integers(0, 3), min_size=1, max_size=25),
    claims=st.sets(st.integers(0, 24)),
    never=st.sets(st.integers(0, 3), max_size=2),
    again=st.integers(0, 25),
    lives=st.lists(st.integers(0, 40), max_size=6),
    paces=st.lists(st.integers(0, 4), min_size=1, max_size=6),
)
def test_whatever_crashes_each_update_is_released_once_in_its_order(
    streams: list[int], claims: set[int], never: set[int], again: int, lives: list[int], paces: list[int]
) -> None:
    """The process ends before any record or commit; what was committed last is where the next one begins.

    `claims`: which records are claims, of which nothing is released; `never`: streams whose genesis does not come;
    `again`: records of the micro-batch that the query `updates` wrote before it crashed, and wrote again then;
    `lives`: records and commits of each; `paces`: records taken at once.
    """
    written = [
        encode((claim if number in claims else wanted_update)(stream, number)) for number, stream in enumerate(streams)
    ]
    wanted = written[:again] + written
    log, quarantine, told = Log(), set[bytes](), dict[str, bytes]()
    committed = (0, "")
    pace = cycle([*paces, 1])
    for number, life in enumerate([*lives, 1_000_000]):
        committed = _live(wanted, never, Life(life), log, quarantine, told, committed, 1_000 * (number + 1), pace)
    assert committed[0] == len(wanted)
    waiting = [number for number in range(len(streams)) if number not in claims]
    come = [number for number in waiting if streams[number] not in never]
    assert Counter(update.message_id for update in log.kept) == Counter(f"message {number}" for number in come)
    for stream in sorted({0, 1, 2, 3} - never):
        order = [update.message_id for update in log.kept if update.stream == stream_of(stream)]
        assert order == [f"message {number}" for number in come if streams[number] == stream]
    assert {decode_wanted(value).cid for value in quarantine} == {
        genesis_cid(streams[number]) for number in waiting if streams[number] in never
    }
    assert told.keys() == {stream_of(stream) for stream in streams if stream not in never}


def test_what_was_going_at_a_crash_goes_again_first_and_alone() -> None:
    first = Run()
    first.take(wanted_update(1, 0), wanted_update(2, 1), wanted_update(2, 2))
    asks = first.next()
    first.pending.add_answer(asks[1], GenesisAnswer(MODEL, None), START)
    due = first.pending.stage_writes(START)
    generation = first.done_offsets.generation
    metadata = first.done_offsets.metadata(due.releasing[0])
    # the process ends here; whether the two were written nobody knows

    run = Run()
    run.done_offsets = DoneOffsets(0, metadata, 77)
    run.pending = PendingFetches(OPTIONS, KnownAnswers())
    run.pending.start(0, run.done_offsets)
    run.take(wanted_update(1, 0), wanted_update(2, 1), wanted_update(2, 2), wanted_update(1, 3))
    asks = run.next()
    assert run.answer(asks[0], GenesisAnswer(MODEL, None)) == []
    assert run.done_offsets.is_repeating
    again = [decode_update(output.value) for output in run.answer(asks[1], GenesisAnswer(MODEL, None))[:2]]
    assert [(update.message_id, update.epoch.batch) for update in again] == [
        ("message 1", generation),
        ("message 2", generation),
    ]
    assert not run.done_offsets.is_repeating
    rest = [decode_update(output.value) for output in run.round() if output.topic == "updates"]
    assert [(update.message_id, update.epoch.batch) for update in rest] == [
        ("message 0", generation + 1),
        ("message 3", generation + 1),
    ]


def test_many_that_wait_for_one_genesis_go_on_in_parts_and_the_answer_after_the_last() -> None:
    run = Run()
    run.take(*(wanted_update(1, number) for number in range(700)))
    (ask,) = run.next()
    topics = [[output.topic for output in run.answer(ask, GenesisAnswer(MODEL, None))]]
    run.take(wanted_update(1, 700))
    while run.pending.is_busy:
        topics.append([output.topic for output in run.round()])
    assert topics == [["updates"] * 300, ["updates"] * 300, ["updates"] * 101 + ["streams"]]
    assert [update.message_id for update in run.updates()] == [f"message {number}" for number in range(701)]
