"""Reader of log files: decompresses them, splits them at line ends, and reads lines with bounded memory.

Log drivers and terminals put text around the lines of a program. The reader removes such *layers*: the JSON objects of
Docker and PM2; the prefixes of CRI, `docker logs -t`, `kubectl logs --timestamps --prefix`, Docker Compose, PM2 and
`ts`; ANSI colors, blanks and byte order marks. Layers nest: for example, Compose adds a prefix before a time. Prefixes
are only removed at the start of a line, because peers may have chosen the rest of the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from typing import BinaryIO, Final, NamedTuple, TypeAlias

import msgspec

from kiln.schemas.captures.compression import DamagedError, describe_damage, name_compression, open_decompressed
from kiln.schemas.captures.items import (
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

_MAX_LAYERS: Final = 6
_DOCKER_PIECE: Final = 16 * 1024
"""Size in bytes of the pieces into which Docker and CRI runtimes split longer lines."""

_BARE: Final = re.compile(rb'\[[A-Z][a-z]{2}, |\{"(?:from|data|type|peerID)"')
"""Start of most lines to which no log driver has added text."""
_COLOR: Final = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_BLANK: Final = re.compile(rb"(?:[ \t]|\xef\xbb\xbf)+")  # also a byte order mark

_ISO: Final = (
    rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?:\ ?(?:Z|UTC|[+-]\d\d:?\d\d))?"  # docker, kubectl, PM2
)
_PREFIX: Final = re.compile(
    rb"""
    (?: (?P<time>"""
    + _ISO
    + rb""")
      | \[(?P<bracketed>"""
    + _ISO
    + rb""")\]
      | (?P<unix>\d{10}(?:\d{3}|\.\d{1,9})?)
    ):?[ ]
    (?:(?P<stream>stdout|stderr)\ (?P<tag>[FP])(?::\S{0,16})?(?:\ |$))?                # CRI
  | \[pod/[^\]\s]{1,300}\]\                                     # kubectl --prefix
  | [^\s|\[\]{}"]{1,100}(?:\|[^\s|\[\]{}"]{1,100})?\ *\|\ (?=\S)   # Compose: name |, PM2: id|name |
    """,
    re.VERBOSE,
)
_TEXT_KEYS: Final = ("log", "message")
"""Keys of the program's line in the JSON objects of Docker (`log`) and PM2 (`message`)."""
_TIME_KEYS: Final = ("time", "timestamp")
_OBJECT: Final = msgspec.json.Decoder(dict[str, object])
_NS_OF_DIGITS: Final = {10: 1_000_000_000, 13: 1_000_000}
"""Unit of a unix time in ns, by the number of digits: 10 for seconds, 13 for milliseconds."""


class UnwrappedLine(NamedTuple):
    """A line without the text that log drivers and terminals put around it."""

    content: bytes
    time: str = ""
    """time that was put before the line, as text: the outermost if there are several; empty if there is none"""
    stream: str = ""
    """stdout or stderr, if the container runtime has recorded it; otherwise empty"""
    is_piece: bool = False
    """true if the next line of the same stream continues this line"""
    is_wrapped: bool = False
    """true if text was removed"""


def unwrap(line: bytes) -> UnwrappedLine:
    """Remove the text that log drivers and terminals put around a line."""
    if _BARE.match(line) and b"\x1b" not in line:
        return UnwrappedLine(line)
    content, time, stream, is_piece, is_wrapped = line, "", "", False, False
    for _ in range(_MAX_LAYERS):
        if b"\x1b" in content:
            content = _COLOR.sub(b"", content)
        if blank := _BLANK.match(content):
            content = content[blank.end() :]
        if content.startswith(b"{"):
            inner = _unwrap_object(content)
            if inner is None:
                break
        else:
            match = _PREFIX.match(content)
            if match is None:
                break
            at = match["time"] or match["bracketed"] or match["unix"] or b""
            inner = UnwrappedLine(
                content[match.end() :], at.decode(), (match["stream"] or b"").decode(), match["tag"] == b"P"
            )
        content, is_wrapped, is_piece = inner.content, True, is_piece or inner.is_piece
        time, stream = time or inner.time, stream or inner.stream
    return UnwrappedLine(content, time, stream, is_piece, is_wrapped)


def _unwrap_object(line: bytes) -> UnwrappedLine | None:
    try:
        found = _OBJECT.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    text = next((found[key] for key in _TEXT_KEYS if key in found), None)
    if not isinstance(text, str):
        return None
    content = text.encode(errors="replace")
    time = next((at for key in _TIME_KEYS if isinstance(at := found.get(key), str)), "")
    stream = str(found["stream"]) if found.get("stream") in ("stdout", "stderr") else ""
    is_piece = bool(stream) and not content.endswith(b"\n") and len(content) >= _DOCKER_PIECE
    return UnwrappedLine(content.removesuffix(b"\n").removesuffix(b"\r"), time, stream, is_piece)


@lru_cache(maxsize=1024)
def parse_time(text: str) -> int | None:
    """Parse the time before a log line: ISO 8601, in UTC if it has no time zone, or a unix time in s or ms.

    Returns:
        Time in ns since the epoch, or `None` if the text is not such a time.
    """
    whole, _, fraction = text.partition(".")
    if whole.isdecimal() and (not fraction or fraction.isdecimal()):
        unit = _NS_OF_DIGITS.get(len(whole))
        return None if unit is None else int(whole) * unit + int(fraction.ljust(9, "0")[:9] or 0) * (unit // 10**9)
    text = text.replace(",", ".").replace(" UTC", "Z").replace("UTC", "Z")
    match = re.fullmatch(r"([^.]+?)(?:\.(\d{1,9}))? ?(Z|[+-]\d\d:?\d\d)?", text)
    if match is None:
        return None
    try:
        at = datetime.fromisoformat(f"{match[1]}{match[3] or 'Z'}".strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return int(at.timestamp()) * 1_000_000_000 + int((match[2] or "").ljust(9, "0"))


MAX_LINE: Final = 16 * 1024 * 1024
"""Maximum length in bytes of a line that is read. An RPC of 4 MiB takes 5.3 MiB in base64."""
QUARANTINED_LINE_BYTES: Final = 64 * 1024
"""Number of bytes that go to quarantine from a line longer than MAX_LINE."""

_BLOCK: Final = 1024 * 1024
_BEGIN: Final = 64 * 1024
"""Number of bytes at the start of a file that show if a runtime has split its lines."""
_SNIFFED_LINES: Final = 1_000
"""Maximum number of lines at the start of a file by which its format is detected."""


class FileRange(NamedTuple):
    """Byte range of a file. It begins at the start of a line, and ends after a line end or with the file."""

    start: int
    stop: int | None
    """exclusive end, or `None` for the end of the file"""
    first: int
    """number of the first line of the range; lines of the file count from 1"""


WHOLE: Final = FileRange(0, None, 1)


class Line(NamedTuple):
    number: int
    data: bytes
    """the line without LF or CRLF; only the first QUARANTINED_LINE_BYTES if the line is longer than MAX_LINE"""
    length: int
    """length of the whole line in bytes"""
    ended: bool
    """false for a last line without line end"""


ParseLine: TypeAlias = Callable[[bytes], LoggedMessage | Rejected]


def read_blocks(file: BinaryIO, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Read the decompressed content of a file in blocks. A range is only possible if the file is not compressed.

    Raises:
        DamagedError: The compressed data is damaged after the last block.
    """
    left = stop - start if stop is not None else None
    with describe_damage() as damage:
        opened = open_decompressed(file)
        if start:
            opened.seek(start)
        # unlike read, read1 returns the data before damage, from which a format can be detected
        read = getattr(opened, "read1", opened.read)
        while left is None or left > 0:
            block = read(_BLOCK if left is None else min(_BLOCK, left))
            if not block:
                return
            left = None if left is None else left - len(block)
            yield block
    if damage:
        raise DamagedError(f"the compressed data {damage[0]}")


def split_lines(file: BinaryIO, size: int) -> Iterator[FileRange]:
    """Split a file into parts of `size` bytes, each extended to the end of its last line.

    A file is one part if it is compressed, or if a container runtime may have broken its long lines into pieces.
    """
    file.seek(0)
    begin = file.read(_BEGIN)
    if name_compression(file) or _has_streams(begin):
        yield WHOLE
        return
    start, first, position, line_ends = 0, 1, 0, 0
    for block in read_blocks(file):
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
    """Split the first bytes of a file into lines, and `unwrap` them. The last line may be incomplete."""
    return [unwrap(line.data) for line in islice(_split_blocks((begin,), 1), _SNIFFED_LINES)]


def read_lines(file: BinaryIO, part: FileRange = WHOLE) -> Iterator[Line]:
    """Read the lines of a part of a file.

    Raises:
        DamagedError: The compressed data is damaged after the last line.
    """
    return _split_blocks(read_blocks(file, part.start, part.stop), part.first)


def _has_streams(begin: bytes) -> bool:
    return any(unwrap(line).stream for line in begin.split(b"\n"))


def _split_blocks(blocks: Iterable[bytes], number: int) -> Iterator[Line]:
    partial, length = bytearray(), 0
    for block in blocks:
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


@dataclass
class _PiecedLine:
    """A program's line that a runtime has split over several lines of the file."""

    number: int
    time: str
    raw: bytearray = field(default_factory=bytearray)
    content: bytearray = field(default_factory=bytearray)


def read_log(name: str, parse: ParseLine, file: BinaryIO, source: FileSource, part: FileRange) -> Iterator[Item]:
    """Read the items of a log with at most one message per line. Empty lines are skipped.

    Lines are unwrapped first (`unwrap`). If a message has no time, it gets the time that was put before its line.

    Raises:
        DamagedError: The compressed data is damaged after the last line.
    """
    frames = LogFrames(name, source)
    pieces: dict[str, _PiecedLine] = {}  # by stream
    for line in read_lines(file, part):
        if line.length > MAX_LINE:
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
