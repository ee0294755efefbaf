"""The formats of captures and logs that Kiln reads, and detection of a file's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from kiln.schemas.captures import ceramic_log, kiln_capture, kubo_sub, pubsub_trace
from kiln.schemas.captures.compression import DamagedError, name_compression
from kiln.schemas.captures.items import FileSource, Item
from kiln.schemas.captures.lines import WHOLE, FileRange, read_blocks, split_begin, split_lines

SNIFF_BYTES: Final = 1024 * 1024
"""number of uncompressed bytes at the start of a file from which its format is detected"""


@dataclass(frozen=True)
class CaptureFormat:
    """A format of captures or logs, with its reader. Files may be compressed."""

    name: str
    """name of the format; also the `protocol` of the Frames, except for Kiln's own captures"""
    sniff: Callable[[bytes], bool]
    """returns true if a line has this format. For a format without lines, the argument is the first SNIFF_BYTES
    uncompressed bytes of a file"""
    read: Callable[[BinaryIO, FileSource, FileRange], Iterator[Item]]
    """reads the items of one part of a seekable file, in order; it raises OSError if reading fails, and DamagedError if
    compressed data is damaged"""
    has_lines: bool
    """true if a file consists of lines, at which it can be split"""

    def split(self, file: BinaryIO, size: int) -> Iterator[FileRange]:
        """Split a file into parts of about `size` bytes. A file that cannot be split is one part (`split_lines`)."""
        return split_lines(file, size) if self.has_lines else iter((WHOLE,))


_ALL: Final = (
    CaptureFormat(
        kiln_capture.NAME,
        kiln_capture.sniff,
        kiln_capture.read,
        has_lines=False,
    ),
    CaptureFormat(
        kubo_sub.NAME,
        kubo_sub.sniff,
        kubo_sub.read,
        has_lines=True,
    ),
    CaptureFormat(
        pubsub_trace.JSON_NAME,
        pubsub_trace.sniff_json,
        pubsub_trace.read_json,
        has_lines=True,
    ),
    CaptureFormat(
        ceramic_log.NAME,
        ceramic_log.sniff,
        ceramic_log.read,
        has_lines=True,
    ),
    CaptureFormat(
        pubsub_trace.PB_NAME,
        pubsub_trace.sniff_pb,
        pubsub_trace.read_pb,
        has_lines=False,
    ),
)

FORMATS: Final[dict[str, CaptureFormat]] = {form.name: form for form in _ALL}

READABLE: Final = (
    f"Kiln reads files of the formats {', '.join(FORMATS)}. Lines must be UTF-8, and may be wrapped as Docker, CRI or "
    "PM2 writes them. JSON must be one object per line. Files may be compressed (gzip, bzip2, xz, zstd)"
)
"""Description of all files that Kiln reads, for the error about another file."""

_ARRAY: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
"""Start of a JSON array of objects, which Kiln does not read: its objects may span several lines, or share a line."""


def detect_format(file: BinaryIO) -> CaptureFormat | None:
    """Detect the format of a file by its first bytes. Return `None` if it is not one of FORMATS.

    Other programs may have written lines before the first line of the format.
    """
    first, _ = _read_first(file)
    if _ARRAY.match(first) or _name_archive(first):
        return None
    lines = split_begin(first)
    return next(
        (
            form
            for form in _ALL
            if (any(form.sniff(line.content) for line in lines) if form.has_lines else form.sniff(first))
        ),
        None,
    )


def describe_file(file: BinaryIO) -> str:
    """Describe the first bytes of a file of unknown format, for an error message."""
    first, damage = _read_first(file)
    compression = name_compression(file)
    inside = f"a {compression} file with " if compression else ""
    if not first:
        if damage:
            return f"{damage} before its first byte ({compression})"
        return "it is empty" if not compression else f"it is {inside}nothing in it"
    if archive := _name_archive(first):
        return f"it is {inside}a {archive} archive: extract it, and pass the folder"
    end = f"; {damage} after {len(first):,} bytes" if damage else ""
    text = next((line.content for line in split_begin(first) if line.content.strip()), b"").decode(errors="replace")
    if not text or "\0" in text or "\ufffd" in text:
        return f"it is {inside or 'a file with '}bytes that are not text, which begin with 0x{first[:8].hex()}{end}"
    return f"it is {inside}text, and its first line is {text[:80]!r}{end}"


def _name_archive(first: bytes) -> str:
    """Return the kind of an archive by its first bytes, or "" if it is none.

    Without this check, a tar of logs would be read as a log.
    """
    if first.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    return "tar" if first[257:262] == b"ustar" else ""


def _read_first(file: BinaryIO) -> tuple[bytes, str]:
    """Read the first SNIFF_BYTES uncompressed bytes of a file.

    Returns:
        The bytes, and a description of the damage in the compressed data after them; "" if there is none.
    """
    first = b""
    try:
        for block in read_blocks(file):
            first += block[: SNIFF_BYTES - len(first)]
            if len(first) >= SNIFF_BYTES:
                break
    except DamagedError as error:
        return first, str(error)
    return first, ""
