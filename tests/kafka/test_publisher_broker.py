"""The publisher between a real broker and a node of the test's own."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from kafka.admin import KafkaAdminClient
from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kiln.bridge.ipfs import BlockStoreUnavailableError
from kiln.bridge.kafka import thread as kafka_thread
from kiln.bridge.kafka.thread import KafkaConfig, Leadership
from kiln.bridge.kafka.topic_notes import TopicNotes, locate_topic_notes
from kiln.bridge.publisher.deliveries import Subscribers
from kiln.bridge.publisher.outbox import RECORDS_LOST, TOO_OLD, PublishingOptions
from kiln.bridge.publisher.publisher import Publisher
from kiln.conf.process.state_version import claim_state_folder
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_topics import ensure_topics
from kiln.schemas.kafka.records import (
    BatchRecord,
    Origin,
    PublicationRecord,
    SeparatorRecord,
    decode_publication,
    decode_quarantine,
    encode,
)
from kiln.schemas.kafka.topics import TOPICS
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.topics import encode_separator_value
from kit.awaiting import awaited
from kit.broker_access import client, security
from kit.topics import add_partitions, create_again, recover
from kit.turns import Turns

pytestmark = pytest.mark.kafka

S = 1_000_000


def batch(number: int, age: int = 0, origin: Origin = "LIVE", model: bytes = b"") -> BatchRecord:
    block = f"block {number}".encode()
    closed = time.time_ns() // 1_000 - age
    separator = SeparatorRecord("model", encode_separator_value(model or bytes([1, number % 3])))
    return BatchRecord("local-test", origin, separator, cid_text(compute_cid(block)), block, closed - S, closed)


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
        self.notes: TopicNotes | None = None
        ensure_topics(
            address, prefix, {"updates": 1}, dict.fromkeys(TOPICS, timedelta(days=1)), client_options=security(address)
        )

    def write(self, *values: bytes, topic: str = "batches", partition: int = 0) -> None:
        producer = KafkaProducer(**client(self.address), acks="all")
        for value in values:
            producer.send(f"{self.prefix}{topic}", value=value, partition=partition)
        producer.close()

    def read(self, topic: str) -> list[bytes]:
        consumer = KafkaConsumer(**client(self.address))
        part = TopicPartition(f"{self.prefix}{topic}", 0)
        consumer.assign([part])
        consumer.seek_to_beginning(part)
        end = consumer.end_offsets([part])[part]
        found: list[bytes] = []
        while consumer.position(part) < end:
            found += [record.value for record in consumer.poll(timeout_ms=500).get(part, [])]
        consumer.close()
        return found

    @property
    def _part(self) -> TopicPartition:
        return TopicPartition(f"{self.prefix}batches", 0)

    @property
    def _group(self) -> str:
        return f"{self.prefix}publisher.local-test"

    def place(self) -> tuple[int, str] | None:
        with KafkaAdminClient(**client(self.address)) as admin:
            committed = admin.list_group_offsets({self._group: None})[self._group].get(self._part)
        return None if committed is None else (committed.offset, committed.metadata)

    def commit_place(self, offset: int, metadata: str) -> None:
        with KafkaAdminClient(**client(self.address)) as admin:
            admin.alter_group_offsets(self._group, {self._part: OffsetAndMetadata(offset, metadata)})

    def forget_place(self) -> None:
        """As `offsets.retention.minutes` does."""
        with KafkaAdminClient(**client(self.address)) as admin:
            admin.delete_group_offsets(self._group, [self._part])

    def delete_records(self, before: int) -> None:
        """As retention does."""
        with KafkaAdminClient(**client(self.address)) as admin:
            admin.delete_records({self._part: before})

    def receipts(self) -> list[PublicationRecord]:
        return [decode_publication(value) for value in self.read("publications")]

    def publish(self, topic: str, data: bytes) -> int:
        if self.crash:
            raise RuntimeError("the node is gone")
        if self.peers:
            self.sent.append(data)
        return self.peers

    def store_and_pin(self, cid: str, block: bytes, now: int) -> None:
        if self.away is not None:
            raise BlockStoreUnavailableError(self.away)
        self.kept.append(cid)

    def unpin_expired(self, now: int) -> int:
        return 0

    def close(self) -> None: ...

    def start(
        self,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
        leadership: Leadership | None = None,
        subscribers: Subscribers | None = None,
    ) -> Publisher:
        options = PublishingOptions("local-test", publish_timeout=S, retry_every=S // 5)
        publisher = Publisher(
            KafkaConfig([self.address], security(self.address), self.prefix),
            options,
            self.publish,
            lambda: self.held,
            self,
            clock_us=clock_us,
            leadership=leadership,
            notes=self.notes,
            subscribers=subscribers,
        )
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

    assert [record.batch_cid.encode() in data for record, data in zip(young, kiln.sent, strict=True)] == [True] * 5
    receipts = {receipt.batch_cid: receipt for receipt in kiln.receipts()}
    assert len(kiln.receipts()) == 6
    assert receipts[old.batch_cid].error == TOO_OLD
    assert {receipts[record.batch_cid].peer_count for record in young} == {1}
    (fault,) = map(decode_quarantine, kiln.read("quarantine"))
    assert (fault.stage, fault.data) == ("publisher", b"{")


def test_of_two_publishers_the_one_that_leads_publishes(kiln: Kiln) -> None:
    batches = [batch(number) for number in range(6)]
    turns = Turns("a")
    one, other = (kiln.start(leadership=turns.of(name)) for name in "ab")

    def turn(leader: Publisher, name: str, done: int) -> None:
        turns.leader = name
        assert awaited(
            lambda: all(each.state == f"on standby: {name} leads" for each in (one, other) if each is not leader)
        )
        kiln.write(encode(batches[done]))
        assert awaited(lambda: len(kiln.receipts()) == done + 1)
        turns.leader = None
        assert awaited(lambda: leader.state == "on standby: None leads")
        kiln.write(encode(batches[done + 1]))  # nobody leads: it waits
        turns.leader = name
        assert awaited(lambda: len(kiln.receipts()) == done + 2)

    turn(one, "a", 0)
    turn(other, "b", 2)
    turn(one, "a", 4)
    assert awaited(lambda: (one.published, other.published) == (4, 2))  # counted after the receipt is written
    assert [receipt.batch_cid for receipt in kiln.receipts()] == [each.batch_cid for each in batches]
    assert [each.batch_cid.encode() in data for each, data in zip(batches, kiln.sent, strict=True)] == [True] * 6


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
    assert receipt.peer_count == 0
    assert re.fullmatch(r"no peer on the topic for \d+ s", receipt.error or "")
    kiln.peers = 2
    kiln.write(encode(batch(2)))
    assert awaited(lambda: publisher.published == 1)


def test_a_batch_does_not_wait_behind_thousands_for_a_topic_without_peers(
    kiln: Kiln, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, wanted = [batch(3 * number + 1) for number in range(3_000)], batch(0)
    monkeypatch.setattr(kiln, "publish", lambda topic, data: int(topic.endswith(wanted.separator.value)))
    kiln.write(*map(encode, [*others, wanted]))
    now = time.time_ns() // 1_000
    publisher = kiln.start(clock_us=lambda: now)  # no batch is given up meanwhile
    assert awaited(lambda: publisher.published == 1)
    assert publisher.state.endswith("(batches waiting: 3000)")


def test_a_batch_does_not_wait_behind_those_of_twelve_thousand_new_models_without_peers(kiln: Kiln) -> None:
    wanted = batch(0)
    others = (batch(number, model=b"\1" + number.to_bytes(4)) for number in range(1, 12_001))
    kiln.write(*map(encode, others), encode(wanted))
    now = time.time_ns() // 1_000

    def subscribers(topics: Collection[str]) -> dict[str, list[str]]:
        return {topic: ["peer"] for topic in topics if topic.endswith(f"/{wanted.separator.value}")}

    # at a time that stands still, no batch is given up
    publisher = kiln.start(clock_us=lambda: now, subscribers=subscribers)
    assert awaited(lambda: publisher.published == 1)
    assert awaited(lambda: publisher.state.endswith("(batches waiting: 12000)"))
    assert kiln.kept == [wanted.batch_cid]


def test_while_ipfs_is_away_batches_wait_and_it_says_so(kiln: Kiln) -> None:
    kiln.away = "http://127.0.0.1:5001 does not answer"
    records = [batch(number) for number in range(4)]
    kiln.write(*map(encode, records))
    publisher = kiln.start()
    assert awaited(
        lambda: publisher.state == "IPFS is unavailable: http://127.0.0.1:5001 does not answer (batches waiting: 4)"
    )
    assert publisher.error == "nothing is published, IPFS is unavailable: http://127.0.0.1:5001 does not answer"
    assert kiln.sent == []
    kiln.away = None
    assert awaited(lambda: publisher.published == 4)
    assert awaited(lambda: publisher.error is None)
    assert kiln.kept == [record.batch_cid for record in records]


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
    assert publisher.error == "nothing is published: the publisher has crashed, and will be restarted"
    kiln.crash = False
    again = kiln.start()
    assert awaited(lambda: again.published >= 1 and again.state == "waiting for batches")
    assert kiln.sent[-1].find(second.batch_cid.encode()) > 0
    assert {receipt.batch_cid for receipt in kiln.receipts()} == {first.batch_cid, second.batch_cid}


def test_broker_away_at_the_start(kiln: Kiln, free_port: int) -> None:
    options = PublishingOptions("local-test")
    kafka = KafkaConfig(f"127.0.0.1:{free_port}", {}, "kiln.")
    publisher = Publisher(kafka, options, kiln.publish, lambda: None, kiln)
    kiln.running.append(publisher)
    publisher.start()
    assert awaited(lambda: "Kafka fails" in publisher.state)
    stopping = threading.Thread(target=publisher.stop)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive()


# ---------------------------------------------------------------- what Kafka forgets


def test_a_place_that_kafka_lost_is_made_up_from_receipts(kiln: Kiln, caplog: pytest.LogCaptureFixture) -> None:
    early = batch(0, age=3600 * S)
    done = [batch(number) for number in range(1, 4)]
    kiln.write(*map(encode, (early, *done)))
    first = kiln.start()
    assert awaited(lambda: first.published == 3 and first.state == "waiting for batches")
    assert first.places_lost == 0
    first.stop()
    kiln.forget_place()
    waited = batch(4, age=600 * S)  # while the bridge was down, for longer than a first start looks back
    kiln.write(encode(waited))

    again = kiln.start()
    assert awaited(lambda: again.published == 1 and again.state == "waiting for batches")
    assert (again.places_lost, again.failed, again.lost) == (1, 0, 0)
    assert "Kafka has lost the committed offset" in caplog.text
    again.stop()
    receipts = [(receipt.batch_cid, receipt.error) for receipt in kiln.receipts()]
    assert sorted(receipts, key=str) == sorted(
        [(early.batch_cid, TOO_OLD), *((b.batch_cid, None) for b in (*done, waited))], key=str
    )

    third = kiln.start()  # and the place is there again
    assert awaited(lambda: third.state == "waiting for batches")
    assert (third.places_lost, third.published) == (0, 0)


def test_a_crash_between_receipt_and_place_gives_no_batch_a_second_receipt(kiln: Kiln) -> None:
    done = [batch(number) for number in range(4)]
    kiln.write(*map(encode, done))
    first = kiln.start()
    assert awaited(lambda: first.published == 4 and first.state == "waiting for batches")
    first.stop()
    committed = kiln.place()
    assert committed is not None
    kiln.commit_place(1, committed[1])  # as it was before the receipts of the others
    kiln.write(encode(batch(4)))
    again = kiln.start()
    assert awaited(lambda: again.published == 1 and again.state == "waiting for batches")
    again.stop()
    assert sorted(receipt.batch_cid for receipt in kiln.receipts()) == sorted(
        batch(number).batch_cid for number in range(5)
    )
    assert kiln.place() == (5, committed[1])


def test_a_micro_batch_that_is_written_again_goes_out_once_even_over_a_restart(kiln: Kiln) -> None:
    written = [encode(batch(number)) for number in range(4)]
    kiln.write(*written[:2])
    first = kiln.start()
    assert awaited(lambda: first.published == 2)
    first.stop()
    kiln.write(*written)
    again = kiln.start()
    assert awaited(lambda: again.published == 2 and again.state == "waiting for batches")
    kiln.write(*written, encode(batch(9)))
    assert awaited(lambda: again.published == 3 and again.state == "waiting for batches")
    again.stop()
    assert len({receipt.batch_cid for receipt in kiln.receipts()}) == len(kiln.receipts()) == 5


def test_a_crash_while_a_lost_place_is_made_up_repeats_nothing(kiln: Kiln) -> None:
    done = [batch(number) for number in range(3)]
    kiln.write(*map(encode, done))
    first = kiln.start()
    assert awaited(lambda: first.published == 3 and first.state == "waiting for batches")
    first.stop()
    kiln.commit_place(0, "0 3")  # as a start leaves it that has read the receipts, and nothing more
    again = kiln.start()
    assert awaited(lambda: again.state == "waiting for batches" and kiln.place() == (3, "0"))
    assert (again.published, len(kiln.receipts())) == (0, 3)


def test_the_place_is_committed_again_while_nothing_comes(kiln: Kiln) -> None:
    now = [time.time_ns() // 1_000]
    kiln.write(encode(batch(1)))
    publisher = kiln.start(lambda: now[0])
    assert awaited(lambda: publisher.published == 1 and kiln.place() is not None)
    assert awaited(lambda: (kiln.place() or (0, ""))[0] == 1)
    kiln.forget_place()
    now[0] += 3600 * S
    assert awaited(lambda: (kiln.place() or (0, ""))[0] == 1)


def test_batches_that_retention_took_unread_are_told(kiln: Kiln, caplog: pytest.LogCaptureFixture) -> None:
    kiln.write(*(encode(batch(number)) for number in range(2)))
    first = kiln.start()
    assert awaited(lambda: first.published == 2 and first.state == "waiting for batches")
    first.stop()
    kiln.write(*(encode(batch(number)) for number in range(2, 7)))
    kiln.delete_records(5)

    again = kiln.start()
    assert awaited(lambda: again.published == 2 and again.state == "waiting for batches")
    assert (again.lost, again.status().lost) == (3, 3)
    assert "3 records of" in caplog.text
    assert "offsets 2 to 4" in caplog.text
    (fault,) = map(decode_quarantine, kiln.read("quarantine"))
    assert (fault.stage, fault.reason, fault.detail) == ("publisher", RECORDS_LOST, "records 0/2 to 0/4 of batches")
    again.stop()

    kiln.held = "on purpose"
    third = kiln.start()  # while it runs
    assert awaited(lambda: third.state == "held back: on purpose")
    assert third.lost == 0
    kiln.delete_records(7)
    kiln.held = None
    kiln.write(encode(batch(7)))
    assert awaited(lambda: third.published == 1)
    assert third.lost == 0  # what it had read is not lost


@pytest.mark.parametrize("runs", [False, True], ids=["stopped", "running"])
def test_another_topic_is_refused_and_read_from_its_beginning_after_recover(
    kiln: Kiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """Kafka forgets a group's offsets with the topic, and kafka-python begins at an end of the new one in silence."""
    monkeypatch.setattr(kafka_thread, "CHECK_EVERY", 0.2)
    kiln.notes = locate_topic_notes(tmp_path / "bridge", "publisher")
    claim_state_folder(tmp_path)
    (tmp_path / "bridge").mkdir()
    before, after = [batch(number) for number in range(3)], [batch(number) for number in range(3, 9)]
    kiln.write(*map(encode, before))
    publisher = kiln.start()
    assert awaited(lambda: publisher.published == 3 and publisher.state == "waiting for batches")
    if not runs:
        publisher.stop()
    create_again(kiln.address, kiln.prefix, "batches")
    if not runs:
        kiln.write(*map(encode, (before[0], *after)))
        publisher = kiln.start()
    said = f"nothing is published: {kiln.prefix}batches is not the topic that was read before"
    assert awaited(lambda: (publisher.error or "").startswith(said)), publisher.error
    assert "kiln recover" in (publisher.error or "")
    if runs:
        kiln.write(*map(encode, (before[0], *after)))
    publisher.stop()
    assert len(kiln.receipts()) == 3

    found = recover(kiln.address, kiln.prefix, tmp_path)
    assert [(damage.query, f"{kiln.prefix}batches" in damage.problem) for damage in found] == [
        ("bridge, publisher", True)
    ]
    again = kiln.start()
    assert awaited(lambda: again.published == 6 and again.state == "waiting for batches"), again.error
    again.stop()
    assert sorted(receipt.batch_cid for receipt in kiln.receipts()) == sorted(
        each.batch_cid for each in (*before, *after)
    )
    assert recover(kiln.address, kiln.prefix, tmp_path) == []
    third = kiln.start()
    assert awaited(lambda: third.state == "waiting for batches")
    assert third.published == 0


def test_partitions_that_are_added_are_read(kiln: Kiln, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_thread, "CHECK_EVERY", 0.2)
    kiln.write(encode(batch(0)))
    publisher = kiln.start()
    assert awaited(lambda: publisher.published == 1)
    add_partitions(kiln.address, f"{kiln.prefix}batches", 2)
    kiln.write(encode(batch(1)), partition=1)
    assert awaited(lambda: publisher.published == 2), publisher.error
