"""Blocks: kept, fetched, pinned, by a real IPFS node where there is one (docs/design, The bridge)."""

from collections.abc import Sequence
from pathlib import Path

from kiln.bridge.ipfs.blocks import (
    MAX_READ,
    BlockRefusedError,
    BlockStore,
    BlockStoreUnavailableError,
    BlockUnavailableError,
    read_digest,
    verify_block,
)
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.ipfs.helia import Helia
from kiln.bridge.ipfs.kubo import Kubo
from kiln.bridge.ipfs.node import NodeBlockStore

__all__ = [
    "MAX_READ",
    "BlockRefusedError",
    "BlockStore",
    "BlockStoreUnavailableError",
    "BlockUnavailableError",
    "open_blocks",
    "read_digest",
    "verify_block",
]


def open_blocks(
    api: str, state: Path, *, auth: str = "", listen: str = "", peers: Sequence[str] = (), at_most: int = 16
) -> BlockStore:
    """Blocks as the settings `ipfs.…` say; returns at once, a node may come up later. End it with `close()`.

    `api`: "" (a folder, STATE/blocks), "helia" (a node of our own, in STATE/helia) or the URL of Kubo's RPC. `auth`:
    for that RPC. `listen`: where a node of our own listens ("": it only dials). `peers`: multiaddrs that the node is
    kept connected to. `at_most`: blocks that are waited for at one time. ValueError: `auth` is not written as it should
    be.
    """
    if not api:
        return FolderBlockStore(state / "blocks")
    if api != "helia":
        return NodeBlockStore(Kubo(api, auth, at_most), peers)
    folder = state / "helia"
    helia = Helia(folder / "app", folder / "repo", state / "logs" / "helia.log", listen)
    return NodeBlockStore(Kubo("http://127.0.0.1:0", at_most=at_most), peers, helia)
