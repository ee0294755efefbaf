"""What the bridge asks of IPFS: blocks in, blocks out, whoever keeps them.

Publisher and fetcher are threads, so calls wait; each may be made from any thread. Every block handed out has the hash
its CID names: no answer of a node is believed.
"""

from __future__ import annotations

from typing import Final, Protocol

from multiformats import multihash

from schemas.batch import MAX_BLOCK
from schemas.cid import CidError, cid_bytes, sha2_256_digest
from schemas.reject import Rejected

MAX_OTHER: Final = 2 << 20
"""Largest block of any other kind, in bytes: the largest that bitswap carries between peers (Kubo, `block put`)."""

TOO_LARGE: Final = "block_too_large"
WRONG_HASH: Final = "block_hash_mismatch"
WRONG_CID: Final = "block_cid_mismatch"
CID_MALFORMED: Final = "cid_malformed"
HASH_UNSUPPORTED: Final = "cid_hash_unsupported"
CODEC_UNSUPPORTED: Final = "cid_codec_unsupported"


class BlocksAwayError(Exception):
    """No node to speak with: whatever is asked for waits until one is there. The text says which, and why."""


class BlockUnavailableError(Exception):
    """This block could not be had (or stored, or pinned) now: nobody gave it in time. Worth another try later."""


class BlockRefusedError(Exception):
    """Never: trying again gives the same. `reason` is a code for the quarantine, the text says it in words."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Blocks(Protocol):
    """Where blocks are kept and come from. `cid` is the text of a CID."""

    def put(self, cid: str, data: bytes) -> None:
        """Keep a block, so that peers can fetch it once this returns; nothing if it is there already.

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
        """Keep this block, and not what it links to, from being collected; nothing if it is so already.

        BlocksAwayError; BlockUnavailableError: the node has no such block.
        """
        ...

    def unpin(self, cid: str) -> None:
        """Let it be collected; nothing if it is not pinned, or pinned with all it links to, which is not our pin.

        BlocksAwayError.
        """
        ...

    def about(self) -> str:
        """In words what this is and how it is, as last seen. Asks nobody, so it returns at once."""
        ...

    def close(self) -> None:
        """End what was started for it. Calls under way elsewhere end with BlocksAwayError."""
        ...


def digest_of(cid: str) -> bytes:
    """The sha2-256 digest in a CID. BlockRefusedError: not a CID, or one of another hash."""
    try:
        digest = sha2_256_digest(cid_bytes(cid))
    except CidError as error:
        raise BlockRefusedError(CID_MALFORMED, str(error)) from None
    if isinstance(digest, Rejected):
        raise BlockRefusedError(digest.reason, f"{cid[:80]}: {digest.detail}")
    return digest


def verified(cid: str, data: bytes) -> bytes:
    """The bytes, if they are those of the CID. BlockRefusedError: they are not, or it cannot be told."""
    if multihash.digest(data, "sha2-256") != multihash.wrap(digest_of(cid), "sha2-256"):
        raise BlockRefusedError(WRONG_HASH, f"{cid[:80]}: the {len(data)} bytes that came have another hash")
    return data


def too_large(cid: str, limit: int) -> BlockRefusedError:
    """The refusal of a block that is larger than asked for."""
    return BlockRefusedError(TOO_LARGE, f"{cid[:80]}: larger than {limit:,} bytes")
