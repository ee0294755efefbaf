"""Simulated networks of routers: every message reaches everybody once, whatever happens."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kiln.bridge.gossipsub.effects import PeerID, Send
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.protocols import VERSIONS
from kiln.bridge.gossipsub.router import Router
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kit.scripted_peers import (
    MESHSUB,
    T,
    check,
    gossip_id,
    message,
    peer,
)


class Network:
    """Routers joined by links that keep order and lose nothing; each tick delivers all that is under way."""

    def __init__(self, count: int, seed: int, options: RouterOptions | None = None) -> None:
        self.options = options or RouterOptions()
        self.now = 0.0
        self.routers = [
            Router(peer(number), self.options, Random(seed * 1000 + number), check) for number in range(count)
        ]
        self.links: set[tuple[int, int]] = set()
        self.queue: deque[tuple[int, Send]] = deque()
        self.delivered: Counter[tuple[int, bytes]] = Counter()
        self.copies = 0

    def number(self, of: PeerID) -> int:
        return int(of[-3:])

    def put(self, source: int, sends: Iterable[Send]) -> None:
        self.queue.extend((source, send) for send in sends)

    def connect(self, a: int, b: int, protocol: str) -> None:
        if a == b or (a, b) in self.links or (b, a) in self.links:
            return
        self.links.add((a, b))
        self.put(a, self.routers[a].add_peer(peer(b), protocol, True, self.now))
        self.put(b, self.routers[b].add_peer(peer(a), protocol, False, self.now))

    def disconnect(self, a: int, b: int) -> None:
        self.links.discard((a, b))
        self.routers[a].remove_peer(peer(b), self.now)
        self.routers[b].remove_peer(peer(a), self.now)

    def linked(self, a: int, b: int) -> bool:
        return (a, b) in self.links or (b, a) in self.links

    def drain(self) -> None:
        while self.queue:
            source, send = self.queue.popleft()
            target = self.number(send.peer)
            if not self.linked(source, target):
                continue
            # over the wire: nothing shared
            rpc = RPC.FromString(send.rpc.SerializeToString())
            self.copies += len(rpc.publish)
            sends, delivered, verdicts = self.routers[target].receive(peer(source), rpc, self.now)
            assert len(verdicts) == len(rpc.publish)
            for each in delivered:
                self.delivered[target, gossip_id(each.message)] += 1
            self.put(target, sends)

    def beat(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            for number, router in enumerate(self.routers):
                self.put(number, router.heartbeat(self.now))
            self.drain()

    def component(self, start: int, topic: str) -> set[int]:
        """Who can be reached over nodes that are on the topic."""
        reached, waiting = {start}, [start]
        while waiting:
            at = waiting.pop()
            for other, router in enumerate(self.routers):
                if other not in reached and self.linked(at, other) and topic in router.mesh:
                    reached.add(other)
                    waiting.append(other)
        return reached


@pytest.mark.parametrize("seed", [1, 2])
def test_thirty_nodes_of_all_versions_hear_every_message_once(seed: int) -> None:
    network = Network(30, seed)
    rng = Random(seed)
    for a in range(30):
        for b in rng.sample(range(30), 10):
            network.connect(a, b, rng.choice([*VERSIONS, MESHSUB, MESHSUB, MESHSUB]))
    for number, router in enumerate(network.routers):
        network.put(number, router.join(T))
    network.drain()
    network.beat(5)
    options = network.options
    for number, router in enumerate(network.routers):
        mesh = router.mesh[T]
        assert len(mesh) <= options.D_high + options.D_out
        candidates = sum(view.protocol != "/floodsub/1.0.0" for view in router.peers.values())
        assert len(mesh) >= min(options.D_low, candidates) or any(
            peer(number) in other.mesh[T] for other in network.routers
        )
    for count in range(60):
        author = rng.randrange(30)
        sent = message(count, author=peer(author), size=rng.choice([10, 2000]))
        network.put(author, network.routers[author].publish(sent, network.now))
        network.drain()
        if count % 5 == 0:
            network.beat()
        assert {key[0] for key in network.delivered if key[1] == gossip_id(sent)} == set(range(30)) - {author}
    network.beat(3)
    assert set(network.delivered.values()) == {1}
    assert all(router.counters["broken_promise"] == 0 for router in network.routers)
    assert all(view.score >= 0 for router in network.routers for view in router.peers.values())


def test_what_the_mesh_lost_comes_by_gossip() -> None:
    network = Network(12, 3)
    for a in range(12):
        for b in range(a):
            network.connect(a, b, MESHSUB)
    for number, router in enumerate(network.routers):
        network.put(number, router.join(T))
    network.drain()
    network.beat(3)
    sent = message(1, author=peer(0))
    first, *_ = network.routers[0].publish(sent, network.now)
    network.put(0, [first])
    # of all copies pushed only the first arrives
    while network.queue:
        source, send = network.queue.popleft()
        target = network.number(send.peer)
        sends, delivered, _ = network.routers[target].receive(peer(source), send.rpc, network.now)
        network.delivered.update((target, gossip_id(each.message)) for each in delivered)
        network.put(target, (each for each in sends if not each.rpc.publish))
    assert len(network.delivered) == 1
    network.beat(5)
    reached = {number for number, _ in network.delivered}
    outside = set(range(1, 12)) - {network.number(each) for each in network.routers[0].mesh[T]}
    assert outside <= reached
    assert set(network.delivered.values()) == {1}


class RandomNetwork(RuleBasedStateMachine):
    """Nodes of all versions connect, part, join, leave and publish; time passes."""

    TOPICS = (T, T + "/sep/model/kabc")
    nodes = st.integers(0, 7)
    topics = st.sampled_from(TOPICS)

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        # seen ids outlive any run of this machine
        self.options = RouterOptions(
            D=3, D_low=2, D_high=4, D_out=1, D_score=2, D_lazy=3, max_topics_per_peer=1, seen_horizon=1e6,
        )  # fmt: skip
        self.network = Network(8, seed, self.options)
        self.count = 0
        self.beaten = False

    def _done(self) -> None:
        self.network.drain()
        self.beaten = False

    @rule(a=nodes, b=nodes, protocol=st.sampled_from(list(VERSIONS)))
    def connect(self, a: int, b: int, protocol: str) -> None:
        self.network.connect(a, b, protocol)
        self._done()

    @rule(protocol=st.sampled_from(list(VERSIONS)), topic=topics)
    def everybody(self, protocol: str, topic: str) -> None:
        for a in range(8):
            for b in range(a):
                self.network.connect(a, b, protocol)
            self.network.put(a, self.network.routers[a].join(topic))
        self._done()

    @precondition(lambda self: self.network.links)
    @rule(pick=st.integers(0, 100))
    def disconnect(self, pick: int) -> None:
        links = sorted(self.network.links)
        self.network.disconnect(*links[pick % len(links)])
        self._done()

    @rule(a=nodes, topic=topics)
    def join(self, a: int, topic: str) -> None:
        self.network.put(a, self.network.routers[a].join(topic))
        self._done()

    @rule(a=nodes, topic=topics)
    def leave(self, a: int, topic: str) -> None:
        self.network.put(a, self.network.routers[a].leave(topic, self.network.now))
        self._done()

    @rule(times=st.integers(1, 20))
    def beat(self, times: int) -> None:
        self.network.beat(times)
        self.beaten = True

    @rule(a=nodes, topic=topics, size=st.sampled_from([1, 3000]))
    def publish(self, a: int, topic: str, size: int) -> None:
        network = self.network
        self.count += 1
        sent = message(self.count, topic, peer(a), size)
        reachable = network.component(a, topic)
        network.put(a, network.routers[a].publish(sent, network.now))
        network.drain()
        network.beat(10)
        got = {number for number, key in network.delivered if key == gossip_id(sent)}
        if topic in network.routers[a].mesh:
            assert got == reachable - {a}
        else:
            assert got <= {number for number, router in enumerate(network.routers) if topic in router.mesh}
        self.beaten = True

    @invariant()
    def nobody_hears_twice(self) -> None:
        assert not self.network.delivered or set(self.network.delivered.values()) == {1}

    @invariant()
    def nobody_is_held_to_be_bad(self) -> None:
        for router in self.network.routers:
            assert all(view.score >= 0 for view in router.peers.values()), dict(router.counters)

    @invariant()
    def meshes_are_of_connected_subscribers(self) -> None:
        for router in self.network.routers:
            peers = router.peers
            for topic, mesh in router.mesh.items():
                for each in mesh:
                    assert topic in peers[each].topics
                    assert peers[each].protocol != "/floodsub/1.0.0"
                if self.beaten:
                    assert len(mesh) <= self.options.D_high + self.options.D_out + self.options.opportunistic_peers + 7

    @invariant()
    def memory_is_bounded(self) -> None:
        for router in self.network.routers:
            sizes = router.sizes
            assert sizes["promises"] <= 7 * self.count
            assert sizes["backoff"] <= 7 * len(self.TOPICS)
            assert sizes["topics"] <= 7 * len(self.TOPICS)
            assert sizes["seen"] <= self.count


TestRandomNetwork = RandomNetwork.TestCase
TestRandomNetwork.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
