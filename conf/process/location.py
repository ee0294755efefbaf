"""Locations of tables and checkpoints: a folder of this machine, or a prefix in an object store (`s3://BUCKET/PREFIX`).

Both are the same to who reads and writes there. A file that `write` or `create` gave is whole, under its name, and
survives a power cut: on a disk because it is synced, in a store because a PUT is answered when it is kept.

Every room may import this file.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple, Self, cast
from urllib.parse import urlsplit

from kiln.conf.process.disk import to_disk
from kiln.conf.process.errors import KilnError

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake.fs import DeltaStorageHandler
    from typing_extensions import Buffer

STORE: Final = "s3://"
"""How the URI of a place in an object store begins."""

Output = io.RawIOBase | io.BufferedIOBase

_FRESH: Final = ".new"


_PIECE: Final = re.compile(r"\s*\n\s*(?:\x1b\[\d+m)?↳(?:\x1b\[0m)?\s*")
"""Between the parts of an error of delta-rs."""
_MOST: Final = 400  # characters of an error


class StoreError(KilnError, OSError):
    """The store does not answer, or refuses. The message names the place."""


def shorten_error(error: Exception) -> str:
    """Shorten an error of delta-rs to one line, without XML of the store and without trace."""
    parts = [part for part in _PIECE.split(str(error)) if not part.startswith("<")]
    return ": ".join(part.split("\n")[0] for part in parts)[:_MOST]


class FileEntry(NamedTuple):
    """A file that is straight in a place. `modified`: µs."""

    name: str
    size: int
    modified: int


@dataclass(frozen=True)
class Location(ABC):
    """A file, or a folder of files. `options`: as delta-rs takes them for a store; they may hold secrets."""

    uri: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self.uri}/{name}", self.options)

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        """The last part of the place."""
        return self.uri.rpartition("/")[2]

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """The place on a disk of this machine; None: the place is in a store."""

    @property
    @abstractmethod
    def spark_uri(self) -> str:
        """The place as Spark, or Hadoop, writes it."""

    @abstractmethod
    def exists(self) -> bool:
        """Return true if there is a file, or a folder; of a folder in a store, whether anything is in it."""

    @abstractmethod
    def files(self) -> Iterator[FileEntry]:
        """List the files of the folder itself, unordered; empty if there is no folder."""

    @abstractmethod
    def folders(self) -> Iterator[str]:
        """List the names of direct subfolders, unordered; empty if there is no folder."""

    @abstractmethod
    def read(self) -> bytes:
        """Read the file."""

    @abstractmethod
    def open(self) -> pa.NativeFile:
        """Open the file for Arrow."""

    @abstractmethod
    def create(self) -> Output:
        """Create a file that exists once it is closed."""

    @abstractmethod
    def write(self, data: Iterable[bytes]) -> None:
        """Puts `data` into the file, in the place of what was there, all at once."""

    @abstractmethod
    def remove(self) -> None:
        """Removes the file, if there is one."""

    @abstractmethod
    def remove_all(self) -> None:
        """Removes the folder with all that is in it, if there is one."""

    @abstractmethod
    def sync(self) -> None:
        """Returns when the bytes of the file, or the names in the folder, survive a power cut, whoever wrote them."""

    @abstractmethod
    def touch(self) -> None:
        """The file counts as written now, where a start after a power cut asks for that."""


def parse_location(place: str | Path, options: Mapping[str, str] | None = None) -> Location:
    """Parse a path or a URI."""
    uri = str(place)
    if uri.startswith(STORE):
        return StorePrefix(uri.rstrip("/"), _allow_http(options or {}))
    return LocalFolder(uri)


def _allow_http(options: Mapping[str, str]) -> dict[str, str]:
    """An endpoint that is written as http:// is meant so: delta-rs wants to be told once more."""
    plain = any("endpoint" in key.lower() and value.startswith("http://") for key, value in options.items())
    return ({"aws_allow_http": "true"} if plain else {}) | dict(options)


class LocalFolder(Location):
    """A folder, or a file, of this machine."""

    @property
    def folder(self) -> Path:
        return Path(self.uri)

    @property
    def spark_uri(self) -> str:
        return self.uri

    def exists(self) -> bool:
        return self.folder.exists()

    def files(self) -> Iterator[FileEntry]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.uri) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # somebody has removed the file meanwhile
                    if entry.is_file(follow_symlinks=False):
                        said = entry.stat(follow_symlinks=False)
                        yield FileEntry(entry.name, said.st_size, said.st_mtime_ns // 1_000)

    def folders(self) -> Iterator[str]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.uri) as entries:
            for entry in entries:
                if entry.is_dir():
                    yield entry.name

    def read(self) -> bytes:
        return self.folder.read_bytes()

    def open(self) -> pa.NativeFile:
        import pyarrow as pa

        return pa.OSFile(self.uri)

    def create(self) -> Output:
        return _SyncedFile(io.FileIO(self.uri, "w"))

    def write(self, data: Iterable[bytes]) -> None:
        fresh = self.folder.with_name(self.name + _FRESH)
        with LocalFolder(str(fresh)).create() as out:
            out.writelines(data)
        fresh.replace(self.folder)
        to_disk(self.folder.parent)

    def remove(self) -> None:
        self.folder.unlink(missing_ok=True)

    def remove_all(self) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def sync(self) -> None:
        to_disk(self.folder)

    def touch(self) -> None:
        os.utime(self.folder)


class _SyncedFile(io.BufferedWriter):
    """A file whose bytes are on the disk once it is closed."""

    def close(self) -> None:
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
        super().close()


class StorePrefix(Location):
    """What of a bucket's objects has a key that begins so. delta-rs speaks with the store here too, so that options and
    credentials are the same for a table's log and for its files."""

    @property
    def folder(self) -> None:
        return None

    @property
    def spark_uri(self) -> str:
        return f"s3a://{self.uri.removeprefix(STORE)}"

    @property
    def bucket(self) -> str:
        return urlsplit(self.uri).netloc

    def exists(self) -> bool:
        from pyarrow.fs import FileType

        with self._in_words():
            (found,) = self._store.get_file_info([self._key])
        return bool(found.type != FileType.NotFound)

    def files(self) -> Iterator[FileEntry]:
        for found in self._listed(recursive=False):
            if found.is_file:
                yield FileEntry(found.base_name, found.size, found.mtime_ns // 1_000)

    def folders(self) -> Iterator[str]:
        for found in self._listed(recursive=False):
            if not found.is_file:
                yield found.base_name

    def read(self) -> bytes:
        with self._in_words(), self.open() as file:
            return bytes(file.read())

    def open(self) -> pa.NativeFile:
        with self._in_words():
            return self._store.open_input_file(self._key)

    def create(self) -> Output:
        return _Upload(self._store, self._key)

    def write(self, data: Iterable[bytes]) -> None:
        with self._in_words(), self.create() as out:
            for each in data:
                out.write(each)

    def remove(self) -> None:
        with self._in_words():
            self._store.delete_file(self._key)

    def remove_all(self) -> None:
        for found in self._listed(recursive=True):
            if found.is_file:
                with self._in_words():
                    self._store.delete_file(found.path)

    def sync(self) -> None:
        """Nothing: what the store has taken, the store keeps."""

    def touch(self) -> None:
        """Nothing: no power cut tears an object, so nobody asks."""

    def _listed(self, *, recursive: bool) -> Iterator[pa.fs.FileInfo]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(self._key, allow_not_found=True, recursive=recursive)
        with self._in_words():
            found = self._store.get_file_info_selector(selector)
        yield from found

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.uri}: there is no such object") from None
        except OSError as error:
            raise StoreError(f"{self.uri}: {shorten_error(error)}") from None

    @property
    def _key(self) -> str:
        return urlsplit(self.uri).path.strip("/")

    @property
    def _store(self) -> DeltaStorageHandler:
        return _store(f"{STORE}{self.bucket}", tuple(self.options.items()))


class _Upload(io.RawIOBase):
    """An object that is there when it is closed, in as many parts as its size asks for."""

    def __init__(self, store: DeltaStorageHandler, key: str) -> None:
        # without the wrapper of pyarrow, which hands on buffers where delta-rs takes bytes alone
        self._out = cast(IO[bytes], store._handler.open_output_stream(key))
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        size = self._out.write(bytes(data))
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def close(self) -> None:
        if not self.closed:
            self._out.close()
        super().close()


@lru_cache(maxsize=4)
def _store(bucket: str, options: tuple[tuple[str, str], ...]) -> DeltaStorageHandler:
    """Open the connections to a bucket, once for each process."""
    from deltalake.fs import DeltaStorageHandler

    return DeltaStorageHandler(bucket, dict(options))
