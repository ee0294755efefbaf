"""Files of an object store as DuckDB reads them: DuckDB's own reader for Parquet, over the connections of delta-rs.

DuckDB's extension for S3 has its own names for options and finds credentials its own way, and is fetched from its
makers' server at the first question.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import IO

from fsspec.spec import AbstractFileSystem

from conf.location import STORE, Location, location


class StoreFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """What DuckDB asks of a file system, read only. No file of a lake changes: each is asked for its size once."""

    protocol = STORE.removesuffix("://")
    cachable = False

    def __init__(self, root: Location) -> None:
        """`root`: any place in the store."""
        super().__init__()
        self._options = root.options
        self._sizes: dict[str, int] = {}

    def _open(self, path: str, mode: str = "rb", **_: object) -> IO[bytes]:
        if mode != "rb":
            raise PermissionError(f"{path}: questions only read")
        opened: IO[bytes] = self._at(path).open()
        return opened

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
