"""What the bridge asks of IPFS: blocks in, blocks out.

Publisher and fetcher are threads, so calls wait. Any thread may make any call. Every block that comes out has the hash
that its CID names: no answer of a node is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final, Protocol

from kiln.bridge.ipfs.neighbours import BitswapPeer
from kiln.conf.process.bridge_status import IpfsStatus
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.batch_block import MAX_BLOCK
from kiln.schemas.wire.cid import CidError, cid_bytes, sha2_256_digest

MAX_READ: Final = 2 << 20
"""Largest block of others, in bytes: the largest that bitswap carries between peers (Kubo, `block put`)."""

TOO_LARGE: Final = "block_too_large"
WRONG_HASH: Final = "block_hash_mismatch"
WRONG_CID: Final = "block_cid_mismatch"
CID_MALFORMED: Final = "cid_malformed"
HASH_UNSUPPORTED: Final = "cid_hash_unsupported"
CODEC_UNSUPPORTED: Final = "cid_codec_unsupported"


class BlockStoreUnavailableError(Exception):
    """There is no node to speak with, so the caller waits. The text says which node, and why."""


class BlockUnavailableError(Exception):
    """The block could not be had (or stored, or pinned) now: no peer gave it in time. Another try later may work."""


class BlockRefusedError(Exception):
    """Another try would give the same. `reason`: for the quarantine; the text says the same in words."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class BlockStore(Protocol):
    """A place that keeps blocks. `cid` is the text of a CID."""

    def put(self, cid: str, data: bytes) -> None:
        """Keep a block, so that peers can fetch it once this returns. Does nothing if the block is there already.

        BlocksAwayError: wait. BlockRefusedError: not the bytes of this CID, too large, or kept under another CID.
        """
        ...

    def get(self, cid: str, timeout: float, limit: int = MAX_BLOCK) -> bytes:
        """The block, verified against its CID, at most `limit` bytes; not more than that is read.

        `timeout` in s: about how long peers are asked. BlocksAwayError: wait. BlockUnavailableError: not found in time.
        BlockRefusedError: larger, other bytes than its CID says, or a CID that cannot be checked (not sha2-256).
        """
        ...

    def pin(self, cid: str) -> None:
        """Keep this block, and not the blocks it links to, from being collected. Does nothing if it is pinned.

        BlocksAwayError; BlockUnavailableError: the node has no such block.
        """
        ...

    def unpin(self, cid: str) -> None:
        """Let the block be collected. Does nothing if it is not pinned, or pinned by others with all it links to.

        BlocksAwayError.
        """
        ...

    def provide(self, cid: str) -> None:
        """Tell others, where the node has a routing, who has this block: in its own time. Returns at once."""
        ...

    def connect_gossip_peers(self, peers: Sequence[BitswapPeer]) -> None:
        """The gossip peers that speak bitswap, the most important first: the node stays connected to them, as long as
        they are named. Returns at once."""
        ...

    def add_announcer(self, peer: str) -> None:
        """A block that this peer announced is about to be fetched: connect to it, if it can be found. Returns at
        once."""
        ...

    def status(self) -> IpfsStatus:
        """The counts. Returns at once."""
        ...

    def describe(self) -> str:
        """What keeps the blocks, and how it was when last seen, in words. Returns at once."""
        ...

    def close(self) -> None:
        """End what was started. Calls under way elsewhere end with BlocksAwayError."""
        ...


def read_digest(cid: str) -> bytes:
    """The sha2-256 digest in a CID. BlockRefusedError: not a CID, or one of another hash."""
    try:
        digest = sha2_256_digest(cid_bytes(cid))
    except CidError as error:
        raise BlockRefusedError(CID_MALFORMED, str(error)) from None
    if isinstance(digest, Rejected):
        raise BlockRefusedError(digest.reason, f"{cid[:80]}: {digest.detail}")
    return digest


def verify_block(cid: str, data: bytes) -> bytes:
    """The bytes, if they are those of the CID. BlockRefusedError: they are not, or the CID cannot be checked."""
    if sha256(data).digest() != read_digest(cid):
        raise BlockRefusedError(WRONG_HASH, f"{cid[:80]}: the {len(data)} bytes that came have another hash")
    return data


def refuse_too_large(cid: str, limit: int) -> BlockRefusedError:
    """The refusal of a block that is larger than asked for."""
    return BlockRefusedError(TOO_LARGE, f"{cid[:80]}: larger than {limit:,} bytes")
