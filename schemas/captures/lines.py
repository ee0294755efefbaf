"""Reader of files of lines: splits files at line ends, decompresses them, and reads lines within bounded memory."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final, NamedTuple, TypeAlias, cast

from kiln.schemas.captures.items import (
    FILE_DAMAGED,
    FILE_ENDS_EARLY,
    LINE_MALFORMED,
    LINE_TOO_LONG,
    FileSource,
    Item,
    LogFrames,
    LoggedMessage,
    UnreadableItem,
)
from kiln.schemas.reject import Rejected

MAX_LINE: Final = 16 * 1024 * 1024
"""Bytes of a line that is read. An RPC of 4 MiB takes 6 MiB in base64."""
QUARANTINED_LINE_BYTES: Final = 64 * 1024
"""Bytes of a longer line that go to quarantine."""

_BLOCK: Final = 1024 * 1024
_GZIP_MAGIC: Final = b"\x1f\x8b"


class FileRange(NamedTuple):
    """A range of a file that begins at the start of a line and ends after a line end, or with the file."""

    start: int
    stop: int | None
    """end of the range, or `None` for the end of the file"""
    first: int
    """number of the first line, from 1"""


WHOLE: Final = FileRange(0, None, 1)


class FileDamage(NamedTuple):
    """Reason why the rest of a file cannot be read."""

    reason: str
    detail: str


class Line(NamedTuple):
    number: int
    data: bytes
    """without LF or CRLF; of a line over MAX_LINE only the first QUARANTINED_LINE_BYTES"""
    length: int
    """bytes of the whole line"""
    ended: bool
    """false if the file ends before the line does"""


ParseLine: TypeAlias = Callable[[bytes], LoggedMessage | Rejected]


def is_gzip(file: BinaryIO) -> bool:
    """Return true if a file is compressed, by its first bytes. The file is left at its begin."""
    file.seek(0)
    magic = file.read(2)
    file.seek(0)
    return magic == _GZIP_MAGIC


def open_decompressed(file: BinaryIO) -> BinaryIO:
    """Open the file from its begin, decompressed if it is compressed."""
    # GzipFile is a BinaryIO in all but its declared type
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_gzip(file) else file


def read_blocks(file: BinaryIO, start: int = 0, stop: int | None = None) -> Iterator[bytes | FileDamage]:
    """Read a file, or a range of an uncompressed one, in blocks. `FileDamage` comes last in a damaged file."""
    opened = open_decompressed(file)
    if start:
        opened.seek(start)
    left = stop - start if stop is not None else None
    # read1 returns the data before the damage
    read = getattr(opened, "read1", opened.read)
    while left is None or left > 0:
        try:
            block: bytes = read(_BLOCK if left is None else min(_BLOCK, left))
        except EOFError:
            yield FileDamage(FILE_ENDS_EARLY, "the compressed file is cut off")
            return
        except (gzip.BadGzipFile, zlib.error) as error:
            yield FileDamage(FILE_DAMAGED, f"the compressed file is damaged: {error}")
            return
        if not block:
            return
        if left is not None:
            left -= len(block)
        yield block


def split_lines(file: BinaryIO, size: int) -> Iterator[FileRange]:
    """Split a file into parts of `size` bytes and the rest of the last line. A compressed file is one part."""
    if is_gzip(file):
        yield WHOLE
        return
    start, first, position, line_ends = 0, 1, 0, 0
    for block in read_blocks(file):
        if isinstance(block, FileDamage):  # only compressed files have damage
            return
        at = 0
        while (end := block.find(b"\n", max(at, start + size - 1 - position))) >= 0:
            line_ends += block.count(b"\n", at, end + 1)
            at = end + 1
            yield FileRange(start, position + at, first)
            start, first = position + at, line_ends + 1
        line_ends += block.count(b"\n", at)
        position += len(block)
    if position > start:
        yield FileRange(start, position, first)


def read_lines(file: BinaryIO, part: FileRange = WHOLE) -> Iterator[Line | UnreadableItem]:
    """Read the lines of a part. `UnreadableItem` comes last if the file is damaged."""
    number, partial, length = part.first, bytearray(), 0
    for block in read_blocks(file, part.start, part.stop):
        if isinstance(block, FileDamage):
            yield UnreadableItem(number, bytes(partial[:QUARANTINED_LINE_BYTES]), block.reason, block.detail)
            return
        *ends, rest = block.split(b"\n")
        for end in ends:
            yield _build_line(number, partial + end if partial else end, length + len(end), ended=True)
            number += 1
            partial, length = bytearray(), 0
        length += len(rest)
        partial += rest
        if length > MAX_LINE:
            del partial[QUARANTINED_LINE_BYTES:]
    if length:
        yield _build_line(number, partial, length, ended=False)


def _build_line(number: int, data: bytes | bytearray, length: int, *, ended: bool) -> Line:
    if length > MAX_LINE:
        return Line(number, bytes(data[:QUARANTINED_LINE_BYTES]), length, ended)
    return Line(number, bytes(data).removesuffix(b"\r"), length, ended)


def read_log(name: str, parse: ParseLine, file: BinaryIO, source: FileSource, part: FileRange) -> Iterator[Item]:
    """Read the items of a log with at most one message a line. Empty lines are skipped."""
    frames = LogFrames(name, source)
    for line in read_lines(file, part):
        if isinstance(line, UnreadableItem):
            yield line
        elif line.length > MAX_LINE:
            detail = f"a line of {line.length} bytes, of which data has the first {QUARANTINED_LINE_BYTES}; "
            detail += f"at most {MAX_LINE} are read"
            yield UnreadableItem(line.number, line.data, LINE_TOO_LONG, detail)
        elif line.data:
            logged = parse(line.data)
            if isinstance(logged, LoggedMessage):
                yield frames.build_frame(line.number, line.data, logged)
            elif logged.reason == LINE_MALFORMED and not line.ended:
                yield UnreadableItem(
                    line.number, line.data, FILE_ENDS_EARLY, f"the last line has no end: {logged.detail}"
                )
            else:
                yield UnreadableItem(line.number, line.data, logged.reason, logged.detail)
