"""A bridge whose slots silent peers of one address hold, and honest peers of the same address that come meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import trio

from hostile.attack import Done
from hostile.scene import MEMORY, MIB, Honest, Latencies, Machine, attacked, until, watch
from kiln.conf.process.bridge_status import BridgeStatus
from kit.bridge_alone import BridgeAlone
from kit.node_town import OPTIONS, TOPIC, Running, Town, in_town, subscribed

_FILLING = 240.0  # s in which the silent peers take all slots: each of them needs CPU for its handshake


@dataclass
class Newcomers:
    """Result for honest peers that connect while silent ones hold all slots."""

    before: Latencies
    during: Latencies
    joining: Latencies
    """from the start of a newcomer until it knows the bridge's subscriptions; silent peers may fill the mesh"""
    hearing: Latencies
    """from the newcomer's message to the honest peers that were there before"""
    came: int
    lost: int
    """messages of honest peers that are in no frame of their connection"""
    machine: Machine
    status: BridgeStatus
    done: Done

    def __str__(self) -> str:
        names = ("connections_evicted", "connections_refused", "handshakes_failed")
        return "\n".join(
            (
                f"{len(self.joining.seconds)} of {self.came} newcomers got in: {self.joining}",
                f"their messages at the others: {self.hearing}",
                f"{self.lost} honest messages not captured",
                f"from one honest peer to the other: before {self.before}",
                f"                                   during {self.during}",
                f"bridge: {self.machine}; {len(self.status.peers)} peers at the end",
                f"counters: { ({name: self.status.counters.get(name, 0) for name in names}) }; came: {self.done.came}",
            )
        )

    def wrong(self) -> list[str]:
        """Return a sentence for each requirement that was not met."""
        return [
            text
            for text, bad in (
                (f"{len(self.joining.seconds)} of {self.came} got in", len(self.joining.seconds) < self.came),
                (f"{self.lost} honest messages are in no frame", self.lost > 0),
                ("no slot was taken from a silent peer", not self.status.counters.get("connections_evicted")),
                (f"{self.machine.memory / MIB:.0f} MiB of memory", self.machine.memory > MEMORY),
            )
            if bad
        ]


def _is_full(status: BridgeStatus) -> bool:
    return status.counters.get("connections_evicted", 0) > 0


def silent_peers(bridge: BridgeAlone, folder: Path, quiet: float, seconds: float, peers: int, count: int) -> Newcomers:
    """Two honest peers speak for so many quiet seconds, and for `seconds` while `peers` silent ones hold all slots and
    `count` newcomers come, each of which speaks once. Ends the bridge."""
    address = bridge.until(lambda status: bool(status.addresses), "the bridge listens").addresses[0]
    machine, done = Machine(), list[Done]()
    joining, hearing = Latencies(), Latencies()
    found: list[tuple[Latencies, Latencies, BridgeStatus]] = []
    speakers: list[Running] = []

    async def join(town: Town, honest: Honest) -> None:
        began = trio.current_time()
        one = await town.node(replace(OPTIONS, bootstrap=(address,)))
        one.node.join(TOPIC)
        with trio.move_on_after(60):
            await town.bell.until(partial(subscribed, one, 1))
            joining.seconds.append(trio.current_time() - began)
            began, data = trio.current_time(), one.peer.encode()
            one.node.publish(TOPIC, data)
            speakers.append(one)
            await town.bell.until(lambda: all(data in each.heard for each in honest.both))
            hearing.seconds.append(trio.current_time() - began)

    async def test(town: Town) -> None:
        honest = await Honest.come(town, address)
        speakers.extend(honest.both)
        await honest.speak(quiet)
        await honest.heard_all(town, 30)
        before = honest.latencies()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, bridge, machine)
            async with attacked(address, done, "--silent", peers):
                await until(bridge, _is_full, "all slots are taken", _FILLING)
                began = trio.current_time()
                nursery.start_soon(honest.speak, seconds)
                for number in range(count):
                    await trio.sleep_until(began + seconds * number / count)
                    await join(town, honest)
                await trio.sleep_until(began + seconds)
                await honest.heard_all(town, 60)
                status = await until(bridge, lambda status: True, "a status")
            nursery.cancel_scope.cancel()
        found.append((before, honest.latencies(began), status))

    in_town(folder, test, quiet + seconds + 60 * count + 240)
    assert bridge.stop() == (0, "")
    captured = set(bridge.received_ids())
    lost = sum((one.node.peer, each) not in captured for one in speakers for each in one.published)
    before, during, status = found[0]
    return Newcomers(before, during, joining, hearing, count, lost, machine, status, done[0])
