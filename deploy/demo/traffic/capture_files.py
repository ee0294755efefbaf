"""Send capture files to Kafka as Frames of origin REPLAY (`kiln replay`), and write the table `frames` to capture files
(`kiln capture`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from kiln.schemas.captures import kiln_capture
from kiln.schemas.captures.formats import FORMATS
from kiln.schemas.captures.kiln_capture import (
    CaptureRecord,
    CaptureSurvey,
    build_frames,
    open_capture,
    read_capture,
    survey_capture,
)
from kiln.schemas.kafka.frames import BEP50
from kiln.schemas.proto.kiln import frame_pb2
from kiln.schemas.wire.identity import raw_peer

DEFAULT_NETWORK: Final = "testnet-clay"


def survey_file(path: Path) -> CaptureSurvey:
    """Read a capture file to its end, and return a summary of its records.

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
    progress: Callable[[int], None] | None = None,
) -> int:
    """Send the frames of one capture file, in order, and return their number.

    Args:
        found: Result of `survey_file` for this file. If `None`, the file is surveyed.
        network: Network of all frames. If `None`, the most frequent network in the file's topics, or `fallback`.
        pace: Speed relative to the capture, such as 2.0 for twice as fast. If `None`, frames are sent without pauses.
        now: Returns the time in seconds. Used only with `pace`, like `sleep`.
        progress: Called with the number of records so far, for each record.

    Raises:
        CaptureError: The file is not a valid capture. No frame was sent.
        OSError: The file cannot be read to its end. No frame was sent.
        ValueError: `pace` is not greater than 0.
    """
    if pace is not None and not pace > 0:
        raise ValueError(f"pace must be greater than 0 (1.0 is the speed of the capture), not {pace}")
    with path.open("rb") as raw:
        digest = hashlib.file_digest(raw, "sha256").digest()
    if found is None:
        found = survey_file(path)
    name = network if network is not None else found.select_network(fallback)
    frames = records = reported = first_at = 0
    started = now() if pace is not None else 0.0

    def counted(captured: Iterable[CaptureRecord]) -> Iterator[CaptureRecord]:
        nonlocal records
        for record in captured:
            records += 1
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
            if progress is not None and records > reported:
                reported = records
                progress(records)
    return frames


_LOGS: Final = frozenset(FORMATS) - {kiln_capture.NAME}
"""Protocols of frames that were read from logs of other programs. Their messages lack signatures."""
_LETTERS: Final[Mapping[str, Literal["R", "S"]]] = {"IN": "R", "OUT": "S"}


class ExportedFrame(NamedTuple):
    """A row that the query of `build_export_query` returns."""

    direction: str
    observed_at: int
    """µs"""
    local_peer: str
    remote_peer: str
    protocol: str
    payload: bytes
    declared_length: int
    is_earlier: bool
    """true if the frame is from before the time range: the first frame of a connection with frames in the range"""


@dataclass
class ExportCounts:
    """Counts of an export, updated while the export runs."""

    records: int = 0
    earlier: int = 0
    """records from before the time range: first RPCs of connections, whose topics later RPCs refer to by index"""
    from_logs: int = 0
    """frames left out because they come from logs of other programs, which lack parts that a capture needs"""
    truncated: int = 0
    """frames left out because Kiln stored only their first bytes"""


def build_export_query(low: int, high: int, network: str | None) -> str:
    """Build the query for the frames from `low` to before `high` (µs), with the first frames of their connections."""
    condition = f"observed_at >= make_timestamptz({low}) AND observed_at < make_timestamptz({high})"
    if network is not None:
        quoted = network.replace("'", "''")
        condition += f" AND network = '{quoted}'"
    columns = "direction, epoch_us(observed_at) AS at, local_peer, remote_peer, protocol, payload, declared_length"
    return f"""
        WITH chosen AS (SELECT DISTINCT connection FROM frames WHERE {condition})
        SELECT {columns}, observed_at < make_timestamptz({low}) AS is_earlier
        FROM frames
        WHERE octet_length(payload) > 0 AND (({condition})
              OR (sequence = 1 AND observed_at < make_timestamptz({low})
                  AND connection IN (SELECT connection FROM chosen)))
        ORDER BY observed_at, connection, direction, sequence"""


def convert_frames(rows: Iterable[ExportedFrame], counts: ExportCounts) -> Iterator[CaptureRecord]:
    """Convert frames into the records of a capture, in the same order.

    Args:
        counts: Counts that grow with each frame.
    """
    for row in rows:
        if row.protocol in _LOGS:
            counts.from_logs += 1
        elif row.declared_length:
            counts.truncated += 1
        else:
            local, remote = (_parse_peer(text, row.protocol) for text in (row.local_peer, row.remote_peer))
            counts.records += 1
            counts.earlier += row.is_earlier
            yield CaptureRecord(
                _LETTERS[row.direction], row.observed_at * 1000, local, remote, row.protocol, row.payload
            )


def _parse_peer(text: str, protocol: str) -> bytes:
    return bytes.fromhex(text) if protocol == BEP50 else raw_peer(text)
