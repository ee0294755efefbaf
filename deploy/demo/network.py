"""A demo network on 127.0.0.1: a Kubo node and two of Kiln's nodes, which exchange synthetic Ceramic traffic.

    python -m kiln.deploy.demo.network

All three subscribe to the topic of the network and the topics of its 500 most popular separators. Kiln's nodes dial
Kubo and each other. The settings select network and traffic. The nodes' identities persist in the folder `demo` of the
state folder. Kubo sends 30 % of the messages, at most 100 per second; Kiln's nodes share the rest. No node publishes
BATCH_UPDATEs, so all received BATCH_UPDATEs come from the bridge under test. If Kubo cannot run, the two nodes run
without it, and the status shows the reason. Two BEP 50 nodes follow the key under which Kiln announces batches.

Commands are lines on stdin: "go" starts the traffic, and "mute" stops it. The end of stdin, SIGTERM and Ctrl-C stop the
network. Events are lines of JSON on stdout:

    {"event": "ready", "addresses": [MULTIADDR with /p2p/], "peers": {NODE: PEER ID},
     "overlay": {"contacts": [HOST:PORT], "follow": [SOURCE]}}                            once, when all nodes listen
    {"event": "status", "published": {NODE: COUNT}, "failed": COUNT, "heard_batches": {NODE: COUNT},
     "fetched": {NODE: COUNT}, "errors": [TEXT], "overlay": {NODE: RECEIVED ITEMS}}
    {"event": "batch", "node": "kubo", "topic", "from": PEER ID, "cid", "data": BASE64}

NODE is kubo, one or two. A status is sent every second. `failed` counts messages that had no peer or that Kubo
rejected. `fetched` counts the blocks of received batches that a node has fetched over bitswap from the bridge. The
event `batch` is a BATCH_UPDATE that Kubo received, with its exact bytes; a slow reader gets only the last 50.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final

import trio
from nacl.signing import SigningKey
from trio_typing import TaskStatus

from kiln.bridge.bep50.carrier import Carrier, CarrierError, CarrierOptions, publisher_key
from kiln.bridge.capture.tap import Sink
from kiln.bridge.gossipsub.effects import Deliver
from kiln.bridge.ipfs import BlockUnavailableError
from kiln.bridge.ipfs.bitswap.exchange import BlockExchange
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.libp2p.addresses import NodeError
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.keys import KeyFileError, load_or_create_key
from kiln.bridge.libp2p.options import NodeOptions
from kiln.bridge.libp2p.seqno import Seqno, SeqnoError
from kiln.bridge.publisher.batches import PublishError
from kiln.conf.process.errors import KilnError
from kiln.conf.process.state_folder import lock_state
from kiln.conf.settings.reading import load_settings
from kiln.deploy.demo.events import EventCounts, Events, in_thread
from kiln.deploy.demo.kubo_node import KUBO, KuboProcess
from kiln.deploy.demo.kubo_peer import KuboError
from kiln.deploy.demo.traffic.messages import TopicData, generate_contents, list_topics
from kiln.deploy.demo.traffic.options import TrafficOptions
from kiln.schemas.dht.announcement import PublisherKey, compute_salt, read_announcement
from kiln.schemas.dht.items import Item
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.identity import peer_text
from kiln.schemas.wire.pubsub import write_batch_update
from kiln.schemas.wire.topics import Separator, format_separator, format_topic, parse_topic

_AT_ONCE: Final = 4
_MAX_WAITING: Final = 1_000
_TIMEOUT: Final = 60.0  # s


class BatchFetcher:
    """Fetches the blocks of received batches over bitswap, from the peer that relayed the announcement.

    A Ceramic node would do the same. Create the fetcher before its node runs.
    """

    def __init__(self, node: Node, folder: Path, name: str, counts: EventCounts) -> None:
        """Create the fetcher of a node.

        Args:
            folder: Folder for blocks that the node offers to peers. It stays empty.
        """
        self._name = name
        self._counts = counts
        self._exchange = BlockExchange(node, FolderBlockStore(folder))
        self._add, self._added = trio.open_memory_channel[tuple[str, bytes]](_MAX_WAITING)

    def add(self, cid: str, deliver: Deliver) -> None:
        """Fetch the block of a batch in the background, unless too many blocks are waiting."""
        with suppress(trio.WouldBlock):
            self._add.send_nowait((cid, deliver.source))

    async def run(self) -> None:
        """Fetch blocks until cancelled. The node must run."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._exchange.run)
            for _ in range(_AT_ONCE):
                nursery.start_soon(self._fetch_added)

    async def _fetch_added(self) -> None:
        async for cid, source in self._added:
            with suppress(BlockUnavailableError):
                await self._exchange.fetch(cid, _TIMEOUT, [source])
                self._counts.fetched[self._name] += 1


NODES: Final = ("one", "two")
REANNOUNCED: Final = 3
"""Number of separators whose batches the first node announces again with its own key."""


class OverlayListeners:
    """The two BEP 50 nodes, on free ports of 127.0.0.1, with their identities in `folder`.

    For a few separators, the first node announces Kiln's batches again under its own key, to which Kiln
    subscribes. So Kiln receives announcements under another key, of blocks that it can fetch.
    """

    def __init__(
        self,
        folder: Path,
        network: str,
        publisher: bytes,
        separators: Sequence[Separator],
        sink: Sink,
        error: Callable[[str], None],
    ) -> None:
        """Create the nodes. They follow the key `publisher` for these separators, and pass errors to `error`."""
        self._folder = folder
        self._network = network
        self._follow = tuple(PublisherKey(publisher, separator) for separator in separators)
        self._reannounced = {compute_salt(network, separator): separator for separator in separators[:REANNOUNCED]}
        self._sink = sink
        self._error = error
        self._key = publisher_key(folder)
        self._to_announce, self._received_by_one = trio.open_memory_channel[Item](math.inf)
        self.addresses: list[str] = []
        """addresses of the nodes, once they listen"""
        self.received: Counter[str] = Counter()
        """number of BEP 50 items that each node has received"""

    @property
    def sources(self) -> list[str]:
        """Sources that the first node announces, in the form of the setting `bep50.follow`."""
        key = self._key.verify_key.encode().hex()
        return [f"{key}/{format_separator(separator)}" for separator in self._reannounced.values()]

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. `task_status.started()` is called once both nodes listen.

        Raises:
            CarrierError: A node cannot listen.
        """
        async with trio.open_nursery() as nursery:
            for name in NODES:
                carrier = Carrier(
                    CarrierOptions(
                        self._network, ("127.0.0.1:0",), contacts=tuple(self.addresses), follow=self._follow
                    ),
                    self._key if name == NODES[0] else SigningKey.generate(),
                    self._folder / f"{name}.bep50",
                    self._sink,
                    on_item=partial(self._record_item, name),
                )
                await nursery.start(carrier.run)
                self.addresses += [address.text for address in carrier.addresses]
                if name == NODES[0]:
                    nursery.start_soon(self._reannounce, carrier)
            task_status.started()

    def _record_item(self, name: str, item: Item) -> None:
        self.received[name] += 1
        if name == NODES[0] and item.salt in self._reannounced:
            self._to_announce.send_nowait(item)

    async def _reannounce(self, carrier: Carrier) -> None:
        async for item in self._received_by_one:
            separator = self._reannounced[item.salt]
            found = read_announcement(item.value, self._network, item.salt)
            if isinstance(found, Rejected):
                continue
            try:
                topic = format_topic(self._network, separator)
                await carrier.announce(topic, write_batch_update(separator, cid_text(found.batch)))
            except PublishError as error:
                self._error(str(error))


MOST_SEPARATORS: Final = 500  # separators with a topic; limited, because Kubo must be polled for each topic

_KUBO_SHARE: Final = 0.3
_KUBO_MOST: Final = 100.0  # messages per second, because Kubo takes one command at a time
_GAP: Final = 0.1  # s between two messages of one author, so that Kubo validates them in order
_READ: Final = 1 << 16
# Go drops messages of a burst beyond 32, so a publisher behind its rate catches up with at most this many at once.
_CATCH_UP: Final = 16


class NetworkError(Exception):
    """The demo network cannot run."""


class _NullSink:
    """A sink of captured frames that drops them, because the nodes of the demo network record nothing."""

    full = False

    def put(self, connection: bytes, frame: bytes) -> None: ...
    def subscribe(self, callback: Callable[[], None]) -> None: ...


class _Network:
    """The three nodes and their traffic."""

    def __init__(self, folder: Path, world: TrafficOptions, rate: float, publisher: bytes, fd: int) -> None:
        self._folder = folder
        self._world = world
        self._rate = rate
        self._authors = max(1, math.ceil(rate / len(NODES) * _GAP))  # authors of each of Kiln's nodes
        self._fd = fd
        self._topics = list_topics(world, MOST_SEPARATORS)
        self._tally = EventCounts()
        separators = [topic.separator for topic in map(parse_topic, self._topics) if topic and topic.separator]
        self._overlay = OverlayListeners(folder, world.network, publisher, separators, _NullSink(), self._tally.error)
        self._contents: Iterator[TopicData] = generate_contents(world, time.time_ns, self._topics)
        self._out = Events()
        self._kubo = KuboProcess(folder / KUBO, self._tally, self._out)
        self._nodes: dict[str, Node] = {}
        self._names: dict[str, str] = {}  # peer id: node
        self._fetchers: dict[str, BatchFetcher] = {}
        self._go = trio.Event()
        self._traffic = trio.CancelScope()

    async def run(self) -> None:
        """Run until a command or signal stops the network."""
        with ExitStack() as seqnos:
            try:
                async with trio.open_nursery() as nursery:
                    for task in (self._await_signal, self._read_commands, self._write):
                        nursery.start_soon(_cancel_after, task, nursery.cancel_scope)
                    await self._start(nursery, seqnos)
                    nursery.start_soon(self._report_status)
                    await self._go.wait()
                    await self._await_peers()
                    with self._traffic:
                        async with trio.open_nursery() as publishers:
                            publishers.start_soon(self._publish_from_kubo)
                            for name in NODES:
                                publishers.start_soon(self._publish_from_node, name)
                    await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await self._kubo.stop()

    # ---------------------------------------------------------------- start and stop

    async def _start(self, nursery: trio.Nursery, seqnos: ExitStack) -> None:
        known: list[str] = []
        peers: dict[str, str] = {}
        try:
            self._kubo.start()
        except (KuboError, OSError) as error:
            self._tally.error(f"the demo network runs without Kubo: {error}")
        else:
            nursery.start_soon(self._kubo.listen)
            if await self._kubo.await_ready():
                await self._kubo.join(self._topics)
                known += self._kubo.addresses
                peers[KUBO] = self._kubo.peer
        for name in NODES:
            key = load_or_create_key(self._folder / f"{name}.key")
            seqno = seqnos.enter_context(Seqno(self._folder / f"{name}.seqno", time.time_ns))
            options = NodeOptions(
                network=self._world.network,
                listen=("/ip4/127.0.0.1/tcp/0",),
                bootstrap=tuple(known),
                agent="kiln-demo",
                redial_most=5.0,
            )
            node = self._nodes[name] = Node(
                options, key, seqno, _NullSink(), self._build_receiver(name), authors=self._authors
            )
            self._fetchers[name] = BatchFetcher(node, self._folder / f"{name}.blocks", name, self._tally)
            await nursery.start(node.run)
            nursery.start_soon(self._fetchers[name].run)
            for topic in self._topics:
                node.join(topic)
            known += node.addresses
            peers[name] = peer_text(node.peer)
        self._names = {peer: name for name, peer in peers.items()}
        await nursery.start(self._overlay.run)
        overlay = {"contacts": self._overlay.addresses, "follow": self._overlay.sources}
        self._out.state({"event": "ready", "addresses": known, "peers": peers, "overlay": overlay})

    def _build_receiver(self, name: str) -> Callable[[Deliver], None]:
        def receive(deliver: Deliver) -> None:
            cid = self._tally.count_received(name, deliver.message.data)
            if cid is not None:
                self._fetchers[name].add(cid, deliver)

        return receive

    async def _await_signal(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                return

    async def _write(self) -> None:
        await self._out.write(self._fd)

    async def _read_commands(self) -> None:
        pending = b""
        # os.read in a thread, because a terminal on stdin must stay blocking. A thread that reads Python's buffered
        # stdin would hold the lock of the buffer at exit
        while chunk := await in_thread(os.read, 0, _READ):
            *lines, pending = (pending + chunk).split(b"\n")
            if b"go" in lines:
                self._go.set()
            if b"mute" in lines:
                self._traffic.cancel()

    # ---------------------------------------------------------------- traffic

    def _kubo_rate(self) -> float:
        return min(self._rate * _KUBO_SHARE, _KUBO_MOST) if self._kubo.running else 0.0

    def _node_rate(self) -> float:
        # Kiln's nodes publish what Kubo does not
        return (self._rate - self._kubo_rate()) / len(NODES)

    async def _await_peers(self) -> None:
        topic = self._topics[0]
        for node in self._nodes.values():
            while not any(topic in peer.topics for peer in node.router.peers.values()):
                await trio.sleep(0.05)

    async def _publish_from_kubo(self) -> None:
        pace = _TrafficPace(self._kubo_rate)
        while True:
            await pace.next()
            await self._kubo.publish(next(self._contents))

    async def _publish_from_node(self, name: str) -> None:
        node = self._nodes[name]
        pace = _TrafficPace(self._node_rate)
        for author in cycle(range(self._authors)):
            await pace.next()
            topic, data = next(self._contents)
            try:
                reached = node.publish(topic, data, author)
            except SeqnoError as error:
                self._tally.error(f"the demo node {name} cannot publish: {error}")
                reached = 0
            if reached:
                self._tally.published[name] += 1
            else:
                self._tally.failed += 1

    # ---------------------------------------------------------------- status

    async def _report_status(self) -> None:
        while True:
            tally = self._tally
            self._out.state(
                {
                    "event": "status",
                    "published": {name: tally.published[name] for name in (KUBO, *NODES)},
                    "failed": tally.failed,
                    "heard_batches": {name: tally.batches[name] for name in (KUBO, *NODES)},
                    "fetched": {name: tally.fetched[name] for name in (KUBO, *NODES)},
                    "errors": [*tally.errors, *self._describe_missing_connections()],
                    "overlay": {name: self._overlay.received[name] for name in NODES},
                }
            )
            await trio.sleep(1)

    def _describe_missing_connections(self) -> Iterator[str]:
        for name, node in self._nodes.items():
            for target in node.view().bootstrap:
                if target.error and not target.connected:
                    peer = self._names.get(target.peer, target.peer)
                    yield f"the demo node {name} is not connected to {peer}: {target.error}"


async def _cancel_after(task: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await task()
    scope.cancel()


class _TrafficPace:
    """Paces messages evenly at `rate()` per second, which may change. At 0, `next` waits for another rate.

    After a delay, at most 16 messages follow at once, because peers drop larger bursts.
    """

    def __init__(self, rate: Callable[[], float]) -> None:
        self._rate = rate
        self._due = trio.current_time()

    async def next(self) -> None:
        while (rate := self._rate()) <= 0:
            await trio.sleep(1)
        self._due = max(self._due + 1 / rate, trio.current_time() - _CATCH_UP / rate)
        await trio.sleep_until(self._due)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> None:
    try:
        settings = load_settings()
        traffic = settings.traffic
        world = TrafficOptions(
            seed=traffic.seed,
            network=settings.network.name,
            separators=traffic.separators,
            streams=traffic.streams,
            batch_update=0.0,
        )
        folder, publisher = settings.state / "demo", publisher_key(settings.bridge_dir).verify_key.encode()
        # output of libraries must not mix with the events
        fd = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with lock_state(folder, "network"):
            try:
                trio.run(_run, folder, world, traffic.rate, publisher, fd)
            except* (NodeError, KeyFileError, SeqnoError, CarrierError) as group:
                raise NetworkError(str(_first(group))) from group
    except (NetworkError, KilnError, KeyFileError, OSError) as error:
        sys.exit(f"the demo network cannot run: {error}")


async def _run(folder: Path, world: TrafficOptions, rate: float, publisher: bytes, fd: int) -> None:
    await _Network(folder, world, rate, publisher, fd).run()


if __name__ == "__main__":
    main()
