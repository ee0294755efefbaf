"""Functions and files of the bridge through which a frame goes to Kafka; run this file to print them.

A function counts as in `record_walks`. A peer in another thread sends one signed message to a node. Its frame goes into
a producer that acknowledges at once, since librdkafka stands outside.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import cast

import trio
from confluent_kafka import Producer

from kiln.bridge.capture.sink import FrameSink
from kiln.bridge.capture.spool import Spool
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.seqno import Seqno
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.identity import sign
from kit.chance import new_key
from kit.node_town import OPTIONS, TOPIC, call_at, raw_peer, subscription
from kit.record_walks import KEY, ROOT, TIP, Walk

_FOLDERS = tuple(f"{ROOT}/kiln/{folder}/" for folder in ("bridge", "schemas"))


class _Acknowledging:
    """A producer of Kafka that acknowledges at once."""

    def __init__(self) -> None:
        self.values: list[bytes] = []

    def produce(self, topic: str, value: bytes, key: bytes, on_delivery: Callable[..., None]) -> None:
        self.values.append(value)

    def flush(self, timeout: float) -> int:
        return 0

    def purge(self) -> None: ...


def _carries(value: object, mark: bytes, depth: int = 0) -> bool:
    """Return true if a value contains the mark: in bytes, or in fields and items near the top."""
    match value:
        case bytes() | bytearray() | memoryview():
            return mark in bytes(value)
        case RPC() | Message():
            return mark in value.SerializeToString()
        case _ if depth > 3:
            return False
        case tuple() | list():
            return any(_carries(each, mark, depth + 1) for each in value)
    return False


@contextmanager
def _walking(mark: bytes) -> Iterator[Walk]:
    """Record the walk in this thread, and in threads that start meanwhile."""
    functions: dict[tuple[str, str], None] = {}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_FOLDERS) or code.co_name.startswith("<"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        is_entry = event == "call" and any(_carries(frame.f_locals.get(name), mark) for name in names)
        if is_entry or (event == "return" and _carries(argument, mark)):
            functions.setdefault((str(Path(code.co_filename).relative_to(ROOT / "kiln")), code.co_qualname))

    walk = Walk([])
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        walk.functions.extend(functions)


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
                await stream.write(bytes([*_write_varint(len(rpc))]) + rpc)
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
                    while not any(TIP in value for value in producer.values):
                        await trio.sleep(0.01)
                stop.set()
                nursery.cancel_scope.cancel()
        sink.close(1)

    with TemporaryDirectory(prefix="kiln-walk-") as folder, _walking(TIP) as walk:
        trio.run(receive, Path(folder))
    return walk


def _run_outside(send: Callable[..., object], *arguments: object) -> None:
    sys.setprofile(None)
    trio.run(send, *arguments)  # type: ignore[arg-type]  # arguments are those of `send`


def _write_varint(number: int) -> Iterator[int]:
    while number > 127:
        yield number & 127 | 128
        number >>= 7
    yield number


if __name__ == "__main__":
    walk = walk_capture()
    print(f"frame → Kafka: {len(walk.functions)} functions, {len(walk.files)} files")
    for file in walk.files:
        print(f"  {file}: {', '.join(function for path, function in walk.functions if path == file)}")
