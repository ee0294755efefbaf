"""`kiln bridge` while its broker is away: it starts, keeps what it hears, and hands it over when the broker comes."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trio
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient

from conftest import free_ports
from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.gossipsub.wire import encode
from kiln.bridge.libp2p.streams import get_swarm
from kiln.conf.process.files import ensure_password
from kiln.conf.process.logs import identify_problem
from kiln.conf.process.state_folder import claim_state_folder
from kiln.conf.settings.model import EMBEDDED_USER
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kit.awaiting import PATIENCE, wait_until
from kit.bridge_alone import BridgeAlone
from kit.broker_access import client
from kit.chance import new_key
from kit.descriptors import HangingBroker, descriptors, hanging_broker
from kit.node_town import call_at, message, raw_peer, subscription
from kit.service_links import ServicePort, injected

pytestmark = pytest.mark.kafka

SAID = [subscription(), *(message(number, new_key()) for number in range(1, 51))]


SERVICE_LINKS = injected("kiln-bridge", [ServicePort("gossip", 4811)])
"""what a kubelet sets for the Service of the chart"""


@pytest.fixture
def later(new_broker: Callable[..., EmbeddedBroker], tmp_path: Path) -> EmbeddedBroker:
    """A broker that does not run yet."""
    return new_broker(tmp_path / "broker")


@pytest.fixture
def bridge(later: EmbeddedBroker, tmp_path: Path) -> Iterator[BridgeAlone]:
    claim_state_folder(later.state)
    alone = BridgeAlone(
        tmp_path / "state",
        command=(sys.executable, "-m", "kiln.deploy.cli", "bridge"),
        KILN_KAFKA__BOOTSTRAP=later.address,
        KILN_KAFKA__SECURITY_PROTOCOL="SASL_PLAINTEXT",
        KILN_KAFKA__SASL_MECHANISM="PLAIN",
        KILN_KAFKA__SASL_USERNAME=EMBEDDED_USER,
        KILN_KAFKA__SASL_PASSWORD=ensure_password(later.state / "broker"),
        KILN_KAFKA__FRAMES_RETENTION_BYTES="100000000",
        KILN_KAFKA__OTHER_RETENTION_BYTES="0",
        KILN_MONITOR__LISTEN=f"127.0.0.1:{free_ports(1)[0]}",
        KILN_LOG__LEVEL="info",
        **SERVICE_LINKS,
    )
    yield alone
    alone.kill()


def readiness(bridge: BridgeAlone) -> list[str]:
    """Why the bridge is not ready, by its monitor."""
    return list(httpx.get(f"http://{bridge.listen}/ready", timeout=PATIENCE).json()["reasons"])


def in_topic(address: str) -> list[bytes]:
    """What peers said, of the frames there."""
    consumer = KafkaConsumer(**client(address), consumer_timeout_ms=5_000)
    consumer.assign([TopicPartition("kiln.frames", each) for each in consumer.partitions_for_topic("kiln.frames")])
    consumer.seek_to_beginning()
    frames = [Frame.FromString(record.value) for record in consumer]
    consumer.close()
    return [frame.payload for frame in frames if frame.direction == Frame.IN and frame.payload]


def test_it_starts_and_spools_and_hands_over(later: EmbeddedBroker, bridge: BridgeAlone) -> None:
    address = bridge.until(lambda status: bool(status.addresses), "the bridge listens").addresses[0]

    async def talk() -> None:
        async with raw_peer() as host:
            stream = await call_at(host, address)
            await stream.write(b"".join(map(encode, SAID)))
            await trio.to_thread.run_sync(
                bridge.until, lambda status: status.spool.spooled >= len(SAID), "all is in the spool"
            )
            for conn in get_swarm(host).get_connections():  # a host that is cancelled leaves them open
                await conn.close()

    trio.run(talk)
    bridge.until(lambda status: not status.peers, "the peer is gone")
    status = bridge.until(lambda status: bool(status.errors), "the status says what is wrong")
    assert status.spool.acknowledged == 0
    assert any("wait" in error and "Kafka" in error for error in status.errors), status.errors
    with later:
        bridge.until(lambda status: status.spool.waiting == 0, "all is handed over")
        assert in_topic(later.address) == SAID
        names = ("frames", "updates", "batches")
        with KafkaAdminClient(**client(later.address)) as admin:
            resources = [ConfigResource(ConfigResourceType.TOPIC, f"kiln.{name}") for name in names]
            told = admin.describe_configs(resources, config_filter="all")["topic"]
        kept = [told[f"kiln.{name}"]["retention.bytes"]["value"] for name in names]
        assert kept == ["50000000", str(4 << 30), "-1"]  # of each of two partitions, two, and one
        wait_until(lambda: readiness(bridge) == [], "the bridge is ready")
        assert later.pid is not None
        os.kill(later.pid, signal.SIGKILL)
        wait_until(lambda: any("the broker does not answer" in why for why in readiness(bridge)), "it is not ready")
        bridge.until(lambda status: any("Kafka fails" in error for error in status.errors), "the broker is missed")
        code, said = bridge.stop()
    assert code == 0, said
    problems = [identify_problem(each) for each in re.findall(r'event="problem" error="(.*)"$', said, re.M)]
    resolved = [identify_problem(each) for each in re.findall(r'event="problem resolved" error="(.*)"$', said, re.M)]
    assert not Counter(problems) - Counter(resolved) - Counter(set(problems)), said  # none comes twice without an end
    assert all(number <= 2 for number in Counter(problems).values()), said  # before the broker came, and after it went
    assert f"no broker at {later.address}" in said
    assert f"using the broker at {later.address}" in said
    assert said.count("enableServiceLinks: false") == 1
    assert all(name in said for name in SERVICE_LINKS)


def test_it_opens_no_more_and_more_descriptors_while_every_connection_fails(tmp_path: Path) -> None:
    def most_until(calls: int) -> int:
        """The most descriptors that the bridge has open until so many connections have failed."""
        seen: list[int] = []

        def are_made(broker: HangingBroker = broker) -> bool:
            seen.append(descriptors(bridge.process.pid))
            return broker.calls >= calls

        wait_until(are_made, f"{calls} connections", 180)
        return max(seen)

    with hanging_broker() as broker:
        bridge = BridgeAlone(
            tmp_path / "state",
            KILN_KAFKA__BOOTSTRAP=broker.address,
            KILN_PUBLISH__ENABLED="true",
            KILN_IPFS__FETCH="true",
        )
        try:
            most_until(150)
            first = most_until(250)  # a client makes dozens before it gives up
            most_until(500)
            assert most_until(600) <= first + 4
        finally:
            bridge.kill()
