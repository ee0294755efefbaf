"""The publisher between a real broker and a node of the test's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kit.awaiting import awaited

from bridge.ipfs import BlocksAwayError
from bridge.publishing.outbox import TOO_OLD, PublishingOptions
from bridge.publishing.publisher import Publisher
from deploy.embedded.broker import EmbeddedBroker
from deploy.kafka.topics import ensure_topics
from schemas.cid import block_cid, cid_text
from schemas.log import TOPICS
from schemas.records import (
    BatchRecord,
    Origin,
    PublicationRecord,
    SeparatorRecord,
    decode_publication,
    decode_quarantine,
    encode,
)
from schemas.topics import separator_value

pytestmark = pytest.mark.kafka

S = 1_000_000


def batch(number: int, age: int = 0, origin: Origin = "LIVE") -> BatchRecord:
    block = f"block {number}".encode()
    closed = time.time_ns() // 1_000 - age
    separator = SeparatorRecord("model", separator_value(bytes([1, number % 3])))
    return BatchRecord("local-test", origin, separator, cid_text(block_cid(block)), block, closed - S, closed)


class Kiln:
    """Topics of its own, publishers on them, and what they gave to the node."""

    def __init__(self, address: str, prefix: str) -> None:
        self.address = address
        self.prefix = prefix
        self.sent: list[bytes] = []
        self.peers = 1
        self.held: str | None = None
        self.away: str | None = None
        self.kept: list[str] = []
        self.crash = False
        self.running: list[Publisher] = []
        ensure_topics(address, prefix, {"updates": 1}, dict.fromkeys(TOPICS, timedelta(days=1)))

    def write(self, *values: bytes) -> None:
        producer = KafkaProducer(bootstrap_servers=[self.address], acks="all")
        for value in values:
            producer.send(f"{self.prefix}batches", value=value, partition=0)
        producer.close()

    def read(self, topic: str) -> list[bytes]:
        consumer = KafkaConsumer(bootstrap_servers=[self.address])
        part = TopicPartition(f"{self.prefix}{topic}", 0)
        consumer.assign([part])
        consumer.seek_to_beginning(part)
        end = consumer.end_offsets([part])[part]
        found: list[bytes] = []
        while consumer.position(part) < end:
            found += [record.value for record in consumer.poll(timeout_ms=500).get(part, [])]
        consumer.close()
        return found

    def receipts(self) -> list[PublicationRecord]:
        return [decode_publication(value) for value in self.read("publications")]

    def publish(self, topic: str, data: bytes) -> int:
        if self.crash:
            raise RuntimeError("the node is gone")
        if self.peers:
            self.sent.append(data)
        return self.peers

    def keep(self, cid: str, block: bytes, now: int) -> None:
        if self.away is not None:
            raise BlocksAwayError(self.away)
        self.kept.append(cid)

    def unpin_expired(self, now: int) -> int:
        return 0

    def close(self) -> None: ...

    def start(self) -> Publisher:
        options = PublishingOptions("local-test", publish_timeout=S, retry_every=S // 5)
        publisher = Publisher([self.address], {}, self.prefix, options, self.publish, lambda: self.held, self)
        publisher.start()
        self.running.append(publisher)
        return publisher


@pytest.fixture
def kiln(broker: EmbeddedBroker, prefix: str) -> Iterator[Kiln]:
    made = Kiln(broker.address, prefix)
    yield made
    for publisher in made.running:
        publisher.stop()


def test_batches_are_published_once_over_restarts(kiln: Kiln) -> None:
    old, young = batch(0, age=3600 * S), [batch(n) for n in range(1, 6)]
    kiln.write(encode(old), b"{", encode(batch(99, origin="REPLAY")), *map(encode, young[:3]))
    publisher = kiln.start()
    assert awaited(lambda: publisher.published == 3)
    publisher.stop()
    assert publisher.state == "stopped"
    kiln.write(*map(encode, young[3:]))
    again = kiln.start()
    assert awaited(lambda: again.published == 2)
    assert awaited(lambda: again.state == "waiting for batches")
    assert again.error is None
    again.stop()

    assert [record.cid.encode() in data for record, data in zip(young, kiln.sent, strict=True)] == [True] * 5
    receipts = {receipt.cid: receipt for receipt in kiln.receipts()}
    assert len(kiln.receipts()) == 6
    assert receipts[old.cid].error == TOO_OLD
    assert {receipts[record.cid].peers for record in young} == {1}
    (fault,) = map(decode_quarantine, kiln.read("quarantine"))
    assert (fault.stage, fault.data) == ("publisher", b"{")


def test_it_says_what_it_waits_for(kiln: Kiln) -> None:
    kiln.held = "no batch block is in IPFS"
    kiln.peers = 0
    kiln.write(encode(batch(1)))
    publisher = kiln.start()
    assert awaited(lambda: publisher.state == "held back: no batch block is in IPFS (batches waiting: 1)")
    kiln.held = None
    assert awaited(lambda: publisher.state.startswith("waiting for a peer on /ceramic/local-test/sep/model/k"))
    assert awaited(lambda: publisher.failed == 1)
    (receipt,) = kiln.receipts()
    assert (receipt.peers, receipt.error) == (0, "no peer on the topic for 1 s")
    kiln.peers = 2
    kiln.write(encode(batch(2)))
    assert awaited(lambda: publisher.published == 1)


def test_while_ipfs_is_away_batches_wait_and_it_says_so(kiln: Kiln) -> None:
    kiln.away = "http://127.0.0.1:5001 does not answer"
    records = [batch(number) for number in range(4)]
    kiln.write(*map(encode, records))
    publisher = kiln.start()
    assert awaited(
        lambda: publisher.state == "IPFS is away: http://127.0.0.1:5001 does not answer (batches waiting: 4)"
    )
    assert publisher.error == "nothing is published, IPFS is away: http://127.0.0.1:5001 does not answer"
    assert kiln.sent == []
    kiln.away = None
    assert awaited(lambda: publisher.published == 4)
    assert awaited(lambda: publisher.error is None)
    assert kiln.kept == [record.cid for record in records]


# the fault is raised on purpose, in the publisher's thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_crash_repeats_what_had_no_receipt_and_passes_over_nothing(kiln: Kiln) -> None:
    first, second = batch(1), batch(2)
    kiln.write(encode(first))
    publisher = kiln.start()
    assert awaited(lambda: publisher.published == 1)
    kiln.crash = True
    kiln.write(encode(second))
    assert awaited(lambda: publisher.error is not None)
    assert publisher.error == "nothing is published: the publisher has ended by a fault"
    kiln.crash = False
    again = kiln.start()
    assert awaited(lambda: again.published >= 1 and again.state == "waiting for batches")
    assert kiln.sent[-1].find(second.cid.encode()) > 0
    assert {receipt.cid for receipt in kiln.receipts()} == {first.cid, second.cid}


def test_broker_away_at_the_start(kiln: Kiln, free_port: int) -> None:
    options = PublishingOptions("local-test")
    publisher = Publisher(f"127.0.0.1:{free_port}", {}, "kiln.", options, kiln.publish, lambda: None, kiln)
    kiln.running.append(publisher)
    publisher.start()
    assert awaited(lambda: "Kafka fails" in publisher.state)
    stopping = threading.Thread(target=publisher.stop)
    stopping.start()
    stopping.join(10)
    assert not stopping.is_alive()
