"""Reading of compressed files (gzip, bzip2, xz, zstd), detected by their first bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final, NamedTuple, cast

_BEGIN: Final = 16
"""Number of bytes at the start of a file that show its compression."""
_ZSTD_STEP: Final = 16 * 1024

_DAMAGE: Final = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""Exceptions that damaged data can cause. An `OSError` with an errno comes from the file system instead."""


class DamagedError(Exception):
    """Compressed data is damaged. The message describes the damage."""


def open_decompressed(file: BinaryIO) -> BinaryIO:
    """Return a stream of a file's content from its start, decompressed if the file is compressed."""
    begin = _read_begin(file)
    for kind in _COMPRESSIONS:
        if kind.begin.match(begin):
            return kind.open(file)
    return file


def name_compression(file: BinaryIO) -> str:
    """Return the name of a file's compression, or "" if there is none, and move the file's position to its start."""
    begin = _read_begin(file)
    return next((kind.name for kind in _COMPRESSIONS if kind.begin.match(begin)), "")


@contextmanager
def describe_damage() -> Iterator[list[str]]:
    """Catch an exception that damaged data causes, and append a description of the damage to the yielded list. Errors
    of the file system are raised."""
    damage: list[str] = []
    try:
        yield damage
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        cut = isinstance(error, EOFError) or "Truncated" in str(error) or "unexpected end" in str(error)
        damage.append("is cut off" if cut else f"is damaged: {error}")


class _Compression(NamedTuple):
    name: str
    begin: re.Pattern[bytes]
    open: Callable[[BinaryIO], BinaryIO]


class _OpenFile(io.RawIOBase):
    """Wrapper that pyarrow can close without closing the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)


class _ZstdFile(io.RawIOBase):
    """Decompressed content of a zstd file. Reads are small, because pyarrow drops all data of a read that finds
    damage."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow as pa  # slow to import, and few files need it

        self._stream = pa.CompressedInputStream(pa.PythonFile(_OpenFile(file), mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any buffer in typeshed
        data: bytes = self._stream.read(min(len(buffer), _ZSTD_STEP))
        buffer[: len(data)] = data
        return len(data)


# The classes of the standard library implement BinaryIO, but do not declare it.
_COMPRESSIONS: Final = (
    _Compression("gzip", re.compile(rb"\x1f\x8b"), lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file))),
    _Compression(
        "bzip2",
        re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", re.DOTALL),
        lambda file: cast(BinaryIO, bz2.BZ2File(file)),
    ),
    _Compression("xz", re.compile(rb"\xfd7zXZ\0"), lambda file: cast(BinaryIO, lzma.LZMAFile(file))),  # noqa: SIM115 - the caller closes it
    _Compression(
        "zstd", re.compile(rb"\x28\xb5\x2f\xfd"), lambda file: cast(BinaryIO, io.BufferedReader(_ZstdFile(file)))
    ),
)


def _read_begin(file: BinaryIO) -> bytes:
    file.seek(0)
    begin = file.read(_BEGIN)
    file.seek(0)
    return begin
