"""The spool: a first-in, first-out queue of frames on disk, in one SQLite file.

Layout of `frames.sqlite`: the table `frames(id, connection, frame, crc)`. Ids rise without gaps. `crc` is the crc32 of
connection and frame, because SQLite has no checksums of its own. The file exists only while frames are in it.

Appended frames survive a crash of the process. If the spool is `durable`, they also survive a power cut, because
`append` calls fsync.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from kiln.conf.process.files import to_disk

FILE_NAME: Final = "frames.sqlite"
DAMAGED_SUFFIX: Final = ".damaged"

# The conversions matter in a damaged file only, where a value may have another type.
_READ: Final = (
    "SELECT id, ifnull(CAST(connection AS BLOB), x''), ifnull(CAST(frame AS BLOB), x''), crc FROM frames"
    " WHERE id > ? ORDER BY id"
)
_DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_CHECKPOINT: Final = 256  # pages in the write-ahead log after which SQLite copies them into the file
_LOG_BYTES: Final = 4 * 1024 * 1024  # bytes of the write-ahead log, including one transaction's pages


class SpoolError(RuntimeError):
    """The spool's folder cannot be used. The message has the folder and the reason."""


class QueuedFrame(NamedTuple):
    """A serialized Frame, and the id of its connection, which is the key of its Kafka record."""

    connection: bytes
    frame: bytes
    queued_at: float = 0.0
    """Seconds of the monotonic clock at `FrameSink.put`; 0 for a frame read from the spool."""


class Spool:
    """Queue of frames on disk. Only one thread may call its methods; other threads may read its attributes.

    Frames are appended, read, acknowledged and released (deleted), in this order. Methods raise OSError or
    sqlite3.Error if the disk is full or fails.
    """

    def __init__(
        self, folder: Path, limit: int, floor: int = 0, *, durable: bool = False, free: Callable[[], int] | None = None
    ) -> None:
        """Open the spool in a folder, which only one process may use. Create the folder if it is missing.

        Args:
            limit: Maximum bytes of the spool's files; must be over 4 MiB.
            floor: Free bytes on the disk below which `find_shortage` reports a shortage.
            durable: If true, appended frames survive a power cut.
            free: Returns the number of free bytes; by default, those on the folder's disk.

        Raises:
            SpoolError: The folder cannot be used.
        """
        self._folder = folder
        self._path = folder / FILE_NAME
        self._log_path = folder / f"{FILE_NAME}-wal"
        self._limit = limit
        self._floor = floor
        self._durable = durable
        self._free = free or (lambda: shutil.disk_usage(folder).free)
        self._is_short = False  # fewer bytes are free than the floor
        self._file: sqlite3.Connection | None = None
        self._acknowledged = self._read = self._last = 0  # ids
        self.size = 0
        """Bytes of the spool's files."""
        self.free_bytes = 0
        self.spooled = 0
        """Number of frames that were appended since the start."""
        self.lost_bytes = 0
        """Bytes that could not be read back since the start, because they were damaged."""
        self.loss: str | None = None
        """Text for users about the last damage; `None` if there was none since the start."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if durable:
                to_disk(folder.parent)
            if self._path.exists():
                self._load()
        except (OSError, sqlite3.Error) as error:
            raise SpoolError(
                f"cannot use the spool folder {folder} ({error}). Check its permissions and the disk."
            ) from error

    @property
    def unread(self) -> int:
        """Number of frames that are not read yet."""
        return self._last - self._read

    @property
    def unacknowledged(self) -> int:
        """Number of frames that are not acknowledged yet."""
        return self._last - self._acknowledged

    def append(self, frames: Sequence[QueuedFrame], *, are_read: bool = False) -> None:
        """Append frames, either all or none.

        Args:
            are_read: If true, the frames count as read. This is allowed only if no frame is unread.
        """
        try:
            self._insert(frames)
        except sqlite3.DatabaseError as error:
            self._set_aside(error)
            self._insert(frames)
        self._last += len(frames)
        self.spooled += len(frames)
        if are_read:
            self._read = self._last
        self._measure()

    def read(self, max_bytes: int) -> list[QueuedFrame]:
        """Read the next frames, and skip damaged ones.

        Args:
            max_bytes: Stop once the frames have at least this size in total.
        """
        frames: list[QueuedFrame] = []
        size = 0
        try:
            with closing(self._open().execute(_READ, (self._read,))) as rows:
                for number, connection, frame, crc in rows:
                    self._read = number
                    if _checksum(connection, frame) != crc:
                        self._record_loss(len(frame))
                        continue
                    frames.append(QueuedFrame(connection, frame))
                    size += len(frame)
                    if size >= max_bytes:
                        return frames
        except sqlite3.DatabaseError as error:
            if not frames:  # else the next read begins at the damage
                self._set_aside(error)
            return frames
        if self._read < self._last:  # a damaged file lacks ids
            self._read = self._last
            self._record_loss(0)
        return frames

    def acknowledge(self) -> None:
        """Mark all read frames as acknowledged by Kafka."""
        self._acknowledged = self._read

    def rewind(self) -> None:
        """Mark all unacknowledged frames as unread, so that `read` returns them again."""
        self._read = self._acknowledged

    def release(self) -> None:
        """Delete acknowledged frames. If no frame is left, delete the file."""
        if self._file is None:
            return
        if self.unacknowledged:
            try:
                with self._file:
                    self._file.execute("DELETE FROM frames WHERE id <= ?", (self._acknowledged,))
            except sqlite3.DatabaseError as error:
                self._set_aside(error)
        else:
            self.close()
            self._path.unlink()
            self._log_path.unlink(missing_ok=True)
            self._acknowledged = self._read = self._last = 0
        self._measure()

    def has_room(self) -> bool:
        """Return true if at least a quarter of the maximum file size is free."""
        if self._file is None:
            return True
        names = ("page_count", "freelist_count", "max_page_count")
        pages, unused, most = (self._file.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return bool(pages - unused <= most * 3 // 4)

    def find_shortage(self) -> str | None:
        """Return a message for users while the disk is short of space.

        A shortage begins when less than `floor` bytes are free, and ends when 1.25 times `floor` are free.
        """
        self.free_bytes = self._free()
        self._is_short = self.free_bytes < (self._floor + self._floor // 4 if self._is_short else self._floor)
        if not self._is_short:
            return None
        return (
            f"the disk of {self._folder} has {self.free_bytes} bytes free, and needs {self._floor + self._floor // 4} "
            "(1.25 times bridge.min_free_bytes). Free some space."
        )

    def describe_error(self, error: OSError | sqlite3.Error) -> str:
        """Return the message for users about an error that a method of the spool raised."""
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return (
                f"the spool is full ({self.size} of at most {self._limit} bytes, and {self.free_bytes} bytes free on "
                "its disk). Restore Kafka, or free some space."
            )
        return f"cannot use the spool in {self._folder} ({error}). Check the folder's permissions and the disk."

    def close(self) -> None:
        """Close the SQLite file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> sqlite3.Connection:
        if self._file is not None:
            return self._file
        self._path.touch(mode=0o600)  # SQLite gives its log the same mode
        file = sqlite3.connect(self._path, check_same_thread=False)
        try:
            file.text_factory = bytes  # so damaged text raises the same error as damaged bytes
            file.execute("PRAGMA locking_mode = EXCLUSIVE")  # otherwise SQLite adds a file for shared memory
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = NORMAL")  # `append` syncs the log; a deletion needs no sync
            file.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT}")
            (page,) = file.execute("PRAGMA page_size").fetchone()
            file.execute(f"PRAGMA max_page_count = {(self._limit - _LOG_BYTES) // page}")
            file.execute(
                "CREATE TABLE IF NOT EXISTS frames"
                " (id INTEGER PRIMARY KEY, connection BLOB NOT NULL, frame BLOB NOT NULL, crc INTEGER NOT NULL)"
            )
            if self._durable:
                to_disk(self._folder)
        except (OSError, sqlite3.Error):
            file.close()
            raise
        self._file = file
        return file

    def _load(self) -> None:
        try:
            file = self._open()
            # one query for min and max would read the whole table
            (first,) = file.execute("SELECT min(id) FROM frames").fetchone()
            (last,) = file.execute("SELECT max(id) FROM frames").fetchone()
        except sqlite3.DatabaseError as error:
            self._set_aside(error)
            return
        if last is not None:
            self._acknowledged = self._read = first - 1
            self._last = last
        self._measure()

    def _insert(self, frames: Sequence[QueuedFrame]) -> None:
        rows = (
            (number, queued.connection, queued.frame, _checksum(queued.connection, queued.frame))
            for number, queued in enumerate(frames, self._last + 1)
        )
        with self._open() as file:
            file.executemany("INSERT INTO frames VALUES (?, ?, ?, ?)", rows)
        if self._durable:
            to_disk(self._log_path)

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        """Rename a damaged file, so that a new one is created. Raise the error if it does not mean a damaged file."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _DAMAGE:
            raise error
        self.close()
        self._measure()
        damaged = self._path.with_suffix(f".{self._path.stat().st_mtime_ns}{DAMAGED_SUFFIX}")
        self._path.rename(damaged)
        if self._log_path.exists():
            self._log_path.rename(f"{damaged}-wal")
        self.lost_bytes += self.size
        self.loss = (
            f"spool: the file {self._path} was damaged ({error}). Kiln renamed it to {damaged.name}, and its frames "
            f"({self.size} bytes) were not sent to Kafka. Check the disk."
        )
        self._acknowledged = self._read = self._last = self.size = 0

    def _record_loss(self, size: int) -> None:
        self.lost_bytes += size
        self.loss = f"spool: frames in {self._path} are damaged and were not sent to Kafka. Check the disk."

    def _measure(self) -> None:
        self.size = sum(path.stat().st_size for path in (self._path, self._log_path) if path.exists())


def _checksum(connection: bytes, frame: bytes) -> int:
    return crc32(frame, crc32(connection))
