"""Thirteen foreign peers around a bridge that is killed once, half of them behind relays with jitter.

Seven of them, and the first relay, are neighbours of the bridge and of each other in a ring; the second relay knows
the first one alone. All publish and listen. The ledger is what the peers tell of what they published and received.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx
import trio
from trio_typing import TaskStatus

from conftest import free_ports
from hostile.kubos import FetchingKubo, Usage
from hostile.scene import MEMORY, MIB
from kiln.deploy.demo.traffic.messages import TopicData, generate_contents, list_topics
from kiln.deploy.demo.traffic.options import TrafficOptions
from kit import foreign_peer
from kit.awaiting import awaited, until
from kit.bridge_alone import BridgeAlone
from kit.broker_access import variables
from kit.foreign_peer import ForeignPeer, ForeignPeerError
from kit.jitter import JitteryNode
from kit.kiln_process import Kiln, end
from kit.kubo_daemon import Daemon, build
from kit.live_batches import LiveBatches, running_broker
from kit.node_town import OPTIONS, Town, in_town

WORLD = TrafficOptions(network="local-test", separators=10, streams=100, batch_update=0.0, garbage=0.0, reannounced=0.0)
"""All data is valid and occurs once; all batches are the bridge's."""
_DOWN = 3.0  # s from the death of the bridge to its next start
_BEFORE, _AFTER = 1.0, 2.0  # s before the kill and after a connection, in which a message need not be captured
_PATIENCE = 90.0  # s after the last message
_GROWTH = 0.1  # of the memory from a fifth of a bridge's life to its end, which counts as none


@dataclass
class SoakPeer:
    """A foreign peer that publishes, and tells what it receives."""

    name: str
    peer: str
    address: str
    connect: Callable[[str], None]
    publish: Callable[[str, bytes], Awaitable[None]]
    received: Callable[[], list[tuple[bytes, float]]]
    """data, and seconds of the monotonic clock"""
    published: list[tuple[bytes, float]] = field(default_factory=list)
    rejoined_at: float = 0.0
    """when the second bridge was connected, if it is a neighbour"""


@dataclass
class Soaked:
    """Counts of messages captured and lost, and of batches missed."""

    published: int
    ledger: int
    """messages that a neighbour of the bridge had while it was connected"""
    captured: int
    lost: dict[str, str]
    """messages of the ledger that are in no frame, with the peers that received them"""
    batches: int
    kubos: list[FetchingKubo]
    missed: list[list[float]]
    """by Kubo, the batches that it did not receive: seconds after the kill at which each was written to Kafka"""
    lives: list[list[Usage]]
    """resources of each bridge process, once a minute"""
    rows: str = ""
    """comparison with the table `messages`, if the query ran"""

    def __str__(self) -> str:
        return "\n".join(
            (
                f"{self.published} messages published, {self.captured} captured",
                f"{self.ledger} reached a neighbour while it was connected, {len(self.lost)} of them not captured",
                f"{self.batches} batches: missed {[len(each) for each in self.missed]}",
                f"fetched by the neighbour: {len(self.kubos[0].fetched)}",
                *(
                    f"bridge {number}: MiB {' '.join(f'{usage.memory / MIB:.0f}' for usage in life)}, "
                    f"descriptors {' '.join(str(usage.descriptors) for usage in life)}"
                    for number, life in enumerate(self.lives, 1)
                ),
                self.rows,
            )
        )

    def wrong(self) -> list[str]:
        """Return a sentence for each requirement that was not met."""
        return list(self._find_faults())

    def _find_faults(self) -> Iterator[str]:
        for data, who in self.lost.items():
            yield f"in no frame, although {who} had it: {data[:200]}"
        for number, (missed, kubo) in enumerate(zip(self.missed, self.kubos, strict=True), 1):
            if missed:
                times = " ".join(f"{at:+.1f}" for at in missed)
                yield f"Kubo {number} missed {len(missed)} of {self.batches} batches: {times} s after the kill"
            if kubo.fetches and len(kubo.fetched) < len(kubo.heard_at):
                yield f"Kubo {number} fetched {len(kubo.fetched)} of {len(kubo.heard_at)} batches"
        if self.rows and not self.rows.endswith(" once"):
            yield self.rows
        for life in self.lives:
            settled = life[len(life) // 5 :]
            if max(usage.memory for usage in life) > MEMORY:
                yield f"{max(usage.memory for usage in life) / MIB:.0f} MiB of memory"
            if len(settled) > 4 and settled[-1].memory > (1 + _GROWTH) * settled[0].memory:
                yield f"memory grows from {settled[0].memory / MIB:.0f} to {settled[-1].memory / MIB:.0f} MiB"
            if settled and settled[-1].descriptors > settled[0].descriptors + 10:
                yield f"descriptors grow from {settled[0].descriptors} to {settled[-1].descriptors}"


def _of_process(peer: ForeignPeer) -> SoakPeer:
    async def publish(topic: str, data: bytes) -> None:
        await trio.to_thread.run_sync(peer.publish_raw, topic, data)

    def received() -> list[tuple[bytes, float]]:
        return [(each.data, at) for each, at in zip(list(peer.received), peer.received_at, strict=False)]

    return SoakPeer(peer.name, peer.peer, peer.address, peer.connect, publish, received)


def _of_daemon(kubo: FetchingKubo, client: httpx.AsyncClient, number: int) -> SoakPeer:
    address = kubo.daemon.address
    kubo.received = []
    return SoakPeer(
        f"Kubo {number}",
        address.rpartition("/")[2],
        address,
        kubo.daemon.connect,
        partial(kubo.daemon.publish, client),
        lambda: list(kubo.received or ()),
    )


class _Scene:
    def __init__(self, folder: Path, address: str, batches: LiveBatches, seconds: float, rate: float) -> None:
        self._folder = folder
        self._broker = address
        self._batches = batches
        self._seconds = seconds
        self._rate = rate
        self._topics = list_topics(WORLD)
        self._kubos: list[FetchingKubo] = []
        self._near: list[SoakPeer] = []
        self._all: list[SoakPeer] = []
        self._processes: list[ForeignPeer] = []
        self._lives: list[list[Usage]] = []
        self._stack = ExitStack()
        self._killed_at = 0.0
        self.result: Soaked | None = None

    async def run(self, town: Town) -> None:
        with self._stack:
            async with httpx.AsyncClient(timeout=90) as client:
                bootstrap = await self._gather(town, client)
                bridge = await self._start_bridge(bootstrap)
                async with trio.open_nursery() as nursery:
                    reports = await nursery.start(self._report, bridge)
                    nursery.start_soon(self._publish)
                    await trio.sleep(self._seconds / 2)  # the first half
                    reports.cancel()
                    self._killed_at = time.monotonic()
                    bridge.kill()
                    await trio.sleep(_DOWN)  # the time that it is away
                    bridge = await self._start_bridge(bootstrap)
                    reports = await nursery.start(self._report, bridge)
                    await trio.sleep(self._seconds / 2)  # the second half
                    with trio.move_on_after(_PATIENCE):
                        await town.bell.until(self._is_done, _PATIENCE + 10)
                    reports.cancel()
                    self._lives[-1].append(Usage.of(bridge))
                assert bridge.stop()[0] == 0
            self.result = self._build_result()

    async def _gather(self, town: Town, client: httpx.AsyncClient) -> list[str]:
        """Start all peers, and return the addresses of the bridge's neighbours."""
        js, rust, go = foreign_peer.install_js(), foreign_peer.build_rust(), foreign_peer.build_go_pubsub()
        for number in range(3):
            daemon = Daemon(str(build()), self._folder / f"kubo{number}")
            self._stack.callback(daemon.stop)
            daemon.start().close()
            self._kubos.append(FetchingKubo(daemon, town.bell, fetches=number == 0))  # the others know no IPFS node

        def enter(peer: ForeignPeer) -> SoakPeer:
            self._processes.append(self._stack.enter_context(peer))
            return _of_process(peer)

        folder = self._folder
        kubos = [_of_daemon(kubo, client, number) for number, kubo in enumerate(self._kubos, 1)]
        wheels = [enter(foreign_peer.go_peer(folder / f"wheel{number}")) for number in (1, 2)]
        gos = [enter(foreign_peer.go_pubsub_peer(go, folder / f"go{number}")) for number in (1, 2, 3)]
        scripts = [enter(foreign_peer.js_peer(js, folder / f"js{number}")) for number in (1, 2, 3)]
        rusts = [enter(foreign_peer.rust_peer(rust, folder / f"rust{number}")) for number in (1, 2)]
        first = await town.node(OPTIONS, kind=JitteryNode)
        second = await town.node(replace(OPTIONS, bootstrap=(first.address,)), kind=JitteryNode)
        self._near = [kubos[0], wheels[0], *gos[:2], *scripts[:2], rusts[0]]
        self._all = [*kubos, *wheels, *gos, *scripts, *rusts]
        ring = [*(peer.address for peer in self._near), first.address]
        for peer, after in zip(self._near, ring[1:], strict=True):
            await trio.to_thread.run_sync(peer.connect, after)
        for relay, far in ((first, (kubos[1], wheels[1], gos[2])), (second, (kubos[2], scripts[2], rusts[1]))):
            for peer in far:
                await trio.to_thread.run_sync(peer.connect, relay.address)
        await trio.to_thread.run_sync(self._near[0].connect, first.address)  # closes the ring
        for topic in self._topics:
            for relay in (first, second):
                relay.node.join(topic)
            for kubo in self._kubos:
                town.nursery.start_soon(kubo.listen, topic, client, town.nursery)
        for process in self._processes:
            for topic in self._topics:
                await trio.to_thread.run_sync(process.subscribe, topic)
        return ring

    async def _start_bridge(self, bootstrap: list[str]) -> BridgeAlone:
        bridge = BridgeAlone(
            self._folder / "state",
            KILN_PUBLISH__ENABLED="true",
            KILN_BRIDGE__BOOTSTRAP=json.dumps(bootstrap),
            **variables(self._broker),
        )
        self._stack.callback(bridge.kill)
        waiting = {peer.peer: peer for peer in self._near}

        def have_all_rejoined() -> bool:
            status = bridge.status()
            for each in status.peers if status is not None and status.pid == bridge.process.pid else ():
                if each.topics >= len(self._topics) and each.peer in waiting:
                    waiting.pop(each.peer).rejoined_at = time.monotonic()
            return not waiting

        await until(have_all_rejoined, lambda: f"{len(waiting)} peers with all topics", 120)
        return bridge

    async def _publish(self) -> None:
        contents = generate_contents(WORLD, time.time_ns)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number, peer in enumerate(self._all):
                nursery.start_soon(self._publish_from, peer, contents, began + number / self._rate)

    async def _publish_from(self, peer: SoakPeer, contents: Iterator[TopicData], began: float) -> None:
        """Publish one by one, as an author must; what the peer refuses counts as not published."""
        every = len(self._all) / self._rate
        for number in range(int(self._seconds / every)):
            await trio.sleep_until(began + number * every)
            if trio.current_time() > began + self._seconds:  # on a busy machine it publishes less
                return
            topic, data = next(contents)
            at = time.monotonic()
            with suppress(httpx.HTTPError, ForeignPeerError):
                await peer.publish(topic, data)
                peer.published.append((data, at))

    def _required(self) -> dict[bytes, str]:
        """The ledger: messages that a neighbour published or received while it was connected; who, and when."""
        had: dict[bytes, list[str]] = {}
        published = {data for peer in self._all for data, _ in peer.published}  # not the bridge's own batches
        for peer in self._near:
            for data, at in (*peer.published, *peer.received()):
                if data in published and not self._killed_at - _BEFORE <= at <= peer.rejoined_at + _AFTER:
                    had.setdefault(data, []).append(f"{peer.name} at {at - self._killed_at:+.1f} s")
        return {data: ", ".join(who) for data, who in had.items()}

    def _is_done(self) -> bool:
        written = set(self._batches.written_at)
        return self._required().keys() <= self._batches.captured_data and all(
            written <= (kubo.fetched if kubo.fetches else kubo.heard_at).keys() for kubo in self._kubos
        )

    async def _report(
        self, bridge: BridgeAlone, *, task_status: TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Print a line each minute."""
        life: list[Usage] = []
        self._lives.append(life)
        with trio.CancelScope() as scope:
            task_status.started(scope)
            while True:
                life.append(Usage.of(bridge))
                print(
                    f"bridge {len(self._lives)}, {len(life):2} min: {life[-1].memory / MIB:.1f} MiB, "
                    f"{life[-1].descriptors} descriptors, {life[-1].cpu:.0f} s of CPU; "
                    f"{sum(len(peer.published) for peer in self._all)} published, "
                    f"{len(self._batches.captured)} captured, {len(self._batches.written_at)} batches, "
                    f"heard {[len(kubo.heard_at) for kubo in self._kubos]}, fetched {len(self._kubos[0].fetched)}",
                    flush=True,
                )
                await trio.sleep(60)  # the interval of the figures

    def _build_result(self) -> Soaked:
        required = self._required()
        lost = {data.decode(errors="replace"): required[data] for data in required.keys() - self._batches.captured_data}
        written = self._batches.written_at
        missed = [
            sorted(at - self._killed_at for cid, at in written.items() if cid not in kubo.heard_at)
            for kubo in self._kubos
        ]
        return Soaked(
            sum(len(peer.published) for peer in self._all),
            len(required),
            len(self._batches.captured),
            lost,
            len(written),
            self._kubos,
            missed,
            self._lives,
        )


def _count_rows(folder: Path, address: str, captured: set[str]) -> str:
    """Run the query `archive` over all frames, and describe what `messages` has of the captured ones."""
    settings = {**variables(address), "KILN_NETWORK": "local-test", "KILN_KAFKA__UPDATES_PARTITIONS": "1"}
    kiln = Kiln(folder, free_ports(2), settings)
    job = kiln.start("job", "archive")
    try:

        def is_written() -> bool:
            assert job.poll() is None, (folder / "started.out").read_text()
            return (kiln.lake / "messages").exists() and kiln.count("messages") >= len(captured)

        awaited(is_written, 300)
    finally:
        end(job)
    ids = [str(row["message_id"]) for row in kiln.sql("select message_id from messages")]
    if len(ids) == len(set(ids)) and set(ids) >= captured:  # the bridge's own batches may have come from no peer
        return f"{len(ids)} rows in messages: each captured message once"
    return f"{len(ids)} rows in messages, {len(set(ids) & captured)} of {len(captured)} captured messages"


def soak(folder: Path, seconds: float, rate: float, tables: bool) -> Soaked:
    """All peers together publish `rate` messages a second for so many seconds; `tables`: the query `archive` runs over
    the frames afterwards."""
    with running_broker(folder / "broker") as broker:
        batches = LiveBatches(broker.address)
        with batches.running():
            scene = _Scene(folder, broker.address, batches, seconds, rate)
            in_town(folder, scene.run, seconds + 900)
        assert scene.result is not None
        print(scene.result, flush=True)
        if tables:
            scene.result.rows = _count_rows(folder / "tables", broker.address, set(batches.captured))
        return scene.result
