"""A node of the demo network that fetches the blocks of the batches that it receives, as a Ceramic node would."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from kiln.bridge.gossipsub.effects import Deliver
from kiln.bridge.ipfs import BlockUnavailableError
from kiln.bridge.ipfs.bitswap.exchange import AnnouncementSources, BlockExchange
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.libp2p.host import Node
from kiln.deploy.demo.events import EventCounts

_AT_ONCE: Final = 4
_MAX_WAITING: Final = 1_000
_TIMEOUT: Final = 60.0  # s


class BatchFetcher:
    """Fetches from the peer that relayed the announcement, over bitswap. Create it before the node runs."""

    def __init__(self, node: Node, folder: Path, name: str, counts: EventCounts) -> None:
        """Create the fetcher of a node.

        Args:
            folder: folder of the node's own blocks, which stays empty.
        """
        self._name = name
        self._counts = counts
        self._sources = AnnouncementSources()
        self._exchange = BlockExchange(node, FolderBlockStore(folder), sources=self._sources)
        self._add, self._added = trio.open_memory_channel[str](_MAX_WAITING)

    def add(self, cid: str, deliver: Deliver) -> None:
        """Fetch the block of a batch in the background, unless too many blocks are waiting."""
        self._sources.record_message(deliver.message.data, deliver.source)
        with suppress(trio.WouldBlock):
            self._add.send_nowait(cid)

    async def run(self) -> None:
        """Fetch until cancelled, once the node runs."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._exchange.run)
            for _ in range(_AT_ONCE):
                nursery.start_soon(self._fetch_added)

    async def _fetch_added(self) -> None:
        async for cid in self._added:
            with suppress(BlockUnavailableError):
                await self._exchange.fetch(cid, _TIMEOUT)
                self._counts.fetched[self._name] += 1
