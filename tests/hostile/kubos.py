"""Three Kubos that publish and fetch each batch, around a bridge with a broker, and the bridge's figures each minute.

No Spark runs: `kit.live_batches` makes the batches of what the bridge captures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import trio

from hostile.scene import MEMORY, MIB, Latencies, cpu_seconds, until
from kiln.deploy.demo.traffic.messages import TopicData, generate_contents, list_topics
from kiln.deploy.demo.traffic.options import TrafficOptions
from kiln.schemas.wire.pubsub import PubsubMessage, read_message
from kit.bridge_alone import BridgeAlone
from kit.broker_access import variables
from kit.descriptors import descriptors
from kit.kubo_daemon import Daemon, build
from kit.live_batches import LiveBatches, running_broker
from kit.node_town import Bell

COUNT = 3
WORLD = TrafficOptions(network="local-test", batch_update=0.0)  # all batches are the bridge's
_FETCH_TIMEOUT = 60  # s
_PATIENCE = 90.0  # s after the last message
_SETTLED = 10  # minutes until all stores of a bridge have their size
_GROWTH = 0.05  # of the memory, after that, which counts as none


@dataclass(frozen=True)
class Usage:
    """Resources of a process at one moment: bytes, open descriptors, seconds of CPU since its start."""

    memory: int
    descriptors: int
    cpu: float

    @classmethod
    def of(cls, bridge: BridgeAlone) -> Usage:
        return cls(bridge.memory("VmRSS"), descriptors(bridge.process.pid), cpu_seconds(bridge))


@dataclass
class FetchingKubo:
    """A Kubo that is on all topics, and fetches each batch that it hears of."""

    daemon: Daemon
    bell: Bell
    fetches: bool = True
    """if false, it listens only"""
    heard_at: dict[str, float] = field(default_factory=dict)
    """seconds of the monotonic clock, by CID"""
    fetched: dict[str, float] = field(default_factory=dict)
    """seconds that it took, by CID"""
    failed: list[str] = field(default_factory=list)
    received: list[tuple[bytes, float]] | None = None
    """if it is kept, data of all messages and when each came"""

    async def listen(self, topic: str, client: httpx.AsyncClient, nursery: trio.Nursery) -> None:
        with suppress(httpx.HTTPError):  # the daemon ends
            async for data in self.daemon.hear(topic):
                if self.received is not None:
                    self.received.append((data, time.monotonic()))
                content = read_message(data)
                if isinstance(content, PubsubMessage) and content.batch and content.batch not in self.heard_at:
                    self.heard_at[content.batch] = time.monotonic()
                    if self.fetches:
                        nursery.start_soon(self._fetch, client, content.batch)

    async def _fetch(self, client: httpx.AsyncClient, cid: str) -> None:
        data = None
        with suppress(httpx.HTTPError):
            data = await self.daemon.fetch(client, cid, _FETCH_TIMEOUT)
        if data is None:
            self.failed.append(cid)
        else:
            self.fetched[cid] = time.monotonic() - self.heard_at[cid]
        self.bell.ring()


def is_growing(memory: list[int]) -> bool:
    """Return whether memory that was sampled each minute still grows once it has settled."""
    settled = memory[_SETTLED:]
    third = len(settled) // 3
    return third >= 3 and median(settled[-third:]) > (1 + _GROWTH) * median(settled[:third])


@dataclass
class Fetched:
    """Counts of messages captured, and of batches received and fetched."""

    published: int
    missed: int
    """messages that are in no frame"""
    batches: int
    kubos: list[FetchingKubo]
    minutes: list[Usage]

    def __str__(self) -> str:
        heard = " ".join(str(len(kubo.heard_at)) for kubo in self.kubos)
        fetched = " ".join(str(len(kubo.fetched)) for kubo in self.kubos)
        first, last = self.minutes[0], self.minutes[-1]
        memory = [minute.memory / MIB for minute in self.minutes]
        return "\n".join(
            (
                f"{self.published} messages published, {self.missed} not captured",
                f"{self.batches} batches: heard {heard}, fetched {fetched}",
                f"bridge: {min(memory):.0f} to {max(memory):.0f} MiB, {memory[-1]:.0f} MiB at the end",
                f"{first.descriptors} descriptors, {last.descriptors} at the end; {last.cpu - first.cpu:.0f} s of CPU",
            )
        )

    def wrong(self) -> list[str]:
        """Return a sentence for each requirement that was not met."""
        return list(self._find_faults())

    def _find_faults(self) -> Iterator[str]:
        if self.missed:
            yield f"{self.missed} messages are in no frame"
        for number, kubo in enumerate(self.kubos, 1):
            if len(kubo.heard_at) < self.batches:
                yield f"Kubo {number} heard {len(kubo.heard_at)} of {self.batches} batches"
            if len(kubo.fetched) < len(kubo.heard_at):
                yield f"Kubo {number} fetched {len(kubo.fetched)} of {len(kubo.heard_at)} batches"
        memory = [minute.memory for minute in self.minutes]
        if max(memory) > MEMORY:
            yield f"{max(memory) / MIB:.0f} MiB of memory"
        if is_growing(memory):
            yield f"memory grows: {' '.join(f'{each / MIB:.0f}' for each in memory)} MiB"
        if self.minutes[-1].descriptors > self.minutes[0].descriptors + 10:
            yield f"descriptors grow from {self.minutes[0].descriptors} to {self.minutes[-1].descriptors}"


class _Scene:
    def __init__(self, bridge: BridgeAlone, batches: LiveBatches, daemons: list[Daemon], rate: float) -> None:
        self._bridge = bridge
        self._batches = batches
        self._bell = Bell()
        self._kubos = [FetchingKubo(daemon, self._bell) for daemon in daemons]
        self._contents = generate_contents(WORLD, time.time_ns)
        self._rate = rate / len(daemons)
        self._sent = 0
        self._published: set[bytes] = set()
        self._minutes: list[Usage] = []

    async def run(self, seconds: float) -> Fetched:
        """Publish for so many seconds, and return once all is fetched."""
        topics = list_topics(WORLD)
        async with trio.open_nursery() as nursery, httpx.AsyncClient(timeout=_FETCH_TIMEOUT + 30) as client:
            for kubo in self._kubos:
                for topic in topics:
                    nursery.start_soon(kubo.listen, topic, client, nursery)
            await until(
                self._bridge,
                lambda status: all(status.mesh.get(topic) == len(self._kubos) for topic in topics),
                "all Kubos are in the mesh of every topic",
            )
            nursery.start_soon(self._report)
            async with trio.open_nursery() as publishers:
                for kubo in self._kubos:
                    publishers.start_soon(self._publish, kubo.daemon, client, seconds)
            with suppress(trio.TooSlowError):
                await self._bell.until(self._is_done, _PATIENCE)
            self._minutes.append(Usage.of(self._bridge))
            nursery.cancel_scope.cancel()
        missed = len(self._published - self._batches.captured_data)
        return Fetched(self._sent, missed, len(self._batches.written_at), self._kubos, self._minutes)

    async def _publish(self, daemon: Daemon, client: httpx.AsyncClient, seconds: float) -> None:
        began = trio.current_time()
        for number in range(int(seconds * self._rate)):
            await trio.sleep_until(began + number / self._rate)
            if trio.current_time() > began + seconds:  # on a busy machine it publishes less
                return
            content: TopicData = next(self._contents)
            await daemon.publish(client, *content)
            self._sent += 1
            self._published.add(content.data)  # some data is published again

    def _is_done(self) -> bool:
        """Return whether every message is captured, its windows have closed, and all batches are fetched."""
        written = self._batches.written_at
        return (
            self._published <= self._batches.captured_data
            and time.monotonic() - max(written.values(), default=0) > 3
            and all(len(kubo.fetched) + len(kubo.failed) >= len(written) for kubo in self._kubos)
        )

    async def _report(self) -> None:
        """Print a line each minute."""
        last, counted = Usage.of(self._bridge), 0
        while True:
            await trio.sleep(60)  # the interval of the figures
            now = Usage.of(self._bridge)
            self._minutes.append(now)
            written = list(self._batches.written_at.items())
            since = dict(written[counted:])
            counted = len(written)
            hearing = Latencies(
                [kubo.heard_at[cid] - at for kubo in self._kubos for cid, at in since.items() if cid in kubo.heard_at]
            )
            fetching = Latencies([kubo.fetched[cid] for kubo in self._kubos for cid in since if cid in kubo.fetched])
            print(
                f"{len(self._minutes):3} min: bridge {now.memory / MIB:.1f} MiB, {now.descriptors} descriptors, "
                f"{(now.cpu - last.cpu) / 0.6:.0f} % CPU; {self._sent} published, {len(written)} batches, "
                f"heard {' '.join(str(len(kubo.heard_at)) for kubo in self._kubos)}, "
                f"fetched {' '.join(str(len(kubo.fetched)) for kubo in self._kubos)}; "
                f"heard after {hearing.at(0.5):.0f} / {hearing.at(0.99):.0f} ms, "
                f"fetched in {fetching.at(0.5):.0f} / {fetching.at(0.99):.0f} ms",
                flush=True,
            )
            last = now


def kubos(folder: Path, seconds: float, rate: float) -> Fetched:
    """Three Kubos publish `rate` messages a second in total for so many seconds, and fetch each batch."""
    with ExitStack() as stack:
        broker = stack.enter_context(running_broker(folder / "broker"))
        daemons = [Daemon(str(build()), folder / f"kubo{number}") for number in range(COUNT)]
        for daemon in daemons:
            stack.callback(daemon.stop)
            daemon.start().close()
        bridge = BridgeAlone(folder / "state", KILN_PUBLISH__ENABLED="true", **variables(broker.address))
        stack.callback(bridge.kill)
        address = bridge.until(lambda status: bool(status.addresses), "the bridge listens").addresses[0]
        for daemon in daemons:
            daemon.connect(address)
        batches = LiveBatches(broker.address)
        with batches.running():
            came = trio.run(_Scene(bridge, batches, daemons, rate).run, seconds)
        assert bridge.stop()[0] == 0
        return came
