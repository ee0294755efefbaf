"""Storing, serving and fetching of blocks, by the bridge itself or by a Kubo through its RPC (docs/design)."""

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
from kiln.bridge.ipfs.kubo import Kubo
from kiln.bridge.ipfs.node import NodeBlockStore

__all__ = [
    "MAX_READ",
    "BlockRefusedError",
    "BlockStore",
    "BlockStoreUnavailableError",
    "BlockUnavailableError",
    "open_store",
    "read_digest",
    "verify_block",
]


def open_store(api: str, folder: Path, *, auth: str = "", peers: Sequence[str] = (), at_most: int = 16) -> BlockStore:
    """Open the block store of a bridge that does not speak bitswap itself. Returns at once; a Kubo may start later.

    Args:
        api: URL of Kubo's RPC, or "" for a folder alone.
        folder: the folder of blocks.
        auth: credentials for that RPC.
        peers: multiaddrs that the node stays connected to.
        at_most: blocks that are fetched at one time.

    Raises:
        ValueError: `auth` is malformed.
    """
    if not api:
        return FolderBlockStore(folder)
    return NodeBlockStore(Kubo(api, auth, at_most), peers)
