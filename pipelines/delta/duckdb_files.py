"""Files of an object store as DuckDB reads them: DuckDB's own reader for Parquet, over the connections of delta-rs.

DuckDB's extension for S3 has its own names for options and finds credentials its own way, and is fetched from its
makers' server at the first question.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from threading import Lock, get_ident
from typing import IO

from fsspec.spec import AbstractFileSystem

from kiln.conf.process.location import STORE, Location, location


class SharedFile:
    """A file that several threads of DuckDB read at once. Each has a place of its own: DuckDB moves to a place in one
    call and reads there in the next, and another thread may do the same in between."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lock = Lock()
        self._places: dict[
            int, int
        ] = {}  # by thread: what is local to a thread goes when DuckDB's thread leaves Python

    def seek(self, place: int) -> int:
        self._places[get_ident()] = place
        return place

    def tell(self) -> int:
        return self._places.get(get_ident(), 0)

    def read(self, size: int = -1) -> bytes:
        with self._lock:
            self._file.seek(self.tell())
            found = self._file.read(size)
        self._places[get_ident()] = self.tell() + len(found)
        return found

    def close(self) -> None:
        self._file.close()


class StoreFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """File system for DuckDB, read only. No file of a lake changes: the size of each is read once."""

    protocol = STORE.removesuffix("://")
    cachable = False

    def __init__(self, root: Location) -> None:
        """`root`: any place in the store."""
        super().__init__()
        self._options = root.options
        self._sizes: dict[str, int] = {}

    def _open(self, path: str, mode: str = "rb", **_: object) -> SharedFile:
        if mode != "rb":
            raise PermissionError(f"{path}: questions only read")
        return SharedFile(self._at(path).open())

    def size(self, path: str) -> int:
        """Bytes. FileNotFoundError."""
        if path not in self._sizes:
            with self._at(path).open() as file:
                self._sizes[path] = file.size()
        return self._sizes[path]

    def modified(self, path: str) -> datetime:
        """A time long ago: what is at this path is never another file."""
        return datetime(2000, 1, 1, tzinfo=UTC)

    def exists(self, path: str, **_: object) -> bool:
        return self._at(path).exists()

    def glob(self, path: str, **_: object) -> Iterable[str]:
        """The file itself: nobody asks for files by pattern."""
        return [path]

    def _at(self, path: str) -> Location:
        return location(STORE + path.removeprefix(STORE), self._options)
