"""Registry of the file formats that Kiln reads as history, and detection of a file's format.

A format is one module in this folder and one entry of FORMATS.
"""

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
"""uncompressed bytes from which a format is detected"""


@dataclass(frozen=True)
class CaptureFormat:
    """A format of files. A file may be compressed whatever its name is, and its lines may be wrapped (`transport`)."""

    name: str
    """name of the format; also the `protocol` of the Frames, except for Kiln's own captures"""
    description: str
    """description of the format, and of what it lacks compared with Kiln's own captures"""
    sniff: Callable[[bytes], bool]
    """returns true for a line of this format or, if the format has no lines, for the first SNIFF_BYTES uncompressed
    bytes of a file"""
    read: Callable[[BinaryIO, FileSource, FileRange], Iterator[Item]]
    """reads the items of one part of a seekable file, in order; whatever the bytes, it raises only the file's OSError
    and DamagedError"""
    has_lines: bool
    """true if a file consists of lines, and so can be split"""

    def split(self, file: BinaryIO, size: int) -> Iterator[FileRange]:
        """Split a file into parts of about `size` bytes. Without lines, a file is one part; so are some with lines."""
        return split_lines(file, size) if self.has_lines else iter((WHOLE,))


_ALL: Final = (
    CaptureFormat(
        kiln_capture.NAME,
        "Kiln's capture file: RPCs exactly as on the wire, in both directions",
        kiln_capture.sniff,
        kiln_capture.read,
        has_lines=False,
    ),
    CaptureFormat(
        kubo_sub.NAME,
        "the answer of Kubo's RPC pubsub/sub, one JSON object a line: no times, no signatures, no copies",
        kubo_sub.sniff,
        kubo_sub.read,
        has_lines=True,
    ),
    CaptureFormat(
        pubsub_trace.JSON_NAME,
        "a trace of go-libp2p-pubsub's JSONTracer: copies of messages without their data",
        pubsub_trace.sniff_json,
        pubsub_trace.read_json,
        has_lines=True,
    ),
    CaptureFormat(
        ceramic_log.NAME,
        "a service log of js-ceramic: messages as the node had read them, times in whole seconds, no signatures",
        ceramic_log.sniff,
        ceramic_log.read,
        has_lines=True,
    ),
    CaptureFormat(
        pubsub_trace.PB_NAME,
        "a trace of go-libp2p-pubsub's PBTracer: copies of messages without their data",
        pubsub_trace.sniff_pb,
        pubsub_trace.read_pb,
        has_lines=False,
    ),
)

FORMATS: Final[dict[str, CaptureFormat]] = {form.name: form for form in _ALL}

READABLE: Final = (
    f"Kiln reads {', '.join(FORMATS)}: lines of UTF-8, bare or as Docker, CRI and PM2 write them, one JSON object a "
    "line, in files that may be compressed (gzip, bzip2, xz, zstd) or in zip and tar archives"
)
"""description of the files that can be read, for the error about any other file"""

_ARRAY: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
"""start of a JSON array of objects, which is not one JSON object a line"""


def detect_format(file: BinaryIO) -> CaptureFormat | None:
    """Detect the format of a file by its first bytes, if it is one of FORMATS.

    Lines of other programs before the first one of the format are skipped.
    """
    first, _ = _read_first(file)
    if _ARRAY.match(first):
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
    """Describe a file that has none of the FORMATS, by its first bytes."""
    first, damage = _read_first(file)
    compression = name_compression(file)
    inside = f"a {compression} file with " if compression else ""
    if not first:
        if damage:
            return f"{damage} before its first byte ({compression})"
        return "it is empty" if not compression else f"it is {inside}nothing in it"
    end = f"; {damage} after {len(first):,} bytes" if damage else ""
    text = next((line.content for line in split_begin(first) if line.content.strip()), b"").decode(errors="replace")
    if not text or "\0" in text or "\ufffd" in text:
        return f"it is {inside or 'a file with '}bytes that are not text, which begin with 0x{first[:8].hex()}{end}"
    return f"it is {inside}text, and its first line is {text[:_SHOWN]!r}{end}"


_SHOWN: Final = 80
"""characters of a line that an error shows"""


def _read_first(file: BinaryIO) -> tuple[bytes, str]:
    """Read the first SNIFF_BYTES uncompressed bytes of a file, or the bytes before its damage, and describe the
    damage."""
    first = b""
    try:
        for block in read_blocks(file):
            first += block[: SNIFF_BYTES - len(first)]
            if len(first) >= SNIFF_BYTES:
                break
    except DamagedError as error:
        return first, str(error)
    return first, ""
