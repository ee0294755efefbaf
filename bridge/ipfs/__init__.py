"""Storing, serving and fetching of blocks, by the bridge itself or by a Kubo through its RPC (docs/design)."""

from kiln.bridge.ipfs.blocks import (
    MAX_READ,
    BlockRefusedError,
    BlockStore,
    BlockStoreUnavailableError,
    BlockUnavailableError,
    read_digest,
    verify_block,
)

__all__ = [
    "MAX_READ",
    "BlockRefusedError",
    "BlockStore",
    "BlockStoreUnavailableError",
    "BlockUnavailableError",
    "read_digest",
    "verify_block",
]
