"""The publisher between a real broker and a node of the test's own."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
from kafka.admin import KafkaAdminClient
from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kiln.bridge.ipfs import BlockStore, BlockStoreUnavailableError
from kiln.bridge.kafka import session_thread
from kiln.bridge.kafka.session_thread import KafkaConfig
from kiln.bridge.publisher import publisher as publisher_module
from kiln.bridge.publisher.batches import RECORDS_LOST, TOO_OLD, PublishingOptions
from kiln.bridge.publisher.deliveries import Subscribers
from kiln.bridge.publisher.publisher import Publisher
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import ensure_topics
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
from kit.awaiting import awaited, wait_until
from kit.broker_access import client, security
from kit.topics import add_partitions, create_again

pytestmark = pytest.mark.kafka

S = 1_000_000
KILLS = int(os.environ.get("KILN_TEST_PUBLISHER_KILLS", "1"))
CID = re.compile(r"b[a-z2-7]{58}")


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

    def owner(self) -> str:
        """The instance id of the member that has the partition, or "" while the group changes."""
        with KafkaAdminClient(**client(self.address)) as admin:
            members = admin.describe_groups([self._group])[self._group]["members"]
        for member in members:
            assignment = member["member_assignment"]
            if isinstance(assignment, dict) and assignment["assigned_partitions"]:
                return str(member["group_instance_id"])
        return ""

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

    def put(self, cid: str, data: bytes) -> None:
        if self.away is not None:
            raise BlockStoreUnavailableError(self.away)
        self.kept.append(cid)

    def remove_older(self, before: int) -> bool:
        return False

    def start(
        self,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000,
        instance: str | None = None,
        subscribers: Subscribers | None = None,
    ) -> Publisher:
        options = PublishingOptions("local-test", publish_timeout=S, retry_every=S // 5)
        publisher = Publisher(
            KafkaConfig(client(self.address), self.prefix),
            options,
            self.publish,
            lambda: self.held,
            cast(BlockStore, self),
            clock_us=clock_us,
            instance=instance,
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
    assert awaited(lambda: publisher.status().published == 3)
    publisher.stop()
    assert publisher.state == "stopped"
    kiln.write(*map(encode, young[3:]))
    again = kiln.start()
    assert awaited(lambda: again.status().published == 2)
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


def test_two_publishers_share_the_partitions_and_one_that_leaves_is_replaced(kiln: Kiln) -> None:
    add_partitions(kiln.address, f"{kiln.prefix}batches", 2)
    one, other = kiln.start(), kiln.start()
    assert awaited(lambda: (one.state, other.state) == ("waiting for batches", "waiting for batches"))
    batches = [batch(number) for number in range(8)]
    for number, each in enumerate(batches[:4]):
        kiln.write(encode(each), partition=number % 2)
    assert awaited(lambda: (one.status().published, other.status().published) == (2, 2))
    other.stop()
    for number, each in enumerate(batches[4:]):
        kiln.write(encode(each), partition=number % 2)
    assert awaited(lambda: one.status().published == 6)
    assert sorted(receipt.batch_cid for receipt in kiln.receipts()) == sorted(each.batch_cid for each in batches)


def test_a_publisher_without_a_partition_is_on_standby(kiln: Kiln) -> None:
    one, other = kiln.start(), kiln.start()
    standby = f"on standby: Kafka has assigned no partition of {kiln.prefix}batches to this bridge"
    assert awaited(lambda: {one.state, other.state} == {standby, "waiting for batches"})
    assert (one.error, other.error) == (None, None)


class Killed:
    """Two publishers in processes of their own; the one that publishes is killed at seeded moments, and a new one,
    under another id, takes its place."""

    def __init__(self, kiln: Kiln, said: Path) -> None:
        self.kiln = kiln
        self.rng = random.Random(KILLS)
        self.written: list[BatchRecord] = []
        self.lonely = batch(2).separator.value
        """topics that end with it never have a peer"""
        self._said = said
        self._started = 0
        self._members: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self._started += 1
        instance = f"bridge {self._started}"
        arguments = (self.kiln.address, self.kiln.prefix, instance, str(self._said), self.lonely)
        self._members[instance] = subprocess.Popen(
            [sys.executable, "-m", "kit.publisher_process", *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def kill(self, instance: str) -> None:
        process = self._members.pop(instance)
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        for instance in list(self._members):
            self.kill(instance)

    def write(self, count: int) -> set[str]:
        """Write batches, and return the CIDs of those whose topic has a peer."""
        records = [batch(len(self.written) + number) for number in range(count)]
        self.kiln.write(*map(encode, records))
        self.written += records
        return {each.batch_cid for each in records if each.separator.value != self.lonely}

    @property
    def lines(self) -> list[str]:
        return self._said.read_text().splitlines()

    @property
    def sent(self) -> list[str]:
        return [cid for line in self.lines if line.startswith("s ") for cid in CID.findall(line)]

    def wait_for(self, cids: set[str], least: int) -> None:
        wait_until(lambda: len(cids & set(self.sent)) >= least, lambda: "\n".join(self.lines[-5:]))

    def take_over(self) -> float:
        """Return the seconds from the kill until a batch that was written after it is announced."""
        self.wait_for(self.write(30), self.rng.randrange(1, 20))
        self.write(self.rng.randrange(1, 10))
        time.sleep(self.rng.uniform(0, 2))  # the seeded moment, before or after a commit
        wait_until(lambda: self.kiln.owner() != "", "a member has the partition")
        self.kill(self.kiln.owner())
        ended = time.monotonic()
        late = self.write(3)
        self.wait_for(late, 1)
        took = time.monotonic() - ended
        self.start()
        return took


def test_at_kills_every_batch_is_announced_in_order_and_the_other_takes_over(kiln: Kiln, tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.touch()
    killed = Killed(kiln, said)
    with ExitStack() as stack:
        stack.callback(killed.kill_all)
        killed.start()
        killed.start()
        takeovers = [killed.take_over() for _ in range(KILLS)]
        cids = {each.batch_cid for each in killed.written}
        wait_until(lambda: {each.batch_cid for each in kiln.receipts()} == cids, lambda: str(len(kiln.receipts())))
    lines, sent, receipts = killed.lines, killed.sent, kiln.receipts()
    first = list(dict.fromkeys(sent))
    flows: dict[str, list[str]] = {}
    for each in killed.written:
        flows.setdefault(each.separator.value, []).append(each.batch_cid)
    assert not set(sent) & set(flows.pop(killed.lonely))
    for expected in flows.values():
        assert [cid for cid in first if cid in set(expected)] == expected
    assert all(lines.index(f"k {cid}") < next(i for i, line in enumerate(lines) if f'"{cid}"' in line) for cid in first)
    print(
        f"{KILLS} kills, {len(cids)} batches: {len(sent) - len(first)} announced again, {len(receipts) - len(cids)} "
        f"receipts more, taken over after {min(takeovers):.1f} to {max(takeovers):.1f} s"
    )


def test_it_says_what_it_waits_for(kiln: Kiln) -> None:
    kiln.held = "no batch block is in IPFS"
    kiln.peers = 0
    kiln.write(encode(batch(1)))
    publisher = kiln.start()
    assert awaited(lambda: publisher.state == "held back: no batch block is in IPFS (batches waiting: 1)")
    kiln.held = None
    assert awaited(lambda: publisher.state.startswith("waiting for a peer on /ceramic/local-test/sep/model/k"))
    assert awaited(lambda: publisher.status().failed == 1)
    (receipt,) = kiln.receipts()
    assert receipt.peer_count == 0
    assert re.fullmatch(r"no peer on the topic for \d+ s", receipt.error or "")
    kiln.peers = 2
    kiln.write(encode(batch(2)))
    assert awaited(lambda: publisher.status().published == 1)


def test_a_batch_does_not_wait_behind_thousands_for_a_topic_without_peers(
    kiln: Kiln, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, wanted = [batch(3 * number + 1) for number in range(3_000)], batch(0)
    monkeypatch.setattr(kiln, "publish", lambda topic, data: int(topic.endswith(wanted.separator.value)))
    kiln.write(*map(encode, [*others, wanted]))
    now = time.time_ns() // 1_000
    publisher = kiln.start(clock_us=lambda: now)  # no batch is given up meanwhile
    assert awaited(lambda: publisher.status().published == 1)
    assert publisher.state.endswith("(batches waiting: 3000)")


def test_a_batch_does_not_wait_behind_those_of_nine_thousand_new_models_without_peers(kiln: Kiln) -> None:
    wanted = batch(0)
    others = (batch(number, model=b"\1" + number.to_bytes(4)) for number in range(1, 8_501))
    kiln.write(*map(encode, others), encode(wanted))
    now = time.time_ns() // 1_000

    def subscribers(topics: Collection[str]) -> dict[str, list[str]]:
        return {topic: ["peer"] for topic in topics if topic.endswith(f"/{wanted.separator.value}")}

    # at a time that stands still, no batch is given up
    publisher = kiln.start(clock_us=lambda: now, subscribers=subscribers)
    assert awaited(lambda: publisher.status().published == 1)
    assert awaited(lambda: publisher.state.endswith("(batches waiting: 8500)"))
    assert kiln.kept == [wanted.batch_cid]


def test_while_ipfs_is_away_batches_wait_and_it_says_so(kiln: Kiln) -> None:
    kiln.away = "http://127.0.0.1:5001 does not answer"
    records = [batch(number) for number in range(4)]
    kiln.write(*map(encode, records))
    publisher = kiln.start()
    assert awaited(
        lambda: publisher.state == "IPFS is unavailable: http://127.0.0.1:5001 does not answer (batches waiting: 4)"
    )
    assert publisher.error == "nothing is published, because IPFS is unavailable: http://127.0.0.1:5001 does not answer"
    assert kiln.sent == []
    kiln.away = None
    assert awaited(lambda: publisher.status().published == 4)
    assert awaited(lambda: publisher.error is None)
    assert kiln.kept == [record.batch_cid for record in records]


def test_crash_repeats_what_had_no_receipt_and_passes_over_nothing(kiln: Kiln, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_thread, "_LONG_PAUSE", 0.1)
    first, second = batch(1), batch(2)
    kiln.write(encode(first))
    publisher = kiln.start()
    assert awaited(lambda: publisher.status().published == 1)
    kiln.crash = True
    kiln.write(encode(second))
    assert awaited(lambda: publisher.error is not None)
    assert publisher.error == "nothing is published: the publisher has crashed, and will be restarted"
    kiln.crash = False
    assert awaited(lambda: publisher.status().published >= 2 and publisher.state == "waiting for batches")
    assert kiln.sent[-1].find(second.batch_cid.encode()) > 0
    assert {receipt.batch_cid for receipt in kiln.receipts()} == {first.batch_cid, second.batch_cid}


def test_broker_away_at_the_start(kiln: Kiln, free_port: int) -> None:
    options = PublishingOptions("local-test")
    kafka = KafkaConfig({"bootstrap_servers": f"127.0.0.1:{free_port}"}, "kiln.")
    publisher = Publisher(kafka, options, kiln.publish, lambda: None, cast(BlockStore, kiln))
    kiln.running.append(publisher)
    publisher.start()
    assert awaited(lambda: "Kafka fails" in publisher.state)
    stopping = threading.Thread(target=publisher.stop)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive()


def test_after_a_crash_what_waits_for_a_peer_is_announced_and_nothing_that_is_settled(kiln: Kiln) -> None:
    hour = 3_600 * S
    kiln.write(*(encode(batch(number, age=hour)) for number in range(3)))
    first = kiln.start(clock_us=lambda: time.time_ns() // 1_000 - hour)
    assert awaited(lambda: first.status().published == 3 and (kiln.place() or (0, ""))[0] == 3)
    limit = (kiln.place() or (0, ""))[1]
    first.stop()
    kiln.commit_place(1, limit)  # a crash before the offset of two receipts was committed
    waited = batch(4, age=600 * S)  # while no bridge ran, for longer than a first start looks back
    kiln.write(encode(waited))
    again = kiln.start()
    assert awaited(lambda: again.status().published == 3 and (kiln.place() or (0, ""))[0] == 4)
    assert (again.status().failed, kiln.place()) == (0, (4, limit))
    counts = Counter(receipt.batch_cid for receipt in kiln.receipts())
    assert counts == {batch(0).batch_cid: 1, batch(1).batch_cid: 2, batch(2).batch_cid: 2, waited.batch_cid: 1}


def test_it_reads_no_further_while_ten_thousand_wait(kiln: Kiln, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "MAX_OPEN", 10)
    kiln.held = "on purpose"
    kiln.write(*(encode(batch(number)) for number in range(50)))
    publisher = kiln.start()
    assert awaited(lambda: publisher.state == "held back: on purpose (batches waiting: 10)")
    kiln.held = None
    assert awaited(lambda: publisher.status().published == 50)
    assert len(kiln.receipts()) == 50


# ---------------------------------------------------------------- what Kafka forgets


def test_batches_that_retention_took_unread_are_told(kiln: Kiln, caplog: pytest.LogCaptureFixture) -> None:
    kiln.write(*(encode(batch(number)) for number in range(2)))
    first = kiln.start()
    assert awaited(lambda: first.status().published == 2 and first.state == "waiting for batches")
    first.stop()
    kiln.write(*(encode(batch(number)) for number in range(2, 7)))
    kiln.delete_records(5)

    again = kiln.start()
    assert awaited(lambda: again.status().published == 2 and again.state == "waiting for batches")
    assert again.status().lost == 3
    assert "3 records of" in caplog.text
    assert "below offset 5" in caplog.text
    (fault,) = map(decode_quarantine, kiln.read("quarantine"))
    assert (fault.stage, fault.reason) == ("publisher", RECORDS_LOST)
    assert fault.detail == "Kafka deleted the records 0/2 to 0/4 of batches before they were read"
    again.stop()

    kiln.held = "on purpose"
    third = kiln.start()  # while it runs
    assert awaited(lambda: third.state == "held back: on purpose")
    assert third.status().lost == 0
    kiln.delete_records(7)
    kiln.held = None
    kiln.write(encode(batch(7)))
    assert awaited(lambda: third.status().published == 1)
    assert third.status().lost == 0  # what it had read is not lost


@pytest.mark.parametrize("runs", [False, True], ids=["stopped", "running"])
def test_a_topic_that_was_created_again_is_read_from_its_beginning(kiln: Kiln, runs: bool) -> None:
    """Kafka forgets a group's offsets with the topic."""
    kiln.write(*(encode(batch(number)) for number in range(3)))
    publisher = kiln.start()
    assert awaited(lambda: publisher.status().published == 3 and (kiln.place() or (0, ""))[0] == 3)
    if not runs:
        publisher.stop()
    create_again(kiln.address, kiln.prefix, "batches")
    kiln.write(*(encode(batch(number)) for number in range(3, 9)))
    if not runs:
        publisher = kiln.start()
    assert awaited(lambda: {each.batch_cid for each in kiln.receipts()} == {batch(n).batch_cid for n in range(9)}), (
        publisher.error
    )


def test_partitions_that_are_added_are_read(kiln: Kiln) -> None:
    kiln.write(encode(batch(0)))
    publisher = kiln.start()
    assert awaited(lambda: publisher.status().published == 1)
    add_partitions(kiln.address, f"{kiln.prefix}batches", 2)
    kiln.write(encode(batch(1)), partition=1)
    assert awaited(lambda: publisher.status().published == 2), publisher.error
