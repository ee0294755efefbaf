"""Locations of tables and checkpoints: a folder of this machine, or a prefix in an object store (`s3://BUCKET/PREFIX`).

Both have the same methods. The bytes of a file survive a power cut once `write` returns, or the file from `create` is
closed: on a disk they are synced, and a store makes a PUT durable before it answers. On a disk, only `write` is atomic
and syncs the folder; after `create`, call `sync` of the folder.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple, Self, cast
from urllib.parse import urlsplit

from kiln.conf.process.errors import KilnError, SettingsError
from kiln.conf.process.extras import require_extras
from kiln.conf.process.files import to_disk
from kiln.conf.process.forks import refuse_fork

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake.fs import DeltaStorageHandler
    from typing_extensions import Buffer

STORE: Final = "s3://"
"""Scheme of the URIs of an object store."""

Output = io.RawIOBase | io.BufferedIOBase

_FRESH: Final = ".new"


_PIECE: Final = re.compile(r"\s*\n\s*(?:\x1b\[\d+m)?↳(?:\x1b\[0m)?\s*")
"""Separator between the parts of an error of delta-rs."""
_MAX_LENGTH: Final = 400  # characters of an error


class StoreError(KilnError, OSError):
    """The store does not answer, or rejects a request. The message names the location."""


def expand_path(path: str | Path) -> Path:
    """Return the absolute path, with `~` replaced by the home folder.

    Raises:
        SettingsError: There is no home folder, or no current folder.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise SettingsError([f"{path}: there is no such home folder. Set HOME, or write the path without ~"]) from None
    except FileNotFoundError:
        raise SettingsError([f"{path}: the current folder was removed. Change to another one"]) from None


def shorten_error(error: Exception) -> str:
    """Shorten an error of delta-rs to one line, without the store's XML and without stack trace."""
    parts = [part for part in _PIECE.split(str(error)) if not part.startswith("<")]
    return ": ".join(part.split("\n")[0] for part in parts)[:_MAX_LENGTH]


def find_os_error(error: Exception) -> str:
    """Find the operating system's error, such as "No space left on device", in an error of delta-rs.

    Returns:
        The text of the error; empty if there is none.
    """
    match = re.search(r"(?:^|: )([^:]+) \(os error \d+\)", str(error))
    return match[1] if match else ""


class FileEntry(NamedTuple):
    """A file in a folder or prefix. `size` is in bytes, `modified` in µs since the epoch."""

    name: str
    size: int
    modified: int


@dataclass(frozen=True)
class _Place:
    """A file, or a folder of files; `options` are delta-rs's storage options, which may contain secrets."""

    uri: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self.uri}/{name}", self.options)

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.uri.rpartition("/")[2]


def parse_location(place: str | Path, options: Mapping[str, str] | None = None) -> Location:
    """Parse a path or a URI."""
    uri = str(place)
    if uri.startswith(STORE):
        return StorePrefix(uri.rstrip("/"), _allow_http(options or {}))
    return LocalFolder(uri)


def _allow_http(options: Mapping[str, str]) -> dict[str, str]:
    """Add delta-rs's option that allows an endpoint with http://."""
    is_plain = any("endpoint" in key.lower() and value.startswith("http://") for key, value in options.items())
    return ({"aws_allow_http": "true"} if is_plain else {}) | dict(options)


class LocalFolder(_Place):
    """A folder or file on this machine."""

    @property
    def folder(self) -> Path:
        """Path on this machine; `None` for a store."""
        return Path(self.uri)

    @property
    def spark_uri(self) -> str:
        """URI for Spark and Hadoop."""
        # with a scheme: Hadoop looks up a bare path in its default file system, which may be HDFS
        return f"file://{self.folder.absolute()}"

    def exists(self) -> bool:
        """Return true if the file or folder exists. In a store, a folder exists if it is not empty."""
        return self.folder.exists()

    def files(self) -> Iterator[FileEntry]:
        """List the files of the folder itself, unordered; empty if there is no folder."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.uri) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has removed the file meanwhile
                    if entry.is_file(follow_symlinks=False):
                        info = entry.stat(follow_symlinks=False)
                        yield FileEntry(entry.name, info.st_size, info.st_mtime_ns // 1_000)

    def folders(self) -> Iterator[str]:
        """List the names of direct subfolders, unordered; empty if there is no folder."""
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
        """Create a file, and sync it to disk when it is closed. In a store, it exists only from then on."""
        return _SyncedFile(io.FileIO(self.uri, "w"))

    def write(self, data: Iterable[bytes]) -> None:
        """Replace the content of the file atomically."""
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
        """Sync the file, or the folder's entries, to disk, so that they survive a power cut."""
        to_disk(self.folder)


class _SyncedFile(io.BufferedWriter):
    """A file that is synced to disk when it is closed."""

    def close(self) -> None:
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
        super().close()


class StorePrefix(_Place):
    """The objects of a bucket with a common key prefix.

    The store is accessed by delta-rs, so that options and credentials are the same as for the tables' logs.
    """

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
        with self._translate_errors():
            (info,) = self._store.get_file_info([self._key])
        from pyarrow.fs import FileType

        return bool(info.type != FileType.NotFound)

    def files(self) -> Iterator[FileEntry]:
        for info in self._list_objects(recursive=False):
            if info.is_file:
                yield FileEntry(info.base_name, info.size, info.mtime_ns // 1_000)

    def folders(self) -> Iterator[str]:
        for info in self._list_objects(recursive=False):
            if not info.is_file:
                yield info.base_name

    def read(self) -> bytes:
        with self._translate_errors(), self.open() as file:
            return bytes(file.read())

    def open(self) -> pa.NativeFile:
        with self._translate_errors():
            return self._store.open_input_file(self._key)

    def create(self) -> Output:
        return _Upload(self._store, self._key)

    def write(self, data: Iterable[bytes]) -> None:
        with self._translate_errors(), self.create() as out:
            for chunk in data:
                out.write(chunk)

    def remove(self) -> None:
        with self._translate_errors():
            self._store.delete_file(self._key)

    def remove_all(self) -> None:
        for info in self._list_objects(recursive=True):
            if info.is_file:
                with self._translate_errors():
                    self._store.delete_file(info.path)

    def sync(self) -> None:
        """Do nothing: the store makes a PUT durable before it answers."""

    def _list_objects(self, *, recursive: bool) -> Iterator[pa.fs.FileInfo]:
        store = self._store
        from pyarrow.fs import FileSelector

        selector = FileSelector(self._key, allow_not_found=True, recursive=recursive)
        with self._translate_errors():
            infos = store.get_file_info_selector(selector)
        for info in infos:
            if info.path != self._key:  # not the marker that Hadoop's file system creates for an empty folder
                yield info

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
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
        refuse_fork()
        return _store(f"{STORE}{self.bucket}", tuple(self.options.items()))


Location = LocalFolder | StorePrefix


class _Upload(io.RawIOBase):
    """A multipart upload of an object, which exists once this file is closed."""

    def __init__(self, store: DeltaStorageHandler, key: str) -> None:
        # without pyarrow's wrapper, which passes buffers, while delta-rs accepts bytes only
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
    """Open the connections to a bucket, once per process."""
    require_extras("lake")
    from deltalake.fs import DeltaStorageHandler

    return DeltaStorageHandler(bucket, dict(options))
