"""One attempt to fetch a block from IPFS and to decode it: the genesis of a stream, or the block of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from kiln.bridge.ipfs import (
    MAX_READ,
    Announcer,
    BlockRefusedError,
    BlockStore,
    BlockStoreUnavailableError,
    BlockUnavailableError,
)
from kiln.schemas.kafka.records import SeparatorRecord
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.batch_block import BlockError, read_foreign_block
from kiln.schemas.wire.cid import cid_bytes, cid_text
from kiln.schemas.wire.genesis import NeedsBlock, read_genesis

GENESIS_UNAVAILABLE: Final = "genesis_unavailable"
BLOCK_UNAVAILABLE: Final = "block_unavailable"
BLOCK_MALFORMED: Final = "block_malformed"
FAULT: Final = "fetch_fault"
OVER_LIMIT: Final = "announcer_over_limit"
REASONS: Final = (GENESIS_UNAVAILABLE, BLOCK_UNAVAILABLE, BLOCK_MALFORMED, FAULT, OVER_LIMIT)
"""reasons for quarantine that this package declares; kiln.bridge.ipfs and kiln.schemas.wire.genesis declare others"""


class BlockRequest(NamedTuple):
    """The CID of a block to fetch, and the kind that the block must have."""

    kind: Literal["genesis", "batch"]
    cid: str


class GenesisAnswer(NamedTuple):
    """The separator that the genesis of a stream names, or the reason why it names none."""

    separator: SeparatorRecord | None
    without: str | None


class BatchAnswer(NamedTuple):
    """The bytes of a batch's block, and the StreamIDs that the batch lists."""

    block: bytes
    streams: tuple[str, ...]


class FetchFailure(NamedTuple):
    """A failed attempt to fetch a block. `final` is true if another attempt would fail in the same way."""

    reason: str
    detail: str
    final: bool


class IpfsUnavailable(NamedTuple):
    """An attempt that could not be made because IPFS is unavailable, with the reason."""

    reason: str


Answer = GenesisAnswer | BatchAnswer | FetchFailure | IpfsUnavailable


def fetch_block(
    blocks: BlockStore,
    request: BlockRequest,
    timeout: float,
    implied_separator: str | None = None,
    announcers: Sequence[Announcer] = (),
) -> Answer:
    """Make one attempt to fetch and decode a block.

    Args:
        timeout: limit for each block, in seconds; a signed genesis has two blocks.
        implied_separator: separator key of a genesis that names no separator, if the network defines one.
        announcers: announcers of a batch, the most trusted first.
    """
    try:
        if request.kind == "batch":
            block = blocks.get(request.cid, timeout, MAX_READ, announcers)
            return BatchAnswer(block, tuple(read_foreign_block(block).tips))
        return _get_genesis(blocks, request.cid, timeout, implied_separator)
    except BlockStoreUnavailableError as error:
        return IpfsUnavailable(str(error))
    except BlockUnavailableError as error:
        return FetchFailure(
            BLOCK_UNAVAILABLE if request.kind == "batch" else GENESIS_UNAVAILABLE, str(error), final=False
        )
    except BlockRefusedError as error:
        return FetchFailure(error.reason, str(error), final=True)
    except BlockError as error:
        return FetchFailure(BLOCK_MALFORMED, str(error), final=True)


def _get_genesis(blocks: BlockStore, cid: str, timeout: float, implied_separator: str | None) -> Answer:
    root = cid_bytes(cid)
    read_blocks: dict[bytes, bytes] = {}
    while isinstance(genesis := read_genesis(root, read_blocks, implied_separator), NeedsBlock):
        read_blocks[genesis.cid] = blocks.get(cid_text(genesis.cid), timeout, MAX_READ)
    if isinstance(genesis, Rejected):
        return FetchFailure(genesis.reason, genesis.detail, final=True)
    separator = None if genesis.separator is None else SeparatorRecord(genesis.separator.key, genesis.separator.value)
    return GenesisAnswer(separator, genesis.without)
