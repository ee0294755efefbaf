"""Reading of compressed files (gzip, bzip2, xz, zstd) and of archives (tar, zip), detected by their first bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import BinaryIO, Final, NamedTuple, cast

_BEGIN: Final = 512
"""Number of bytes at the start of a file that show its type; also the size of a tar header."""
_ZSTD_STEP: Final = 16 * 1024
_NS: Final = 1_000_000_000
_ENCRYPTED: Final = 1
"""Flag bit of an encrypted member of a zip file."""

_DAMAGE: Final = (
    EOFError,
    OSError,
    # zipfile and tarfile raise these for unsupported versions, invalid names and sizes out of range
    NotImplementedError,
    OverflowError,
    ValueError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
)
"""Exceptions that damaged data can cause. An `OSError` with an errno comes from the file system instead."""


MAX_MEMBERS: Final = 100_000
"""Maximum number of entries in an archive. Each entry takes about 1 KiB of memory."""


class DamagedError(Exception):
    """Compressed data is damaged. The message describes the damage."""


class ArchiveError(Exception):
    """An archive cannot be read. The message gives the reason."""


class Member(NamedTuple):
    """A file in an archive."""

    name: str
    number: int
    """position among all entries of the archive, from 0; two entries may have the same name"""
    modified_at: int | None
    """time of the last change, in ns since the epoch"""


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


def is_archive(file: BinaryIO) -> bool:
    """Return true if a file is a zip or a tar; a tar may be compressed."""
    return _is_zip(file) or _is_tar_begin(file)


def read_members(file: BinaryIO, wanted: Collection[int] | None = None) -> Iterator[tuple[Member, BinaryIO]]:
    """Read the files in an archive in the order in which they are stored, without folders, links and hidden files.

    Args:
        wanted: Numbers of the members to yield (`Member.number`); by default all.

    Yields:
        A member, and a stream of its content. The stream is valid until the next member, and seeking back is slow.

    Raises:
        ArchiveError: The archive is damaged, encrypted, compressed in a way that is not supported, or has more than
            MAX_MEMBERS entries.
    """
    with describe_damage() as damage:
        members = _read_zip(file, wanted) if _is_zip(file) else _read_tar(open_decompressed(file), wanted)
        left = None if wanted is None else len(wanted)
        while left is None or left > 0:
            member = next(members, None)
            if member is None:
                return
            left = None if left is None else left - 1
            yield member
    if damage:
        raise ArchiveError(f"the archive {damage[0]}. Extract the files that are intact, and pass them instead")


def _read_zip(file: BinaryIO, wanted: Collection[int] | None) -> Iterator[tuple[Member, BinaryIO]]:
    archive = zipfile.ZipFile(file)
    for number, member in enumerate(archive.infolist()):
        _check_number(number)
        if _is_wanted(member) and (wanted is None or number in wanted):
            with archive.open(member) as content:
                yield _describe_zip_member(number, member), cast(BinaryIO, content)


def _read_tar(opened: BinaryIO, wanted: Collection[int] | None) -> Iterator[tuple[Member, BinaryIO]]:
    # a zstd stream cannot seek
    with tarfile.open(fileobj=opened, mode="r:" if opened.seekable() else "r|") as archive:
        for number, member in enumerate(archive):
            _check_number(number)
            if not member.isfile() or is_hidden(member.name):
                continue
            if member.issparse():
                raise ArchiveError(
                    f"{member.name} in the archive is sparse. Extract the archive, and pass the extracted files instead"
                )
            _check_size(opened, member)
            if wanted is None or number in wanted:
                content = archive.extractfile(member)
                assert content is not None
                yield Member(member.name, number, int(member.mtime * _NS)), cast(BinaryIO, content)


def _check_number(number: int) -> None:
    if number >= MAX_MEMBERS:
        raise ArchiveError(
            f"the archive has more than {MAX_MEMBERS:,} entries. Extract it, and pass the extracted folders instead"
        )


def _check_size(opened: BinaryIO, member: tarfile.TarInfo) -> None:
    """Check that a member ends within its tar. In a compressed tar, reading the member finds the damage instead."""
    try:
        size = os.fstat(opened.fileno()).st_size if isinstance(opened, io.BufferedReader | io.FileIO) else None
    except io.UnsupportedOperation:
        return
    if size is not None and member.offset_data + member.size > size:
        raise ArchiveError(
            f"{member.name} in the archive claims {member.size:,} bytes, but the archive has only "
            f"{max(0, size - member.offset_data):,} more: it is cut off or damaged. Extract the files that are intact, "
            "and pass them instead"
        )


def read_begin(file: BinaryIO, size: int) -> tuple[bytes, str]:
    """Read the next bytes of a file or member.

    Returns:
        At most `size` bytes, and a description of the damage that ends them, or "".
    """
    begin = b""
    read = getattr(file, "read1", file.read)  # unlike read, read1 returns the data before damage
    with describe_damage() as damage:
        while len(begin) < size and (more := read(size - len(begin))):
            begin += more
    return begin, damage[0] if damage else ""


def is_hidden(name: str) -> bool:
    """Return true if a part of a path begins with a dot, or is `__MACOSX`, a folder that macOS adds to archives."""
    return any((part.startswith(".") and part.strip(".")) or part == "__MACOSX" for part in name.split("/"))


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
    begin = b""
    file.seek(0)
    with describe_damage():  # in a member of an archive, damage is reported when the member is read
        begin = file.read(_BEGIN)
    file.seek(0)
    return begin


def _is_zip(file: BinaryIO) -> bool:
    return _read_begin(file).startswith((b"PK\x03\x04", b"PK\x05\x06"))


def _is_tar_begin(file: BinaryIO) -> bool:
    with describe_damage():
        return open_decompressed(file).read(_BEGIN)[257:262] == b"ustar"
    return False


def _is_wanted(member: zipfile.ZipInfo) -> bool:
    if not member.filename or member.is_dir() or is_hidden(member.filename):
        return False
    if member.flag_bits & _ENCRYPTED:
        raise ArchiveError(
            f"{member.filename} in the archive is encrypted. Extract the archive, and pass the extracted files instead"
        )
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        raise ArchiveError(
            f"{member.filename} in the archive is compressed by method {member.compress_type}, which is not "
            "supported. Extract the archive, and pass the extracted files instead"
        )
    return True


def _describe_zip_member(number: int, member: zipfile.ZipInfo) -> Member:
    try:  # times in a zip file have no time zone, and may be invalid
        at = int(datetime(*member.date_time, tzinfo=UTC).timestamp()) * _NS
    except ValueError:
        return Member(member.filename, number, None)
    return Member(member.filename, number, at)
