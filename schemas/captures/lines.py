"""Reader of files of lines: decompresses and decodes files, divides them at line ends, and reads lines within bounded
memory. The objects of a JSON array, or of pretty-printed JSON, are lines too."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import BinaryIO, Final, NamedTuple, TypeAlias

from kiln.schemas.captures.compression import CUT_OFF, describe_damage, name_compression, open_decompressed
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
from kiln.schemas.captures.transport import UnwrappedLine, parse_time, unwrap
from kiln.schemas.reject import Rejected

MAX_LINE: Final = 16 * 1024 * 1024
"""Bytes of a line that is read. An RPC of 4 MiB takes 6 MiB in base64."""
QUARANTINED_LINE_BYTES: Final = 64 * 1024
"""Bytes of a longer line that go to quarantine."""

_BLOCK: Final = 1024 * 1024
_BEGIN: Final = 64 * 1024
"""Number of bytes at the start of a file that decide how to read it."""
_SNIFFED_LINES: Final = 1_000
"""Maximum number of lines in these bytes that are read to decide, because a line costs more than its bytes."""
_UTF16: Final = (
    ("utf-16-le", re.compile(rb"\xff\xfe|(?:[\t\n\r -~]\0){2}")),
    ("utf-16-be", re.compile(rb"\xfe\xff|(?:\0[\t\n\r -~]){2}")),
)
_JSON: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\[\s*\{|\{[ \t\r]*\n\s*\")")
"""Start of a JSON array of objects, or of an object over several lines."""
_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:(?P<end>")|\\?\Z)|[{}]', re.DOTALL)
"""A JSON string, possibly incomplete, or a brace."""


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


def read_blocks(file: BinaryIO, start: int = 0, stop: int | None = None) -> Iterator[bytes | FileDamage]:
    """Read a file, or a range of an uncompressed one, in blocks. `FileDamage` comes last in a damaged file."""
    opened = file
    with describe_damage() as damage:
        opened = open_decompressed(file)
        if start:
            opened.seek(start)
    left = stop - start if stop is not None else None
    # read1 returns the data before the damage
    read = getattr(opened, "read1", opened.read)
    while not damage and (left is None or left > 0):
        block = b""
        with describe_damage() as damage:
            block = read(_BLOCK if left is None else min(_BLOCK, left))
            if not block:
                return
        if left is not None:
            left -= len(block)
        yield block
    if damage:
        reason = FILE_ENDS_EARLY if damage[0] == CUT_OFF else FILE_DAMAGED
        yield FileDamage(reason, f"the compressed file {damage[0]}")


def split_lines(file: BinaryIO, size: int) -> Iterator[FileRange]:
    """Split a file into parts of `size` bytes and the rest of the last line.

    A file is one part if it is compressed, if it is UTF-16 or JSON over several lines, or if its lines may be in
    pieces.
    """
    file.seek(0)
    begin = file.read(_BEGIN)
    if name_compression(file) or _find_encoding(begin) or _JSON.match(begin) or _has_streams(begin):
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


def split_begin(begin: bytes) -> list[UnwrappedLine]:
    """Read the first lines in the first bytes of a file, without their layers. The last line may be cut."""
    lines = islice(_read_block_lines(iter((begin,)), WHOLE), _SNIFFED_LINES)
    return [unwrap(line.data) for line in lines if not isinstance(line, UnreadableItem)]


def read_lines(file: BinaryIO, part: FileRange = WHOLE) -> Iterator[Line | UnreadableItem]:
    """Read the lines of a part. `UnreadableItem` comes last if the file is damaged."""
    return _read_block_lines(read_blocks(file, part.start, part.stop), part)


def _read_block_lines(blocks: Iterator[bytes | FileDamage], part: FileRange) -> Iterator[Line | UnreadableItem]:
    if part.start == 0:  # else the file was divided, and so is plain text
        begin, blocks = _take_begin(blocks)
        encoding = _find_encoding(begin)
        if encoding:
            begin, blocks = _take_begin(_decode_blocks(blocks, encoding))
        if _JSON.match(begin):
            yield from _split_objects(blocks)
            return
    yield from _split_blocks(blocks, part.first)


def _take_begin(blocks: Iterator[bytes | FileDamage]) -> tuple[bytes, Iterator[bytes | FileDamage]]:
    """Return the first bytes of a file, and all of its blocks."""
    taken: list[bytes | FileDamage] = []
    begin = b""
    for block in blocks:
        taken.append(block)
        if isinstance(block, FileDamage):
            break
        begin += block
        if len(begin) >= _BEGIN:
            break
    return begin, chain(taken, blocks)


def _find_encoding(begin: bytes) -> str:
    """Find the encoding of a text in UTF-16; "" for any other file."""
    return next((name for name, pattern in _UTF16 if pattern.match(begin)), "")


def _has_streams(begin: bytes) -> bool:
    return any(unwrap(line).stream for line in begin.split(b"\n"))


def _decode_blocks(blocks: Iterator[bytes | FileDamage], encoding: str) -> Iterator[bytes | FileDamage]:
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for block in blocks:
        if isinstance(block, FileDamage):
            yield block
        elif text := decoder.decode(block):
            yield text.encode()
    if rest := decoder.decode(b"", final=True):
        yield rest.encode()


def _split_blocks(blocks: Iterator[bytes | FileDamage], number: int) -> Iterator[Line | UnreadableItem]:
    partial, length = bytearray(), 0
    for block in blocks:
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


def _split_objects(blocks: Iterator[bytes | FileDamage]) -> Iterator[Line | UnreadableItem]:
    """Split JSON into its outermost objects, and into the text between them that is not punctuation of an array."""
    number, text, scanned, start, depth = 1, bytearray(), 0, 0, 0
    for block in blocks:
        if isinstance(block, FileDamage):
            yield UnreadableItem(number, bytes(text[:QUARANTINED_LINE_BYTES]), block.reason, block.detail)
            return
        text += block
        while match := _TOKEN.search(text, scanned):
            token = match.group()
            if token[0] == _QUOTE and match["end"] is None:
                scanned = match.start()  # the string ends in a later block
                break
            scanned = match.end()
            if token == b"{":
                depth += 1
                if depth == 1:
                    between, start = bytes(text[start : match.start()]), match.start()
                    if rest := between.strip(_PUNCTUATION):
                        yield _build_line(number, rest, len(rest), ended=True)
                        number += 1
            elif token == b"}" and depth:
                depth -= 1
                if depth == 0:
                    yield _build_line(number, text[start:scanned], scanned - start, ended=True)
                    number += 1
                    start = scanned
        else:
            scanned = len(text)
        del text[:start]
        scanned, start = scanned - start, 0
        if len(text) > MAX_LINE + _BLOCK:
            detail = f"an object of over {MAX_LINE} bytes; the rest of the file is not read"
            yield UnreadableItem(number, bytes(text[:QUARANTINED_LINE_BYTES]), LINE_TOO_LONG, detail)
            return
    if rest := bytes(text).strip(_PUNCTUATION):
        yield _build_line(number, rest, len(rest), ended=False)


_QUOTE: Final = ord('"')
_PUNCTUATION: Final = b"\xef\xbb\xbf \t\r\n,[]"


def _build_line(number: int, data: bytes | bytearray, length: int, *, ended: bool) -> Line:
    if length > MAX_LINE:
        return Line(number, bytes(data[:QUARANTINED_LINE_BYTES]), length, ended)
    return Line(number, bytes(data).removesuffix(b"\r"), length, ended)


@dataclass
class _PiecedLine:
    """A line that a runtime has split over several lines of the file."""

    number: int
    time: str
    raw: bytearray = field(default_factory=bytearray)
    content: bytearray = field(default_factory=bytearray)


def read_log(name: str, parse: ParseLine, file: BinaryIO, source: FileSource, part: FileRange) -> Iterator[Item]:
    """Read the items of a log with at most one message a line. Empty lines are skipped.

    A line's layers (`kiln.schemas.captures.transport`) are removed first, and their time applies if the line has none.
    """
    frames = LogFrames(name, source)
    pieces: dict[str, _PiecedLine] = {}  # by stream
    for line in read_lines(file, part):
        if isinstance(line, UnreadableItem):
            yield line
        elif line.length > MAX_LINE:
            detail = f"a line of {line.length} bytes, of which data has the first {QUARANTINED_LINE_BYTES}; "
            detail += f"at most {MAX_LINE} are read"
            yield UnreadableItem(line.number, line.data, LINE_TOO_LONG, detail)
        elif line.data:
            unwrapped = unwrap(line.data)
            if unwrapped.is_piece or unwrapped.stream in pieces:
                pieced = pieces.setdefault(unwrapped.stream, _PiecedLine(line.number, unwrapped.time))
                pieced.raw += line.data + b"\n"
                pieced.content += unwrapped.content
                if unwrapped.is_piece and len(pieced.content) <= MAX_LINE:
                    continue
                del pieces[unwrapped.stream]
                yield _join_pieces(frames, parse, pieced, ended=line.ended)
            elif unwrapped.content or not unwrapped.is_wrapped:
                yield _build_item(frames, parse, line, unwrapped.content, unwrapped.time)
    for pieced in pieces.values():
        yield _join_pieces(frames, parse, pieced, ended=False)


def _join_pieces(frames: LogFrames, parse: ParseLine, pieced: _PiecedLine, *, ended: bool) -> Item:
    raw, content = bytes(pieced.raw[:-1]), bytes(pieced.content)
    if len(content) > MAX_LINE:
        detail = f"a line in pieces of over {MAX_LINE} bytes, of which data has the first {QUARANTINED_LINE_BYTES}"
        return UnreadableItem(pieced.number, raw[:QUARANTINED_LINE_BYTES], LINE_TOO_LONG, detail)
    return _build_item(frames, parse, Line(pieced.number, raw, len(raw), ended), content, pieced.time)


def _build_item(frames: LogFrames, parse: ParseLine, line: Line, content: bytes, time: str) -> Item:
    logged = parse(content)
    if isinstance(logged, LoggedMessage):
        if logged.at is None and time:
            logged = logged._replace(at=parse_time(time))
        return frames.build_frame(line.number, line.data, logged)
    if logged.reason == LINE_MALFORMED and not line.ended:
        return UnreadableItem(line.number, line.data, FILE_ENDS_EARLY, f"the last line has no end: {logged.detail}")
    return UnreadableItem(line.number, line.data, logged.reason, logged.detail)
