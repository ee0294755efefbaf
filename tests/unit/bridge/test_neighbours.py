"""Whom the IPFS node is connected to: gossip peers that speak bitswap, and announcers; what its routing is told."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from multiaddr import Multiaddr

from kiln.bridge.app.neighbours import select_bitswap_peers
from kiln.bridge.gossipsub.effects import PeerView
from kiln.bridge.ipfs.blocks import BlockStoreUnavailableError
from kiln.bridge.ipfs.kubo import KuboError, NoRoutingError
from kiln.bridge.ipfs.neighbours import AT_ONCE, BITSWAP, MOST, MOST_ANNOUNCERS, BitswapPeer, BitswapPeers
from kiln.bridge.ipfs.providing import MOST as MOST_BLOCKS
from kiln.bridge.ipfs.providing import BlockProvider
from kiln.bridge.libp2p.host import Node
from kiln.schemas.wire.identity import compute_peer_id, peer_bytes, peer_text
from kit.awaiting import wait_until
from kit.chance import new_key

OWN = "ours"


def gossip(*names: str) -> list[BitswapPeer]:
    return [BitswapPeer(name, (f"/ip4/192.0.2.1/tcp/{number}",)) for number, name in enumerate(names, 1)]


def dial(near: BitswapPeers, now: float, *connected: str) -> list[str]:
    return [each.peer for each in near.select_to_dial(OWN, connected, now)]


# ---------------------------------------------------------------- neighbours


def test_a_gossip_peer_is_dialled_where_it_listens_and_not_again_while_connected() -> None:
    near = BitswapPeers()
    assert near.set_gossip(gossip("a", OWN))
    (one,) = near.select_to_dial(OWN, (), 0.0)
    assert one.dialled == ("/ip4/192.0.2.1/tcp/1/p2p/a",)
    near.dialled("a", True, 0.0)
    assert (near.gossip_peers, near.connected) == (2, 1)
    assert dial(near, 1.0, "a") == []
    assert dial(near, 2.0) == ["a"], "the connection was lost"
    assert not near.set_gossip(gossip("a", OWN))


def test_a_peer_that_does_not_answer_is_dialled_less_and_less_often() -> None:
    near = BitswapPeers()
    near.set_gossip(gossip("a"))
    dialled, now = [], 0.0
    while now < 2_000:
        if dial(near, now):
            near.dialled("a", False, now)
            dialled.append(now)
        now += 1
    pauses = [later - sooner for sooner, later in pairwise(dialled)]
    assert pauses[:3] == [5, 10, 20]
    assert max(pauses) == 300
    assert dial(near, now, "a") == []  # it came by itself
    assert dial(near, now) == ["a"], "so it counts as any other again"


def test_who_leaves_the_gossip_is_hung_up_on_unless_the_node_had_the_connection_before() -> None:
    near = BitswapPeers()
    near.set_gossip(gossip("a", "b"))
    assert dial(near, 0.0, "b") == ["a"]
    near.dialled("a", True, 0.0)
    assert near.select_to_disconnect(OWN, ("a", "b")) == []
    near.set_gossip([])
    assert near.select_to_disconnect(OWN, ("a", "b")) == ["a"]
    assert near.select_to_disconnect(OWN, ("a", "b")) == []


def test_there_are_no_more_than_the_bound_and_the_rest_is_counted() -> None:
    near = BitswapPeers()
    near.set_gossip(gossip(*(f"peer {number}" for number in range(MOST + 5))))
    connected: set[str] = set()
    while asked := dial(near, 0.0, *connected):
        assert len(asked) <= AT_ONCE
        connected.update(asked)
    assert len(connected) == near.connected == MOST
    assert near.left_out == 5


def test_an_announcer_comes_first_for_a_while() -> None:
    near = BitswapPeers()
    near.set_gossip(gossip("a", "b"))
    assert not near.add_announcer("b", 0.0)
    assert near.add_announcer("stranger", 0.0)
    assert dial(near, 0.0) == ["stranger", "b", "a"]
    assert near.select_to_dial(OWN, (), 0.0)[0].dialled == ("/p2p/stranger",), "the node may know where it is"
    assert dial(near, 599.0) == ["stranger", "b", "a"]
    assert dial(near, 600.0) == ["a", "b"]
    for number in range(2 * MOST_ANNOUNCERS):
        near.add_announcer(f"many {number}", 600.0)
    near.set_gossip([])
    first = dial(near, 600.0)
    assert first[0] == f"many {2 * MOST_ANNOUNCERS - 1}"
    assert dial(near, 600.0, *(f"many {number}" for number in range(MOST_ANNOUNCERS, 2 * MOST_ANNOUNCERS))) == []


# ---------------------------------------------------------------- which gossip peers


class Connections(Node):
    """Peers, each connected from an IP address, and what it says of itself."""

    def __init__(self) -> None:
        self.peers: dict[bytes, tuple[str, tuple[str, ...], list[bytes]]] = {}
        self.views: dict[bytes, PeerView] = {}

    def add(
        self, remote: str, *listens: str, speaks: str = BITSWAP[0], score: float = 0.0, outbound: bool = False
    ) -> str:
        peer = compute_peer_id(new_key())
        self.peers[peer] = (remote, (speaks,), [Multiaddr(each).to_bytes() for each in listens])
        self.views[peer] = PeerView("/meshsub/1.2.0", frozenset(), score, outbound)
        return peer_text(peer)

    def peers_speaking(self, *protocols: str) -> list[tuple[bytes, list[bytes]]]:
        return [(peer, listens) for peer, (_, speaks, listens) in self.peers.items() if set(speaks) & set(protocols)]

    def remote_address(self, peer: bytes) -> tuple[str, int] | None:
        return self.peers[peer][0], 4001


def test_those_that_speak_bitswap_are_neighbours_the_dialled_first() -> None:
    node = Connections()
    inbound = node.add("192.88.1.1", "/ip4/192.88.1.1/tcp/1", speaks="/ipfs/bitswap/1.1.0")
    node.add("192.88.1.2", "/ip4/192.88.1.2/tcp/1", speaks="/meshsub/1.2.0")
    node.add("192.88.1.3", "/ip4/192.88.1.3/tcp/1", score=-1.0)
    node.add("192.88.1.4", "/dns4/a.example/tcp/1", "/ip4/192.88.1.4/udp/1/quic-v1")
    dialled = node.add("192.88.1.5", "/ip4/192.88.1.5/tcp/1", "/ip4/192.88.1.5/tcp/2", outbound=True)
    assert select_bitswap_peers(node, node.views) == [
        BitswapPeer(dialled, ("/ip4/192.88.1.5/tcp/1", "/ip4/192.88.1.5/tcp/2")),
        BitswapPeer(inbound, ("/ip4/192.88.1.1/tcp/1",)),
    ]
    node.add("192.88.1.6", "/ip4/192.88.1.6/tcp/1")
    del node.views[peer_bytes(inbound)]  # connected, and no gossip peer: a server of the DHT
    assert len(select_bitswap_peers(node, node.views)) == 2


def test_a_stranger_cannot_have_the_ipfs_node_knock_on_doors_inside() -> None:
    inside = ("/ip4/127.0.0.1/tcp/5001", "/ip4/10.0.0.1/tcp/80", "/ip4/169.254.169.254/tcp/80")
    node = Connections()
    node.add("192.88.1.1", *inside)
    assert select_bitswap_peers(node, node.views) == []
    node.add("10.0.0.9", *inside)
    assert [each.addresses for each in select_bitswap_peers(node, node.views)] == [("/ip4/10.0.0.1/tcp/80",)]
    node.add("127.0.0.1", *inside)
    assert select_bitswap_peers(node, node.views)[1].addresses == inside[:2]


# ---------------------------------------------------------------- providing


def test_blocks_are_provided_once_behind_the_back_of_who_asks() -> None:
    gate, told = threading.Event(), list[str]()

    def provide(cid: str) -> None:
        gate.wait(60)
        told.append(cid)

    providing = BlockProvider(provide)
    for cid in ("one", "two", "one", "three"):
        providing.add(cid)  # returns although nothing is provided yet
    gate.set()
    wait_until(lambda: providing.provided == 3, "all provided")
    assert sorted(told) == ["one", "three", "two"]
    providing.close()


def test_what_is_too_much_is_left_out_the_oldest_first() -> None:
    gate, told = threading.Event(), list[str]()

    def provide(cid: str) -> None:
        gate.wait(60)
        told.append(cid)

    providing = BlockProvider(provide)
    for number in range(MOST_BLOCKS + 50):
        providing.add(str(number))
    left_out = providing.unprovided
    assert 48 <= left_out <= 50
    gate.set()
    wait_until(lambda: providing.provided == MOST_BLOCKS + 50 - left_out, "the rest provided")
    assert str(MOST_BLOCKS + 49) in told
    providing.close()


@pytest.mark.parametrize("error", [KuboError("cannot provide, no connected peers"), BlockStoreUnavailableError("gone")])
def test_what_cannot_be_provided_is_tried_again_and_counted(error: Exception) -> None:
    calls = list[str]()

    def provide(cid: str) -> None:
        calls.append(cid)
        if cid == "never" or len(calls) < 2:
            raise error

    providing = BlockProvider(provide, pause=0.01)
    providing.add("later")
    wait_until(lambda: providing.provided == 1, "the second try")
    providing.add("never")
    wait_until(lambda: providing.unprovided == 1, "the last try")
    assert calls == ["later"] * 2 + ["never"] * 3
    providing.close()


def test_a_node_that_does_not_route_is_not_asked_again() -> None:
    calls = list[str]()

    def provide(cid: str) -> None:
        calls.append(cid)
        raise NoRoutingError("404")

    providing = BlockProvider(provide)
    providing.add("one")
    wait_until(lambda: not providing.routes, "that it does not route")
    providing.add("two")
    assert (calls, providing.unprovided) == (["one"], 0)
    providing.close()
