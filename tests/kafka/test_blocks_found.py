"""A Kubo that is a gossip peer of the bridge and nothing else to us: it fetches every block that the bridge announces.

The real bridge with a real broker; the bridge serves the blocks itself, or another Kubo does. Needs `ipfs` on the PATH,
or named by KILN_TEST_KUBO; skips where there is none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
import trio

from kafka import KafkaProducer
from kiln.conf.process.files import ensure_password
from kiln.conf.settings.model import EMBEDDED_USER
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.schemas.kafka.records import BatchRecord, SeparatorRecord, encode
from kiln.schemas.kafka.topics import TOPICS
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.pubsub import write_update
from kiln.schemas.wire.topics import Separator, encode_separator_value, format_topic
from kit.awaiting import wait_until
from kit.batch_blocks import write_blocks
from kit.bridge_alone import BridgeAlone
from kit.broker_access import client, security
from kit.foreign_peer import NewPeer
from kit.kubo_daemon import Daemon, program

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

STREAM = "kjzl6kcym7w8y7i5ugaq9a3vlm771v8s5m7f1zcsvrkzgjbwe2gh1vh6ab2m2ts"
SEPARATORS = [SeparatorRecord("model", encode_separator_value(bytes([1, number]))) for number in range(10)]
BATCHES = 40


def batch(number: int) -> BatchRecord:
    (block,) = write_blocks({STREAM: [compute_cid(b"tip %d" % number)]})
    closed = time.time_ns() // 1_000
    separator = SEPARATORS[number % len(SEPARATORS)]
    return BatchRecord("local-test", "LIVE", separator, block.cid, block.data, closed - 1_000_000, closed)


@pytest.fixture
def neighbour(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(program(), tmp_path / "neighbour")
    yield daemon
    daemon.stop()


def make_topics(broker: EmbeddedBroker, prefix: str) -> None:
    days = dict.fromkeys(TOPICS, timedelta(days=1))
    ensure_topics(broker.address, prefix, {"updates": 1}, days, client_options=security(broker.address))


def start_bridge(broker: EmbeddedBroker, prefix: str, state: Path, **settings: str) -> BridgeAlone:
    return BridgeAlone(
        state,
        KILN_KAFKA__BOOTSTRAP=broker.address,
        KILN_KAFKA__PREFIX=prefix,
        KILN_KAFKA__SECURITY_PROTOCOL="SASL_PLAINTEXT",
        KILN_KAFKA__SASL_MECHANISM="PLAIN",
        KILN_KAFKA__SASL_USERNAME=EMBEDDED_USER,
        KILN_KAFKA__SASL_PASSWORD=ensure_password(broker.state / "broker"),
        **settings,
    )


def write_batches(broker: EmbeddedBroker, prefix: str, batches: list[BatchRecord]) -> None:
    producer = KafkaProducer(**client(broker.address), acks="all")
    for each in batches:
        producer.send(f"{prefix}batches", value=encode(each), partition=0)
    producer.close()


@pytest.fixture(params=["self", "kubo"])
def bridge(
    request: pytest.FixtureRequest, neighbour: Daemon, broker: EmbeddedBroker, prefix: str, tmp_path: Path
) -> Iterator[BridgeAlone]:
    ours = None
    if request.param == "kubo":
        ours = Daemon(program(), tmp_path / "ours")
        ours.start().close()
    make_topics(broker, prefix)
    api = "self" if ours is None else ours.url
    alone = start_bridge(broker, prefix, tmp_path / "state", KILN_IPFS__API=api, KILN_PUBLISH__ENABLED="true")
    yield alone
    alone.kill()
    if ours is not None:
        ours.stop()


def connected(daemon: Daemon) -> set[str]:
    peers = httpx.post(f"{daemon.url}/api/v0/swarm/peers", timeout=60).json()["Peers"] or []
    return {each["Peer"] for each in peers}


async def heard_and_fetched(daemon: Daemon, count: int) -> set[str]:
    """The CIDs of so many batches that the daemon hears; it fetches the block of each within 20 s."""
    cids: set[str] = set()
    enough = trio.Event()

    async def listen(topic: str) -> None:
        async for data in daemon.hear(topic):
            cid = str(json.loads(data)["batch"])
            async with httpx.AsyncClient() as kubo:
                asked = {"arg": cid, "timeout": "20s"}
                answer = await kubo.post(f"{daemon.url}/api/v0/block/get", params=asked, timeout=60)
            assert answer.status_code == 200, (cid, answer.text)
            cids.add(cid)
            if len(cids) == count:
                enough.set()

    with trio.fail_after(90):
        async with trio.open_nursery() as nursery:
            for separator in SEPARATORS:
                topic = format_topic("local-test", Separator(separator.key, separator.value))
                nursery.start_soon(listen, topic)
            await enough.wait()
            nursery.cancel_scope.cancel()
    return cids


def test_a_gossip_peer_fetches_every_announced_block(
    bridge: BridgeAlone, neighbour: Daemon, broker: EmbeddedBroker, prefix: str
) -> None:
    itself = bridge.until(lambda told: bool(told.addresses), "an address").ipfs.startswith("the bridge itself")
    batches = [batch(number) for number in range(BATCHES)]
    write_batches(broker, prefix, batches)
    neighbour.start().close()
    neighbour.connect(bridge.until(lambda told: bool(told.addresses), "an address").addresses[0])
    assert trio.run(heard_and_fetched, neighbour, BATCHES) == {each.batch_cid for each in batches}
    told = bridge.until(lambda told: told.publisher.published == BATCHES, "receipts of all")
    assert (told.ipfs_node.gossip_peers, told.ipfs_node.gossip_connected, told.publisher.failed) == (1, 1, 0)
    if itself:
        assert connected(neighbour) == {told.peer}
        bridge.until(lambda told: told.ipfs_node.blocks_sent == BATCHES, "the count of blocks")
        return
    assert ", without routing, 1 of 1 gossip peers connected" in told.ipfs
    ours = (connected(neighbour) - {told.peer}).pop()
    # a peer that leaves the gossip is none any more
    httpx.post(f"{neighbour.url}/api/v0/swarm/disconnect", params={"arg": f"/p2p/{told.peer}"}, timeout=60)
    told = bridge.until(lambda told: not told.ipfs_node.gossip_peers, "its end as a neighbour")
    wait_until(lambda: ours not in connected(neighbour), "the end of the connection", 60)


def test_a_bridge_with_default_settings_announces_no_batch(
    broker: EmbeddedBroker, prefix: str, tmp_path: Path, js_peer: NewPeer
) -> None:
    make_topics(broker, prefix)
    one, two = js_peer(), js_peer()
    topic = format_topic("local-test", Separator(SEPARATORS[0].key, SEPARATORS[0].value))
    bridge = start_bridge(broker, prefix, tmp_path / "state", KILN_BRIDGE__BOOTSTRAP=f"{one.address},{two.address}")
    update = write_update(STREAM, cid_text(compute_cid(b"a tip")))
    try:
        told = bridge.until(lambda told: len(told.peers) == 2, "two peers")
        assert told.publisher.state == "off: set publish.enabled = true to announce batches"
        for peer in (one, two):
            peer.subscribe(topic)
            peer.wait_subscriber(topic, told.peer)
        write_batches(broker, prefix, [batch(0)])
        one.wait_mesh(topic, told.peer)
        one.publish_raw(topic, update)
        assert [each.data for each in two.wait_received(1, topic)] == [update], (
            "the bridge relays, and announces nothing"
        )
        bridge.stop()
        bridge = start_bridge(
            broker,
            prefix,
            tmp_path / "state",
            KILN_BRIDGE__BOOTSTRAP=f"{one.address},{two.address}",
            KILN_PUBLISH__ENABLED="true",
        )
        heard = [each.data for each in two.wait_received(2, topic)]
        assert json.loads(heard[1])["batch"] == batch(0).batch_cid
    finally:
        bridge.kill()
