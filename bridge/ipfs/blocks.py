"""The bridge's interface to IPFS: store and fetch blocks.

Publisher and fetcher are threads, so calls block. Any thread may make any call. Every returned block was verified
against its CID: no response of a node is trusted.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final, Protocol

from kiln.conf.process.bridge_status import IpfsStatus
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.batch_block import MAX_BLOCK
from kiln.schemas.wire.cid import CidError, cid_bytes, read_sha2_256_digest

MAX_READ: Final = 2 << 20
"""Largest block read from other nodes, in bytes: the largest that bitswap carries between peers (Kubo, `block put`)."""

TOO_LARGE: Final = "block_too_large"
WRONG_HASH: Final = "block_hash_mismatch"
WRONG_CID: Final = "block_cid_mismatch"
CID_MALFORMED: Final = "cid_malformed"
CODEC_UNSUPPORTED: Final = "cid_codec_unsupported"


class BlockStoreUnavailableError(Exception):
    """No node is reachable, so the caller waits. The message names the node and the reason."""


class BlockUnavailableError(Exception):
    """The block could not be fetched (or stored, or pinned) now: no peer sent it in time. A later attempt may
    succeed."""


class BlockRefusedError(Exception):
    """The block is rejected, and a later attempt would not help. `reason` is the reason for quarantine; the message
    describes it."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class BlockStore(Protocol):
    """A store of blocks: put, get, remove and close. `cid` is the text of a CID."""

    def put(self, cid: str, data: bytes) -> None:
        """Store a block, protect it from garbage collection, and announce it in the background. Peers can then fetch
        it. A block that is stored already is no error.

        Raises:
            BlockStoreUnavailableError: the store cannot be reached; a later call may succeed.
            BlockUnavailableError: the block cannot be stored or protected now; a later call may succeed.
            BlockRefusedError: the bytes do not match the CID, the block is too large, or it was stored under another
                CID.
        """
        ...

    def get(self, cid: str, timeout: float, limit: int = MAX_BLOCK) -> bytes:
        """Fetch a block and verify it against its CID, reading at most `limit` bytes.

        Args:
            timeout: seconds, roughly, to search for the block among peers.

        Raises:
            BlockStoreUnavailableError: the store cannot be reached; a later call may succeed.
            BlockUnavailableError: the block was not found in time.
            BlockRefusedError: the block is larger than `limit`, does not have the hash of the CID, or the CID cannot be
                checked (not sha2-256).
        """
        ...

    def remove(self, cid: str) -> None:
        """Undo `put` for a block; do nothing if the block is not stored, or if others protect it too.

        Raises:
            BlockStoreUnavailableError: the store cannot be reached; a later call may succeed.
        """
        ...

    def status(self) -> IpfsStatus:
        """Return the numbers of connections and blocks, without waiting for a node."""
        ...

    def describe(self) -> str:
        """Describe the store and its last known state. Returns at once."""
        ...

    def close(self) -> None:
        """Close the store. Calls in other threads end with `BlockStoreUnavailableError`."""
        ...


def read_digest(cid: str) -> bytes:
    """Return the sha2-256 digest in a CID.

    Raises:
        BlockRefusedError: the text is not a CID, or the CID has another hash.
    """
    try:
        digest = read_sha2_256_digest(cid_bytes(cid))
    except CidError as error:
        raise BlockRefusedError(CID_MALFORMED, str(error)) from None
    if isinstance(digest, Rejected):
        raise BlockRefusedError(digest.reason, f"{cid[:80]}: {digest.detail}")
    return digest


def verify_block(cid: str, data: bytes) -> bytes:
    """Return the bytes if they match the CID.

    Raises:
        BlockRefusedError: the bytes do not match the CID, or the CID cannot be checked.
    """
    if sha256(data).digest() != read_digest(cid):
        raise BlockRefusedError(WRONG_HASH, f"{cid[:80]}: the {len(data)} bytes received have another hash")
    return data


def refuse_too_large(cid: str, limit: int) -> BlockRefusedError:
    """Return the error of a block that exceeds the limit."""
    return BlockRefusedError(TOO_LARGE, f"{cid[:80]}: larger than {limit:,} bytes")
