"""A bridge that honest peers gossip through and fetch from, while one hostile peer of bitswap after another comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from hostile.attack import Done
from hostile.scene import MEMORY, MIB, Honest, Latencies, attacked, cpu_seconds
from kiln.bridge.ipfs import BlockUnavailableError
from kiln.bridge.ipfs.folder import FolderBlockStore
from kit.bitswap_sides import Side, make_blocks, open_side
from kit.bridge_alone import BridgeAlone
from kit.descriptors import descriptors
from kit.node_town import Town, in_town
from kit.raw_bitswap import SERVED

_EVERY = 0.1  # s between two blocks that are fetched


@dataclass
class Round:
    """The figures of one kind of hostile peer."""

    name: str
    gossip: Latencies = field(default_factory=Latencies)
    fetching: Latencies = field(default_factory=Latencies)
    not_fetched: int = 0
    memory: int = 0
    """bytes at the end"""
    descriptors: int = 0
    cpu: float = 0.0
    came: int = 0
    """hostile peers, one after another"""

    def __str__(self) -> str:
        return (
            f"{self.name}: gossip {self.gossip}; blocks {self.fetching}, {self.not_fetched} not fetched; "
            f"bridge {self.memory / MIB:.0f} MiB, {self.descriptors} descriptors, {self.cpu:.0f} s of CPU; "
            f"came {self.came} times"
        )


@dataclass
class Rounds:
    """All rounds, the first of them without a hostile peer."""

    rounds: list[Round]
    published: int
    lost: int
    """honest messages that are in no frame of their author's connection"""

    def __str__(self) -> str:
        return "\n".join((*map(str, self.rounds), f"{self.published} honest messages, {self.lost} not captured"))

    def wrong(self) -> list[str]:
        """Return a sentence for each requirement that was not met."""
        most = max(each.memory for each in self.rounds)
        return [
            text
            for text, bad in (
                (f"{self.lost} honest messages are in no frame", self.lost > 0),
                (f"{most / MIB:.0f} MiB of memory", most > MEMORY),
                *(
                    (f"{each.name}: {each.not_fetched} blocks not fetched", each.not_fetched > 0)
                    for each in self.rounds
                ),
            )
            if bad
        ]


def bitswap(bridge: BridgeAlone, folder: Path, quiet: float, seconds: float, kinds: Sequence[str]) -> Rounds:
    """Two honest peers speak and a third fetches for so many quiet seconds, and for `seconds` beside a hostile peer of
    each kind (`kit.raw_bitswap.HOSTILE`). Ends the bridge."""
    address = bridge.until(lambda status: bool(status.addresses), "the bridge listens").addresses[0]
    store = FolderBlockStore(bridge.state / "blocks")
    for block in SERVED:
        store.put(*block)
    rounds: list[Round] = []
    there: list[Honest] = []

    async def fetch(one: Round, fetcher: Side, count: int) -> None:
        began = trio.current_time()
        for number, block in enumerate(make_blocks(count, one.name)):
            await trio.sleep_until(began + number * _EVERY)
            store.put(*block)
            asked = trio.current_time()
            try:
                await fetcher.fetch(block.cid)
            except BlockUnavailableError:
                one.not_fetched += 1
            else:
                one.fetching.seconds.append(trio.current_time() - asked)

    async def run_round(town: Town, honest: Honest, fetcher: Side, name: str, length: float) -> None:
        one, began, cpu = Round(name), trio.current_time(), cpu_seconds(bridge)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(honest.speak, length)
            nursery.start_soon(fetch, one, fetcher, int(length / _EVERY))
        await honest.heard_all(town, 60)
        one.gossip = honest.latencies(began)
        one.memory, one.descriptors = bridge.memory("VmRSS"), descriptors(bridge.process.pid)
        one.cpu = cpu_seconds(bridge) - cpu
        rounds.append(one)

    async def test(town: Town) -> None:
        honest = await Honest.come(town, address)
        there.append(honest)
        fetcher = await open_side(town, "fetcher", address, listen=())
        await town.bell.until(lambda: bool(fetcher.exchange.peers))
        await run_round(town, honest, fetcher, "quiet", quiet)
        for kind in kinds:
            done: list[Done] = []
            async with attacked(address, done, "--bitswap", kind):
                await run_round(town, honest, fetcher, kind, seconds)
            rounds[-1].came = done[0].came[kind]
            print(rounds[-1], flush=True)

    in_town(folder, test, quiet + (seconds + 90) * len(kinds) + 240)
    assert bridge.stop() == (0, "")
    published = [(one.node.peer, each) for one in there[0].both for each in one.published]
    captured = set(bridge.received_ids())
    return Rounds(rounds, len(published), sum(each not in captured for each in published))
