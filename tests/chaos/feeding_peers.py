"""Two gossipsub peers that speak made-up Ceramic traffic and keep a ledger of what they said and heard.

    cd tests && python -m chaos.feeding_peers --folder DIR --network NAME --host IP --ports A,B --rate N --seed N

The first one speaks; the second one is in the same meshes, so that every message reaches Kiln twice. They print the
addresses of both in one line once they listen. Lines on stdin: "hush", "go"; the end of stdin ends them.
DIR/ledger.jsonl has a line for each thing, times in unix ns: {"said": ID, "at", "there"} of a message, where `there`
tells whether a third peer was on its topic; {"heard": CID, "at"} of a batch that somebody announced.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import IO

import msgspec
import trio

from kiln.bridge.gossipsub.effects import Deliver, Send
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.keys import load_or_create_key
from kiln.bridge.libp2p.options import NodeOptions
from kiln.bridge.libp2p.seqno import Seqno
from kiln.deploy.demo.traffic.messages import generate_contents, list_topics
from kiln.deploy.demo.traffic.options import TrafficOptions
from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.wire.identity import check, compute_peer_id, message_id
from kiln.schemas.wire.pubsub import PubsubMessage, read_message

SEPARATORS = 10


class Entry(msgspec.Struct, omit_defaults=True):
    """A line of the ledger."""

    at: int
    said: str = ""
    heard: str = ""
    there: bool = False


def read_ledger(folder: Path) -> list[Entry]:
    """All whole lines."""
    whole = (folder / "ledger.jsonl").read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line, type=Entry) for line in whole.splitlines()]


class _Nowhere:
    full = False

    def put(self, connection: bytes, frame: bytes) -> None: ...
    def subscribe(self, callback: Callable[[], None]) -> None: ...


class _Ledger:
    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def write(self, entry: Entry) -> None:
        self._out.write(msgspec.json.encode(entry) + b"\n")
        self._out.flush()

    def hear(self, deliver: Deliver) -> None:
        told = read_message(deliver.message.data)
        if isinstance(told, PubsubMessage) and told.batch:
            self.write(Entry(time.time_ns(), heard=told.batch))


class _NotingRouter(Router):
    """Tells the ledger what the node says, and who is there to hear it."""

    def __init__(self, own: bytes, sibling: bytes, ledger: _Ledger) -> None:
        options = RouterOptions()
        super().__init__(own, options, Random(), partial(check, policy=options.policy))
        self._sibling = sibling
        self._ledger = ledger

    def publish(self, message: Message, now: float) -> list[Send]:
        there = any(peer != self._sibling for peer in self.subscribers(message.topic))
        if isinstance(read_message(message.data), PubsubMessage):
            self._ledger.write(Entry(time.time_ns(), said=message_id(message), there=there))
        return super().publish(message, now)


async def _speak(node: Node, world: TrafficOptions, rate: float) -> None:
    started = trio.current_time()
    for number, (topic, data) in enumerate(generate_contents(world, time.time_ns, list_topics(world, SEPARATORS))):
        await trio.sleep_until(started + number / rate)
        node.publish(topic, data)


async def _obey(nursery: trio.Nursery, speak: Callable[[], Awaitable[None]]) -> None:
    """Until the end of stdin."""
    scope: trio.CancelScope | None = None

    async def scoped(scope: trio.CancelScope) -> None:
        with scope:
            await speak()

    while word := await trio.to_thread.run_sync(sys.stdin.readline):
        if scope is not None:
            scope.cancel()
        if word.strip() == "go":
            scope = trio.CancelScope()
            nursery.start_soon(scoped, scope)
    if scope is not None:
        scope.cancel()


async def _run(folder: Path, world: TrafficOptions, host: str, ports: Iterable[int], rate: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    keys = [load_or_create_key(folder / f"{name}.key") for name in ("one", "two")]
    peers = [compute_peer_id(key) for key in keys]
    with ExitStack() as stack:
        ledger = _Ledger(stack.enter_context((folder / "ledger.jsonl").open("ab")))
        async with trio.open_nursery() as nursery:
            nodes: list[Node] = []
            for number, port in enumerate(ports):
                options = NodeOptions(
                    network=world.network,
                    listen=(f"/ip4/{host}/tcp/{port}",),
                    bootstrap=nodes[0].addresses if nodes else (),
                    agent="chaos",
                )
                seqno = stack.enter_context(Seqno(folder / f"{number}.seqno", time.time_ns))
                router = _NotingRouter(peers[number], peers[1 - number], ledger)
                hear = None if nodes else ledger.hear
                node = Node(options, keys[number], seqno, _Nowhere(), hear, router=router)
                await nursery.start(node.run)
                for topic in list_topics(world, SEPARATORS):
                    node.join(topic)
                nodes.append(node)
            print(" ".join(address for node in nodes for address in node.addresses), flush=True)
            await _obey(nursery, partial(_speak, nodes[0], world, rate))
            for node in nodes:
                node.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--network", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--ports", type=lambda text: [int(port) for port in text.split(",")], required=True)
    parser.add_argument("--rate", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    world = TrafficOptions(
        seed=given.seed, network=given.network, separators=SEPARATORS, streams=100, batch_update=0.0, garbage=0.02
    )
    trio.run(_run, given.folder, world, given.host, given.ports, given.rate)


if __name__ == "__main__":
    main()
