"""Block store of a bridge that is its own IPFS node. Bitswap serves the blocks of a folder, and fetches others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import trio

from kiln.bridge.ipfs.bitswap.exchange import BlockExchange
from kiln.bridge.ipfs.blocks import (
    Announcer,
    BlockStoreUnavailableError,
    BlockUnavailableError,
    refuse_too_large,
)
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.libp2p.discovery import Discovery
from kiln.conf.process.bridge_status import IpfsStatus
from kiln.schemas.wire.batch_block import MAX_BLOCK
from kiln.schemas.wire.cid import cid_bytes
from kiln.schemas.wire.identity import raw_peer

_STOPPING = "the bridge is stopping"
_MULTIHASH_SIZE = 34  # bytes at the end of a CID with sha2-256, the only hash of stored blocks


class BitswapBlockStore:
    """The `BlockStore` of `ipfs.api = "self"`.

    `put` stores Kiln's own blocks in a folder. `get` fetches other blocks from peers, and does not store them, so the
    bridge serves only its own blocks. `put`, `get` and `remove_older` are called in threads, and network I/O runs in
    the trio thread.
    """

    def __init__(
        self,
        folder: FolderBlockStore,
        exchange: BlockExchange,
        discovery: Discovery | None,
        token: trio.lowlevel.TrioToken,
        counters: Mapping[str, int],
        count_gossip_peers: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create the store.

        Args:
            discovery: announces the blocks in the DHT; `None` if the DHT is not used.
            token: token of the trio thread in which `exchange` runs.
            counters: event counters of `exchange` and `discovery`, for `status`.
            count_gossip_peers: returns the number of gossip peers that speak bitswap, for `status`.
        """
        self._folder = folder
        self._exchange = exchange
        self._discovery = discovery
        self._token = token
        self._counters = counters
        self._count_gossip_peers = count_gossip_peers
        self._closed = False

    def put(self, cid: str, data: bytes) -> None:
        """Implement `BlockStore.put`. Connected peers that have requested the block get it at once."""
        self._folder.put(cid, data)
        raw = cid_bytes(cid)
        self._call(self._exchange.add_block, raw, len(data))
        if self._discovery is not None:
            self._call(self._discovery.provide_block, raw[-_MULTIHASH_SIZE:])

    def get(self, cid: str, timeout: float, limit: int = MAX_BLOCK, announcers: Sequence[Announcer] = ()) -> bytes:
        """Implement `BlockStore.get`."""
        with suppress(BlockUnavailableError):
            return self._folder.get(cid, timeout, limit)
        if self._closed:
            raise BlockStoreUnavailableError(_STOPPING)
        try:
            data = trio.from_thread.run(self._fetch, cid, timeout, announcers, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled) as error:
            raise BlockStoreUnavailableError(_STOPPING) from error
        if len(data) > limit:
            raise refuse_too_large(cid, limit)
        return data

    async def _fetch(self, cid: str, timeout: float, announcers: Sequence[Announcer]) -> bytes:
        if self._exchange.is_isolated:
            raise BlockStoreUnavailableError("the bridge has no peer. Check bridge.bootstrap, and the network.")
        peers: list[bytes] = []
        for announcer in announcers:
            # not from the author, whose key may belong to no peer
            with suppress(ValueError):  # the peer of another transport
                peers.append(raw_peer(announcer.peer))
        return await self._exchange.fetch(cid, timeout, peers)

    def remove_older(self, before: int) -> bool:
        """Implement `BlockStore.remove_older`, and stop announcing the blocks."""
        return self._folder.remove_older(before, self._withdraw)

    def _withdraw(self, cid: str) -> None:
        if self._discovery is not None:
            self._call(self._discovery.withdraw_block, cid_bytes(cid)[-_MULTIHASH_SIZE:])

    def status(self) -> IpfsStatus:
        """Implement `BlockStore.status`."""
        counters, gossip_peers = self._counters, self._count_gossip_peers()
        return IpfsStatus(
            connections=len(self._exchange.peers),
            gossip_peers=gossip_peers,
            gossip_connected=gossip_peers,  # one node does gossip and bitswap
            provided=counters.get("discovery_blocks_provided", 0),
            unprovided=counters.get("discovery_blocks_unprovided", 0),
            blocks_sent=counters.get("bitswap_blocks_sent", 0),
            bytes_sent=counters.get("bitswap_bytes_sent", 0),
            blocks_received=counters.get("bitswap_blocks_received", 0),
        )

    def describe(self) -> str:
        """Implement `BlockStore.describe`."""
        peers, sent = len(self._exchange.peers), self._counters.get("bitswap_blocks_sent", 0)
        routing = "" if self._discovery is not None else ", without content routing"
        return f"the bridge itself: connected to {peers} peers that speak bitswap, {sent} blocks sent{routing}"

    def close(self) -> None:
        """Implement `BlockStore.close`."""
        self._closed = True

    def _call(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(trio.RunFinishedError):  # the node has ended
            self._token.run_sync_soon(call, *arguments)
