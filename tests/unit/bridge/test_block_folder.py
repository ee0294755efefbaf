"""Blocks in a folder: kept whole and for a set time, verified when handed out."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.ipfs import (
    BlockRefusedError,
    BlockStore,
    BlockStoreUnavailableError,
    BlockUnavailableError,
    verify_block,
)
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.schemas.wire.cid import check_block, cid_bytes, cid_text, compute_cid

DATA = b"\xa1dtips\xa0"
CID = cid_text(compute_cid(DATA))
OTHER = cid_text(compute_cid(b"other"))
LATE = cid_text(compute_cid(b"late"))


@pytest.fixture
def blocks(tmp_path: Path) -> FolderBlockStore:
    return FolderBlockStore(tmp_path / "blocks")


def test_what_is_put_is_there_for_the_next_one_too(blocks: BlockStore, tmp_path: Path) -> None:
    blocks.put(CID, DATA)
    blocks.put(CID, DATA)
    assert FolderBlockStore(tmp_path / "blocks").get(CID, 1.0) == DATA
    assert [path.name for path in (tmp_path / "blocks").iterdir()] == [CID]
    assert "no peer can fetch" in blocks.describe()


def set_age(path: Path, seconds: int) -> None:
    at = time.time() - seconds
    os.utime(path, (at, at))


def remove_older(blocks: BlockStore, seconds: int) -> None:
    while blocks.remove_older(round((time.time() - seconds) * 1e6)):
        pass


def test_a_block_is_removed_once_it_was_put_long_ago(blocks: BlockStore, tmp_path: Path) -> None:
    remove_older(blocks, 60)  # there is no folder yet
    for cid, data in ((CID, DATA), (OTHER, b"other"), (LATE, b"late")):
        blocks.put(cid, data)
    set_age(tmp_path / "blocks" / CID, 61)
    set_age(tmp_path / "blocks" / OTHER, 61)
    set_age(tmp_path / "blocks" / LATE, 59)
    blocks.put(OTHER, b"other")  # as long as if for the first time
    again = FolderBlockStore(tmp_path / "blocks")
    remove_older(again, 60)
    assert {path.name for path in (tmp_path / "blocks").iterdir()} == {OTHER, LATE}
    set_age(tmp_path / "blocks" / LATE, 61)
    remove_older(again, 60)
    assert [path.name for path in (tmp_path / "blocks").iterdir()] == [OTHER]
    assert blocks.get(OTHER, 1.0) == b"other"


def test_a_clock_that_is_set_back_shortens_no_time(blocks: BlockStore, tmp_path: Path) -> None:
    blocks.put(CID, DATA)
    set_age(tmp_path / "blocks" / CID, -1_000)
    blocks.put(CID, DATA)
    remove_older(blocks, -999)
    assert blocks.get(CID, 1.0) == DATA
    remove_older(blocks, -1_001)
    assert list((tmp_path / "blocks").iterdir()) == []


def test_what_a_killed_put_left_is_removed_and_what_is_not_kilns_is_kept(blocks: BlockStore, tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    blocks.put(CID, DATA)
    (folder / CID).rename(folder / ".tmp12345")
    (folder / "README").write_text("the user's")
    (folder / "lost+found").mkdir()
    (folder / ".Trash").mkdir()
    for path in folder.iterdir():
        set_age(path, 61)
    remove_older(blocks, 60)
    assert {path.name for path in folder.iterdir()} == {"README", "lost+found", ".Trash"}


def test_one_call_examines_few_files_and_all_are_examined_in_turn(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    for number in range(1_000):
        path = folder / cid_text(compute_cid(b"%d" % number))
        path.touch()
        set_age(path, 61 if number % 2 else 0)
    blocks, calls, counts = FolderBlockStore(folder), 1, [1_000]
    while blocks.remove_older(round((time.time() - 60) * 1e6)):
        calls += 1
        counts.append(len(list(folder.iterdir())))
        assert counts[-2] - counts[-1] <= 100
    assert (calls, counts[-1]) == (11, 500)


def test_a_mark_is_no_block_and_a_block_takes_its_place(blocks: FolderBlockStore, tmp_path: Path) -> None:
    blocks.mark(CID)
    assert blocks.read_blocks([cid_bytes(CID)]) == {}
    set_age(tmp_path / "blocks" / CID, 61)
    blocks.mark(CID)
    remove_older(blocks, 60)
    assert (tmp_path / "blocks" / CID).exists()
    blocks.put(CID, DATA)
    assert blocks.get(CID, 1.0) == DATA


def test_blocks_are_found_and_read_for_peers_unless_they_are_damaged(tmp_path: Path) -> None:
    blocks, cid, other = FolderBlockStore(tmp_path / "blocks"), cid_bytes(CID), cid_bytes(OTHER)
    assert blocks.find_sizes([cid]) == {cid: None}
    blocks.put(CID, DATA)
    blocks.put(OTHER, b"other")
    absent = compute_cid(b"absent")
    assert blocks.find_sizes([cid, absent]) == {cid: len(DATA), absent: None}
    (tmp_path / "blocks" / OTHER).write_bytes(b"others")
    assert blocks.read_blocks([cid, other, absent]) == {cid: DATA}


def test_what_is_not_there_is_unavailable(blocks: BlockStore) -> None:
    with pytest.raises(BlockUnavailableError, match=r"ipfs\.api is empty"):
        blocks.get(OTHER, 60.0)


def test_bytes_of_another_cid_are_neither_kept_nor_handed_out(blocks: BlockStore, tmp_path: Path) -> None:
    with pytest.raises(BlockRefusedError, match="another hash") as refused:
        blocks.put(OTHER, DATA)
    assert refused.value.reason == "block_hash_mismatch"
    blocks.put(CID, DATA)
    (tmp_path / "blocks" / CID).write_bytes(DATA[:-1])
    with pytest.raises(BlockRefusedError, match="another hash"):
        blocks.get(CID, 1.0)


def test_no_more_is_read_than_asked_for(blocks: BlockStore) -> None:
    blocks.put(CID, DATA)
    assert blocks.get(CID, 1.0, limit=len(DATA)) == DATA
    with pytest.raises(BlockRefusedError) as refused:
        blocks.get(CID, 1.0, limit=len(DATA) - 1)
    assert refused.value.reason == "block_too_large"


@pytest.mark.parametrize(
    ("cid", "reason"),
    [
        ("../../etc/passwd", "cid_malformed"),
        ("", "cid_malformed"),
        ("bafyreib", "cid_malformed"),
        (cid_text(b"\x01\x71\x13\x40" + bytes(64)), "cid_hash_unsupported"),  # sha2-512
        (cid_text(b"\x01\x71\x00\x20" + bytes(32)), "cid_hash_unsupported"),  # identity
        (cid_text(b"\x01\x71\x12\x1f" + bytes(31)), "cid_hash_unsupported"),  # sha2-256, cut
    ],
)
def test_what_cannot_be_checked_is_refused(blocks: BlockStore, cid: str, reason: str) -> None:
    for call in (lambda: blocks.get(cid, 1.0), lambda: blocks.put(cid, DATA)):
        with pytest.raises(BlockRefusedError) as refused:
            call()
        assert refused.value.reason == reason


@given(data=st.binary(max_size=300), codec=st.sampled_from([0x55, 0x70, 0x71, 0x85, 0x0129]))
def test_every_block_comes_back(tmp_path_factory: pytest.TempPathFactory, data: bytes, codec: int) -> None:
    blocks = FolderBlockStore(tmp_path_factory.getbasetemp() / "every")
    raw = compute_cid(data, codec)
    blocks.put(cid_text(raw), data)
    assert blocks.get(cid_text(raw), 1.0) == data
    assert blocks.get(cid_text(raw).upper(), 1.0) == data  # base32 is read in either case


def test_a_version_0_cid_is_of_its_bytes_too(blocks: BlockStore) -> None:
    old = cid_text(b"\x12\x20" + compute_cid(DATA, 0x70)[4:])
    assert old.startswith("Qm")
    blocks.put(old, DATA)
    assert blocks.get(old, 1.0) == DATA


def test_a_folder_that_cannot_be_written_is_away_for_now(tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text("a file")
    with pytest.raises(BlockStoreUnavailableError, match="cannot write to the folder"):
        FolderBlockStore(tmp_path / "blocks").put(CID, DATA)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_a_block_is_verified_as_the_fast_way_does(data: bytes, other: bytes) -> None:
    """`kiln.schemas.wire.cid.check_block` is what messages and events are checked with."""
    cid = compute_cid(other)
    refused = check_block(data, cid)
    if refused is None:
        assert verify_block(cid_text(cid), data) == data
    else:
        with pytest.raises(BlockRefusedError) as error:
            verify_block(cid_text(cid), data)
        assert error.value.reason == refused.reason
