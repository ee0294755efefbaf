"""Conversion of Frames to rows of the table `frames`, and back."""

from __future__ import annotations

from typing import NamedTuple

from kiln.schemas.kafka.frames import BEP50, DIRECTIONS, ORIGINS
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import peer_text, raw_peer


class FrameRow(NamedTuple):
    """A row of the table `frames`, in the order of its columns. Times are µs."""

    network: str
    connection: bytes
    direction: str
    local_peer: str
    remote_peer: str
    protocol: str
    observed_at: int
    sequence: int
    payload: bytes
    hello_in: bytes
    hello_out: bytes
    verdicts: bytes
    origin: str
    remote_address: bytes
    declared_length: int
    kafka_partition: int
    kafka_offset: int
    kafka_timestamp: int
    agent: str | None = None
    end_reason: str | None = None
    dialled: bool | None = None


def build_frame_row(partition: int, offset: int, stamp: int, frame: Frame) -> FrameRow:
    """Build the row of a frame. `stamp`: the broker's timestamp, µs."""
    protocol, payload = frame.protocol, frame.payload
    has_record = not payload and frame.HasField("dialled")  # the record of the connection
    return FrameRow(
        network=frame.network,
        connection=frame.connection,
        direction=DIRECTIONS[frame.direction],
        local_peer=_format_peer(frame.local_peer, protocol),
        remote_peer=_format_peer(frame.remote_peer, protocol),
        protocol=protocol,
        observed_at=frame.observed_at // 1000,
        sequence=frame.sequence,
        payload=payload,
        hello_in=frame.hello_in,
        hello_out=frame.hello_out,
        verdicts=frame.verdicts,
        origin=ORIGINS[frame.origin],
        remote_address=frame.remote_address,
        declared_length=frame.declared_length,
        kafka_partition=partition,
        kafka_offset=offset,
        kafka_timestamp=stamp,
        agent=(frame.agent or None) if has_record else None,
        end_reason=(frame.end_reason or None) if has_record else None,
        dialled=frame.dialled if has_record else None,
    )


def _format_peer(raw: bytes, protocol: str) -> str:
    """Format a peer id as text. A node id of the BitTorrent DHT (BEP 5) is written in hex."""
    return raw.hex() if protocol == BEP50 else peer_text(raw)


def parse_frame_row(row: FrameRow) -> Frame:
    """Build the Frame of a row. It is the reverse of `build_frame_row`, but times have a resolution of 1 µs."""
    return Frame(
        network=row.network,
        connection=row.connection,
        direction=Frame.IN if row.direction == DIRECTIONS[Frame.IN] else Frame.OUT,
        local_peer=_parse_peer(row.local_peer, row.protocol),
        remote_peer=_parse_peer(row.remote_peer, row.protocol),
        protocol=row.protocol,
        observed_at=row.observed_at * 1000,
        sequence=row.sequence,
        payload=row.payload,
        hello_in=row.hello_in,
        hello_out=row.hello_out,
        verdicts=row.verdicts,
        origin=Frame.LIVE if row.origin == ORIGINS[Frame.LIVE] else Frame.REPLAY,
        remote_address=row.remote_address,
        declared_length=row.declared_length,
        agent=row.agent or "",
        end_reason=row.end_reason or "",
        dialled=row.dialled,
    )


def _parse_peer(text: str, protocol: str) -> bytes:
    return bytes.fromhex(text) if protocol == BEP50 else raw_peer(text)
