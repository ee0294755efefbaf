"""Block store in a folder, with one file for each block. Only `kiln.bridge.ipfs.bitswap` serves the blocks to peers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from kiln.bridge.ipfs.blocks import (
    BlockStoreUnavailableError,
    BlockUnavailableError,
    read_digest,
    refuse_too_large,
    verify_block,
)
from kiln.conf.process.bridge_status import IpfsStatus
from kiln.conf.process.files import open_regular_file, read_small_file
from kiln.schemas.wire.batch_block import MAX_BLOCK
from kiln.schemas.wire.cid import cid_bytes, cid_text, read_sha2_256_digest


class FolderBlockStore:
    """A `BlockStore` in a folder, which the first `put` creates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, cid: str, data: bytes) -> None:
        """Implement `BlockStore.put`, and flush the block to disk (fsync).

        Raises:
            BlockStoreUnavailableError: the folder cannot be written.
        """
        verify_block(cid, data)
        path = self._path(cid)
        try:
            if path.exists():
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

    def get(self, cid: str, timeout: float, limit: int = MAX_BLOCK) -> bytes:
        """Implement `BlockStore.get`. `timeout` is ignored, because there are no peers to wait for."""
        read_digest(cid)
        try:
            with open_regular_file(self._path(cid)) as file:
                data = file.read(limit + 1)
        except FileNotFoundError:
            raise BlockUnavailableError(f"{cid[:80]} is not in {self._folder}, and ipfs.api is empty") from None
        except OSError as error:
            raise BlockStoreUnavailableError(self._describe("read", error)) from error
        if len(data) > limit:
            raise refuse_too_large(cid, limit)
        return verify_block(cid, data)

    def remove(self, cid: str) -> None:
        """Implement `BlockStore.remove` by deleting the file."""
        try:
            self._path(cid).unlink(missing_ok=True)
        except OSError as error:
            raise BlockStoreUnavailableError(self._describe("delete from", error)) from error

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
                data = read_small_file(self._folder / cid_text(cid))
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
