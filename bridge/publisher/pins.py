"""Pins of Kiln's own blocks in IPFS: each block is stored, and removed after a set time, even if the bridge restarts.

An SQLite file has the table `pins(cid TEXT PRIMARY KEY, until INTEGER)`, with `until` in µs since the epoch. A row is
written before its block is stored, so that each stored block has a row. To remove a block that is not stored is no
error.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from kiln.bridge.ipfs import BlockStore

_MAX_UNPINS: Final = 100  # per call, so that no other work waits long


class PinsError(Exception):
    """The SQLite file of the pins cannot be used. The message gives its path."""


class BlockPins:
    """Blocks pinned in IPFS for a set time. For one thread. The caller passes the time, in µs."""

    def __init__(self, blocks: BlockStore, path: Path, pin_duration: int) -> None:
        self._blocks = blocks
        self._path = path
        self._pin_duration = pin_duration
        self._connection: sqlite3.Connection | None = None

    def store_and_pin(self, cid: str, block: bytes, now: int) -> None:
        """Store a block in IPFS for `pin_duration`, so that peers can fetch it.

        Raises:
            BlockStoreUnavailableError, BlockUnavailableError, PinsError: the block cannot be stored or pinned now; a
                later call may succeed.
            BlockRefusedError: the block is rejected, and would be at a later call too.
        """
        self._run(
            "INSERT INTO pins VALUES (?, ?) ON CONFLICT (cid) DO UPDATE SET until = max(until, excluded.until)",
            (cid, now + self._pin_duration),
        )
        self._blocks.put(cid, block)

    def unpin_expired(self, now: int) -> int:
        """Unpin blocks whose pin has expired, at most `_MAX_UNPINS`, and return their number.

        Raises:
            BlockStoreUnavailableError, PinsError: the blocks cannot be unpinned now; a later call may succeed.
        """
        expired = self._run("SELECT cid FROM pins WHERE until <= ? ORDER BY until LIMIT ?", (now, _MAX_UNPINS))
        for (cid,) in expired:
            self._blocks.remove(str(cid))
            self._run("DELETE FROM pins WHERE cid = ?", (cid,))
        return len(expired)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, statement: str, values: tuple[object, ...]) -> list[tuple[object, ...]]:
        try:
            if self._connection is None:  # opened here: a connection belongs to its thread
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._connection = sqlite3.connect(self._path, isolation_level=None)
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = NORMAL")
                self._connection.execute(
                    "CREATE TABLE IF NOT EXISTS pins (cid TEXT PRIMARY KEY, until INTEGER NOT NULL)"
                )
            return self._connection.execute(statement, values).fetchall()
        except (OSError, sqlite3.Error) as error:
            raise PinsError(
                f"cannot use {self._path}, the list of blocks pinned in IPFS ({error}). Check the disk."
            ) from error
