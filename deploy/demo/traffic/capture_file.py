"""Synthetic traffic as a capture file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO

from kiln.deploy.demo.traffic.connection import GeneratedFrame
from kiln.deploy.demo.traffic.garbage import restore_rpc
from kiln.schemas.captures.capture_file import CaptureRecord, write_capture
from kiln.schemas.proto.kiln.frame_pb2 import Frame


def build_capture_records(frames: Iterable[GeneratedFrame]) -> Iterator[CaptureRecord]:
    """The RPCs of the frames, those that were cut in full length. Closing frames are no RPCs and left out.

    Use `TrafficOptions.for_capture`: a capture has no refused hellos, no verdicts and no ids of connections.
    DecodeError for a value that is no Frame.
    """
    for generated in frames:
        frame = generated.frame
        if not frame.payload:
            continue
        yield CaptureRecord(
            "R" if frame.direction == Frame.IN else "S",
            frame.observed_at,
            frame.local_peer,
            frame.remote_peer,
            frame.protocol,
            restore_rpc(frame.payload, frame.declared_length),
        )


def write_traffic(stream: BinaryIO, frames: Iterable[GeneratedFrame]) -> int:
    """Write a capture, uncompressed (wrap the stream in gzip for `*.rpc.gz`), and return its number of records."""
    return write_capture(stream, build_capture_records(frames))
