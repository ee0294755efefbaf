"""Functions and files of the bridge through which a frame goes to Kafka; run this file to print them.

A function counts as in `record_walks`. A peer in another thread sends one signed message to a node. Its frame goes into
a producer of this file, since librdkafka stands outside.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import trio
from confluent_kafka import Producer

from kiln.bridge.capture.sink import FrameSink
from kiln.bridge.capture.spool import Spool
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.seqno import Seqno
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.cid import write_varint
from kiln.schemas.wire.identity import sign
from kit.chance import new_key
from kit.node_town import OPTIONS, TOPIC, call_at, raw_peer, subscription
from kit.record_walks import KEY, TIP, Walk, print_walk, walking


class _Acknowledging:
    """A producer of Kafka that notices the record with TIP."""

    def __init__(self) -> None:
        self.has_tip = threading.Event()

    def produce(self, topic: str, value: bytes, key: bytes, on_delivery: Callable[..., None]) -> None:
        if TIP in value:
            self.has_tip.set()

    def flush(self, timeout: float) -> int:
        return 0

    def purge(self) -> None: ...


def _carries(value: object, depth: int = 0) -> bool:
    """Return true if a value contains TIP: in bytes, or in fields and items near the top."""
    match value:
        case bytes() | bytearray() | memoryview():
            return TIP in bytes(value)
        case RPC() | Message():
            return TIP in value.SerializeToString()
        case _ if depth > 3:
            return False
        case tuple() | list():
            return any(_carries(item, depth + 1) for item in value)
    return False


def walk_capture() -> Walk:
    """From the bytes that a peer sends to a record of `kiln.frames`."""
    message = Message(data=TIP, topic=TOPIC, seqno=bytes(8))
    sign(message, KEY)
    payload = RPC(publish=[message]).SerializeToString()
    sent = trio.Event()

    async def send(address: str, stop: threading.Event) -> None:
        async with raw_peer(key=new_key()) as host:
            stream = await call_at(host, address)
            for rpc in (subscription(), payload):
                await stream.write(write_varint(len(rpc)) + rpc)
            await trio.to_thread.run_sync(stop.wait)

    async def receive(folder: Path) -> None:
        producer, stop = _Acknowledging(), threading.Event()
        sink = FrameSink(lambda: cast(Producer, producer), "frames", Spool(folder / "spool", 64 << 20), 64 << 20)
        with Seqno(folder / "seqno", lambda: 1) as seqno:
            node = Node(OPTIONS, new_key(), seqno, sink, lambda _: sent.set())
            node.join(TOPIC)
            async with trio.open_nursery() as nursery:
                await nursery.start(node.run)
                threading.Thread(target=_run_outside, args=(send, node.addresses[0], stop), daemon=True).start()
                with trio.fail_after(60):
                    await sent.wait()
                    await trio.to_thread.run_sync(producer.has_tip.wait, 60)
                stop.set()
                nursery.cancel_scope.cancel()
        sink.close(1)

    with (
        TemporaryDirectory(prefix="kiln-walk-") as folder,
        walking(("bridge", "schemas"), _carries, new_threads=True) as walk,
    ):
        trio.run(receive, Path(folder))
    return walk


def _run_outside(send: Callable[[str, threading.Event], Awaitable[None]], address: str, stop: threading.Event) -> None:
    sys.setprofile(None)
    trio.run(send, address, stop)


if __name__ == "__main__":
    print_walk("frame → Kafka", walk_capture())
