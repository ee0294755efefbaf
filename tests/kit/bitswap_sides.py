"""Nodes of ours that serve and fetch blocks over bitswap, and blocks for them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from kiln.bridge.ipfs.bitswap.exchange import BlockExchange, ExchangeOptions
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.libp2p.discovery import Discovery, DiscoveryOptions
from kiln.bridge.libp2p.host import Node
from kiln.schemas.wire.cid import cid_bytes, cid_text, compute_cid
from kit.awaiting import until
from kit.node_town import OPTIONS, Running, Town

FULL = bool(os.environ.get("KILN_TEST_FULL"))
"""True if tests with foreign peers run at their full size, which takes minutes."""
COUNT = 1_000 if FULL else 40
CODECS = (0x55, 0x71, 0x85)


class Block(NamedTuple):
    """A block and its CID."""

    cid: str
    data: bytes


def make_blocks(count: int, seed: str, codecs: Sequence[int] = CODECS) -> list[Block]:
    """Make blocks of 100 B to 13 kB (410 kB if FULL) in several codecs. Of more than three blocks, one in 50 has
    2 MiB."""
    random = Random(seed)
    blocks = []
    for number in range(count):
        is_largest = count > 3 and (count - 1 - number) % 50 == 0
        size = 2 << 20 if is_largest else 100 << random.randrange(13 if FULL else 8)
        data = random.randbytes(size)
        blocks.append(Block(cid_text(compute_cid(data, codecs[number % len(codecs)])), data))
    return blocks


@dataclass
class Side:
    """A running node with bitswap, and optionally with a DHT."""

    running: Running
    exchange: BlockExchange
    folder: FolderBlockStore
    discovery: Discovery | None

    @property
    def node(self) -> Node:
        return self.running.node

    @property
    def address(self) -> str:
        return self.running.address

    def put(self, block: Block) -> None:
        """Store a block as the publisher does, and send it to the peers that want it."""
        self.folder.put(*block)
        self.exchange.add_block(cid_bytes(block.cid), len(block.data))

    async def fetch(self, cid: str, seconds: float = 30) -> bytes:
        return await self.exchange.fetch(cid, seconds)

    async def until_wanted(self, blocks: Collection[Block], at_once: int) -> None:
        """Wait until peers want `at_once` of these blocks, or all if there are fewer. This node has none of them."""
        awaited = {cid_bytes(block.cid) for block in blocks}
        peers = self.exchange._engine._peers
        await until(
            lambda: sum(len(awaited & state.wants.keys()) for state in peers.values()) >= min(at_once, len(awaited)),
            "a peer wants the blocks that are not there",
        )

    def counts(self) -> dict[str, int]:
        """Return the bitswap counters that are not 0."""
        return {name: count for name, count in self.node.counters.items() if name.startswith("bitswap_") and count}


async def open_side(
    town: Town,
    name: str,
    *bootstrap: str,
    options: ExchangeOptions | None = None,
    dht: DiscoveryOptions | None = None,
    listen: Sequence[str] = OPTIONS.listen,
) -> Side:
    """Start one of Kiln's nodes, with its blocks in a folder of this name."""
    folder = FolderBlockStore(town.folder / name / "blocks")
    made: list[tuple[BlockExchange, Discovery | None]] = []

    def serve(node: Node) -> None:
        discovery = None if dht is None else Discovery(node, dht, Random(name))
        search = None if discovery is None else discovery.connect_providers
        made.append((BlockExchange(node, folder, options, search), discovery))

    running = await town.node(replace(OPTIONS, bootstrap=bootstrap, listen=listen), before=serve)
    ((exchange, discovery),) = made
    await town.nursery.start(exchange.run)
    if discovery is not None:
        town.nursery.start_soon(discovery.run)
    return Side(running, exchange, folder, discovery)


def batches_of(blocks: Sequence[Block], size: int) -> Iterator[Sequence[Block]]:
    """Yield the blocks in groups of at most `size`."""
    for start in range(0, len(blocks), size):
        yield blocks[start : start + size]
