"""From the topic of the network to the topics of separators (CIP-120, Transition): what peers on either one get.

The bridge is a process, the broker and the two peers are real; the batches are written by the test.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kiln.conf.process.bridge_status import read_status
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.kafka.records import BatchRecord, PublicationRecord, SeparatorRecord, decode_publication, encode
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID
from kiln.schemas.wire.topics import Separator, format_topic
from kit.awaiting import wait_until
from kit.broker_access import client
from kit.foreign_peer import ForeignPeer, NewPeer
from kit.kiln_process import Kiln, end
from kit.log_feed import kiln_beside

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.kafka, pytest.mark.network, pytest.mark.timeout(300)]

NETWORK = "local-transition"
SEPARATOR = Separator("model", StreamID(2, compute_cid(b"model")).text)
OLD, NEW = format_topic(NETWORK, None), format_topic(NETWORK, SEPARATOR)
PATIENCE = 240.0


class Running:
    """A bridge with both peers on it."""

    def __init__(self, kiln: Kiln, prefix: str) -> None:
        self._kiln = kiln
        self._prefix = prefix
        self._written = 0

    def write(self, count: int) -> list[str]:
        """Batches that close now; their CIDs."""
        cids = []
        producer = KafkaProducer(**client(self._kiln.servers), acks="all")
        for _ in range(count):
            block = b"block %d" % self._written
            self._written += 1
            now = time.time_ns() // 1_000
            cids.append(cid_text(compute_cid(block)))
            record = BatchRecord(NETWORK, "LIVE", SeparatorRecord(*SEPARATOR), cids[-1], block, now - 1_000_000, now)
            producer.send(f"{self._prefix}batches", value=encode(record))
        producer.close()
        return cids

    def receipts(self, count: int) -> list[PublicationRecord]:
        """Once there are so many."""
        consumer = KafkaConsumer(**client(self._kiln.servers))
        part = TopicPartition(f"{self._prefix}publications", 0)
        consumer.assign([part])
        consumer.seek_to_beginning(part)
        found: list[PublicationRecord] = []
        until = time.monotonic() + PATIENCE
        while len(found) < count:
            assert time.monotonic() < until, found
            records = consumer.poll(timeout_ms=500).get(part, [])
            found += [decode_publication(record.value) for record in records]
        consumer.close()
        return found


@contextmanager
def bridge(
    broker: EmbeddedBroker, folder: Path, old: ForeignPeer, new: ForeignPeer, settings: dict[str, str]
) -> Iterator[Running]:
    """Runs `kiln bridge`; the peers are on OLD and on NEW, and see it there."""
    prefix = f"{folder.name}."
    environment = {
        "KILN_NETWORK": NETWORK,
        "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
        "KILN_BRIDGE__BOOTSTRAP": f"{old.address},{new.address}",
        "KILN_PUBLISH__ENABLED": "true",
    }
    old.subscribe(OLD)
    new.subscribe(NEW)
    kiln = kiln_beside(broker.address, prefix, folder, environment | settings)
    process = kiln.start("bridge")
    try:
        path = folder / "bridge" / "status.json"
        wait_until(
            lambda: (now := read_status(path)) is not None and len(now.peers) >= 2,
            lambda: f"both peers\n{(folder / 'started.out').read_text()}",
        )
        status = read_status(path)
        assert status is not None
        old.wait_subscriber(OLD, status.peer)
        new.wait_subscriber(NEW, status.peer)
        yield Running(kiln, prefix)
    finally:
        end(process)


def heard(peer: ForeignPeer, topic: str) -> list[str]:
    return [json.loads(each.data)["batch"] for each in peer.received if each.topic == topic]


def test_during_duplicate_a_peer_on_either_topic_gets_every_batch_once(
    js_peer: NewPeer, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    old, new = js_peer(), js_peer()
    with bridge(broker, tmp_path / "duplicate", old, new, {"KILN_TRANSITION__MODE": "duplicate"}) as running:
        cids = running.write(20)
        old.wait_received(20, OLD)
        new.wait_received(20, NEW)
        receipts = running.receipts(40)
    assert sorted(heard(old, OLD)) == sorted(heard(new, NEW)) == sorted(cids)
    assert sorted((each.batch_cid, each.topic) for each in receipts) == sorted(
        (cid, topic) for cid in cids for topic in (OLD, NEW)
    )
    assert all(each.error is None for each in receipts)


def test_at_the_cutover_nothing_is_lost_and_nothing_is_said_twice(
    js_peer: NewPeer, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    for lead in (15, 60, 225):
        old, new = js_peer(), js_peer()
        moment = datetime.now(UTC) + timedelta(seconds=lead)
        settings = {"KILN_TRANSITION__AT": moment.isoformat()}
        with bridge(broker, tmp_path / f"cutover{lead}", old, new, settings) as running:
            cids = running.write(2)
            running.receipts(2)
            if datetime.now(UTC) >= moment:
                continue  # the machine was too slow to publish before that moment: take a later one
            soon = moment - timedelta(seconds=2)
            wait_until(lambda: datetime.now(UTC) > soon, "two seconds before", 2 * lead)  # noqa: B023 – awaited at once
            while datetime.now(UTC) < moment + timedelta(seconds=2):  # on both sides of it
                cids += running.write(2)
            receipts = running.receipts(len(cids))
            before = [each.batch_cid for each in receipts if each.topic == OLD]
            after = [each.batch_cid for each in receipts if each.topic == NEW]
            old.wait_received(len(before), OLD)
            new.wait_received(len(after), NEW)
            break
    else:
        pytest.fail("no bridge published within 225 s of its start")
    assert before
    assert after
    assert sorted(before + after) == sorted(cids)
    assert heard(old, OLD) == before
    assert heard(new, NEW) == after
