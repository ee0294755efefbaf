"""BEP 50 from broker to broker: what one bridge finds on `kiln.batches` is on `kiln.frames` of another, with gossipsub
off."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kiln.bridge.bep50.carrier import publisher_key
from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.schemas.dht.announcement import PublisherKey, ReceivedAnnouncement, compute_salt, read_datagram
from kiln.schemas.dht.items import compute_target
from kiln.schemas.kafka.frames import read_frame
from kiln.schemas.kafka.records import BatchRecord, PublicationRecord, SeparatorRecord, decode_publication, encode
from kiln.schemas.kafka.topics import TOPICS
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.topics import Separator, encode_separator_value, format_topic
from kit.awaiting import PATIENCE, wait_until
from kit.broker_access import client, security, variables

pytestmark = pytest.mark.kafka

NETWORK = "local-test"
SEPARATOR = Separator("model", encode_separator_value(b"\x01\x02"))
TOPIC = format_topic(NETWORK, SEPARATOR)


def batch(number: int) -> BatchRecord:
    block, closed = b"block %d" % number, time.time_ns() // 1_000
    separator = SeparatorRecord(*SEPARATOR)
    return BatchRecord(NETWORK, "LIVE", separator, cid_text(compute_cid(block)), block, closed - 1_000_000, closed)


class Side:
    """A bridge's topics, state folder and process."""

    def __init__(self, broker: EmbeddedBroker, prefix: str, state: Path) -> None:
        self.address, self.prefix, self.state = broker.address, prefix, state
        ensure_topics(
            self.address,
            prefix,
            {"updates": 1},
            dict.fromkeys(TOPICS, timedelta(days=1)),
            client_options=security(self.address),
        )

    @property
    def status(self) -> BridgeStatus | None:
        return read_status(self.state / "bridge" / "status.json")

    @contextmanager
    def running(self, **settings: str) -> Iterator[BridgeStatus]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KILN_")},
            "KILN_STATE": str(self.state),
            "KILN_NETWORK": NETWORK,
            **variables(self.address),
            "KILN_KAFKA__PREFIX": self.prefix,
            "KILN_BRIDGE__LISTEN": "[]",
            "KILN_PUBLISH__ENABLED": "false",
            "KILN_PUBLISH__TIMEOUT": "2s",
            "KILN_BEP50__ENABLED": "true",
            "KILN_BEP50__PUBLISH": "true",
            "KILN_BEP50__LISTEN": "127.0.0.1:0",
            **settings,
        }
        (self.state / "bridge" / "status.json").unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-m", "kiln.bridge.app.main"], env=environment) as process:
            try:
                wait_until(lambda: self.status is not None or process.poll() is not None, "the bridge runs")
                status = self.status
                assert status is not None
                yield status
            finally:
                process.terminate()
            assert process.wait(PATIENCE) == 0

    def write(self, *batches: BatchRecord) -> None:
        producer = KafkaProducer(**client(self.address), acks="all")
        for each in batches:
            producer.send(f"{self.prefix}batches", value=encode(each), partition=0)
        producer.close()

    def read(self, topic: str) -> list[bytes]:
        consumer = KafkaConsumer(**client(self.address))
        parts = [TopicPartition(f"{self.prefix}{topic}", number) for number in range(2)]
        parts = [part for part in parts if part.partition in (consumer.partitions_for_topic(part.topic) or ())]
        consumer.assign(parts)
        consumer.seek_to_beginning(*parts)
        ends = consumer.end_offsets(parts)
        found: list[bytes] = []
        while any(consumer.position(part) < end for part, end in ends.items()):
            for records in consumer.poll(timeout_ms=500).values():
                found += [record.value for record in records]
        consumer.close()
        return found

    def receipts(self) -> dict[str, PublicationRecord]:
        return {each.batch_cid: each for each in map(decode_publication, self.read("publications"))}

    def announced(self) -> list[str]:
        """CIDs that came in, each once."""
        found: dict[str, None] = {}
        for frame in map(read_frame, self.read("frames")):
            assert isinstance(frame, Frame)
            assert frame.protocol == "bep50"
            if frame.direction == Frame.IN and frame.payload:
                read = read_datagram(frame.payload, NETWORK)
                assert isinstance(read, ReceivedAnnouncement)
                found[cid_text(read.announcement.batch)] = None
        return list(found)


@pytest.fixture
def sides(broker: EmbeddedBroker, prefix: str, tmp_path: Path) -> tuple[Side, Side]:
    return Side(broker, f"a{prefix}", tmp_path / "a"), Side(broker, f"b{prefix}", tmp_path / "b")


def test_batches_of_one_are_frames_of_the_other_and_have_receipts(sides: tuple[Side, Side]) -> None:
    one, other = sides
    batches = [batch(number) for number in range(5)]
    key = publisher_key(one.state / "bridge").verify_key.encode()
    follow = f"{key.hex()}/{SEPARATOR.key}/{SEPARATOR.value}"
    with ExitStack() as stack:
        theirs = stack.enter_context(other.running(KILN_BEP50__FOLLOW=follow)).bep50
        assert theirs is not None
        stack.enter_context(one.running(KILN_BEP50__CONTACTS=theirs.addresses[0]))
        for each in batches[:3]:
            one.write(each)
        wait_until(lambda: len(one.receipts()) == 3, "three receipts")
        assert {each.error for each in one.receipts().values()} == {None}
        wait_until(lambda: len(other.announced()) == 3, "three batches")
        for each in batches[:3]:
            receipt = one.receipts()[each.batch_cid]
            assert (receipt.transport, receipt.topic, receipt.peer_count) == ("bep50", TOPIC, 1)
            assert (
                receipt.target
                == compute_target(PublisherKey(key, SEPARATOR).key, compute_salt(NETWORK, SEPARATOR)).hex()
            )
    assert other.announced() == [each.batch_cid for each in batches[:3]]
    # Nobody is there; what was announced meanwhile is found by who comes back, and nothing goes out twice.
    with one.running() as ours:
        one.write(batches[3])
        wait_until(lambda: batches[3].batch_cid in one.receipts(), "the fourth receipt")
        receipt = one.receipts()[batches[3].batch_cid]
        assert receipt.peer_count == 0
        assert re.fullmatch(r"no peer on the topic for \d+ s", receipt.error or "")
        assert ours.bep50 is not None
        with other.running(KILN_BEP50__FOLLOW=follow, KILN_BEP50__CONTACTS=ours.bep50.addresses[0]):
            wait_until(lambda: other.announced()[-1] == batches[3].batch_cid, "the fourth batch")
            one.write(batches[4])
            wait_until(lambda: other.announced()[-1] == batches[4].batch_cid, "the fifth batch")
            wait_until(lambda: batches[4].batch_cid in one.receipts(), "the fifth receipt")
    assert other.announced() == [each.batch_cid for each in batches]
    assert len(one.read("publications")) == 5
