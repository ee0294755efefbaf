"""File system by which DuckDB reads an object store, with the storage options and credentials of delta-rs.

DuckDB's own S3 extension is not used: it takes other options and credentials, and is downloaded at the first query.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from threading import Lock, get_ident
from typing import IO

from fsspec.spec import AbstractFileSystem

from kiln.conf.process.location import STORE, Location, parse_location


class SharedFile:
    """A file that several threads of DuckDB read at once.

    Each thread has its own offset, because DuckDB seeks in one call and reads in the next. Another thread may seek in
    between.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = Lock()
        # By thread id: thread-local data is lost when DuckDB's thread leaves Python.
        self._offsets: dict[int, int] = {}

    def seek(self, offset: int) -> int:
        self._offsets[get_ident()] = offset
        return offset

    def tell(self) -> int:
        return self._offsets.get(get_ident(), 0)

    def read(self, size: int = -1) -> bytes:
        with self._lock:
            self._file.seek(self.tell())
            data = self._file.read(size)
        self._offsets[get_ident()] = self.tell() + len(data)
        return data

    def close(self) -> None:
        self._file.close()


class StoreFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Read-only file system for DuckDB. Files of a lake never change, so the size of each file is read once."""

    protocol = STORE.removesuffix("://")
    cachable = False

    def __init__(self, root: Location) -> None:
        """Create the file system. `root`: any location in the object store."""
        super().__init__()
        self._options = root.options
        self._sizes: dict[str, int] = {}

    def _open(self, path: str, mode: str = "rb", **_: object) -> SharedFile:
        if mode != "rb":
            raise PermissionError(f"cannot open {path} with mode {mode}: the file system is read-only")
        return SharedFile(self._locate(path).open())

    def size(self, path: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            FileNotFoundError: There is no such file.
        """
        if path not in self._sizes:
            with self._locate(path).open() as file:
                self._sizes[path] = file.size()
        return self._sizes[path]

    def modified(self, path: str) -> datetime:
        """Return a constant time, because files of a lake never change."""
        return datetime(2000, 1, 1, tzinfo=UTC)

    def exists(self, path: str, **_: object) -> bool:
        return self._locate(path).exists()

    def glob(self, path: str, **_: object) -> Iterable[str]:
        """Return the path itself, because Kiln passes no patterns."""
        return [path]

    def _locate(self, path: str) -> Location:
        return parse_location(STORE + path.removeprefix(STORE), self._options)
