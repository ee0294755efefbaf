"""Ledger of the backfill batches that were handed to the node, so that none is published twice (decision 26).

Layout of the file (SQLite): `handed_over(cid TEXT, topic TEXT, PRIMARY KEY (cid, topic))`. A batch is added before the
node gets it, and removed if it reached no peer. A batch in the ledger without a receipt may therefore have been
published before the bridge ended.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from kiln.bridge.kafka.thread import PositionLostError


class PublishLedgerError(PositionLostError):
    """The ledger file cannot be used, so it is unknown which batches were published. The message names the file."""


class PublishLedger:
    """The ledger of one transport, used by one thread. Every method raises `PublishLedgerError`."""

    def __init__(self, path: Path | None = None) -> None:
        """Create a ledger in a file, or in memory if there is no path."""
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._topics: dict[str, set[str]] = {}

    def __contains__(self, entry: object) -> bool:
        """Return whether a batch was handed over: for a CID on any topic, for (CID, topic) on this one."""
        self._open()
        if isinstance(entry, tuple):
            cid, topic = entry
            return topic in self._topics.get(cid, ())
        return entry in self._topics

    def add(self, cid: str, topic: str) -> None:
        """Add a batch before the node gets it; it is on disk when this returns."""
        self._run("INSERT OR IGNORE INTO handed_over VALUES (?, ?)", (cid, topic))
        self._topics.setdefault(cid, set()).add(topic)

    def remove(self, cid: str, topic: str) -> None:
        """Remove a batch that reached no peer."""
        self._run("DELETE FROM handed_over WHERE cid = ? AND topic = ?", (cid, topic))
        topics = self._topics[cid]
        topics.discard(topic)
        if not topics:
            del self._topics[cid]

    def close(self) -> None:
        if self._connection is not None and self._path is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        try:
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
            # opened here, because a connection of SQLite belongs to the thread that opened it
            connection = sqlite3.connect(":memory:" if self._path is None else self._path, isolation_level=None)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # a lost row would be published again
            connection.execute(
                "CREATE TABLE IF NOT EXISTS handed_over (cid TEXT, topic TEXT, PRIMARY KEY (cid, topic))"
            )
            self._topics = {}
            for cid, topic in connection.execute("SELECT cid, topic FROM handed_over"):
                self._topics.setdefault(cid, set()).add(topic)
        except (OSError, sqlite3.Error) as error:
            raise self._wrap_error(error) from error
        self._connection = connection
        return connection

    def _run(self, statement: str, values: tuple[str, str]) -> None:
        try:
            self._open().execute(statement, values)
        except sqlite3.Error as error:
            raise self._wrap_error(error) from error

    def _wrap_error(self, error: Exception) -> PublishLedgerError:
        return PublishLedgerError(
            f"cannot use {self._path} ({error}). It records the published batches of backfill runs: restore it."
        )
