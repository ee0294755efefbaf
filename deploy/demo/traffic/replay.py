"""Sending of a capture file to Kafka, as the Frames of origin REPLAY that `kiln.schemas.captures.kiln_capture` makes of
it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kiln.schemas.captures.kiln_capture import (
    CaptureRecord,
    CaptureSurvey,
    build_frames,
    open_capture,
    read_capture,
    survey_capture,
)
from kiln.schemas.proto.kiln import frame_pb2

DEFAULT_NETWORK: Final = "testnet-clay"


class ReplayProgress(NamedTuple):
    """Progress of a replay: capture records and bytes of RPCs sent, and their totals."""

    records: int
    bytes: int
    all_records: int
    all_bytes: int


class ReplayResult(NamedTuple):
    """Totals of a replay: closing frames count as frames, not as records."""

    network: str
    records: int
    frames: int
    connections: int
    first_at: int
    last_at: int


def survey_file(path: Path) -> CaptureSurvey:
    """Read a capture file to its end, and return what it contains.

    Raises:
        CaptureError: The file is not a valid capture.
        OSError: The file cannot be read.
    """
    with open_capture(path) as stream:
        return survey_capture(read_capture(stream))


def replay(
    path: Path,
    send: Callable[[frame_pb2.Frame], None],
    *,
    found: CaptureSurvey | None = None,
    network: str | None = None,
    fallback: str = DEFAULT_NETWORK,
    pace: float | None = None,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    progress: Callable[[ReplayProgress], None] | None = None,
) -> ReplayResult:
    """Send the frames of one capture file, in order.

    Args:
        found: Result of `survey_file`, if the caller has it.
        network: Network of all frames. By default the one that the file's topics name most often, else `fallback`.
        pace: Factor of the captured speed, such as 2.0 for twice as fast; `None` for full speed.
        now: Returns the time in seconds. Used only with `pace`, like `sleep`.
        progress: Called for each record.

    Raises:
        CaptureError: The file is not a valid capture. No frame was sent.
        OSError: The file cannot be read to its end. No frame was sent.
        ValueError: `pace` is not above 0.
    """
    if pace is not None and not pace > 0:
        raise ValueError(f"pace must be above 0 (1.0 is the speed of the capture), not {pace}")
    with path.open("rb") as raw:
        digest = hashlib.file_digest(raw, "sha256").digest()
    if found is None:
        found = survey_file(path)
    name = network if network is not None else found.select_network(fallback)
    frames = records = done = reported = 0
    first_at = last_at = 0
    started = now() if pace is not None else 0.0

    def counted(captured: Iterable[CaptureRecord]) -> Iterator[CaptureRecord]:
        nonlocal records, done
        for record in captured:
            records += 1
            done += len(record.rpc)
            yield record

    with open_capture(path) as stream:
        for frame in build_frames(counted(read_capture(stream)), found, digest, name):
            if not frames:
                first_at = frame.observed_at
            if pace is not None:
                early = started + (frame.observed_at - first_at) / 1e9 / pace - now()
                if early > 0:
                    sleep(early)
            send(frame)
            frames += 1
            last_at = max(last_at, frame.observed_at)
            if progress is not None and records > reported:
                reported = records
                progress(ReplayProgress(records, done, found.records, found.size))
    connections = len({(local, remote, number) for (local, remote, _), number in found.streams})
    return ReplayResult(name, records, frames, connections, first_at, last_at)
