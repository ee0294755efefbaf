"""Blocks of our own in IPFS: put in, pinned, and let go after a set time, over restarts too.

Layout of the file (SQLite): `pins(cid TEXT PRIMARY KEY, until INTEGER)`, µs since the epoch. A block stands in it
before it is pinned, so that no pin is ever forgotten; to unpin what is not pinned does no harm.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from kiln.bridge.ipfs import BlockStore

_AT_ONCE: Final = 100  # unpinned in one go, so that nothing waits long behind it


class PinsError(Exception):
    """The file of pins cannot be used; the text names it."""


class BlockPins:
    """Keeps blocks in IPFS for a while. Time comes from the caller, in µs. For one thread."""

    def __init__(self, blocks: BlockStore, path: Path, pin_for: int) -> None:
        self._blocks = blocks
        self._path = path
        self._pin_for = pin_for
        self._kept: sqlite3.Connection | None = None

    def keep(self, cid: str, block: bytes, now: int) -> None:
        """Once this returns, peers can fetch the block.

        Raises BlocksAwayError, BlockUnavailableError, BlockRefusedError, PinsError.
        """
        self._run(
            "INSERT INTO pins VALUES (?, ?) ON CONFLICT (cid) DO UPDATE SET until = max(until, excluded.until)",
            (cid, now + self._pin_for),
        )
        self._blocks.put(cid, block)
        self._blocks.pin(cid)
        self._blocks.provide(cid)

    def unpin_expired(self, now: int) -> int:
        """Unpins what has been kept for its time, some at once; how many. BlocksAwayError, PinsError."""
        due = self._run("SELECT cid FROM pins WHERE until <= ? ORDER BY until LIMIT ?", (now, _AT_ONCE))
        for (cid,) in due:
            self._blocks.unpin(str(cid))
            self._run("DELETE FROM pins WHERE cid = ?", (cid,))
        return len(due)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _run(self, statement: str, values: tuple[object, ...]) -> list[tuple[object, ...]]:
        try:
            if self._kept is None:  # here, as SQLite's connections belong to the thread that made them
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._kept = sqlite3.connect(self._path, isolation_level=None)
                self._kept.execute("PRAGMA journal_mode = WAL")
                self._kept.execute("PRAGMA synchronous = NORMAL")
                self._kept.execute("CREATE TABLE IF NOT EXISTS pins (cid TEXT PRIMARY KEY, until INTEGER NOT NULL)")
            return self._kept.execute(statement, values).fetchall()
        except (OSError, sqlite3.Error) as error:
            raise PinsError(f"{self._path}: {error}") from error
