"""An IPFS node in memory, which a test can make unavailable or let wait."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kiln.bridge.ipfs import Announcer, BlockStoreUnavailableError, BlockUnavailableError, verify_block
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.schemas.wire.cid import cid_text, compute_cid


class Ipfs(FolderBlockStore):
    """Blocks in memory. `get` waits while `gate` is not set, and fails if `away` is true or the block is missing."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.blocks: dict[str, bytes] = {}
        self.away = False
        self.asked: Counter[str] = Counter()
        self.announcers: dict[str, list[Announcer]] = {}
        self.fault: str | None = None
        self.gate = threading.Event()
        self.gate.set()

    def add(self, block: bytes) -> str:
        cid = cid_text(compute_cid(block))
        self.blocks[cid] = block
        return cid

    def get(self, cid: str, timeout: float, limit: int = 256_000, announcers: Sequence[Announcer] = ()) -> bytes:
        self.asked[cid] += 1
        self.announcers[cid] = list(announcers)
        self.gate.wait()
        if self.away:
            raise BlockStoreUnavailableError("no node at http://127.0.0.1:5001")
        if cid == self.fault:
            raise RecursionError("what a peer sent")
        if cid not in self.blocks:
            raise BlockUnavailableError(f"{cid}: not found in {timeout:g} s")
        return verify_block(cid, self.blocks[cid])
