"""Interface of the bridge to IPFS: store and fetch blocks.

The calls are synchronous, because publisher and fetcher are threads. Implementations are thread-safe. They verify every
fetched block against its CID, because nodes are not trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple, Protocol

from kiln.conf.process.bridge_status import IpfsStatus
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.batch_block import MAX_BLOCK
from kiln.schemas.wire.cid import CidError, cid_bytes, read_sha2_256_digest

MAX_READ: Final = 2 << 20
"""Maximum size of a block read from other nodes, in bytes. Bitswap transfers no larger ones (Kubo, `block put`)."""

TOO_LARGE: Final = "block_too_large"
WRONG_HASH: Final = "block_hash_mismatch"
WRONG_CID: Final = "block_cid_mismatch"
CID_MALFORMED: Final = "cid_malformed"
CODEC_UNSUPPORTED: Final = "cid_codec_unsupported"


class BlockStoreUnavailableError(Exception):
    """The IPFS node, or the folder of the blocks, cannot be used now. Retry later; another block would fail too."""


class BlockUnavailableError(Exception):
    """This block could not be fetched or pinned, for example because no peer sent it in time. A retry may succeed."""


class BlockRefusedError(Exception):
    """The block or its CID is invalid, or the block is too large, so a retry would fail too.

    Attributes:
        reason: reason code of the record in `kiln.quarantine`.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Announcer(NamedTuple):
    """The author of a message that announces a block, and the peer that sent the message."""

    author: str
    """peer id of the author, or of the sending peer if the message is unsigned"""
    peer: str
    """id of the peer that sent the message, or "" if unknown"""


class BlockStore(Protocol):
    """A store of IPFS blocks. Each argument `cid` is a CID as text."""

    def put(self, cid: str, data: bytes) -> None:
        """Store a block, so that peers can fetch it. Storing a block again renews its time for `remove_older`.

        The block is protected from garbage collection, and announced to peers in the background.

        Raises:
            BlockStoreUnavailableError: the store cannot be reached; a later call may succeed.
            BlockUnavailableError: the block cannot be pinned now; a later call may succeed.
            BlockRefusedError: the bytes do not match the CID, the block is too large, or the node computes another CID
                for the block.
        """
        ...

    def get(self, cid: str, timeout: float, limit: int = MAX_BLOCK, announcers: Sequence[Announcer] = ()) -> bytes:
        """Fetch a block and verify it against its CID, reading at most `limit` bytes.

        Args:
            timeout: approximate time in seconds to wait for a peer that sends the block.
            announcers: nodes that may have the block, the most trusted first.

        Raises:
            BlockStoreUnavailableError: the store cannot be reached; a later call may succeed.
            BlockUnavailableError: the block was not found in time.
            BlockRefusedError: the block is larger than `limit` or does not match the CID, or the hash of the CID is not
                sha2-256.
        """
        ...

    def remove_older(self, before: int) -> bool:
        """Undo `put` for some of the blocks that were last put before this time, in µs since the epoch.

        Each call examines a limited number of blocks, and continues where the last one stopped.

        Returns:
            True if blocks remain to be examined; false after the last one. The next call then begins again.

        Raises:
            BlockStoreUnavailableError: the store cannot be reached; a later call may succeed.
        """
        ...

    def status(self) -> IpfsStatus:
        """Return the last known numbers of connections and blocks. Returns at once."""
        ...

    def describe(self) -> str:
        """Return a text about the store and its last known state, for status.json. Returns at once."""
        ...

    def close(self) -> None:
        """Close the store. Calls in other threads end with `BlockStoreUnavailableError`."""
        ...


def read_digest(cid: str) -> bytes:
    """Return the sha2-256 digest in a CID.

    Raises:
        BlockRefusedError: the text is not a CID, or the hash of the CID is not sha2-256.
    """
    try:
        digest = read_sha2_256_digest(cid_bytes(cid))
    except CidError as error:
        raise BlockRefusedError(CID_MALFORMED, str(error)) from None
    if isinstance(digest, Rejected):
        raise BlockRefusedError(digest.reason, f"{cid[:80]}: {digest.detail}")
    return digest


def verify_block(cid: str, data: bytes) -> bytes:
    """Check that the bytes of a block match its CID, and return the bytes.

    Raises:
        BlockRefusedError: the bytes do not match the CID, or the hash of the CID is not sha2-256.
    """
    if sha256(data).digest() != read_digest(cid):
        raise BlockRefusedError(WRONG_HASH, f"{cid[:80]}: the {len(data)} bytes received have another hash")
    return data


def refuse_too_large(cid: str, limit: int) -> BlockRefusedError:
    """Return the error for a block of more than `limit` bytes."""
    return BlockRefusedError(TOO_LARGE, f"{cid[:80]}: larger than {limit:,} bytes")
