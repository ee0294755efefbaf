"""The bridge on networks of others, with the profiles of `conf/`.

The nodes are go-libp2p-pubsub with the options of Waku (a protocol of its own, unsigned messages, ids that are a sha256
of the data) and of Filecoin (ids that are a blake2b of the data).

KILN_TEST_ANY_NETWORK: seconds for which the nodes publish 50 messages a second with restarts of the bridge in between,
4 unless told.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kiln.conf.process.bridge_status import BridgeStatus
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import DEFAULT_FILE
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, FrameDecoder
from kiln.schemas.wire.message_id import parse_message_id_rule
from kit.bridge_alone import BridgeAlone
from kit.foreign_peer import ForeignPeer, ForeignPeerError, NewPeer, build_payload

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.network, pytest.mark.timeout(1800)]

SECONDS = float(os.environ.get("KILN_TEST_ANY_NETWORK", "4"))
RATE = 50.0  # messages a second, of all nodes together
ROUND = 60.0  # seconds between two restarts, at most
SIZE = 600


@dataclass(frozen=True)
class Network:
    """A profile of `conf/`, and what its nodes do."""

    name: str
    topic: str
    protocol: str


WAKU = Network("waku", "/waku/2/rs/0/1", "/vac/waku/relay/2.0.0")
FILECOIN = Network("filecoin", "/fil/blocks/testnetnet", "/meshsub/1.2.0")
networks = pytest.mark.parametrize("network", [WAKU, FILECOIN], ids=["waku", "filecoin"])


def profile(network: Network) -> Path:
    return DEFAULT_FILE.with_name(f"{network.name}.toml")


@contextmanager
def running(state: Path, network: Network, peers: list[ForeignPeer], in_mesh: int) -> Iterator[BridgeAlone]:
    """A bridge with the profile of the network, connected to the peers, of which so many are in its mesh."""
    bridge = BridgeAlone(
        state,
        KILN_CONFIG=str(profile(network)),
        KILN_NETWORK=network.name,
        KILN_BRIDGE__BOOTSTRAP=",".join(peer.address for peer in peers),
    )
    with ExitStack() as stack:
        stack.callback(bridge.kill)

        def is_ready(status: BridgeStatus) -> bool:
            known = sum(peer.topics > 0 for peer in status.peers)
            is_of_this_run = status.pid == bridge.process.pid
            return is_of_this_run and known == len(peers) and status.mesh.get(network.topic) == in_mesh

        status = bridge.until(is_ready, "the bridge knows the peers")
        for peer in peers:
            peer.wait_subscriber(network.topic, status.peer)
        yield bridge
        stack.pop_all()
    code, said = bridge.stop()
    assert code == 0, said


def decoded(bridge: BridgeAlone, network: Network) -> Iterator[DecodedMessage]:
    """All copies of messages in the frames that the bridge captured, as the query `archive` decodes them."""
    settings = Settings.model_validate(tomllib.loads(profile(network).read_text()))
    decoder = FrameDecoder(
        DecodeConfig(
            policies=settings.policy.networks,
            default_policy=settings.policy.default,
            ceramic=False,
            message_ids=parse_message_id_rule(settings.network.message_id),
        )
    )
    for number, frame in enumerate(bridge.frames()):
        for each in decoder.decode_frame(frame, 0, number):
            assert isinstance(each, DecodedMessage), each
            yield each


def check_capture(bridge: BridgeAlone, network: Network, published: Counter[bytes]) -> None:
    """Each message has one id in the frames, one id is of one message, and its bytes are those that were published."""
    by_id: dict[str, bytes] = {}
    for each in decoded(bridge, network):
        assert each.content.type == "DATA"
        assert each.topic == network.topic
        assert by_id.setdefault(each.message_id, each.envelope.data) == each.envelope.data
    assert Counter(by_id.values()) == published


def check_received(bridge: BridgeAlone, peer: ForeignPeer, expected: Counter[bytes]) -> None:
    """Wait until a peer has these messages, each once and no other."""
    with suppress(ForeignPeerError):  # what is missing says more
        peer.wait_received(expected.total(), timeout=60)
    received = Counter(each.data for each in peer.received)
    assert (expected - received, received - expected) == ({}, {}), bridge.status()


def check_scores(bridge: BridgeStatus, peers: list[ForeignPeer]) -> None:
    assert all(peer.score >= 0 for peer in bridge.peers), bridge.peers
    for peer in peers:
        assert all(score >= 0 for score in peer.lowest_scores().values()), peer.name


@networks
def test_each_message_is_relayed_and_captured_once_over_restarts(
    network: Network, go_pubsub_peer: NewPeer, tmp_path: Path
) -> None:
    """The bridge alone connects the two nodes."""
    peers = [go_pubsub_peer(network=network.name) for _ in range(2)]
    for peer in peers:
        peer.subscribe(network.topic)
    published = Counter[bytes]()
    rounds = max(2, round(SECONDS / ROUND))
    count = round(SECONDS / rounds * RATE / len(peers))
    for number in range(rounds):
        with running(tmp_path, network, peers, len(peers)) as bridge:
            outcomes = [
                peer.publishing(network.topic, count, rate=RATE / len(peers), size=SIZE, tag=f"{name}{number}")
                for name, peer in zip("ab", peers, strict=True)
            ]
            for name, outcome in zip("ab", outcomes, strict=True):
                assert outcome(SECONDS + 60).sent == count
                published.update(build_payload(f"{name}{number}", each, SIZE) for each in range(count))
            for peer in peers:
                check_received(bridge, peer, published)
            status = bridge.until(lambda status: sum(each.frames_in for each in status.peers) >= 2 * count, "frames")
            assert {peer.protocol for peer in status.peers} == {network.protocol}
            check_scores(status, peers)
    check_capture(bridge, network, published)


@networks
def test_messages_come_by_ihave_and_iwant_where_the_bridge_is_in_no_mesh(
    network: Network, go_pubsub_peer: NewPeer, tmp_path: Path
) -> None:
    """The mesh of a node has two places, which two other nodes take. The messages are those of another node, because a
    node may send its own to all."""
    peers = [go_pubsub_peer(network=network.name, degree="2") for _ in range(3)]
    near, far, other = peers
    for peer in peers:
        peer.subscribe(network.topic)
    for peer in (far, other):
        near.connect(peer)
        near.wait_subscriber(network.topic, peer)
        peer.wait_subscriber(network.topic, near)
    published = Counter([build_payload("far", each, SIZE) for each in range(40)])
    with running(tmp_path, network, [near], 0) as bridge:
        assert far.publish(network.topic, 40, rate=20, size=SIZE, tag="far").sent == 40

        def all_came(status: BridgeStatus) -> bool:
            return status.counters.get("delivered", 0) >= len(published)

        status = bridge.until(all_came, "the messages of the far node")
        assert status.counters["iwant_sent"] >= len(published)
        assert status.counters.get("broken_promise", 0) == 0
        check_scores(status, [near])
    check_capture(bridge, network, published)


def test_messages_of_a_kubo_are_captured_once_with_its_profile(go_peer: NewPeer, tmp_path: Path) -> None:
    network = Network("kubo-pubsub", "sensors", "/meshsub/1.1.0")
    kubo = go_peer()
    kubo.subscribe(network.topic)
    with running(tmp_path, network, [kubo], 1) as bridge:
        assert kubo.publish(network.topic, 20, rate=50, size=SIZE, tag="kubo").sent == 20
        status = bridge.until(lambda status: status.counters.get("delivered", 0) >= 20, "the messages of Kubo")
        assert [peer.protocol for peer in status.peers] == [network.protocol]
        assert all(peer.score >= 0 for peer in status.peers)
    check_capture(bridge, network, Counter([build_payload("kubo", each, SIZE) for each in range(20)]))
