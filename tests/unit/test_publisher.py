"""What the publisher does with batches, receipts and places: the part without Kafka."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.publisher import TOO_OLD, Options, Outbox, Output, Place, PublishError
from schemas.cid import block_cid, cid_text
from schemas.pubsub import PubsubMessage, read_message
from schemas.records import (
    BatchRecord,
    Origin,
    PublicationRecord,
    SeparatorRecord,
    decode_publication,
    decode_quarantine,
    encode,
)
from schemas.topics import Separator, separator_value, topic_name

NETWORK = "local-test"
S = 1_000_000
START = 1_000 * S
OPTIONS = Options(NETWORK, publish_timeout=10 * S, retry_every=S, max_age=60 * S)


def batch(
    number: int, model: int = 0, origin: Origin = "LIVE", network: str = NETWORK, closed: int = START
) -> BatchRecord:
    block = f"block {number}".encode()
    separator = SeparatorRecord("model", separator_value(bytes([1, model])))
    return BatchRecord(network, origin, separator, cid_text(block_cid(block)), block, closed - S, closed)


def topic_of(record: BatchRecord) -> str:
    return topic_name(record.network, Separator(record.separator.key, record.separator.value))


class Node:
    """A node with so many peers on each topic; remembers what it was given."""

    def __init__(self, peers: int = 3) -> None:
        self.peers: dict[str, int] = {}
        self.default = peers
        self.sent: list[tuple[str, bytes]] = []
        self.asked = 0
        self.error: str | None = None

    def publish(self, topic: str, data: bytes) -> int:
        self.asked += 1
        if self.error is not None:
            raise PublishError(self.error)
        peers = self.peers.get(topic, self.default)
        if peers:
            self.sent.append((topic, data))
        return peers

    @property
    def cids(self) -> list[str]:
        found = []
        for _, data in self.sent:
            message = read_message(data)
            assert isinstance(message, PubsubMessage)
            assert message.batch is not None
            found.append(message.batch)
        return found


class Run:
    """An outbox of one partition, begun at offset 0."""

    def __init__(self, node: Node, not_before: int = 0) -> None:
        self.node = node
        self.outbox = Outbox(OPTIONS)
        self.outbox.start(0, 0, not_before)
        self.offset = 0
        self.outputs: list[Output] = []

    def take(self, value: BatchRecord | bytes | None, now: int = START) -> None:
        data = encode(value) if isinstance(value, BatchRecord) else value
        output = self.outbox.take(Place(0, self.offset), data, now)
        self.offset += 1
        self.outputs += [] if output is None else [output]

    def step(self, now: int = START, held: bool = False) -> list[PublicationRecord]:
        outputs = self.outbox.step(held, self.node.publish, now)
        self.outputs += outputs
        assert all(output.topic == "publications" for output in outputs)
        return [decode_publication(output.value) for output in outputs]

    def place(self) -> int:
        return self.outbox.places()[0]


def test_batch_goes_out_on_its_topic_and_gets_a_receipt() -> None:
    run = Run(Node(peers=2))
    record = batch(1)
    run.take(record)
    (receipt,) = run.step(START + 5)
    (sent,) = run.node.sent
    assert sent == (
        topic_of(record),
        f'{{"typ":3,"sep":"model/{record.separator.value}","batch":"{record.cid}"}}'.encode(),
    )
    assert receipt == PublicationRecord(record.cid, "gossipsub", START + 5, topic=topic_of(record), peers=2)
    assert run.outputs[0].key == record.cid.encode()
    assert run.step(START + 100 * S) == []  # once


def test_place_moves_only_when_the_broker_has_the_receipt() -> None:
    run = Run(Node())
    for number in range(3):
        run.take(batch(number))
    run.step()
    assert run.place() == 0
    run.outbox.done(Place(0, 1))
    assert run.place() == 0  # the first one is not there yet
    run.outbox.done(Place(0, 0))
    assert run.place() == 2
    run.outbox.done(Place(0, 2))
    assert (run.place(), run.outbox.open) == (3, 0)


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
    assert run.outbox.waiting == {topic_of(record): 1}
    assert run.place() == 0
    run.node.default = 1
    (receipt,) = run.step(START + 2 * S)
    assert (receipt.peers, receipt.error) == (1, None)
    assert run.node.asked == 3
    assert run.outbox.waiting == {}


def test_without_a_peer_for_too_long_the_receipt_says_so() -> None:
    run = Run(Node(peers=0))
    run.take(batch(1))
    receipts = [receipt for at in range(0, 20 * S, S) for receipt in run.step(START + at)]
    (receipt,) = receipts
    assert (receipt.peers, receipt.error) == (0, "no peer on the topic for 10 s")
    assert receipt.published_at == START + 10 * S
    assert (run.outbox.published, run.outbox.failed) == (0, 1)


def test_topic_without_peers_holds_up_no_other_and_keeps_its_order() -> None:
    run = Run(Node())
    lonely, busy = [batch(n, model=1) for n in range(3)], [batch(n, model=2) for n in range(3, 6)]
    run.node.peers[topic_of(lonely[0])] = 0
    for one, other in zip(lonely, busy, strict=True):
        run.take(one)
        run.take(other)
    run.step()
    assert run.node.cids == [record.cid for record in busy]
    assert run.node.asked == 4  # of the lonely topic, one batch asks for all
    run.node.peers.clear()
    run.step(START + S)
    assert run.node.cids[3:] == [record.cid for record in lonely]


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
    assert run.node.cids == [young.cid]
    assert receipt.cid == young.cid
    first = decode_publication(run.outputs[0].value)
    assert (first.cid, first.error, first.peers) == (old.cid, TOO_OLD, None)


BROKEN_SEPARATOR = encode(batch(1)).replace(b'"key":"model"', b'"key":"\\ud800"')


@pytest.mark.parametrize(
    "value",
    [b"{", b"", None, b"{}", b"\xff", encode(batch(1)).replace(b'"cid":"b', b'"cid":"?'), BROKEN_SEPARATOR],
    ids=["not_json", "empty", "none", "not_a_batch", "not_utf8", "cid", "separator"],
)
def test_unreadable_batch_is_quarantined_and_the_next_goes_on(value: bytes | None) -> None:
    run = Run(Node())
    run.take(value)
    run.take(batch(2))
    run.step()
    assert run.node.cids == [batch(2).cid]
    (output, _) = run.outputs
    assert (output.topic, output.key) == ("quarantine", b"batches/0/0")
    fault = decode_quarantine(output.value)
    assert (fault.stage, fault.reason, fault.data) == ("publisher", "batch_malformed", value or b"")
    assert fault.detail.startswith("record 0/0 of batches: ")
    assert run.place() == 0
    run.outbox.done(output.place)
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
                run.outbox.done(output.place)
            acknowledged = min(len(run.outputs), acknowledged + number)
        elif what == "crash":
            place = run.place()
            run = Run(node)
            run.outbox.start(0, place, 0)
            run.offset, acknowledged = place, 0
            for record in log[place:]:
                run.take(record, now)
        elif what == "time":
            now += number * S
            run.step(now)
        else:
            now += number * S
            run.step(now, held=True)
        assert all(receipts[record.cid] for record in log[: run.place()])
    for _ in range(12):  # with or without peers, all come to an end
        now += S
        run.step(now)
    for output in run.outputs[acknowledged:]:
        run.outbox.done(output.place)
    assert run.place() == len(log)
    assert run.outbox.open == 0
