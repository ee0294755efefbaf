"""Store, serve and fetch IPFS blocks, with the bridge's own bitswap or through the RPC of a Kubo node."""

from kiln.bridge.ipfs.blocks import (
    MAX_READ,
    Announcer,
    BlockRefusedError,
    BlockStore,
    BlockStoreUnavailableError,
    BlockUnavailableError,
    read_digest,
    verify_block,
)

__all__ = [
    "MAX_READ",
    "Announcer",
    "BlockRefusedError",
    "BlockStore",
    "BlockStoreUnavailableError",
    "BlockUnavailableError",
    "read_digest",
    "verify_block",
]
