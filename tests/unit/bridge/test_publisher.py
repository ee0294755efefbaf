"""What the publisher does with batches, receipts and places: the part without Kafka."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.ipfs import BlockRefusedError, BlockStoreUnavailableError
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.kafka.number_sets import MAX_METADATA
from kiln.bridge.kafka.session_thread import KafkaConfig
from kiln.bridge.publisher.batches import (
    RECORDS_LOST,
    TOO_OLD,
    PublishingOptions,
    read_metadata,
)
from kiln.bridge.publisher.pace import BURST_SPAN, MAX_BURST, AuthorPacer
from kiln.bridge.publisher.publisher import Publisher
from kiln.bridge.publisher.transition import BOTH, BY_NETWORK, BY_SEPARATOR
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Publish
from kiln.schemas.kafka.records import (
    BatchRecord,
    PublicationRecord,
    decode_publication,
    decode_quarantine,
    encode,
)
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.pubsub import PubsubMessage, read_message
from kit.batches_run import (
    NETWORK,
    PARTITION,
    START,
    Node,
    Run,
    S,
    batch,
    network_topic,
    topic_of,
)


def test_batch_goes_out_on_its_topic_and_gets_a_receipt() -> None:
    run = Run(Node(peers=2))
    record = batch(1)
    run.take(record)
    (receipt,) = run.step(START + 5)
    (sent,) = run.node.sent
    assert sent == (
        topic_of(record),
        f'{{"typ":3,"sep":"model/{record.separator.value}","batch":"{record.batch_cid}"}}'.encode(),
    )
    assert receipt == PublicationRecord(record.batch_cid, "gossipsub", START + 5, topic=topic_of(record), peer_count=2)
    assert run.outputs[0].key == record.batch_cid.encode()
    assert run.step(START + 100 * S) == []  # once


def test_old_blocks_are_removed_as_fast_as_new_ones_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    now, step, per_step, duration = START, S // 10, 10, 10 * S
    folder = tmp_path / "blocks"
    blocks = FolderBlockStore(folder)
    options = PublishingOptions(NETWORK, pin_duration=duration)
    kafka = KafkaConfig({}, "kiln.")
    publisher = Publisher(kafka, options, Node().publish, lambda: None, blocks, clock_us=lambda: now)
    most = 0
    for number in range(300):
        for each in range(per_step):
            data = b"%d %d" % (number, each)
            cid = cid_text(compute_cid(data))
            blocks.put(cid, data)
            os.utime(folder / cid, ns=(now * 1_000, now * 1_000))
        publisher._publish_due()
        most = max(most, len(os.listdir(folder)))
        now += step
    assert most < 1.2 * per_step * (duration + 10 * S) / step
    for _ in range(300):  # no block comes any more
        publisher._publish_due()
        now += step
    assert os.listdir(folder) == []


def test_while_blocks_cannot_be_removed_all_else_goes_on_and_a_clock_set_back_stops_nothing() -> None:
    calls: list[int] = []
    times = iter((START, START + 9 * S, START + 10 * S, START - 1_000 * S))

    class Blocks(FolderBlockStore):
        def remove_older(self, before: int, undo: object = None) -> bool:
            calls.append(before)
            raise BlockStoreUnavailableError("gone")

    options = PublishingOptions(NETWORK, pin_duration=60 * S)
    kafka, blocks = KafkaConfig({}, "kiln."), Blocks(Path("nowhere"))
    publisher = Publisher(kafka, options, Node().publish, lambda: None, blocks, clock_us=lambda: next(times))
    for _ in range(4):
        publisher._publish_due()
    assert calls == [START - 60 * S, START - 50 * S, START - 1_060 * S]


def test_messages_of_one_author_leave_with_a_gap_and_no_topic_waits_for_another_one() -> None:
    gap = 50_000
    run = Run(Node(), pace=AuthorPacer(gap, 1))
    for number in range(6):
        run.take(batch(number, model=number % 2))
    sent_at = []
    for now in range(START, START + S, 10_000):
        before = len(run.node.sent)
        run.step(now)
        sent_at += [now] * (len(run.node.sent) - before)
        assert run.pending.time_to_next_attempt(now, S) <= gap or not run.pending.waiting_count
    assert sent_at == [START + gap * number for number in range(6)]
    topics = [topic for topic, _ in run.node.sent]
    assert topics[0::2] == [topics[0]] * 3
    assert topics[1::2] == [topics[1]] * 3


def test_burst_of_many_separators_is_out_within_half_a_second() -> None:
    run = Run(Node(), pace=AuthorPacer(micros(Publish().min_interval), Publish().author_keys))
    for number in range(40):
        run.take(batch(number, model=number))
    now, sent_at = START, list[int]()
    while run.pending.waiting_count:
        before = len(run.node.sent)
        run.step(now)
        sent_at += [now] * (len(run.node.sent) - before)
        now += max(1, run.pending.time_to_next_attempt(now, S))
    assert len(sent_at) == 40
    assert sent_at[-1] - START < S // 2
    # a peer that is slow for a gap has room for all that comes meanwhile
    assert max(sum(at <= each < at + BURST_SPAN for each in sent_at) for at in sent_at) == MAX_BURST


def test_authors_take_turns_and_each_rests_for_the_gap_at_the_highest_rate() -> None:
    gap, authors = micros(Publish().min_interval), Publish().author_keys
    pace = AuthorPacer(gap, authors)
    now, sent_at = START, defaultdict[int, list[int]](list)
    while now < START + 5 * S:
        sent_at[pace.author_index].append(now)
        pace.record_message(now)
        now = pace.ready_at
    assert len(sent_at) == authors
    assert min(later - at for times in sent_at.values() for at, later in pairwise(times)) >= gap >= S
    assert sum(map(len, sent_at.values())) == 5 * S * MAX_BURST // BURST_SPAN  # no author is missing for the rate


def test_without_a_gap_nothing_waits() -> None:
    pace = AuthorPacer(0, 1)
    pace.record_message(START)
    assert pace.ready_at == START


def test_place_moves_only_when_the_broker_has_the_receipt() -> None:
    run = Run(Node())
    for number in range(3):
        run.take(batch(number))
    run.step()
    assert run.place() == 0
    first, second, third = (output.record for output in sorted(run.outputs, key=lambda each: each.record.offset))
    run.pending.acknowledge(second)
    assert run.place() == 0  # the first one is not there yet
    run.pending.acknowledge(first)
    assert run.place() == 2
    run.pending.acknowledge(third)
    assert (run.place(), run.pending.open_count) == (3, 0)


@pytest.mark.parametrize("record", [batch(1, origin="REPLAY"), batch(1, network="testnet-clay")])
def test_replayed_batches_and_other_networks_are_left_alone(record: BatchRecord) -> None:
    run = Run(Node())
    run.take(record)
    assert run.step() == []
    assert (run.node.asked, run.outputs, run.place()) == (0, [], 1)


def test_without_a_peer_it_tries_again_until_one_is_there() -> None:
    run = Run(Node(peers=0))
    record = batch(1)
    run.take(record)
    assert run.step(START) == []
    assert run.step(START + S // 2) == []
    assert run.node.asked == 1  # not before retry_every
    assert run.step(START + S) == []
    assert run.pending.waiting_count == 1
    assert run.place() == 0
    run.node.default = 1
    (receipt,) = run.step(START + 2 * S)
    assert (receipt.peer_count, receipt.error) == (1, None)
    assert run.node.asked == 3
    assert run.pending.waiting_count == 0


def test_without_a_peer_for_too_long_the_receipt_says_so() -> None:
    run = Run(Node(peers=0))
    run.take(batch(1))
    receipts = [receipt for at in range(0, 20 * S, S) for receipt in run.step(START + at)]
    (receipt,) = receipts
    assert (receipt.peer_count, receipt.error) == (0, "no peer on the topic for 10 s")
    assert receipt.published_at == START + 10 * S
    assert (run.pending.published, run.pending.failed) == (0, 1)


def test_topic_without_peers_holds_up_no_other_and_keeps_its_order() -> None:
    run = Run(Node())
    lonely, busy = [batch(n, model=1) for n in range(3)], [batch(n, model=2) for n in range(3, 6)]
    run.node.peers[topic_of(lonely[0])] = 0
    for one, other in zip(lonely, busy, strict=True):
        run.take(one)
        run.take(other)
    run.step()
    assert run.node.cids == [record.batch_cid for record in busy]
    assert run.node.asked == 4  # of the lonely topic, one batch asks for all
    run.node.peers.clear()
    run.step(START + S)
    assert run.node.cids[3:] == [record.batch_cid for record in lonely]


def test_what_waits_behind_another_is_handed_over_before_it_is_given_up() -> None:
    """A transport may keep it for who comes later, as BEP 50's item does."""
    run = Run(Node(peers=0))
    given: list[bytes] = []

    def publish(topic: str, data: bytes) -> int:
        given.append(data)
        return 0

    for number in range(3):
        run.take(batch(number))
    for at in range(0, 20 * S, S):
        run.pending.step(False, run.ipfs, publish, START + at, BY_SEPARATOR, run.pace)
    assert len(run.pending.take_outputs()) == 3
    messages = [read_message(data) for data in dict.fromkeys(given)]
    assert [each.batch for each in messages if isinstance(each, PubsubMessage)] == [
        batch(n).batch_cid for n in range(3)
    ]


def test_held_back_nothing_is_tried_and_no_time_runs_out() -> None:
    run = Run(Node(peers=0))
    run.take(batch(1))
    for at in range(0, 9 * S, S):
        assert run.step(START + at) == []
    asked = run.node.asked
    for at in range(9 * S, 1_000 * S, 50 * S):
        assert run.step(START + at, held=True) == []
    assert run.node.asked == asked
    run.node.default = 2
    (receipt,) = run.step(START + 1_000 * S)
    assert receipt.error is None


def test_node_that_cannot_try_is_waited_for() -> None:
    run = Run(Node())
    run.node.error = "the node is stopping"
    run.take(batch(1))
    assert [receipt.error for at in range(0, 20 * S, S) for receipt in run.step(START + at)] == [
        "the node is stopping for 10 s"
    ]


def test_first_start_does_not_publish_what_is_too_old() -> None:
    run = Run(Node(), not_before=START - 60 * S)
    old, young = batch(1, closed=START - 60 * S - 1), batch(2, closed=START - 60 * S)
    run.take(old)
    run.take(young)
    (receipt,) = run.step()
    assert run.node.cids == [young.batch_cid]
    assert receipt.batch_cid == young.batch_cid
    first = decode_publication(run.outputs[0].value)
    assert (first.batch_cid, first.error, first.peer_count) == (old.batch_cid, TOO_OLD, None)


NEWER = encode(batch(1))[:-1] + b',"since":"version 9"}'
BROKEN_SEPARATOR = encode(batch(1)).replace(b'"key":"model"', b'"key":"\\ud800"')


@pytest.mark.parametrize(
    "value",
    [
        b"{",
        b"",
        None,
        b"{}",
        b"\xff",
        encode(batch(1)).replace(b'"batch_cid":"b', b'"batch_cid":"?'),
        BROKEN_SEPARATOR,
        NEWER,
    ],
    ids=["not_json", "empty", "none", "not_a_batch", "not_utf8", "cid", "separator", "unknown_field"],
)
def test_unreadable_batch_is_quarantined_and_the_next_goes_on(value: bytes | None) -> None:
    run = Run(Node())
    run.take(value)
    run.take(batch(2))
    run.step()
    assert run.node.cids == [batch(2).batch_cid]
    (output, _) = run.outputs
    assert (output.topic, output.key) == ("quarantine", b"batches/0/0")
    fault = decode_quarantine(output.value)
    assert (fault.stage, fault.reason, fault.data) == ("publisher", "batch_malformed", value or b"")
    assert fault.detail.startswith("record 0/0 of batches: ")
    assert run.place() == 0
    run.pending.acknowledge(output.record)
    assert run.place() == 1


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("batch"), st.integers(0, 2)),
            st.tuples(st.just("peers"), st.integers(0, 2)),
            st.tuples(st.just("time"), st.integers(0, 12)),
            st.tuples(st.just("held"), st.integers(0, 3)),
            st.tuples(st.just("ack"), st.integers(0, 5)),
            st.tuples(st.just("crash"), st.just(0)),
        ),
        max_size=40,
    )
)
def test_whatever_happens_each_batch_has_a_receipt_before_its_place_is_passed(events: list[tuple[str, int]]) -> None:
    node = Node(peers=1)
    log: list[BatchRecord] = []
    receipts: Counter[str] = Counter()  # those that the broker has
    run = Run(node)
    now, acknowledged = START, 0
    for what, number in events:
        if what == "batch":
            log.append(batch(len(log), model=number))
            run.take(log[-1], now)
        elif what == "peers":
            topic = topic_of(batch(0, model=number))
            node.peers[topic] = 1 - node.peers.get(topic, 1)
        elif what == "ack":
            for output in run.outputs[acknowledged : acknowledged + number]:
                receipts[output.key.decode()] += 1
                run.pending.acknowledge(output.record)
            acknowledged = min(len(run.outputs), acknowledged + number)
        elif what == "crash":
            place = run.place()
            run = Run(node)
            run.pending.start(PARTITION, place, 0)
            run.offset, acknowledged = place, 0
            for record in log[place:]:
                run.take(record, now)
        elif what == "time":
            now += number * S
            run.step(now)
        else:
            now += number * S
            run.step(now, held=True)
        assert all(receipts[record.batch_cid] for record in log[: run.place()])
    for _ in range(12):  # with or without peers, all come to an end
        now += S
        run.step(now)
    for output in run.outputs[acknowledged:]:
        run.pending.acknowledge(output.record)
    assert run.place() == len(log)
    assert run.pending.open_count == 0


# ---------------------------------------------------------------- IPFS


def test_block_is_in_ipfs_before_its_cid_is_published() -> None:
    run = Run(Node())
    record = batch(1)
    run.take(record)

    def publish(topic: str, data: bytes) -> int:
        assert run.ipfs.kept == {record.batch_cid: record.block}
        return 1

    run.pending.step(False, run.ipfs, publish, START, BY_SEPARATOR, run.pace)
    (output,) = run.pending.take_outputs()
    assert decode_publication(output.value).peer_count == 1


def test_while_ipfs_is_away_nothing_goes_out_and_all_wait_in_their_order() -> None:
    run = Run(Node(peers=0))
    kept, *later = [batch(number) for number in range(4)]
    run.take(kept)
    run.step()
    run.ipfs.error = BlockStoreUnavailableError("http://127.0.0.1:5001 does not answer")
    for record in later:
        run.take(record)
    run.node.default = 1
    for at in range(1, 1_000):
        assert run.step(START + at * S) == []
    assert run.pending.ipfs_error == "http://127.0.0.1:5001 does not answer"
    assert (run.node.sent, run.pending.waiting_count, run.place()) == ([], 4, 0)
    run.ipfs.error = None
    receipts = run.step(START + 1_000 * S)
    assert run.pending.ipfs_error is None
    assert run.node.cids == [record.batch_cid for record in (kept, *later)]
    assert [receipt.error for receipt in receipts] == [None] * 4


def test_ipfs_that_goes_away_while_a_batch_waits_for_a_peer_holds_it_back() -> None:
    run = Run(Node(peers=0))
    run.take(batch(1))
    run.step()
    run.ipfs.error = BlockStoreUnavailableError("gone")
    for at in range(1, 8):
        run.step(START + at * S)
    run.node.default = 1
    assert run.step(START + 8 * S) == []
    run.ipfs.error = None
    (receipt,) = run.step(START + 9 * S)
    assert receipt.error is None


def test_ipfs_is_not_asked_more_than_once_a_second_while_it_is_away() -> None:
    run = Run(Node())
    run.ipfs.error = BlockStoreUnavailableError("gone")
    run.take(batch(1))
    for at in range(0, 10 * S, S // 10):
        run.step(START + at)
    assert run.ipfs.asked == 10


def test_block_that_ipfs_refuses_is_not_published_and_holds_up_no_other() -> None:
    run = Run(Node())
    bad, good = batch(1), batch(2)
    run.take(bad)
    run.take(good)
    run.ipfs.error = BlockRefusedError("block_cid_mismatch", "kept under another CID")
    assert len(run.step()) == 2
    run.ipfs.error = None
    run.take(batch(2, closed=START + S))
    run.step()
    assert run.node.cids == [good.batch_cid]
    first = decode_publication(run.outputs[0].value)
    assert (first.batch_cid, first.error) == (bad.batch_cid, "IPFS refused the block: kept under another CID")
    assert run.pending.block_bytes == 0


def test_blocks_count_as_memory_until_they_are_out() -> None:
    run = Run(Node(peers=0))
    records = [batch(number) for number in range(3)]
    for record in records:
        run.take(record)
    assert run.pending.block_bytes == sum(len(record.block) for record in records)
    for at in range(12):
        run.step(START + at * S)
    assert run.pending.block_bytes == 0


# ---------------------------------------------------------------- transition


def test_duplicate_publishes_on_both_topics_with_a_receipt_of_each() -> None:
    run = Run(Node(peers=2))
    record = batch(1)
    run.take(record)
    receipts = run.step(on=BOTH)
    assert {topic for topic, _ in run.node.sent} == {topic_of(record), network_topic()}
    assert len({data for _, data in run.node.sent}) == 1
    assert {(receipt.batch_cid, receipt.topic) for receipt in receipts} == {
        (record.batch_cid, topic_of(record)),
        (record.batch_cid, network_topic()),
    }
    one, other = (output.record for output in run.outputs)
    run.pending.acknowledge(one)
    assert run.place() == 0  # one receipt is not there yet
    run.pending.acknowledge(other)
    assert run.place() == 1


def test_at_the_cutover_what_waits_goes_to_the_new_topic_in_its_order() -> None:
    run = Run(Node())
    run.node.peers[network_topic()] = 0
    records = [batch(number) for number in range(5)]
    for record in records[:3]:
        run.take(record)
    assert run.step(on=BY_NETWORK) == []
    assert run.pending.waiting_count == 3
    for record in records[3:]:
        run.take(record)
    receipts = run.step(START + S // 2, on=BY_SEPARATOR)
    assert [receipt.batch_cid for receipt in receipts if receipt.topic == topic_of(records[0])] == [
        record.batch_cid for record in records if topic_of(record) == topic_of(records[0])
    ]
    assert sorted(run.node.cids) == sorted(record.batch_cid for record in records)
    for _ in receipts:
        run.pending.acknowledge(run.outputs.pop(0).record)
    assert (run.place(), run.pending.waiting_count, run.pending.block_bytes) == (5, 0, 0)


def test_what_is_out_on_one_topic_is_not_held_up_by_the_other_when_the_transition_ends() -> None:
    run = Run(Node())
    run.node.peers[network_topic()] = 0
    run.take(batch(1))
    (receipt,) = run.step(on=BOTH)
    run.pending.acknowledge(run.outputs[0].record)
    assert (receipt.topic, run.place()) == (topic_of(batch(1)), 0)
    assert run.step(START + S, on=BY_SEPARATOR) == []
    assert (run.place(), len(run.node.sent)) == (1, 1)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("batch"), st.integers(0, 2)),
            st.tuples(st.just("peers"), st.integers(0, 3)),
            st.tuples(st.just("time"), st.integers(0, 3)),
            st.tuples(st.just("ipfs"), st.just(0)),
            st.tuples(st.just("on"), st.integers(0, 2)),
            st.tuples(st.just("ack"), st.integers(0, 5)),
        ),
        max_size=40,
    )
)
def test_whatever_topics_and_ipfs_do_no_batch_is_lost(events: list[tuple[str, int]]) -> None:
    node = Node(peers=1)
    run = Run(node)
    now, on, acknowledged = START, BY_NETWORK, 0
    for what, number in events:
        if what == "batch":
            run.take(batch(run.offset, model=number), now)
        elif what == "peers":
            topic = network_topic() if number == 3 else topic_of(batch(0, model=number))
            node.peers[topic] = 1 - node.peers.get(topic, 1)
        elif what == "ipfs":
            run.ipfs.error = None if run.ipfs.error else BlockStoreUnavailableError("gone")
        elif what == "on":
            on = (BY_NETWORK, BOTH, BY_SEPARATOR)[number]
        elif what == "ack":
            for output in run.outputs[acknowledged : acknowledged + number]:
                run.pending.acknowledge(output.record)
            acknowledged = min(len(run.outputs), acknowledged + number)
        else:
            now += number * S
            run.step(now, on=on)
    run.ipfs.error = None
    for _ in range(15):
        now += S
        run.step(now, on=on)
    for output in run.outputs[acknowledged:]:
        run.pending.acknowledge(output.record)
    assert (run.place(), run.pending.open_count, run.pending.block_bytes) == (run.offset, 0, 0)
    receipts = [decode_publication(output.value) for output in run.outputs]
    assert {receipt.batch_cid for receipt in receipts} == {batch(number).batch_cid for number in range(run.offset)}
    assert len({(receipt.batch_cid, receipt.topic) for receipt in receipts}) == len(receipts)


# ---------------------------------------------------------------- what Kafka forgot


def test_the_network_topic_in_the_form_of_the_cip_is_published_to_while_a_peer_is_on_it() -> None:
    written = f"{network_topic()}/"
    on_it: list[str] = []
    run = Run(Node(), subscribers=lambda names: {name: [b"a peer"] for name in names if name != written or on_it})
    run.take(batch(0))
    run.step(on=BOTH)
    on_it.append("a peer")
    run.take(batch(1))
    run.step(on=BOTH)
    of_the_network = sorted(topic for topic, _ in run.node.sent if topic in (network_topic(), written))
    assert of_the_network == [network_topic(), network_topic(), written]
    run.take(batch(2))
    run.step()  # by separator alone
    assert [topic for topic, _ in run.node.sent][-1] == topic_of(batch(2))


def test_records_that_are_gone_are_counted_and_the_place_waits_for_the_word() -> None:
    run = Run(Node())
    run.take(batch(0))
    run.step()
    run.pending.acknowledge(run.outputs[0].record)
    assert run.pending.record_lost_range(PARTITION, 1, START) == 0
    assert run.pending.record_lost_range(PARTITION, 5, START) == 4
    (word,) = run.pending.take_outputs()
    fault = decode_quarantine(word.value)
    assert (fault.stage, fault.reason, fault.data) == ("publisher", RECORDS_LOST, b"")
    assert fault.detail == "Kafka deleted the records 0/1 to 0/4 of batches before they were read"
    assert (run.pending.lost, run.place()) == (4, 1)
    run.pending.acknowledge(word.record)
    assert run.place() == 5


# ---------------------------------------------------------------- several bridges


def test_what_is_settled_behind_a_batch_without_a_peer_is_not_published_again() -> None:
    run = Run(Node(), not_before=START - S)
    run.node.peers[topic_of(batch(0, model=1))] = 0
    records = [batch(number, model=number % 5 == 1) for number in range(20)]
    for record in records:
        run.take(record)
    run.step()
    for output in run.outputs:
        run.pending.acknowledge(output.record)
    place, metadata = run.place(), run.pending.metadata(PARTITION)
    assert (place, run.pending.open_count) == (1, 4)
    again = Run(Node())
    again.pending.start(PARTITION, place, *read_metadata(place, metadata))
    again.offset = place
    for record in records[place:]:
        again.take(record)
    again.take(batch(20))
    again.step()
    assert sorted(again.node.cids) == sorted(batch(number).batch_cid for number in (1, 6, 11, 16, 20))
    assert again.pending.metadata(PARTITION).startswith(f"{START - S} ")


def settle_some(unsettled: Collection[int], first: int, count: int) -> tuple[int, frozenset[int]]:
    """The committed offset and what is read from its metadata, after receipts of all batches but these."""
    run = Run(Node())
    run.pending.start(PARTITION, first, START)
    for offset in range(first, first + count):
        run.pending.add_record(PARTITION, offset, b"no batch", START)
    for output in run.pending.take_outputs():
        if output.record.offset not in unsettled:
            run.pending.acknowledge(output.record)
    metadata = run.pending.metadata(PARTITION)
    assert len(metadata) <= MAX_METADATA
    not_before, settled = read_metadata(run.place(), metadata)
    assert not_before == START
    return run.place(), settled


@given(st.integers(0, 1 << 40), st.lists(st.booleans(), max_size=50))
def test_settled_offsets_are_read_as_they_were_written(first: int, settled: list[bool]) -> None:
    unsettled = {first + number for number, each in enumerate(settled) if not each}
    place, found = settle_some(unsettled, first, len(settled))
    assert found == {offset for offset in range(place, first + len(settled)) if offset not in unsettled}


@pytest.mark.parametrize("text", ["", "x", "-1", "é ü", "0 x", "5 !!!!!", f"7 {'z' * 5000}"])
def test_metadata_of_another_program_settles_nothing(text: str) -> None:
    assert read_metadata(0, text)[1] == frozenset()


def test_settled_offsets_have_room_in_a_commit_whatever_their_order() -> None:
    rng = Random(1)
    unsettled = {number for number in range(40_000) if rng.random() < 0.5}
    _, settled = settle_some(unsettled, 0, 40_000)
    assert len(settled) > 4_000
    assert not settled & unsettled


def test_a_partition_that_another_bridge_takes_over_leaves_nothing_behind() -> None:
    """Its batches wait no more, and the receipts that still arrive move no offset of the other partition."""
    run = Run(Node())
    run.node.peers[topic_of(batch(0, model=7))] = 0
    run.pending.start(1, 0, 0)
    for number in range(4):
        run.take(batch(number, model=number))
        run.pending.add_record(1, number, encode(batch(10 + number, model=7 if number % 2 else number)), START)
    run.step()
    run.pending.add_record(1, 4, encode(batch(14)), START)
    run.pending.end(1)
    for output in run.outputs:
        run.pending.acknowledge(output.record)
    assert (run.place(), run.pending.open_count) == (4, 0)
    assert (run.pending.waiting_count, run.pending.block_bytes) == (0, 0)
    sent = len(run.node.sent)
    run.pending.start(1, 1, 0)  # it comes back, at the offset that the other bridge committed
    run.pending.add_record(1, 1, encode(batch(11)), START)
    run.step(START + S)
    assert run.node.cids[sent:] == [batch(11).batch_cid]
    assert run.pending.resume_offsets() == {PARTITION: 4, 1: 1}
