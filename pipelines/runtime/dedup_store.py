"""Deduplication store of a query: an SQLite file of digests in the query's checkpoint folder (decision 10).

A message arrives in several copies, one of which is accepted. The store keeps a digest of the message with the Kafka
position of the accepted copy. If that copy is read again, it is accepted again. So a micro-batch that is repeated after
a crash has the same rows, even if Spark splits it into other tasks. The file may therefore be newer than the
checkpoint, but never older.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress, islice
from pathlib import Path
from typing import Final, Generic, NamedTuple, Protocol, Self, TypeVar

from kiln.conf.process.errors import KilnError
from kiln.conf.process.files import to_disk
from kiln.schemas.kafka.records import Epoch

FILE_NAME: Final = "dedup.sqlite"

CHUNK_ROWS: Final = 1_000
"""Maximum number of copies that one SQLite transaction looks up"""
CHUNK_BYTES: Final = 16 << 20
"""Number of bytes of copies in memory at which a transaction ends"""

_PATIENCE_S: Final = 60.0  # seconds for another task to put its rows into the file
_SWEPT_PER_ROW: Final = 8  # old rows checked for each new one, so that the file is at most an eighth larger than needed
_MIN_SWEPT: Final = 64
_REBUILT_AT_ONCE: Final = 10_000  # rows
_MAX_LOOKUP: Final = 999  # digests in one SELECT: every SQLite takes as many parameters


@dataclass(frozen=True)
class DedupStoreConfig:
    """Options with which a task opens the deduplication file."""

    path: str
    span: int
    """retention of a digest, in µs"""
    durable: bool = False
    """true if the file must survive a power cut"""


class DedupStoreError(KilnError):
    """The deduplication file cannot be read or written, for example because the disk is full or the file is damaged."""


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder, so that only one task at a time creates the deduplication file in it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


class StoredDigest(NamedTuple):
    """State that the store keeps for a digest."""

    position: str = ""
    """Kafka position of the accepted copy; empty if there is none, or if the position is not known"""
    tip: bytes = b""
    """digest of a stream's tip, if the query's `DedupRule` stores tips"""
    at: int = 0
    """a time that the query's `DedupRule` stores, in µs"""


class DedupCopy(Protocol):
    """A copy of a message or row, of which the store accepts only one.

    `identities` has one or two digests, which equal copies share. `position` is unique to the copy. `size` is in bytes.
    """

    @property
    def identities(self) -> tuple[bytes, ...]: ...
    @property
    def position(self) -> str: ...
    @property
    def size(self) -> int: ...


_Copy = TypeVar("_Copy", bound=DedupCopy)


class DedupRule(NamedTuple, Generic[_Copy]):
    """A query's own rule for accepting copies, instead of accepting the first copy of each digest."""

    keys: Callable[[_Copy], tuple[bytes, ...]]
    """lists the digests whose stored state the rule needs for a copy"""
    select: Callable[[Collection[_Copy], Mapping[bytes, StoredDigest]], tuple[list[_Copy], dict[bytes, StoredDigest]]]
    """returns the accepted copies and the changed state, given copies and the stored state of their digests"""


class DedupStore:
    """SQLite file with digests of the messages or rows that a query has accepted. Several tasks may have it open.

    A digest takes about 40 bytes of disk. Memory use and lookup time do not depend on the number of digests. Every
    method raises `DedupStoreError` if the file cannot be read or written.
    """

    def __init__(self, config: DedupStoreConfig) -> None:
        self._span = config.span
        self._path = Path(config.path)
        with self._wrap_errors():
            self._file = sqlite3.connect(config.path, timeout=_PATIENCE_S, isolation_level=None)
            with _lock_folder(self._path.parent):  # SQLite does not wait for another process that makes the file
                self._file.execute("PRAGMA journal_mode = WAL")
                self._file.execute(f"PRAGMA synchronous = {'NORMAL' if config.durable else 'OFF'}")
                self._file.execute(f"PRAGMA journal_size_limit = {64 << 20}")
                self._file.executescript(_TABLES)
        self._inode = self._path.stat().st_ino

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def is_in_place(self) -> bool:
        """Return true if the file at the path is still the file that this object has open."""
        return self._path.exists() and self._path.stat().st_ino == self._inode

    def filter_new(self, copies: Collection[_Copy], now: int) -> list[_Copy]:
        """Return the accepted copies: one for each digest, and another one after the digest has expired.

        If a copy has two digests, they are checked one after the other, as by two consecutive deduplication operators
        of Spark. So a copy that is rejected because of its second digest still counts as seen for its first digest.

        Args:
            now: Time of the micro-batch, µs.
        """
        identities, positions = [copy.identities for copy in copies], [copy.position for copy in copies]
        return list(compress(copies, self.select_new(identities, positions, range(len(positions)), now)))

    def select_new(
        self, identities: Iterable[tuple[bytes, ...]], positions: Sequence[str], order: Iterable[int], now: int
    ) -> list[bool]:
        """Return, for each copy, true if it is accepted. The rule and `now` are those of `filter_new`.

        Args:
            identities: One or two digests of each copy, which equal copies share.
            positions: Kafka position of each copy.
            order: Indexes of all copies, in the order in which they are checked.
        """
        keys = [_build_keys(digests) for digests in identities]
        accepted = [False] * len(keys)
        with self._transaction():
            stored, expired = self._find_stored(set(chain.from_iterable(keys)), now - self._span)
            holders = {key: digest.position for key, digest in stored.items()}
            added: dict[bytes, str] = {}
            for index in order:
                position = positions[index]
                for key in keys[index]:
                    holder = holders.get(key)
                    if holder is None:
                        holders[key] = added[key] = position
                    elif holder != position:
                        break
                else:
                    accepted[index] = True
            self._file.executemany(_PUT_COPY, ((key, position, now) for key, position in sorted(added.items())))
            self._forget(now, len(added.keys() - expired))
        return accepted

    def filter_by(self, rule: DedupRule[_Copy], copies: Collection[_Copy], now: int) -> list[_Copy]:
        """Return the copies that a query's own rule accepts, and store the state that it changes. `now`: in µs."""
        with self._transaction():
            stored, expired = self._find_stored(set(chain.from_iterable(map(rule.keys, copies))), now - self._span)
            passed, changed = rule.select(copies, stored)
            self._file.executemany(_PUT_DIGEST, ((key, now, *digest) for key, digest in sorted(changed.items())))
            self._forget(now, len(changed.keys() - stored.keys() - expired))
        return passed

    def _find_stored(self, keys: set[bytes], expired_at: int) -> tuple[dict[bytes, StoredDigest], set[bytes]]:
        """Look up the stored state of digests.

        Returns:
            The state by digest, and the digests that were stored at `expired_at` (µs) or earlier and so have expired.
        """
        stored: dict[bytes, StoredDigest] = {}
        expired: set[bytes] = set()
        all_keys = list(keys)
        for start in range(0, len(all_keys), _MAX_LOOKUP):
            some = all_keys[start : start + _MAX_LOOKUP]
            rows = self._file.execute(_SELECT_DIGESTS % ", ".join("?" * len(some)), some)
            for key, passed_at, position, tip, at in rows:
                if passed_at > expired_at:
                    stored[key] = StoredDigest(position, tip or b"", at or 0)
                else:
                    expired.add(key)
        return stored, expired

    def mark(self, epoch: Epoch, now: int) -> None:
        """Record that a task has stored all digests of its part of a micro-batch. `now`: the micro-batch's time, µs."""
        with self._transaction():
            self._file.execute(_MARK_EPOCH, (epoch.query, epoch.batch, now))

    def add_known(self, identities: Iterable[tuple[bytes, ...]], now: int) -> None:
        """Add the digests of copies that were accepted at unknown Kafka positions. `now`: in µs."""
        with self._transaction():
            added = 0
            for digests in identities:
                for key in _build_keys(digests):
                    added += self._file.execute(_ADD_KNOWN, (key, now)).rowcount
            self._file.execute(_ADD_COUNT, (added,))

    def _forget(self, now: int, added: int) -> None:
        """Check a part of the digests, and delete the expired ones. Each call continues where the previous call ended.

        `added` is the number of new digests. Eight times as many are checked, so the file stays small.
        """
        (first,) = self._file.execute(_SELECT_SWEPT).fetchone()
        last = self._file.execute(_SELECT_LAST, (first, _SWEPT_PER_ROW * added + _MIN_SWEPT)).fetchone()
        if last is None:  # fewer digests are left
            forgotten = self._file.execute(_DELETE_REST, (first, now - self._span)).rowcount
        else:
            forgotten = self._file.execute(_DELETE_EXPIRED, (first, *last, now - self._span)).rowcount
        self._file.execute(_MARK_SWEPT, (b"" if last is None else last[0], added - forgotten))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._wrap_errors():
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:  # raised again, whatever the error is
                if self._file.in_transaction:  # SQLite may have ended the transaction, as on a full disk
                    self._file.execute("ROLLBACK")
                raise
            self._file.execute("COMMIT")

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise DedupStoreError(f"cannot use the deduplication file {self._path}: {error}") from error


_TABLES = """
CREATE TABLE IF NOT EXISTS digests
  (digest BLOB PRIMARY KEY, position TEXT, passed_at INTEGER, tip BLOB, at INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS progress
  (id INTEGER PRIMARY KEY, swept_to BLOB, digest_count INTEGER, query_id TEXT, batch_id INTEGER, newest_time INTEGER);
INSERT OR IGNORE INTO progress VALUES (1, x'', 0, '', -1, 0);
"""
_SELECT_DIGESTS = "SELECT digest, passed_at, position, tip, at FROM digests WHERE digest IN (%s)"
_PUT_COPY = "INSERT OR REPLACE INTO digests (digest, position, passed_at) VALUES (?, ?, ?)"
_PUT_DIGEST = "INSERT OR REPLACE INTO digests (digest, passed_at, position, tip, at) VALUES (?, ?, ?, ?, ?)"
_ADD_KNOWN = "INSERT OR IGNORE INTO digests (digest, position, passed_at) VALUES (?, '', ?)"
_ADD_COUNT = "UPDATE progress SET digest_count = digest_count + ?"
_SELECT_SWEPT = "SELECT swept_to FROM progress"
_MARK_SWEPT = "UPDATE progress SET swept_to = ?, digest_count = digest_count + ?"
_SELECT_SIZE = "SELECT digest_count, newest_time FROM progress"
_MARK_EPOCH = "UPDATE progress SET query_id = ?, batch_id = ?, newest_time = max(newest_time, ?)"
_SELECT_EPOCH = "SELECT query_id, batch_id FROM progress"
_SELECT_LAST = "SELECT digest FROM digests WHERE digest > ? ORDER BY digest LIMIT 1 OFFSET ?"
_DELETE_EXPIRED = "DELETE FROM digests WHERE digest > ? AND digest <= ? AND passed_at <= ?"
_DELETE_REST = "DELETE FROM digests WHERE digest > ? AND passed_at <= ?"


_SECOND_TURN: Final = b"\1"
"""suffix of the keys of second digests, so that they differ from the keys of equal first digests"""


def _build_keys(digests: tuple[bytes, ...]) -> tuple[bytes, ...]:
    if len(digests) == 1:  # most copies
        return digests
    first, second = digests
    return first, second + _SECOND_TURN


def chunk_copies(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """Split the copies of a task into lists, one for each SQLite transaction. The last list may be empty."""
    chunk: list[_Copy] = []
    size = 0
    for copy in copies:
        chunk.append(copy)
        size += copy.size
        if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    yield chunk


def filter_new_copies(
    chunks: Iterable[list[_Copy]],
    config: DedupStoreConfig,
    now: int,
    epoch: Epoch,
    rule: DedupRule[_Copy] | None = None,
) -> Iterator[list[_Copy]]:
    """Yield the accepted copies of a task, in their order.

    Args:
        chunks: The copies, one list per SQLite transaction.
        now: Time of the micro-batch, µs.
        epoch: Query id and number of the micro-batch.
        rule: The query's own rule; `None` to accept the first copy of each digest.
    """
    store = open_dedup_store(config)
    for chunk in chunks:
        yield store.filter_new(chunk, now) if rule is None else store.filter_by(rule, chunk, now)
    store.mark(epoch, now)


def open_dedup_store(config: DedupStoreConfig) -> DedupStore:
    """Open a query's deduplication file. All tasks of a Python worker share the open file."""
    store = _open_store(config)
    if not store.is_in_place():  # the state folder was replaced
        _open_store.cache_clear()
        store = _open_store(config)
    return store


@lru_cache(maxsize=4)
def _open_store(config: DedupStoreConfig) -> DedupStore:
    return DedupStore(config)


def build_dedup_store(
    config: DedupStoreConfig, identities: Iterable[tuple[bytes, ...]], epoch: Epoch, now: int
) -> None:
    """Create a query's deduplication file from the digests of rows that its tables have, and sync the file to disk.

    Args:
        identities: Digests of each row.
        epoch: Query id, and number of the newest micro-batch whose rows are in the file.
        now: Time from which the digests age, µs.
    """
    with DedupStore(config) as store:
        rest = iter(identities)
        while chunk := list(islice(rest, _REBUILT_AT_ONCE)):
            store.add_known(chunk, now)
        store.mark(epoch, now)
    path = Path(config.path)
    to_disk(path)  # SQLite has removed its log, as no other process has the file open
    to_disk(path.parent)


class DedupStoreState(NamedTuple):
    """State of a deduplication file, for metrics and status. All values are 0 if there is no file."""

    rows: int = 0
    """number of digests"""
    size: int = 0
    """size of the file, bytes"""
    at: int = 0
    """newest micro-batch time that the query has stored, µs"""


def read_dedup_state(checkpoint: Path | None) -> DedupStoreState:
    """Read the state of the deduplication file in a checkpoint's folder.

    If the file is missing or cannot be read, all values are 0: the query itself reports an unreadable file.

    Args:
        checkpoint: Folder of the checkpoint; `None` if the checkpoint is in an object store.
    """
    if checkpoint is None or not (checkpoint / FILE_NAME).exists():
        return DedupStoreState()
    path = checkpoint / FILE_NAME
    with suppress(sqlite3.Error, OSError), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as file:
        rows, at = file.execute(_SELECT_SIZE).fetchone()
        (pages,), (page,) = (file.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
        return DedupStoreState(int(rows), int(pages * page), int(at))
    return DedupStoreState()


def has_dedup_state(checkpoint: Path) -> bool:
    """Return true if a checkpoint contains deduplication state: an SQLite file, or Spark's state store."""
    return (checkpoint / FILE_NAME).exists() or (checkpoint / "state").exists()


def read_marked_epoch(checkpoint: Path) -> Epoch:
    """Read the newest micro-batch whose digests are all in the deduplication file of a checkpoint.

    Raises:
        DedupStoreError: The file cannot be read.
    """
    path = checkpoint / FILE_NAME
    try:
        with closing(sqlite3.connect(path)) as file:
            marked = file.execute(_SELECT_EPOCH).fetchone()
    except sqlite3.Error as error:
        raise DedupStoreError(f"cannot use the deduplication file {path}: {error}") from error
    if marked is None:
        raise DedupStoreError(
            f"the deduplication file {path} is damaged: it does not name the newest micro-batch whose digests it "
            "contains"
        )
    return Epoch(str(marked[0]), int(marked[1]))


def find_missing_digests(checkpoint: Path) -> str:
    """Detect a damaged or incomplete deduplication file in a checkpoint's folder.

    The file stores its number of digests. The stored number is wrong if the file was copied while a query wrote to it,
    or was changed by another program. Counting reads the whole file, at about 5 million digests per second, so the
    result is cached until the file changes.

    Returns:
        A description of the fault; empty if there is none.
    """
    path = checkpoint / FILE_NAME
    files = (path, path.with_name(f"{FILE_NAME}-wal"))
    stats = [file.stat() for file in files if file.exists()]
    return _count_missing_digests(path, tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats))


@lru_cache(maxsize=8)
def _count_missing_digests(path: Path, state: tuple[tuple[int, int, int], ...]) -> str:
    """Implement `find_missing_digests`. `state` identifies the content of the file, as the key of the cache."""
    try:
        with closing(sqlite3.connect(path)) as file:
            (found,) = file.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                return f"the deduplication file {path} is damaged ({found.splitlines()[-1]})"
            (digests,) = file.execute("SELECT count(*) FROM digests").fetchone()
            (marked, _) = file.execute(_SELECT_SIZE).fetchone()
    except sqlite3.Error as error:
        return f"cannot use the deduplication file {path}: {error}"
    if digests < marked:
        return f"the deduplication file {path} is incomplete: it contains {digests:,} of its {marked:,} digests"
    return ""


def release_positions(checkpoint: Path, lost: Mapping[int, range]) -> None:
    """Clear the Kafka positions in a deduplication file after a topic was created again.

    The new topic has other records at these positions, and they must not count as the accepted copies. The digests
    stay, so repeated messages are still recognised.

    Args:
        checkpoint: The folder with the file. Nothing happens if there is no file.
        lost: By partition, the offsets of the unfinished micro-batch, whose records were not written and are lost.
            Their digests are deleted, so that the messages are accepted if they arrive again.

    Raises:
        DedupStoreError: The file cannot be read or written.
    """

    def is_lost(position: str) -> bool:
        partition, _, rest = position.partition("/")
        return bool(rest) and int(rest.partition("/")[0]) in lost.get(int(partition), ())

    path = checkpoint / FILE_NAME
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path)) as file, file:
            file.create_function("is_lost", 1, is_lost)
            forgotten = file.execute("DELETE FROM digests WHERE position != '' AND is_lost(position)").rowcount
            file.execute("UPDATE digests SET position = '' WHERE position != ''")
            file.execute("UPDATE progress SET digest_count = digest_count - ?", (forgotten,))
    except sqlite3.Error as error:
        raise DedupStoreError(f"cannot use the deduplication file {path}: {error}") from error
