"""`kiln backfill run --publish` from the command to the network: frames that no query ever read become batches of a
run, and a peer that others wrote hears each of them once, whatever runs hand over (decision 26)."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kiln.conf.process.bridge_status import read_status
from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.kafka.records import decode_publication
from kiln.schemas.wire.topics import Separator, format_topic
from kit.awaiting import wait_until
from kit.foreign_peer import ForeignPeer, NewPeer
from kit.kiln_process import Kiln, end
from kit.log_feed import frames_producer, kiln_beside
from kit.log_model import read_records

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.network, pytest.mark.timeout(900)]

NETWORK = "local-publish"
SECONDS = 8
WORLD = TrafficOptions(
    seed=7, network=NETWORK, separators=3, streams=30, without_separator=0, other_network=0, garbage=0, forged=0
)


def heard_frames(address: str, prefix: str) -> tuple[str, str, set[Separator]]:
    """Puts LIVE frames of the last minute into Kafka: the range in which they were heard, and their separators."""
    began = time.time_ns() - 60 * 10**9
    traffic = Traffic(WORLD, began, 20)
    with frames_producer(address, prefix) as producer:
        for frame in traffic.frames(duration_ns=SECONDS * 10**9):
            producer.send_record(frame.key, frame.value)
    assert traffic.ledger is not None
    named = [entry.separator for entry in traffic.ledger.messages.values() if entry.separator is not None]
    separators = {Separator(each.key, each.value) for each in named}
    low, high = (datetime.fromtimestamp(began / 1e9 + more, UTC).isoformat() for more in (-1, SECONDS + 5))
    return low, high, separators


def announced(peer: ForeignPeer) -> Counter[tuple[str, str]]:
    """How often the peer heard of each batch: topic and CID."""
    return Counter((each.topic, json.loads(each.data)["batch"]) for each in peer.received)


def batches(kiln: Kiln, run: str) -> set[tuple[str, str]]:
    """Topic and CID of each batch of a run."""
    rows = Lake(str(kiln.lake)).locate_run(run).open("batches").to_pyarrow_table().to_pylist()
    return {
        (format_topic(NETWORK, Separator(row["separator_key"], row["separator_value"])), row["batch_cid"])
        for row in rows
    }


def test_a_peer_hears_each_batch_of_a_run_once(
    broker: EmbeddedBroker, prefix: str, js_peer: NewPeer, tmp_path: Path
) -> None:
    peer = js_peer()
    settings = {
        "KILN_NETWORK": NETWORK,
        "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
        "KILN_BRIDGE__BOOTSTRAP": peer.address,
        "KILN_DISCOVERY__ENABLED": "false",
        "KILN_PUBLISH__ENABLED": "true",
        "KILN_IPFS__FETCH": "false",  # no peer has the geneses of synthetic streams
    }
    kiln = kiln_beside(broker.address, prefix, tmp_path / "state", settings)
    low, high, separators = heard_frames(broker.address, prefix)
    topics = [format_topic(NETWORK, each) for each in separators]
    for topic in topics:
        peer.subscribe(topic)
    bridge = kiln.start("bridge")
    try:
        told = kiln.state / "bridge" / "status.json"
        wait_until(lambda: bool((status := read_status(told)) and status.peers), "the bridge has a peer")

        def run(name: str, *more: str) -> int:
            command = ("backfill", "run", "--from", low, "--to", high, "--run", name, "--source", "kafka", *more)
            published = json.loads(kiln.run(*command, "--publish", "--json", timeout=300).stdout)["published"]
            assert isinstance(published, int)
            return published

        first = run("missed")
        made = batches(kiln, "missed")
        assert first == len(made) > len(topics)
        wait_until(lambda: announced(peer).keys() == made, lambda: f"{made}, not {announced(peer)}")
        assert run("missed") == 0, "the account says that the run was published"
        # no receipt is in the table yet, so the twin hands over the same once more; the last run's come after it
        assert run("twin") == first
        assert run("longer", "--window", "3s") > 0
        made |= batches(kiln, "longer")
        assert len(made) > first
        wait_until(lambda: announced(peer).keys() == made, lambda: f"{made}, not {announced(peer)}")
    finally:
        end(bridge)
    assert set(announced(peer).values()) == {1}
    records = read_records(broker.address, f"{prefix}publications").values()
    receipts = [decode_publication(value) for part in records for _, _, value in part]
    assert Counter((each.topic, each.batch_cid) for each in receipts) == announced(peer)
    assert {(each.peer_count, each.error) for each in receipts} == {(1, None)}
