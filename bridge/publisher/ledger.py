"""Which batches of backfill runs were handed to the node, so that none goes out twice (decision 26).

Layout of the file (SQLite): `handed_over(cid TEXT, topic TEXT, PRIMARY KEY (cid, topic))`. A batch stands in it before
the node has it, and leaves it again where no peer got it. So a batch that stands in it and has no receipt may have gone
out: the bridge ended in between.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from kiln.bridge.kafka.thread import PositionLostError


class PublishLedgerError(PositionLostError):
    """The file cannot be used; the text names it. Without it nobody knows which batches of runs went out."""


class PublishLedger:
    """For one thread, and one transport."""

    def __init__(self, path: Path | None = None) -> None:
        """None: what it holds ends with the process."""
        self._path = path
        self._kept: sqlite3.Connection | None = None
        self._topics: dict[str, set[str]] = {}

    def __contains__(self, what: object) -> bool:
        """Of a CID: whether the batch was handed over on any topic. Of (CID, topic): on this one. LedgerError."""
        self._open()
        if isinstance(what, tuple):
            cid, topic = what
            return topic in self._topics.get(cid, ())
        return what in self._topics

    def begin(self, cid: str, topic: str) -> None:
        """To be called before the node gets a batch. On the disk when this returns. LedgerError."""
        self._run("INSERT OR IGNORE INTO handed_over VALUES (?, ?)", (cid, topic))
        self._topics.setdefault(cid, set()).add(topic)

    def undo(self, cid: str, topic: str) -> None:
        """No peer got it. LedgerError."""
        self._run("DELETE FROM handed_over WHERE cid = ? AND topic = ?", (cid, topic))
        topics = self._topics[cid]
        topics.discard(topic)
        if not topics:
            del self._topics[cid]

    def close(self) -> None:
        if self._kept is not None and self._path is not None:
            self._kept.close()
            self._kept = None

    def _open(self) -> sqlite3.Connection:
        if self._kept is not None:
            return self._kept
        try:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            # here, as SQLite's connections belong to the thread that made them
            kept = sqlite3.connect(":memory:" if self._path is None else self._path, isolation_level=None)
            kept.execute("PRAGMA journal_mode = WAL")
            kept.execute("PRAGMA synchronous = FULL")  # what is forgotten would go out again
            kept.execute("CREATE TABLE IF NOT EXISTS handed_over (cid TEXT, topic TEXT, PRIMARY KEY (cid, topic))")
            self._topics = {}
            for cid, topic in kept.execute("SELECT cid, topic FROM handed_over"):
                self._topics.setdefault(cid, set()).add(topic)
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error
        self._kept = kept
        return kept

    def _run(self, statement: str, values: tuple[str, str]) -> None:
        try:
            self._open().execute(statement, values)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> PublishLedgerError:
        return PublishLedgerError(f"{self._path}: {error}. The file says which batches of backfill runs went out")
