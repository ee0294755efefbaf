"""A bridge with go peers behind it, to whom an honest peer speaks, while a stranger sends large messages."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import trio

from hostile.attack import Done
from hostile.scene import attacked, until
from kiln.conf.process.bridge_status import BridgeStatus
from kit.bridge_alone import BridgeAlone
from kit.foreign_peer import ForeignPeer, build_go_pubsub, go_pubsub_peer
from kit.kubo_daemon import Daemon, build
from kit.node_town import OPTIONS, TOPIC, Town, in_town

_RATE = 2.5  # honest messages a second
_PATIENCE = 30.0  # s after the last one
_OVER_GO = 1 << 20  # bytes


@dataclass
class HonestMessages:
    """How many honest messages each go peer received, next to a stranger's large ones."""

    sent: int
    done: Done
    status: BridgeStatus
    received: dict[str, int] = field(default_factory=dict)
    large_in: int = 0
    """captured RPCs of the stranger that are larger than go accepts"""
    large_out: int = 0
    """the same that the bridge sent"""

    def __str__(self) -> str:
        counters = {
            name: self.status.counters.get(name, 0)
            for name in ("message_too_large", "control_too_large", "peers_banned")
        }
        return "\n".join(
            (
                *(f"{name}: {count} of {self.sent} honest messages" for name, count in self.received.items()),
                f"RPCs of more than 1 MiB: {self.large_in} came, {self.large_out} went",
                f"counters: {counters}; strangers came: {self.done.came}",
            )
        )

    def wrong(self) -> list[str]:
        """Return a sentence for each requirement that was not met."""
        return [
            text
            for text, bad in (
                *(
                    (f"{name} received {count} of {self.sent} honest messages", count < self.sent)
                    for name, count in self.received.items()
                ),
                (f"{self.large_out} RPCs of more than 1 MiB were sent", self.large_out > 0),
                ("no large message came", self.large_in == 0),
                ("nobody was kept out", not self.status.counters.get("peers_banned")),
            )
            if bad
        ]


def large_messages(folder: Path, count: int, seed: int) -> HonestMessages:
    """An honest peer publishes `count` messages through a bridge to Kubo 0.43 and to go-libp2p-pubsub, while a stranger
    sends a large message each 2 s, and comes again under a new key when it is kept out."""
    folder.mkdir()
    kubo = Daemon(str(build()), folder / "kubo")
    bridge = BridgeAlone(folder / "state")
    try:
        kubo.start().close()
        with go_pubsub_peer(build_go_pubsub(), folder / "go") as go:
            came = _speak(bridge, kubo, go, folder, count, seed)
        bridge.stop()
    finally:
        kubo.stop()
        bridge.kill()
    for frame in bridge.frames():
        if len(frame.payload) > _OVER_GO:
            came.large_in += frame.direction == frame.IN
            came.large_out += frame.direction == frame.OUT
    return came


def _speak(bridge: BridgeAlone, kubo: Daemon, go: ForeignPeer, folder: Path, count: int, seed: int) -> HonestMessages:
    address = bridge.until(lambda status: bool(status.addresses), "the bridge listens").addresses[0]
    messages = [b"honest %d" % number for number in range(count)]
    to_kubo: set[bytes] = set()
    done: list[Done] = []
    last: list[BridgeStatus] = []

    def all_received() -> bool:
        return to_kubo >= set(messages) and {each.data for each in go.received} >= set(messages)

    async def listen(town: Town) -> None:
        with suppress(httpx.HTTPError):
            async for data in kubo.hear(TOPIC):
                to_kubo.add(data)
                town.bell.ring()

    async def test(town: Town) -> None:
        honest = await town.node(replace(OPTIONS, bootstrap=(address,)))
        honest.node.join(TOPIC)
        town.nursery.start_soon(listen, town)
        await trio.to_thread.run_sync(kubo.connect, address)
        await trio.to_thread.run_sync(go.connect, address)
        await trio.to_thread.run_sync(go.subscribe, TOPIC)
        await until(bridge, lambda status: status.mesh.get(TOPIC, 0) == 3, "all three are in the bridge's mesh")
        async with attacked(address, done, "--large", "--seed", seed):
            began = trio.current_time()
            for number, data in enumerate(messages):
                await trio.sleep_until(began + number / _RATE)
                honest.node.publish(TOPIC, data)
            with trio.move_on_after(_PATIENCE):
                await town.bell.until(all_received, _PATIENCE * 2)
        last.append(await until(bridge, lambda status: True, "a status"))

    in_town(folder, test, count / _RATE + 240)
    received = {
        "Kubo": len(to_kubo & set(messages)),
        "go-libp2p-pubsub": len({each.data for each in go.received} & set(messages)),
    }
    return HonestMessages(count, done[0], last[0], received)
