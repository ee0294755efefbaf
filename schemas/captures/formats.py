"""Registry of the file formats that Kiln reads as history, and detection of a file's format.

A format is one module in this folder and one entry of FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from kiln.schemas.captures import ceramic_log, kiln_capture, kubo_sub, pubsub_trace
from kiln.schemas.captures.items import FileSource, Item
from kiln.schemas.captures.lines import WHOLE, FileDamage, FileRange, read_blocks, split_lines

SNIFF_BYTES: Final = 64 * 1024
"""uncompressed bytes from which a format is detected"""


@dataclass(frozen=True)
class CaptureFormat:
    """A format of files. Files may be compressed with gzip, whatever their names."""

    name: str
    """also the `protocol` of the Frames, except for Kiln's own captures"""
    description: str
    """description of the format, and of what it lacks compared with Kiln's own captures"""
    sniff: Callable[[bytes], bool]
    """returns true if the first SNIFF_BYTES uncompressed bytes of a file are of this format"""
    read: Callable[[BinaryIO, FileSource, FileRange], Iterator[Item]]
    """reads the items of one part of a seekable file, in order; raises only the file's OSError, whatever the bytes"""
    has_lines: bool
    """true if a file consists of lines, and so can be split"""
    has_times: bool = True
    """true if a file has times of messages; otherwise `FileSource.default_time` applies"""

    def split(self, file: BinaryIO, size: int) -> Iterator[FileRange]:
        """Split a file into parts of about `size` bytes. A compressed file, or one without lines, is one part."""
        return split_lines(file, size) if self.has_lines else iter((WHOLE,))


def _sniff_any_line(sniff: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
    """Build a detector that skips lines of other programs before the first one of the format."""

    def sniff_lines(first: bytes) -> bool:
        return any(sniff(line.removesuffix(b"\r")) for line in first.split(b"\n"))

    return sniff_lines


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
        _sniff_any_line(kubo_sub.sniff),
        kubo_sub.read,
        has_lines=True,
        has_times=False,
    ),
    CaptureFormat(
        pubsub_trace.JSON_NAME,
        "a trace of go-libp2p-pubsub's JSONTracer: copies of messages without their data",
        _sniff_any_line(pubsub_trace.sniff_json),
        pubsub_trace.read_json,
        has_lines=True,
    ),
    CaptureFormat(
        ceramic_log.NAME,
        "a service log of js-ceramic: messages as the node had read them, times in whole seconds, no signatures",
        _sniff_any_line(ceramic_log.sniff),
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

FORMATS: Final[dict[str, CaptureFormat]] = {each.name: each for each in _ALL}


def detect_format(file: BinaryIO) -> CaptureFormat | None:
    """Detect the format of a file by its first bytes, if it is one of FORMATS."""
    first = b""
    for block in read_blocks(file):
        if isinstance(block, FileDamage):
            break
        first += block[: SNIFF_BYTES - len(first)]
        if len(first) >= SNIFF_BYTES:
            break
    return next((each for each in _ALL if each.sniff(first)), None)
