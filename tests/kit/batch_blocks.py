"""Blocks of batches, from tips by stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kiln.schemas.wire.batch_block import MAX_BLOCK, BatchBlock, encode_stream_key, write_leaves


def write_blocks(tips: Mapping[str, Iterable[bytes]], limit: int = MAX_BLOCK) -> list[BatchBlock]:
    """Write tips (CIDs by StreamID text) as `write_leaves` does."""
    return write_leaves({encode_stream_key(stream) + tip for stream, links in tips.items() for tip in links}, limit)
