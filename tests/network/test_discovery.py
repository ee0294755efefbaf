"""Peers found through the DHT: our nodes through each other and through go-libp2p-kad-dht, and what liars achieve."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from kiln.bridge.gossipsub.wire import encode
from kiln.bridge.libp2p.addresses import NodeError
from kiln.bridge.libp2p.discovery import Discovery, DiscoveryOptions
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.kademlia import TcpAddress, build_announcement, topic_key
from kiln.bridge.libp2p.slots import InboundSlots
from kiln.bridge.libp2p.streams import make_host
from kiln.schemas.wire.identity import peer_bytes
from kit.chance import new_key
from kit.foreign_peer import ForeignPeer, NewPeer
from kit.node_town import LISTEN, OPTIONS, TOPIC, Running, Town, in_town

pytest_plugins = ["kit.foreign_fixtures"]

FAST = DiscoveryOptions(
    first_lookup_interval=0.2,
    lookup_interval=1.0,
    dial_timeout=1.0,
    query_timeout=3.0,
    subscribe_timeout=2.0,
    idle_connection_timeout=1.0,
    first_backoff=5.0,
    max_backoff=20.0,
    reprovide_interval=60.0,
)
HIDDEN = replace(FAST, serve=False)  # no DHT server: it can be found under its topics only
OTHER = "/ceramic/local-test/sep/model/kother"


T = TypeVar("T")


@dataclass
class Finder(Running):
    """A node with discovery beside it."""

    discovery: Discovery

    def count(self, what: str) -> int:
        return self.node.counters[f"discovery_{what}"]


async def finder(
    town: Town,
    *bootstrap: str,
    topics: tuple[str, ...] = (TOPIC,),
    options: DiscoveryOptions = FAST,
    listen: tuple[str, ...] = (LISTEN,),
    key: Ed25519PrivateKey | None = None,
) -> Finder:
    discoveries: list[Discovery] = []

    def beside(node: Node) -> None:
        discoveries.append(Discovery(node, options, random.Random(1)))

    one = await town.node(replace(OPTIONS, bootstrap=bootstrap, listen=listen), key, beside)
    for topic in topics:
        one.node.join(topic)
    town.nursery.start_soon(discoveries[0].run)
    return Finder(one.node, one.tape, one.heard, one.numbers, one.heard_at, discoveries[0])


async def server(town: Town, *bootstrap: str) -> Finder:
    """A node on no topic: to the others it is a DHT server only."""
    return await finder(town, *bootstrap, topics=())


def on_topic(one: Running, other: Running | ForeignPeer, topic: str = TOPIC) -> bool:
    return peer_bytes(other.peer) in one.node.router.subscribers(topic)


async def talk(town: Town, one: Running, other: Running, data: bytes, topic: str = TOPIC) -> None:
    await town.bell.until(lambda: on_topic(one, other, topic) and on_topic(other, one, topic))
    one.node.publish(topic, data)
    await town.bell.until(lambda: data in other.heard)


# ---------------------------------------------------------------- ours


def test_second_finds_first_through_the_key_of_the_topic(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        third = await server(town)
        first = await finder(town, third.address, options=HIDDEN)
        await town.bell.until(lambda: first.count("provided") > 0)
        stranger = await finder(town, third.address, topics=(OTHER,), options=HIDDEN)
        await town.bell.until(lambda: stranger.count("provided") > 0)
        second = await finder(town, third.address, options=HIDDEN)
        await talk(town, second, first, b"found")
        await talk(town, first, second, b"found too")
        await town.bell.until(lambda: second.count("found") + first.count("found") >= 1)
        assert not second.node.is_connected(peer_bytes(stranger.peer))

    in_town(tmp_path, test)


def test_one_that_does_not_listen_finds_and_is_not_announced(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        third = await server(town)
        first = await finder(town, third.address)
        await town.bell.until(lambda: first.count("provided") > 0)
        second = await finder(town, third.address, listen=())
        await talk(town, second, first, b"found")
        assert second.count("provided") == 0

    in_town(tmp_path, test)


def test_through_a_server_that_is_named_only(tmp_path: Path) -> None:
    """The record lies with all servers; the one that both began at goes, and they find each other all the same."""

    async def test(town: Town) -> None:
        third = await server(town)
        named = [await server(town, third.address) for _ in range(3)]
        await town.bell.until(lambda: all(each.discovery.sizes["servers"] >= 2 for each in named))  # each other
        # a server that a busy machine kept from answering is told again soon
        first = await finder(town, third.address, options=replace(FAST, reprovide_interval=5.0))
        await town.bell.until(lambda: first.count("provided") >= 4)
        begun = await finder(town, third.address, topics=(OTHER,))
        await town.bell.until(lambda: begun.discovery.sizes["servers"] >= 4)
        third.node.close()
        await town.bell.until(lambda: not begun.node.is_connected(peer_bytes(third.peer)))
        begun.node.join(TOPIC)
        await talk(town, begun, first, b"found")

    in_town(tmp_path, test)


def test_found_again_after_the_server_forgot(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        key = new_key()
        third = await finder(town, topics=(), key=key)
        port = third.address.split("/")[4]
        first = await finder(town, third.address)
        await town.bell.until(lambda: first.count("provided") == 1)
        third.node.close()
        await town.bell.until(lambda: not first.node.is_connected(peer_bytes(third.peer)))
        await finder(town, topics=(), key=key, listen=(f"/ip4/127.0.0.1/tcp/{port}",))
        await town.bell.until(lambda: first.count("provided") == 2)  # long before it is to be renewed

    in_town(tmp_path, test)


def test_announced_again_when_it_is_time(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        third = await server(town)
        first = await finder(town, third.address, options=replace(FAST, reprovide_interval=0.5))
        await town.bell.until(lambda: first.count("provided") >= 3)

    in_town(tmp_path, test)


def test_nobody_is_contacted_without_a_bootstrap_peer(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        alone = await finder(town)
        other = await finder(town, alone.address, topics=(OTHER,))
        await town.bell.until(lambda: other.count("provided") > 0)
        assert alone.count("queries_answered") > 0
        assert (alone.count("queries"), alone.count("dialled"), alone.count("provided")) == (0, 0, 0)

    in_town(tmp_path, test)


def test_found_peers_are_half_of_a_mesh(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        # on a busy machine, a handshake or a subscription takes longer than `FAST` waits, and so would the next one
        patient = replace(FAST, dial_timeout=30.0, query_timeout=30.0, subscribe_timeout=30.0)
        third = await server(town)
        crowd = [await finder(town, third.address, options=patient) for _ in range(6)]
        await town.bell.until(lambda: all(each.count("provided") > 0 for each in crowd))
        # all serve the DHT, so it comes to know them all: more than it may have in its mesh, and keeps what it may
        last = await finder(town, third.address, listen=(), options=patient)
        meshes = set[int]()

        def settled() -> bool:
            meshes.add(len(last.node.router.mesh[TOPIC]))
            return last.count("found") >= 4 and len(last.node.discovered) == 3

        await town.bell.until(settled)
        assert len(last.node.router.subscribers(TOPIC)) == 3 == max(meshes)
        third.node.join(TOPIC)
        await town.bell.until(lambda: len(last.node.router.mesh[TOPIC]) == 4)  # who was not found so has a place

    in_town(tmp_path, test)


@pytest.mark.parametrize("text", ["192.0.2.1:4811", "/dns4/example.org/tcp/4811", "/ip4/192.0.2.1/udp/4811/quic-v1"])
def test_what_cannot_be_announced_is_refused(tmp_path: Path, text: str) -> None:
    async def test(town: Town) -> None:
        with pytest.raises(NodeError, match=r"discovery\.announce.*such as /ip4/192.0.2.1/tcp/4811"):
            await finder(town, options=replace(FAST, announce=(text,)))

    in_town(tmp_path, test)


# ---------------------------------------------------------------- go-libp2p-kad-dht


async def named_by(peer: ForeignPeer, topic: str = TOPIC) -> dict[str, list[str]]:
    """Who provides a topic, and where, as a go node finds it."""
    answer = await told(peer.command, "providers", topic=topic)
    items = answer["items"]
    assert isinstance(items, list)
    return {each["peer"]: each["addrs"] for each in items}


async def told(what: Callable[..., T], *arguments: object, **fields: object) -> T:
    return await trio.to_thread.run_sync(partial(what, *arguments, **fields))


def test_go_finds_ours_and_ours_finds_go(go_kad_peer: NewPeer, tmp_path: Path) -> None:
    server, client = go_kad_peer(), go_kad_peer(mode="client")

    async def test(town: Town) -> None:
        await told(client.connect, server)
        first = await finder(town, server.address, options=HIDDEN)
        await town.bell.until(lambda: first.count("provided") == 1)

        found = await named_by(client)
        assert found == {first.peer: [first.address.partition("/p2p/")[0]]}
        await told(client.connect, f"{found[first.peer][0]}/p2p/{first.peer}")
        await town.bell.until(lambda: first.node.is_connected(peer_bytes(client.peer)))

        await told(client.command, "provide", topic=OTHER)
        second = await finder(town, server.address, topics=(OTHER,), options=HIDDEN)
        await told(client.wait_connected, second.peer)
        await town.bell.until(lambda: second.count("not_on_topic") > 0)  # it speaks no pubsub

    in_town(tmp_path, test)


def test_go_uses_our_server(go_kad_peer: NewPeer, tmp_path: Path) -> None:
    one, other = go_kad_peer(), go_kad_peer(mode="client")

    async def test(town: Town) -> None:
        third = await server(town)
        for each in (one, other):
            await told(each.connect, third.address)
        await told(one.command, "provide", topic=TOPIC)
        await town.bell.until(lambda: third.discovery.sizes["records"] == 1)
        assert list(await named_by(other)) == [one.peer]
        first = await finder(town, third.address, options=HIDDEN)
        await town.bell.until(lambda: first.count("provided") >= 1)
        assert first.peer in await named_by(other)
        said = "/ip4/127.0.0.1/tcp/1"  # behind NAT, say
        behind = await finder(town, third.address, options=replace(HIDDEN, announce=(said,)))
        await town.bell.until(lambda: behind.count("provided") >= 1)
        assert (await named_by(other))[behind.peer].count(said) == 1
        await told(one.wait_connected, first.peer)

    in_town(tmp_path, test)


@pytest.mark.parametrize("prefix", ["/ipfs", "/kiln-test"])
def test_ours_find_each_other_through_go(go_kad_peer: NewPeer, tmp_path: Path, prefix: str) -> None:
    go = go_kad_peer(prefix=prefix)

    async def test(town: Town) -> None:
        same = replace(HIDDEN, prefix=prefix)
        first = await finder(town, go.address, options=same)
        await town.bell.until(lambda: first.count("provided") > 0)
        another = await finder(town, go.address, options=replace(HIDDEN, prefix="/another"))
        second = await finder(town, go.address, options=same)
        await talk(town, second, first, b"found")
        assert not another.node.is_connected(peer_bytes(first.peer))

    in_town(tmp_path, test)


# ---------------------------------------------------------------- liars


async def provide(liar: BasicHost, at: Running, topic: str, addresses: list[bytes]) -> None:
    """As who is announced does it, with whatever addresses."""
    info = info_from_p2p_addr(Multiaddr(at.address))
    await liar.connect(info)
    stream = await liar.new_stream(info.peer_id, [TProtocol(FAST.protocol)])
    said = build_announcement(topic_key(topic), liar.get_id().to_bytes(), addresses)
    ping = Message(type=Message.PING)  # it is answered, when the other has been read
    await stream.write(encode(said.SerializeToString()) + encode(ping.SerializeToString()))
    await stream.read(64)
    await stream.close()


class Hole:
    """Listeners that accept connections and never say anything."""

    def __init__(self) -> None:
        self.open = self.most = self.count = 0

    async def listen(self, town: Town) -> int:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        town.nursery.start_soon(trio.serve_listeners, self._take, listeners)
        return int(listeners[0].socket.getsockname()[1])

    async def _take(self, stream: trio.SocketStream) -> None:
        self.open, self.count = self.open + 1, self.count + 1
        self.most = max(self.most, self.open)
        try:
            while await stream.receive_some():
                pass
        except trio.BrokenResourceError:
            pass
        finally:
            self.open -= 1


async def lie(at: Running, port: int | None, few: trio.CapacityLimiter) -> None:
    """A peer of its own that announces TOPIC; no port: it is where it says, but on no topic."""
    liar = make_host(new_key(), "liar", InboundSlots(10))
    async with liar.run([] if port else [Multiaddr(LISTEN)]):
        here = [each.to_bytes() for each in liar.get_transport_addrs()]
        async with few:
            await provide(liar, at, TOPIC, [TcpAddress("127.0.0.1", port).bytes] if port else here)
        if port is None:
            await trio.sleep_forever()


def test_fifty_lying_providers(tmp_path: Path) -> None:
    """They never answer, are not there, are somebody else, or are not on the topic."""

    async def test(town: Town) -> None:
        third, friend, victim = await server(town), await town.node(), await town.node()
        friend.node.join(OTHER)
        true = await finder(town, third.address, options=replace(HIDDEN, max_providers=0))  # it looks for nobody
        await town.bell.until(lambda: true.count("provided") > 0)
        hole = Hole()
        silent = [await hole.listen(town) for _ in range(20)]
        with trio.socket.socket() as taken:
            await taken.bind(("127.0.0.1", 0))  # and does not listen
            ports = silent + [taken.getsockname()[1]] * 10 + [int(victim.address.split("/")[4])] * 10
            few = trio.CapacityLimiter(8)
            for port in (*ports, *[None] * 10):
                town.nursery.start_soon(lie, third, port, few)
            await town.bell.until(lambda: third.discovery.sizes["records"] == 51)

            patient = replace(HIDDEN, first_backoff=60.0, max_backoff=60.0)
            seeker = await finder(
                town, third.address, friend.address, topics=(TOPIC, OTHER), options=patient, listen=()
            )
            await town.bell.until(lambda: on_topic(friend, seeker, OTHER))
            number = 0
            # on when it has found the true one: it wants more, and there are but liars
            while not on_topic(seeker, true) or seeker.count("lookups") < 24:
                number += 1
                friend.node.publish(OTHER, b"%d" % number)
                await town.until_heard(seeker, b"%d" % number)
                await trio.sleep(0.02)  # a steady talk, not all there is time for
            await talk(town, seeker, true, b"found")

            # meanwhile its other topic is as it was: a lookup holds up no message
            assert number > 2 * seeker.count("lookups")
            assert 0 < hole.count <= len(silent)
            assert hole.most <= 3  # half a mesh is wanted
            # ten of one address, twice, of which some are dialled; the others once each
            assert seeker.count("dialled") <= len(silent) + 2 * FAST.max_dials_per_address + 10 + 1
            assert seeker.discovery.sizes["failures"] <= 2 * 51
            assert victim.node._swarm.get_connections() == []
            assert seeker.node.router.peers[peer_bytes(friend.peer)].score >= 0
            await town.bell.until(lambda: len(seeker.node.discovered) == 1)

    in_town(tmp_path, test)
