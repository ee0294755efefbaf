"""The formats of files that Kiln reads as history: a registry, and how a file's format is recognised.

A format is one file beside this one, and a line in FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from kiln.schemas.captures import ceramic_log, kiln_capture, kubo_sub, pubsub_trace
from kiln.schemas.captures.items import FileSource, Item
from kiln.schemas.captures.lines import WHOLE, FileDamage, FileRange, cut_lines, read_blocks

SNIFFED: Final = 64 * 1024
"""Bytes, unzipped, by which a format is recognised."""


@dataclass(frozen=True)
class CaptureFormat:
    """A format of files. Files may be compressed with gzip, whatever their names."""

    name: str
    """also the `protocol` of the Frames, but for Kiln's own captures"""
    holds: str
    """what such a file is, and what a file lacks that Kiln's own captures have, for people"""
    sniff: Callable[[bytes], bool]
    """whether the first SNIFFED bytes of a file, unzipped, are of this format"""
    read: Callable[[BinaryIO, FileSource, FileRange], Iterator[Item]]
    """The items of one part of a file, in order; `file` is open for reading bytes and can seek. Nothing is raised on
    any bytes; OSError as from the file."""
    of_lines: bool
    """whether a file is made of lines, and so can be cut into parts"""
    timed: bool = True
    """whether a file tells when messages were heard; else Source.heard_at does"""

    def cut(self, file: BinaryIO, size: int) -> Iterator[FileRange]:
        """Parts of about `size` bytes, which read one after another give what WHOLE gives.

        A compressed file, or one that is not made of lines, is one part.
        """
        return cut_lines(file, size) if self.of_lines else iter((WHOLE,))


def _some_line(sniff: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
    """A log may begin with lines of other programs."""

    def sniffs(first: bytes) -> bool:
        return any(sniff(line.removesuffix(b"\r")) for line in first.split(b"\n"))

    return sniffs


_ALL: Final = (
    CaptureFormat(
        kiln_capture.NAME,
        "Kiln's capture file: RPCs exactly as on the wire, in both directions",
        kiln_capture.sniff,
        kiln_capture.read,
        of_lines=False,
    ),
    CaptureFormat(
        kubo_sub.NAME,
        "the answer of Kubo's RPC pubsub/sub, one JSON object a line: no times, no signatures, no copies",
        _some_line(kubo_sub.sniff),
        kubo_sub.read,
        of_lines=True,
        timed=False,
    ),
    CaptureFormat(
        pubsub_trace.JSON_NAME,
        "a trace of go-libp2p-pubsub's JSONTracer: copies of messages without their data",
        _some_line(pubsub_trace.sniff_json),
        pubsub_trace.read_json,
        of_lines=True,
    ),
    CaptureFormat(
        ceramic_log.NAME,
        "a service log of js-ceramic: messages as the node had read them, times in whole seconds, no signatures",
        _some_line(ceramic_log.sniff),
        ceramic_log.read,
        of_lines=True,
    ),
    CaptureFormat(
        pubsub_trace.PB_NAME,
        "a trace of go-libp2p-pubsub's PBTracer: copies of messages without their data",
        pubsub_trace.sniff_pb,
        pubsub_trace.read_pb,
        of_lines=False,
    ),
)

FORMATS: Final[dict[str, CaptureFormat]] = {each.name: each for each in _ALL}


def recognise(file: BinaryIO) -> CaptureFormat | None:
    """The format of a file, by its first bytes; None: none of FORMATS. OSError as from the file."""
    first = b""
    for block in read_blocks(file):
        if isinstance(block, FileDamage):
            break
        first += block[: SNIFFED - len(first)]
        if len(first) >= SNIFFED:
            break
    return next((each for each in _ALL if each.sniff(first)), None)
