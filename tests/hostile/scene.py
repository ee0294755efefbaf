"""A bridge of its own, honest peers that speak through it, and the figures of both while others attack."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import trio

from hostile.attack import Done
from kiln.conf.process.bridge_status import BridgeStatus
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import message_id
from kit.awaiting import PATIENCE
from kit.bridge_alone import BridgeAlone
from kit.node_town import OPTIONS, TOPIC, Running, Town, in_town

MIB = 1 << 20
MEMORY = 512 * MIB
"""that a bridge may take, whatever others do"""
RATE = 20  # honest messages a second, of each of two peers
_IN_THE_AIR = 64 * MIB  # what is read when a budget ends, of all peers together
_TICKS = os.sysconf("SC_CLK_TCK")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Latencies:
    """Seconds from publishing to hearing, at honest peers that hear each other through the bridge alone."""

    seconds: list[float] = field(default_factory=list)

    def at(self, part: float) -> float:
        """Milliseconds that so great a part took at most; nan if there is nothing."""
        if not self.seconds:
            return math.nan
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1e3

    def __str__(self) -> str:
        at = [f"{self.at(part):.1f}" for part in (0.5, 0.99, 1.0)]
        return f"p50 {at[0]} ms, p99 {at[1]} ms, most {at[2]} ms of {len(self.seconds)}"


@dataclass
class Machine:
    """Resources of a bridge: peak memory and disk in bytes, CPU in seconds, most topics joined, lowest score."""

    memory: int = 0
    disk: int = 0
    cpu: float = 0.0
    topics: int = 0
    score: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.memory / MIB:.0f} MiB of memory at most, {self.disk / MIB:.0f} MiB on disk at most, "
            f"{self.cpu:.0f} s of CPU"
        )


def cpu_seconds(bridge: BridgeAlone) -> float:
    """CPU that the bridge took since it began."""
    fields = Path(f"/proc/{bridge.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def watch(bridge: BridgeAlone, machine: Machine) -> None:
    """Each second, until cancelled."""
    began = cpu_seconds(bridge)
    while True:
        status = bridge.status()  # AssertionError with its last words, if it has ended
        machine.memory = max(machine.memory, bridge.memory())
        machine.disk = max(machine.disk, on_disk(bridge.state))
        machine.cpu = cpu_seconds(bridge) - began
        if status is not None:
            machine.topics = max(machine.topics, len(status.topics))
            machine.score = min((machine.score, *(peer.score for peer in status.peers)))
        await trio.sleep(1)  # the pace of the looks


def on_disk(folder: Path) -> int:
    """Bytes of all files; those that go meanwhile do not count."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += (Path(parent) / name).stat().st_size
            except FileNotFoundError:
                continue
    return size


class Honest:
    """Two peers that know the bridge alone, and speak."""

    def __init__(self, both: tuple[Running, Running]) -> None:
        self.both = both
        self._said_at: dict[bytes, float] = {}

    @classmethod
    async def come(cls, town: Town, address: str) -> Honest:
        """Both are there, and the bridge knows that each is on the topic: it has sent each a GRAFT."""
        one, other = [await town.node(replace(OPTIONS, bootstrap=(address,))) for _ in range(2)]
        for each in (one, other):
            each.node.join(TOPIC)
        for each in (one, other):
            await town.bell.until(partial(is_grafted, each))
        return cls((one, other))

    async def speak(self, seconds: float) -> None:
        """Both, for so long."""
        async with trio.open_nursery() as nursery:
            for one in self.both:
                nursery.start_soon(self._speak, one, int(seconds * RATE))

    async def _speak(self, one: Running, count: int) -> None:
        began = trio.current_time()
        for number in range(count):
            await trio.sleep_until(began + number / RATE)
            data = f"honest {len(self._said_at)} ".encode().ljust(200, b"\0")
            self._said_at[data] = trio.current_time()
            one.node.publish(TOPIC, data)

    async def heard_all(self, town: Town, seconds: float) -> None:
        """Until each has heard what the other said: it is with the bridge then. TooSlowError: not in time."""
        for one, other in (self.both, self.both[::-1]):
            await town.bell.until(partial(_has_heard, other, one), seconds)

    def latencies(self, since: float = 0.0) -> Latencies:
        """Return the latencies of messages published from `since` on."""
        said = self._said_at
        return Latencies(
            [
                at - said[data]
                for one in self.both
                for data, at in zip(one.heard, one.heard_at, strict=True)
                if said.get(data, -1.0) >= since
            ]
        )


def _has_heard(one: Running, other: Running) -> bool:
    return len(one.heard) >= len(other.published)


def is_grafted(one: Running) -> bool:
    """Return whether the bridge has taken a peer into its mesh."""
    return any(graft.topicID == TOPIC for rpc in one.rpcs(Frame.IN) for graft in rpc.control.graft)


async def until(
    bridge: BridgeAlone, true: Callable[[BridgeStatus], bool], what: str, seconds: float = PATIENCE
) -> BridgeStatus:
    """As `BridgeAlone.until`; the other tasks go on meanwhile."""
    return await trio.to_thread.run_sync(bridge.until, true, what, seconds)


_ENDING = 240.0  # s for an attacker to close its streams, of which it may have thousands, on a busy machine


@asynccontextmanager
async def attacked(address: str, done: list[Done], *options: object) -> AsyncIterator[None]:
    """Once others attack, with these options of `hostile.attack`, and as long; what they did is appended to `done`."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "hostile.attack", address, *map(str, options)],
        cwd=_ROOT / "tests",
        env={**os.environ, "PYTHONPATH": f"{_ROOT}:{_ROOT / 'tests'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with trio.fail_after(60):
            assert await process.stdout.receive_some(1) == b"\n"
        yield
        await process.stdin.aclose()
        with trio.fail_after(_ENDING):
            said = b"".join([part async for part in process.stdout])
            await process.wait()
        done.append(msgspec.json.decode(said, type=Done))
    finally:
        if process.returncode is None:
            process.kill()


@dataclass
class Flood:
    """Result of a flood, and of the honest peers that published during it."""

    before: Latencies
    during: Latencies
    machine: Machine
    status: BridgeStatus
    done: Done
    seconds: float
    said: int
    lost: int
    """honest messages that are in no frame of their author's connection"""
    bytes_of: Counter[bytes]
    """bytes of captured frames, by who sent them"""

    @property
    def taken(self) -> int:
        """Bytes of all frames that came."""
        return self.bytes_of.total()

    @property
    def most(self) -> int:
        """Bytes of the frames of the peer of whom most came."""
        return max(self.bytes_of.values())

    def __str__(self) -> str:
        counters = {name: count for name, count in sorted(self.status.counters.items()) if count}
        return "\n".join(
            (
                f"{self.said} honest messages, {self.lost} not captured",
                f"from one honest peer to the other: before {self.before}",
                f"                                   during {self.during}",
                f"bridge: {self.machine}, of {self.seconds:.0f} s",
                f"captured of all: {self.taken / MIB:.0f} MiB; at most of one: {self.most / MIB:.0f} MiB",
                f"kept out at the end: {self.status.kept_out}",
                f"attackers came: {self.done.came}",
                f"attackers said, bytes: {self.done.said}",
                f"counters: {counters}",
            )
        )


def flood(bridge: BridgeAlone, folder: Path, quiet: float, seconds: float, crowd: int, seed: int) -> Flood:
    """Honest peers speak for so many quiet seconds, and then for so many while others attack. Ends the bridge."""
    address = bridge.until(lambda status: bool(status.addresses), "the bridge listens").addresses[0]
    before, during, machine, done = Latencies(), Latencies(), Machine(), list[Done]()
    published: dict[bytes, set[str]] = {}
    took: list[float] = []

    async def test(town: Town) -> None:
        honest = await Honest.come(town, address)
        await honest.speak(quiet)
        await honest.heard_all(town, 30)
        before.seconds = honest.latencies().seconds
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, bridge, machine)
            async with attacked(address, done, "--flood", "--seed", seed, "--crowd", crowd):
                began = trio.current_time()
                await honest.speak(seconds)
                await honest.heard_all(town, 60)
                await until(bridge, lambda status: status.kept_out > 0, "somebody is kept out")
            took.append(trio.current_time() - began)
            nursery.cancel_scope.cancel()
        during.seconds = honest.latencies(began).seconds
        published.update((one.node.peer, set(one.published)) for one in honest.both)

    in_town(folder, test, quiet + seconds + 240)
    status = bridge.status()
    assert status is not None
    assert bridge.stop() == (0, "")
    captured: dict[bytes, set[str]] = {peer: set() for peer in published}
    bytes_of: Counter[bytes] = Counter()
    for frame in bridge.frames():
        if frame.direction == Frame.IN:
            bytes_of[frame.remote_peer] += frame.ByteSize()
            if frame.remote_peer in captured:
                captured[frame.remote_peer].update(map(message_id, RPC.FromString(frame.payload).publish))
    return Flood(
        before,
        during,
        machine,
        status,
        done[0],
        took[0],
        sum(map(len, published.values())),
        sum(len(ids - captured[peer]) for peer, ids in published.items()),
        bytes_of,
    )


def wrong(came: Flood, of_peer: int, of_all: int) -> list[str]:
    """Return a sentence for each requirement that was not met. `of_peer`, `of_all`: the budgets, in bytes an hour."""
    most = of_all * (1 + came.seconds / 3600) + _IN_THE_AIR
    return [
        text
        for text, bad in (
            (f"{came.lost} honest messages are in no frame", came.lost > 0),
            (f"{came.machine.memory / MIB:.0f} MiB of memory", came.machine.memory > MEMORY),
            (f"{came.taken / MIB:.0f} MiB captured, and {most / MIB:.0f} are allowed", came.taken > most),
            (
                f"{came.most / MIB:.0f} MiB of one peer",
                came.most > of_peer * (1 + came.seconds / 3600) + _IN_THE_AIR / 8,
            ),
        )
        if bad
    ]


@dataclass
class Names:
    """Result for peers on thousands of topics, and for the honest peers that published meanwhile."""

    before: Latencies
    during: Latencies
    machine: Machine
    status: BridgeStatus
    done: Done
    seconds: float
    few_joined: float
    """seconds until the bridge was on the five topics of a peer that came meanwhile"""
    few_kept: bool
    """whether the bridge was on them at the end"""

    def __str__(self) -> str:
        subscribers = [round(peer.score) for peer in self.status.peers if peer.topics > 5]
        return "\n".join(
            (
                f"joined at most {self.machine.topics}; {self.status.topics_refused} refused at the end",
                f"five topics of another peer: joined after {self.few_joined:.1f} s, kept: {self.few_kept}",
                f"from one honest peer to the other: before {self.before}",
                f"                                   during {self.during}",
                f"bridge: {self.machine}, of {self.seconds:.0f} s",
                f"scores of subscribers at the end: {subscribers}; the lowest seen {self.machine.score:.0f}",
                f"kept out at the end: {self.status.kept_out}; came: {self.done.came}",
            )
        )


def names(
    bridge: BridgeAlone, folder: Path, quiet: float, seconds: float, peers: int, topics: int, at_once: int
) -> Names:
    """Honest peers speak for so many quiet seconds, and then for so many while each of others subscribes to so many
    topics, so many in an RPC. Then one comes that is on five. Ends the bridge."""
    address = bridge.until(lambda status: bool(status.addresses), "the bridge listens").addresses[0]
    few = {f"{TOPIC}/sep/model/k{number}" for number in range(5)}
    machine, done = Machine(), list[Done]()
    found: list[Names] = []

    async def test(town: Town) -> None:
        honest = await Honest.come(town, address)
        await honest.speak(quiet)
        await honest.heard_all(town, 30)
        before = honest.latencies()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, bridge, machine)
            async with attacked(address, done, "--topics", topics, "--peers", peers, "--at-once", at_once):
                began = trio.current_time()
                nursery.start_soon(honest.speak, seconds)
                await until(bridge, lambda status: status.topics_refused > 0, "all places are taken")
                one = await town.node(replace(OPTIONS, bootstrap=(address,)))
                for topic in few:
                    one.node.join(topic)
                came = trio.current_time()
                await until(bridge, lambda status: few <= set(status.topics), "the five are joined")
                joined = trio.current_time() - came
                await trio.sleep_until(began + seconds)
                await honest.heard_all(town, 60)
                status = await until(bridge, lambda status: True, "a status")
            nursery.cancel_scope.cancel()
        kept, took = few <= set(status.topics), trio.current_time() - began
        found.append(Names(before, honest.latencies(began), machine, status, done[0], took, joined, kept))

    in_town(folder, test, quiet + seconds + 240)
    assert bridge.stop() == (0, "")
    return found[0]
