"""Kiln's libp2p nodes on 127.0.0.1, and raw libp2p peers that send only what a test sends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from kiln.bridge.gossipsub.effects import Deliver
from kiln.bridge.gossipsub.protocols import VERSIONS
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.options import NodeOptions
from kiln.bridge.libp2p.seqno import Seqno
from kiln.bridge.libp2p.slots import InboundSlots
from kiln.bridge.libp2p.streams import make_host
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import compute_peer_id, message_id, peer_bytes, peer_text, sign
from kit.chance import new_key

TOPIC = "/ceramic/local-test"
LISTEN = "/ip4/127.0.0.1/tcp/0"
OPTIONS = NodeOptions(network="local-test", listen=(LISTEN,), redial_first=0.05, redial_most=0.2)
ENDS = (BaseLibp2pError, EOFError, trio.BrokenResourceError, trio.ClosedResourceError)
"""Errors of reading a stream after either side has closed it."""


class Bell:
    """Wakes tasks that wait for a condition. Each `ring` makes them check their conditions."""

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        self._rung.set()
        self._rung = trio.Event()

    async def until(self, true: Callable[[], bool], seconds: float = 120) -> None:
        with trio.fail_after(seconds):
            while not true():
                with trio.move_on_after(0.05):  # not everything that can be asked for rings
                    await self._rung.wait()


class Tape:
    """Sink of captured frames that keeps all frames. A test can set `full`."""

    def __init__(self, bell: Bell) -> None:
        self.frames: list[Frame] = []
        self.full = False
        self._bell = bell
        self._callbacks: list[Callable[[], None]] = []

    def put(self, connection: bytes, frame: bytes) -> None:
        read = Frame.FromString(frame)
        assert read.connection == connection
        self.frames.append(read)
        self._bell.ring()

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def make_room(self) -> None:
        self.full = False
        for callback in self._callbacks:
            callback()

    def payloads(self, direction: int) -> list[bytes]:
        return [f.payload for f in self.frames if f.direction == direction and f.payload]


class Numbers(Seqno):
    """A `Seqno` that records the seqnos that it returns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, trio_clock_ns)
        self.given: list[int] = []

    def next(self) -> int:
        self.given.append(super().next())
        return self.given[-1]


@dataclass
class Running:
    """A running node, with its captured frames, and its delivered messages with times in seconds of trio's clock."""

    node: Node
    tape: Tape
    heard: list[bytes]
    numbers: Numbers
    heard_at: list[float]

    @property
    def address(self) -> str:
        return self.node.addresses[0]

    @property
    def peer(self) -> str:
        return peer_text(self.node.peer)

    @property
    def published(self) -> list[str]:
        """Ids of the signed messages that the node has published, from its seqnos."""
        return [f"{self.peer}/{number:016x}" for number in self.numbers.given]

    def rpcs(self, direction: int, peer: str = "") -> list[RPC]:
        """Return the captured RPCs of a direction, of all peers or of one."""
        wanted = peer_bytes(peer) if peer else b""
        return [
            RPC.FromString(f.payload)
            for f in self.tape.frames
            if f.direction == direction and f.payload and (not wanted or f.remote_peer == wanted)
        ]

    def captured(self, direction: int, peer: str = "") -> list[str]:
        """Return the ids of the messages in captured frames, one for each copy."""
        return [message_id(m) for rpc in self.rpcs(direction, peer) for m in rpc.publish]


class Town:
    """Starts the nodes of a test in its nursery."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self.nursery = nursery
        self.folder = folder
        self.bell = Bell()

    async def node(
        self,
        options: NodeOptions = OPTIONS,
        key: Ed25519PrivateKey | None = None,
        before: Callable[[Node], None] = lambda node: None,
        authors: int = 1,
        kind: type[Node] = Node,
    ) -> Running:
        """Start a node. `before` is called with the node before it runs."""
        key = key or new_key()
        tape, heard, heard_at = Tape(self.bell), list[bytes](), list[float]()

        def hear(deliver: Deliver) -> None:
            heard.append(deliver.message.data)
            heard_at.append(trio.current_time())
            self.bell.ring()

        numbers = Numbers(self.folder / peer_text(compute_peer_id(key)))
        node = kind(options, key, numbers, tape, hear, authors=authors)
        before(node)
        await self.nursery.start(node.run)
        return Running(node, tape, heard, numbers, heard_at)

    async def pair(self, options: NodeOptions = OPTIONS) -> tuple[Running, Running]:
        """Start two nodes on TOPIC, and wait until each knows the other's subscription."""
        a = await self.node(options)
        b = await self.node(replace(options, bootstrap=(a.address,)))
        for one in (a, b):
            one.node.join(TOPIC)
        await self.bell.until(lambda: subscribed(a, 1) and subscribed(b, 1))
        return a, b

    async def until_heard(self, one: Running, data: bytes, seconds: float = 30) -> None:
        await self.bell.until(lambda: data in one.heard, seconds)


def trio_clock_ns() -> int:
    return int(trio.current_time() * 1e9)


def subscribed(one: Running, peers: int) -> bool:
    """Return true if the node knows at least `peers` peers that are subscribed to TOPIC."""
    return sum(TOPIC in view.topics for view in one.node.router.peers.values()) >= peers


def in_town(folder: Path, test: Callable[[Town], Awaitable[None]], seconds: float = 240) -> None:
    async def main() -> None:
        with trio.fail_after(seconds):
            async with trio.open_nursery() as nursery:
                await test(Town(nursery, folder))
                nursery.cancel_scope.cancel()

    trio.run(main)


@asynccontextmanager
async def raw_peer(
    reads: bool = True, pause: float = 0.0, key: Ed25519PrivateKey | None = None, listen: bool = False
) -> AsyncIterator[BasicHost]:
    """Run a libp2p host that accepts pubsub streams and sends only what the test sends.

    Args:
        reads: True if the host reads the streams.
        pause: Seconds to wait before each read.
    """
    host = make_host(key or new_key(), "odd/1", InboundSlots(10))

    async def handler(stream: INetStream) -> None:
        if not reads:
            await trio.sleep_forever()
        with suppress(*ENDS):
            while True:
                if pause:
                    await trio.sleep(pause)  # a slow reader is what is wanted
                await stream.read(65536)

    for protocol in VERSIONS:
        host.set_stream_handler(TProtocol(protocol), handler)
    async with host.run([Multiaddr(LISTEN)] if listen else []):
        yield host


async def call(host: BasicHost, node: Running, protocol: str = "/meshsub/1.3.0") -> INetStream:
    return await call_at(host, node.address, protocol)


async def call_at(host: BasicHost, address: str, protocol: str = "/meshsub/1.3.0") -> INetStream:
    info = info_from_p2p_addr(Multiaddr(address))
    await host.connect(info)
    return await host.new_stream(info.peer_id, [TProtocol(protocol)])


def subscription(topic: str = TOPIC) -> bytes:
    rpc = RPC()
    rpc.subscriptions.add(subscribe=True, topicid=topic)
    return rpc.SerializeToString()


def message(number: int, key: Ed25519PrivateKey, size: int = 300) -> bytes:
    out = Message(topic=TOPIC, data=number.to_bytes(4, "big") * (size // 4), seqno=number.to_bytes(8, "big"))
    sign(out, key)
    return RPC(publish=[out]).SerializeToString()


def check_sequences(tape: Tape, closed: bool) -> None:
    """Assert that the sequence numbers in each direction of each connection are contiguous from 1. If `closed`, the
    last frame of each must be a closing frame, and otherwise there must be none."""
    by_way: dict[tuple[bytes, int], list[Frame]] = {}
    for frame in tape.frames:
        by_way.setdefault((frame.connection, frame.direction), []).append(frame)
    assert by_way
    for frames in by_way.values():
        assert [f.sequence for f in frames] == list(range(1, len(frames) + 1))
        empty = [i for i, f in enumerate(frames) if not f.payload]
        assert empty == ([len(frames) - 1] if closed else [])
