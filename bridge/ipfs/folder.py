"""Block store in a folder, with one file for each block. Only `kiln.bridge.ipfs.bitswap` serves the blocks to peers."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Final

from kiln.bridge.ipfs.blocks import (
    Announcer,
    BlockRefusedError,
    BlockStoreUnavailableError,
    BlockUnavailableError,
    read_digest,
    refuse_too_large,
    verify_block,
)
from kiln.conf.process.bridge_status import IpfsStatus
from kiln.schemas.wire.batch_block import MAX_BLOCK
from kiln.schemas.wire.cid import cid_bytes, cid_text, read_sha2_256_digest

_MAX_EXAMINED: Final = 100  # files per step of a removal: more than a publisher stores in one


class FolderBlockStore:
    """A `BlockStore` in a folder, which the first `put` creates. The time of a file is that of its last `put` or
    `mark`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()  # so that a block is not removed while it is stored again
        self._files = self._list_files()  # not examined yet

    def put(self, cid: str, data: bytes) -> None:
        """Implement `BlockStore.put`, and flush the block to disk (fsync).

        Raises:
            BlockStoreUnavailableError: the folder cannot be written.
        """
        verify_block(cid, data)
        path = self._path(cid)
        try:
            with self._lock:
                if _renew(path, len(data)):
                    return
                self._folder.mkdir(parents=True, exist_ok=True)
                # To a temporary file first: a file with the final name is always complete.
                with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as file:
                    try:
                        file.write(data)
                        file.flush()
                        os.fsync(file.fileno())
                        os.replace(file.name, path)
                    except OSError:
                        os.unlink(file.name)
                        raise
        except OSError as error:
            raise BlockStoreUnavailableError(self._describe("write to", error)) from error

    def mark(self, cid: str) -> None:
        """Create an empty file for a block that is stored elsewhere, so that `remove_older` reports the block later. If
        the file exists, set its time to now.

        Raises:
            BlockStoreUnavailableError: the folder cannot be written.
        """
        path = self._path(cid)
        try:
            with self._lock:
                if not _renew(path):
                    self._folder.mkdir(parents=True, exist_ok=True)
                    path.touch()
        except OSError as error:
            raise BlockStoreUnavailableError(self._describe("write to", error)) from error

    def get(self, cid: str, timeout: float, limit: int = MAX_BLOCK, announcers: Sequence[Announcer] = ()) -> bytes:
        """Implement `BlockStore.get`. There are no peers, so `timeout` and `announcers` are ignored."""
        read_digest(cid)
        try:
            with self._path(cid).open("rb") as file:
                data = file.read(limit + 1)
        except FileNotFoundError:
            raise BlockUnavailableError(f"{cid[:80]} is not in {self._folder}, and ipfs.api is empty") from None
        except OSError as error:
            raise BlockStoreUnavailableError(self._describe("read", error)) from error
        if len(data) > limit:
            raise refuse_too_large(cid, limit)
        return verify_block(cid, data)

    def remove_older(self, before: int, undo: Callable[[str], None] = lambda _: None) -> bool:
        """Implement `BlockStore.remove_older` by deleting files, including those of interrupted calls of `put`.

        Args:
            undo: called with the CID of each block before its file is deleted.
        """
        examined = 0
        try:
            with self._lock:
                for file in islice(self._files, _MAX_EXAMINED):
                    examined += 1
                    if not file.is_file(follow_symlinks=False) or file.stat().st_mtime_ns // 1_000 >= before:
                        continue
                    with suppress(BlockRefusedError):  # the user's own file, whose name is no CID
                        if not file.name.startswith("."):
                            read_digest(file.name)
                            undo(file.name)
                        os.unlink(file)
                if examined < _MAX_EXAMINED:
                    self._files = self._list_files()
        except OSError as error:
            raise BlockStoreUnavailableError(self._describe("delete from", error)) from error
        return examined == _MAX_EXAMINED

    def _list_files(self) -> Iterator[os.DirEntry[str]]:
        with suppress(FileNotFoundError), os.scandir(self._folder) as files:
            yield from files

    def find_sizes(self, cids: Sequence[bytes]) -> Mapping[bytes, int | None]:
        """Return the size of each block in bytes, by CID; `None` for a block that is not in the folder."""
        sizes: dict[bytes, int | None] = {}
        for cid in cids:
            try:
                sizes[cid] = (self._folder / cid_text(cid)).stat().st_size
            except OSError:
                sizes[cid] = None
        return sizes

    def read_blocks(self, cids: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """Read blocks, by CID. Omit blocks that are missing, and files whose bytes do not match the CID."""
        blocks: dict[bytes, bytes] = {}
        for cid in cids:
            try:
                data = (self._folder / cid_text(cid)).read_bytes()
            except OSError:
                continue
            if sha256(data).digest() == read_sha2_256_digest(cid):
                blocks[cid] = data
        return blocks

    def status(self) -> IpfsStatus:
        """Implement `BlockStore.status`."""
        return IpfsStatus()

    def describe(self) -> str:
        """Implement `BlockStore.describe`."""
        return f"blocks are in {self._folder}, and no peer can fetch them, because ipfs.api is empty"

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _describe(self, action: str, error: OSError) -> str:
        return f"cannot {action} the folder {self._folder} ({error.strerror}). Check its permissions and the disk."

    def _path(self, cid: str) -> Path:
        return self._folder / cid_text(cid_bytes(cid))  # one name for all spellings, and none with a slash


def _renew(path: Path, size: int | None = None) -> bool:
    """Set the time of a file to now. Keep a later time, because the clock may be wrong.

    Returns:
        False if there is no file, or its size is not `size`.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if size not in (None, status.st_size):
        return False
    now = time.time_ns()
    os.utime(path, ns=(now, max(now, status.st_mtime_ns)))
    return True
