"""Blocks that Kiln would not write itself, from IPFS to what the fetcher makes of them (CIP-123)."""

from __future__ import annotations

from pathlib import Path

import cbor2
import pytest

from kiln.bridge.fetcher.attempts import BatchAnswer, BlockRequest, FetchFailure, fetch_block
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID


def block_of(count: int, *bad: int, **also: object) -> bytes:
    """A block of so many streams, their StreamIDs as bytes; those of `bad` lack their first byte."""
    tips = {
        stream(number).bytes[number in bad :]: [cbor2.CBORTag(42, b"\0" + compute_cid(b"%d" % number))]
        for number in range(count)
    }
    return cbor2.dumps({"by": "another", "tips": tips, **also})


def stream(number: int) -> StreamID:
    return StreamID(3, compute_cid(b"genesis %d" % number))


def test_a_large_block_with_a_bad_stream_and_other_keys_is_read_but_for_that_stream(tmp_path: Path) -> None:
    without = len(block_of(1000, 500, pad=bytes(0x10000)))
    data = block_of(1000, 500, pad=bytes(0x10000 + 321_009 - without))
    assert len(data) == 321_009
    blocks, cid = FolderBlockStore(tmp_path), cid_text(compute_cid(data))
    blocks.put(cid, data)
    read = fetch_block(blocks, BlockRequest("batch", cid), 1)
    assert isinstance(read, BatchAnswer)
    assert (read.block, set(read.streams)) == (data, {stream(number).text for number in range(1000) if number != 500})


def test_a_block_of_two_mebibytes_is_read_and_a_larger_one_refused(tmp_path: Path) -> None:
    blocks, room = FolderBlockStore(tmp_path), (2 << 20) - len(block_of(1, pad=bytes(1 << 20))) + (1 << 20)
    for size, reads in ((room, True), (room + 1, False)):
        data = block_of(1, pad=bytes(size))
        assert len(data) == (2 << 20) + (not reads)
        cid = cid_text(compute_cid(data))
        blocks.put(cid, data)
        answer = fetch_block(blocks, BlockRequest("batch", cid), 1)
        if reads:
            assert isinstance(answer, BatchAnswer)
        else:
            assert isinstance(answer, FetchFailure)
            assert (answer.reason, answer.final) == ("block_too_large", True)


@pytest.mark.parametrize("kind", ["genesis", "batch"])
def test_a_block_that_does_not_fit_its_cid_is_refused_for_good(kind: str, tmp_path: Path) -> None:
    data = block_of(2)
    blocks, cid = FolderBlockStore(tmp_path), cid_text(compute_cid(data))
    blocks.put(cid, data)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(block_of(1))
    answer = fetch_block(blocks, BlockRequest("batch" if kind == "batch" else "genesis", cid), 1)
    assert isinstance(answer, FetchFailure)
    assert (answer.reason, answer.final) == ("block_hash_mismatch", True)
