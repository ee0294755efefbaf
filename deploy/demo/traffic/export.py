"""Conversion of rows of the table `frames` into a capture file that `kiln replay` reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from kiln.schemas.captures import kiln_capture
from kiln.schemas.captures.formats import FORMATS
from kiln.schemas.captures.kiln_capture import CaptureRecord
from kiln.schemas.kafka.frames import BEP50
from kiln.schemas.wire.identity import raw_peer

_LOGS: Final = frozenset(FORMATS) - {kiln_capture.NAME}
"""Protocols of frames that were read from logs of other programs, whose messages have no signature."""
_LETTERS: Final[Mapping[str, Literal["R", "S"]]] = {"IN": "R", "OUT": "S"}


class ExportedFrame(NamedTuple):
    """A row of the query of `build_export_query`."""

    direction: str
    observed_at: int
    """µs"""
    local_peer: str
    remote_peer: str
    protocol: str
    payload: bytes
    declared_length: int
    is_earlier: bool
    """true for the first frame of a connection that began before the range"""


@dataclass
class ExportCounts:
    """Counts of an export, while it goes on."""

    records: int = 0
    earlier: int = 0
    """records from before the range: the first RPCs of connections, which name topics for the later ones"""
    from_logs: int = 0
    """frames left out because a capture cannot hold what a log of another program lacks"""
    truncated: int = 0
    """frames left out because Kiln stored only their first bytes"""


def build_export_query(low: int, high: int, network: str | None) -> str:
    """Build the query for the frames of a time range in µs, with the first frames of their connections."""
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
        rows: The frames.
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
