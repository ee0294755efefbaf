"""Speed of the bridge's libp2p node. A peer in Rust (tests/network/rust) sends as fast as the node accepts.

Several variants of the node are measured. Each leaves out one more step, so the difference between two variants is the
CPU time of a step. The first variant puts frames into Kafka, as a bridge does; the others only count frames.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple, TypeVar
from unittest.mock import patch

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p import new_host
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2 as stock_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from bench.report import Finding, Ratio, Series, number
from bench.runs import BenchError, Extent, Say
from kiln.bridge.capture.sink import FrameSink
from kiln.bridge.capture.spool import Spool
from kiln.bridge.gossipsub.effects import Deliver, PeerID, Send
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.gossipsub.wire import OversizedRpc
from kiln.bridge.kafka.producers import ONLY_REFUSALS, open_producer
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.links import PubsubSession
from kiln.bridge.libp2p.options import NodeOptions
from kiln.bridge.libp2p.seqno import Seqno
from kiln.bridge.libp2p.traffic import Traffic
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.stack.kafka_broker import start_broker
from kiln.deploy.stack.ports import find_free_ports
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.wire.identity import Judgement, Verdict, check, compute_peer_id, peer_text
from kit.foreign_peer import ForeignPeer, ForeignPeerError, build_rust, rust_peer

TOPIC: Final = "/ceramic/local-bench"
FRAMES: Final = 20_000
UNIQUE: Final = 5_000
SIZE: Final = 300  # bytes
MESH: Final = 4
PATIENCE: Final = 60.0  # s
STOCK: Final = "stock py-libp2p"
RUST: Final = "a node in Rust"
_REPORT: Final = 250  # messages
# The Rust peer queues at most 5,000 messages for the node: they are published in portions, never that far ahead.
_PORTION: Final = 500
_AHEAD: Final = 2_500


T = TypeVar("T")


class Figures(NamedTuple):
    """Result of one run."""

    rate: float
    """messages per second"""
    cpu: float
    """CPU time of the node per message, µs"""
    frames: float
    """captured frames per message"""


class _Mute(Router):
    """Router that ignores published messages."""

    def receive(self, peer: PeerID, rpc: RPC, now: float) -> tuple[list[Send], list[Deliver], bytes]:
        return ([], [], b"") if rpc.publish else super().receive(peer, rpc, now)


def _count_unread(sink: _Counting) -> Callable[[Traffic, PubsubSession, bytes | OversizedRpc, bool], None]:
    """Make a `Traffic.process` that counts RPCs without reading them.

    Small RPCs (subscriptions, GRAFT) are still processed, because without these no peer would send messages.
    """
    process = Traffic.process

    def count(traffic: Traffic, session: PubsubSession, received: bytes | OversizedRpc, decode: bool = True) -> None:
        if isinstance(received, OversizedRpc) or len(received) < SIZE:
            process(traffic, session, received, decode)
        else:
            started = time.thread_time()
            sink.put(session.id, received)
            session.unpaid_cpu += time.thread_time() - started

    return count


KAFKA: Final = "into Kafka"
NODE: Final[Mapping[str, tuple[bool, type[Router], bool]]] = {
    KAFKA: (True, Router, True),
    "whole": (True, Router, True),
    "signatures not verified": (True, Router, False),
    "nor routed": (True, _Mute, False),
    "nor parsed and framed": (False, _Mute, False),
}
"""Variants of the node by name. In each tuple, the first item is true if the node parses and frames RPCs, the second
is its router, and the third is true if it verifies signatures."""


def measure(extent: Extent, say: Say) -> Finding:
    """Measure frames/s and CPU per frame with one peer, and unique messages/s with MESH peers in the mesh.

    Raises:
        BenchError: cargo is missing, or a peer or node failed.
    """
    mesh = f"{MESH} mesh peers"
    try:
        binary = build_rust()
        with TemporaryDirectory(prefix="kiln-bench-") as folder, _broker(Path(folder), say) as kafka:
            figures_by_name = _in_turn(binary, kafka, mesh, extent, say)
    except ForeignPeerError as error:
        raise BenchError(f"the peer in Rust: {error}") from error
    cost = {
        name: Series(f"CPU, {name}", "µs/frame", tuple(figures.cpu for figures in figures_by_name[name]))
        for name in (*NODE, STOCK, RUST)
    }
    rate = {
        name: Series(f"frames, {name}", "frames/s", tuple(figures.rate for figures in figures_by_name[name]))
        for name in (KAFKA, "whole", STOCK, RUST)
    }
    return Finding(
        "network",
        f"the bridge's node, which receives signed messages of {SIZE} bytes, one per frame, from a peer in Rust",
        (
            *rate.values(),
            *cost.values(),
            Series(f"unique messages, {mesh}", "messages/s", tuple(figures.rate for figures in figures_by_name[mesh])),
            Series(f"CPU, {mesh}", "µs/message", tuple(figures.cpu for figures in figures_by_name[mesh])),
            Series(
                f"frames in and out, {mesh}",
                "frames/message",
                tuple(figures.frames for figures in figures_by_name[mesh]),
            ),
        ),
        tuple(Ratio(f"{name}, of the whole", cost[name], cost["whole"]) for name in cost if name != "whole"),
        {**_sizes(extent), "peers and broker": "on the same cores"},
    )


def _sizes(extent: Extent) -> dict[str, int]:
    return {"frames": extent.of(FRAMES, least=1000), "unique messages": extent.of(UNIQUE, least=500)}


def _in_turn(binary: Path, kafka: Kafka, mesh: str, extent: Extent, say: Say) -> dict[str, list[Figures]]:
    frames, unique = _sizes(extent).values()
    figures_by_name: dict[str, list[Figures]] = {}
    for run in range(1, extent.runs + 1):
        for name in (*NODE, STOCK, RUST, mesh):
            if name == RUST:
                figures = _rust(binary, frames)
            elif name == mesh:
                figures = _play(binary, name, MESH, unique)
            else:
                figures = _play(binary, name, 1, frames, kafka)
            figures_by_name.setdefault(name, []).append(figures)
            say(f"run {run} of {extent.runs}: {name}: {number(figures.rate)}/s, {number(figures.cpu)} µs CPU each")
    return figures_by_name


@contextmanager
def _broker(folder: Path, say: Say) -> Iterator[Kafka]:
    port, controller_port = find_free_ports()
    settings = Settings(state=folder, kafka=Kafka(embedded_port=port, embedded_controller_port=controller_port))
    with start_broker(settings, say):
        yield settings.broker


def _play(binary: Path, side: str, peers: int, count: int, kafka: Kafka | None = None) -> Figures:
    """Measure a variant of the node. The node has its own process, so that its CPU time can be measured."""
    ours, theirs = get_context("spawn").Pipe()
    with TemporaryDirectory(prefix="kiln-bench-") as folder, ExitStack() as stack:
        rusts = [stack.enter_context(rust_peer(binary, Path(folder, f"rust{i}"))) for i in range(peers)]
        node = get_context("spawn").Process(
            target=_stock if side == STOCK else _node,
            args=(theirs, side if side in NODE else "whole", peers > 1, count, folder, kafka),
            daemon=True,
        )
        node.start()
        stack.callback(node.join)
        stack.callback(node.terminate)
        peer, address = _told(ours, str).split(" ")
        for index, rust in enumerate(rusts):
            rust.subscribe(TOPIC)
            rust.connect(address)
            for other in rusts[:index]:
                rust.connect(other)
        for index, rust in enumerate(rusts):
            rust.wait_mesh(TOPIC, peer)
            for other in rusts[:index]:
                rust.wait_mesh(TOPIC, other)
        sent = heard = turn = 0
        while heard < count:
            while sent < count + _REPORT and sent - heard < _AHEAD // peers:
                outcome = rusts[turn % peers].publish(TOPIC, _PORTION // peers, size=SIZE, tag=f"{turn}")
                if not outcome.sent:
                    raise BenchError(f"the peer in Rust cannot publish: {outcome.text}")
                sent += outcome.sent
                turn += 1
            heard = _told(ours, int)
        return _told(ours, Figures)


def _has(one: ForeignPeer, messages: int) -> bool:
    return len(one.received) >= messages


def _rust(binary: Path, count: int) -> Figures:
    """Measure the Rust peer as the receiver. Its CPU time includes the JSON that it writes for each message."""
    with TemporaryDirectory(prefix="kiln-bench-") as folder, ExitStack() as stack:
        source, target = [stack.enter_context(rust_peer(binary, Path(folder, f"rust{i}"))) for i in range(2)]
        for peer in (source, target):
            peer.subscribe(TOPIC)
        source.connect(target)
        source.wait_mesh(TOPIC, target)
        target.wait_mesh(TOPIC, source)
        began, busy, sent, turn = time.perf_counter(), _cpu_of(target), 0, 0
        while sent < count:
            sent += source.publish(TOPIC, _PORTION, size=SIZE, tag=f"{turn}").sent
            turn += 1
            due = sent - _AHEAD if sent < count else sent
            target.wait_for(partial(_has, target, due))
        return Figures(sent / (time.perf_counter() - began), (_cpu_of(target) - busy) / sent * 1e6, 1.0)


def _cpu_of(peer: ForeignPeer) -> float:
    fields = Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _told(pipe: Connection, kind: type[T]) -> T:
    if not pipe.poll(PATIENCE):
        raise BenchError(f"the measured node reported nothing for {PATIENCE:g} s. It may have lost messages")
    try:
        value = pipe.recv()
    except EOFError:
        raise BenchError("the process of the measured node has ended") from None
    assert isinstance(value, kind)
    return value


# ---------------------------------------------------------------- the node's process


class _Counting:
    """Sink of captured frames that counts them."""

    full = False
    frames = 0

    def put(self, connection: bytes, frame: bytes) -> None:
        self.frames += 1

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Do nothing: this sink is never full."""


class _Counter:
    """Counts messages, and reports the count and finally the `Figures` to the parent process.

    The first tenth of the messages is not measured.
    """

    def __init__(self, pipe: Connection, count: int) -> None:
        self._pipe = pipe
        self._first, self._last = count // 10, count
        self._marks: list[tuple[float, float, int]] = []
        self._count = 0

    def tick(self, frames: int) -> None:
        self._count += 1
        if self._count in (self._first, self._last):
            self._marks.append((time.perf_counter(), time.process_time(), frames))
        if self._count % _REPORT == 0 or self._count == self._last:
            self._pipe.send(self._count)
        if self._count == self._last:
            (began, busy, before), (ended, busier, after) = self._marks
            many = self._last - self._first
            self._pipe.send(Figures(many / (ended - began), (busier - busy) / many * 1e6, (after - before) / many))


class _Ticking(_Counting):
    """Sink that counts each frame as a message."""

    def __init__(self, counter: _Counter) -> None:
        self._counter = counter

    def put(self, connection: bytes, frame: bytes) -> None:
        super().put(connection, frame)
        self._counter.tick(self.frames)


class _IntoKafka(_Ticking):
    """Sink that counts frames and puts them into Kafka. It does not wait until the broker has the last ones."""

    def __init__(self, counter: _Counter, sink: FrameSink) -> None:
        super().__init__(counter)
        self._sink = sink

    def put(self, connection: bytes, frame: bytes) -> None:
        self._sink.put(connection, frame)
        super().put(connection, frame)


def _sink(side: str, counter: _Counter, by_message: bool, folder: str, kafka: Kafka | None) -> _Counting:
    if side == KAFKA:
        assert kafka is not None
        frames = FrameSink(
            lambda: open_producer(kafka.client_options(), ("kiln.frames",), ONLY_REFUSALS),
            "kiln.frames",
            Spool(Path(folder, "spool"), 1 << 30),
            64 << 20,
        )
        return _IntoKafka(counter, frames)
    return _Counting() if by_message else _Ticking(counter)


def _node(pipe: Connection, side: str, by_message: bool, count: int, folder: str, kafka: Kafka | None) -> None:
    is_parsed, router_type, verified = NODE[side]
    counter = _Counter(pipe, count)
    sink = _sink(side, counter, by_message, folder, kafka)
    key = Ed25519PrivateKey.generate()
    gossip = RouterOptions()
    verify = partial(check, policy=gossip.policy) if verified else lambda message: Judgement(Verdict.VALID)
    router = router_type(compute_peer_id(key), gossip, random.Random(0), verify)

    def hear(deliver: Deliver) -> None:
        counter.tick(sink.frames)

    async def main() -> None:
        options = NodeOptions(network="local-bench", listen=("/ip4/127.0.0.1/tcp/0",), gossip=gossip)
        seqno = Seqno(Path(folder, "seqno"), time.time_ns)
        node = Node(options, key, seqno, sink, hear if by_message else None, router=router)
        async with trio.open_nursery() as nursery:
            await nursery.start(node.run)
            node.join(TOPIC)
            pipe.send(f"{peer_text(node.peer)} {node.addresses[0]}")

    with nullcontext() if is_parsed else patch.object(Traffic, "process", _count_unread(sink)):
        trio.run(main)


def _stock(pipe: Connection, side: str, by_message: bool, count: int, folder: str, kafka: Kafka | None) -> None:
    """Run py-libp2p's own host and pubsub, without its default limit of 10 messages per second."""
    counter = _Counter(pipe, count)
    logging.getLogger("libp2p").addHandler(logging.NullHandler())

    def valid(source: ID, message: stock_pb2.Message) -> bool:
        counter.tick(0)
        return True

    async def main() -> None:
        host = new_host(muxer_preference="YAMUX")
        router = GossipSub(
            protocols=[TProtocol("/meshsub/1.1.0")],
            degree=6,
            degree_low=5,
            degree_high=12,
            heartbeat_interval=1,
            spam_protection_enabled=False,
        )
        pubsub = Pubsub(host, router)
        async with (
            host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]),
            background_trio_service(pubsub),
            background_trio_service(router),
        ):
            await pubsub.wait_until_ready()
            pubsub.set_topic_validator(TOPIC, valid, False)
            subscription = await pubsub.subscribe(TOPIC)
            pipe.send(f"{host.get_id()} {host.get_addrs()[0]}")
            while True:
                await subscription.get()

    trio.run(main)
