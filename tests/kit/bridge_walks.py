"""Functions and files of the bridge through which a frame goes to Kafka, and a batch to a peer. Run this file to print
them.

Functions count as in `record_walks`. Objects of this file replace Kafka and its clients, whose functions do not count.

*Frame.* A peer in another thread sends one signed message to a node. The walk ends in the producer of Kafka.

*Batch.* The publisher of the default settings reads one record of `kiln.batches`. The walk ends when the message is in
the outbox of a peer on its topic, so that the receipt does not count.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast
from unittest.mock import patch

import msgspec
import trio
from confluent_kafka import Producer

from kafka import TopicPartition
from kiln.bridge.app import wiring
from kiln.bridge.capture.sink import FrameSink
from kiln.bridge.capture.spool import Spool
from kiln.bridge.gossipsub.effects import Send
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.kafka.worker import Progress
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.links import QueuedRpc, SendQueue
from kiln.bridge.libp2p.seqno import Seqno
from kiln.bridge.publisher.deliveries import PendingPublication, TopicDelivery
from kiln.conf.process.kafka_records import KafkaRecord, RecordReader
from kiln.conf.settings.model import Settings
from kiln.schemas.kafka.records import encode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.cid import write_varint
from kiln.schemas.wire.identity import sign
from kit.batches_run import NETWORK, batch, topic_of
from kit.chance import new_key
from kit.node_town import OPTIONS, TOPIC, call_at, raw_peer, subscription
from kit.record_walks import KEY, TIP, Walk, print_walk, walking

BATCH = batch(1, closed=time.time_ns() // 1_000)
_WAITS_S = 60  # for what needs milliseconds


class _Acknowledging:
    """A Kafka producer that detects the record with TIP. The walk of a frame ends there."""

    def __init__(self) -> None:
        self.has_tip = threading.Event()

    def carries(self, value: object, depth: int = 0) -> bool:
        """Return true if a value contains TIP: in bytes, or in fields and items near the top."""
        if self.has_tip.is_set():
            return False
        match value:
            case bytes() | bytearray() | memoryview():
                return TIP in bytes(value)
            case RPC() | Message():
                return TIP in value.SerializeToString()
            case _ if depth > 3:
                return False
            case tuple() | list():
                return any(self.carries(item, depth + 1) for item in value)
        return False

    def produce(self, topic: str, value: bytes, key: bytes, on_delivery: Callable[..., None]) -> None:
        if TIP in value:
            self.has_tip.set()

    def flush(self, timeout: float) -> int:
        return 0

    def purge(self) -> None: ...


def walk_capture() -> Walk:
    """Record the walk from the bytes that a peer sends to a record of `kiln.frames`."""
    payload = _sign_message(TOPIC)
    sent, producer = trio.Event(), _Acknowledging()

    async def receive(folder: Path) -> None:
        stop = threading.Event()
        sink = FrameSink(lambda: cast(Producer, producer), "frames", Spool(folder / "spool", 64 << 20), 64 << 20)
        with Seqno(folder / "seqno", lambda: 1) as seqno:
            node = Node(OPTIONS, new_key(), seqno, sink, lambda _: sent.set())
            node.join(TOPIC)
            async with trio.open_nursery() as nursery:
                await nursery.start(node.run)
                _start_peer(node, stop, subscription(), payload)
                with trio.fail_after(_WAITS_S):
                    await sent.wait()
                    await trio.to_thread.run_sync(producer.has_tip.wait, _WAITS_S)
                stop.set()
                nursery.cancel_scope.cancel()
        sink.close(1)

    with (
        TemporaryDirectory(prefix="kiln-walk-") as folder,
        walking(("bridge", "schemas"), producer.carries, new_threads=True) as walk,
    ):
        trio.run(receive, Path(folder))
    return walk


def _sign_message(topic: str) -> bytes:
    """Build the RPC of a message with TIP."""
    message = Message(data=TIP, topic=topic, seqno=bytes(8))
    sign(message, KEY)
    return RPC(publish=[message]).SerializeToString()


def _start_peer(node: Node, stop: threading.Event, *rpcs: bytes) -> None:
    """Start a peer in another thread, which connects to the node, sends these RPCs and stays until `stop`."""
    address = node.addresses[0]

    async def send() -> None:
        async with raw_peer(key=new_key()) as host:
            stream = await call_at(host, address)
            for rpc in rpcs:
                await stream.write(write_varint(len(rpc)) + rpc)
            await trio.to_thread.run_sync(stop.wait)

    threading.Thread(target=_run_outside, args=(send,), daemon=True).start()


def _run_outside(task: Callable[[], Awaitable[None]]) -> None:
    sys.setprofile(None)
    trio.run(task)


class _OneRecord:
    """A `RecordReader` of one record."""

    def __init__(self, topic: str, value: bytes) -> None:
        self._part = TopicPartition(topic, 0)
        self._records = {self._part: [KafkaRecord(0, BATCH.closed_at // 1_000, None, value)]}
        self.partitions = {self._part}

    @property
    def active_positions(self) -> dict[TopicPartition, int]:
        return {self._part: 0}

    def pause(self, parts: Iterable[TopicPartition]) -> None: ...

    def resume(self, parts: Iterable[TopicPartition]) -> None: ...

    def poll(self, timeout: float, most: int) -> dict[TopicPartition, list[KafkaRecord]]:
        records, self._records = self._records, {}
        return records


class _Outbox:
    """Detects when the batch is in a peer's outbox. The walk ends there."""

    def __init__(self) -> None:
        self.has_batch = threading.Event()

    def carries(self, value: object, depth: int = 0) -> bool:
        """Return true if a value contains the batch: its CID, its block, or an object of the publisher."""
        if self.has_batch.is_set():
            return False
        match value:
            case str():
                return BATCH.batch_cid in value
            case bytes() | bytearray() | memoryview():
                return BATCH.batch_cid.encode() in bytes(value) or BATCH.block in bytes(value)
            case RPC() | Message():
                return self.carries(value.SerializeToString())
            case PendingPublication() | TopicDelivery():
                return True
            case Send(rpc=rpc):
                return self.carries(rpc)
            case msgspec.Struct():
                return self.carries(msgspec.structs.astuple(value), depth)
            case _ if depth > 3:
                return False
            case tuple() | list() | deque() | set():
                return any(self.carries(item, depth + 1) for item in value)
            case dict():
                return any(self.carries(item, depth + 1) for item in value.values())
        return False

    def put(self, put: Callable[[SendQueue, QueuedRpc, bool, int], bool]) -> Callable[..., bool]:
        """Wrap `SendQueue.put`."""

        def notice(queue: SendQueue, rpc: QueuedRpc, priority: bool, limit: int) -> bool:
            is_batch = self.carries(rpc.payload)
            has_room = put(queue, rpc, priority, limit)
            if is_batch and has_room:
                self.has_batch.set()
            return has_room

        return notice


def walk_batch() -> Walk:
    """Record the walk from a record of `kiln.batches` to the outbox of a peer."""
    outbox, stop, value = _Outbox(), threading.Event(), encode(BATCH)

    async def publish(folder: Path) -> None:
        settings = Settings.model_validate(
            {"state": folder, "network": {"name": NETWORK}, "kafka": {"bootstrap": "127.0.0.1:1"}}
        )
        sink = FrameSink(
            lambda: cast(Producer, _Acknowledging()), "frames", Spool(folder / "spool", 64 << 20), 64 << 20
        )
        blocks, token = FolderBlockStore(folder / "blocks"), trio.lowlevel.current_trio_token()
        with Seqno(folder / "seqno", time.time_ns) as seqno:
            subscribed, topic = trio.Event(), topic_of(BATCH)
            authors = settings.publish.author_keys
            node = Node(OPTIONS, new_key(), seqno, sink, lambda _: subscribed.set(), authors=authors)
            node.join(topic)
            discovery = wiring._create_discovery(settings, node)
            exchange = wiring._create_exchange(settings, node, blocks, discovery)
            store = wiring._create_bitswap_store(node, blocks, exchange, discovery, token)
            transition = wiring._create_transition(settings)
            publisher = wiring._create_publisher(settings, node, store, transition, token)

            def run_publisher() -> None:
                publisher._reader = cast(RecordReader, _OneRecord("batches", value))
                publisher._committed[0] = Progress(0, "")
                publisher._producer = cast(Producer, _Acknowledging())
                publisher._begin(0, publisher._committed[0], 0, 1)
                publisher._read()
                while not outbox.has_batch.is_set():
                    publisher._work()

            async with trio.open_nursery() as nursery:
                await nursery.start(node.run)
                await nursery.start(exchange.run)
                # a message after the subscription tells that the node has the subscription
                _start_peer(node, stop, subscription(topic), _sign_message(topic))
                with trio.fail_after(_WAITS_S):
                    await subscribed.wait()
                    thread = threading.Thread(target=run_publisher)  # trio's threads have no profile
                    thread.start()
                    await trio.to_thread.run_sync(thread.join)
                stop.set()
                nursery.cancel_scope.cancel()
        sink.close(1)

    with (
        TemporaryDirectory(prefix="kiln-walk-") as folder,
        patch.object(SendQueue, "put", outbox.put(SendQueue.put)),
        walking(("bridge", "schemas"), outbox.carries, new_threads=True) as walk,
    ):
        trio.run(publish, Path(folder))
    return walk


if __name__ == "__main__":
    print_walk("frame → Kafka", walk_capture())
    print_walk("batch → peer", walk_batch())
