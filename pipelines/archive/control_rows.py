"""Rows of the tables `subscriptions` and `controls` of a frame, in either direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.schemas.kafka.frames import BEP50, DIRECTIONS, ORIGINS
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.control import has_control_part, list_control_entries, parse_control_rpc
from kiln.schemas.wire.identity import peer_text
from kiln.schemas.wire.topic_table import TopicSource, negotiate_table

ENTRY_ROW_BYTES: Final = 500
"""approximate bytes of a row, in addition to its message ids"""


class SubscriptionRow(NamedTuple):
    """A row of the table `subscriptions`, in the order of its columns. Times are µs."""

    network: str
    origin: str
    connection: bytes
    direction: str
    local_peer: str
    remote_peer: str
    observed_at: int
    subscribe: bool
    topic: str | None
    topic_source: TopicSource | None
    topic_index: int | None
    raw: bytes | None
    wire_bytes: int
    kafka_partition: int
    kafka_offset: int
    entry_index: int


class ControlRow(NamedTuple):
    """A row of the table `controls`, in the order of its columns. Times are µs."""

    network: str
    origin: str
    connection: bytes
    direction: str
    local_peer: str
    remote_peer: str
    observed_at: int
    kind: str
    topic: str | None
    topic_source: TopicSource | None
    topic_index: int | None
    message_ids: list[str] | None
    message_id_count: int | None
    peer_count: int | None
    backoff: int | None
    raw: bytes | None
    wire_bytes: int
    kafka_partition: int
    kafka_offset: int
    entry_index: int


class ControlRows(NamedTuple):
    """Rows of one frame."""

    subscriptions: Sequence[SubscriptionRow] = ()
    controls: Sequence[ControlRow] = ()
    unread: int = 0
    """number of entries beyond the limit for one RPC"""


NO_CONTROL_ROWS: Final = ControlRows()


def read_control_rpc(frame: Frame) -> RPC | None:
    """Read the RPC of a frame if it has a control part.

    Returns `None` if the frame was cut or is no gossipsub RPC: `FrameDecoder` returns the fault of such a frame.
    """
    payload = frame.payload
    if not has_control_part(payload) or frame.declared_length or frame.protocol == BEP50:
        return None
    rpc = parse_control_rpc(payload)
    return None if isinstance(rpc, Rejected) else rpc


def build_control_rows(frame: Frame, rpc: RPC, config: DecodeConfig, partition: int, offset: int) -> ControlRows:
    """Build the rows of a frame.

    The network of a row is that of its topic, as in the table `messages`, and without a topic that of the frame. `rpc`
    is the frame's.
    """
    table = negotiate_table(frame.hello_in, frame.hello_out, config.bundles).table
    part = list_control_entries(rpc, table, config.message_ids.format)
    network, connection = frame.network, frame.connection
    origin, direction = ORIGINS[frame.origin], DIRECTIONS[frame.direction]
    local_peer, remote_peer, observed_at = peer_text(frame.local_peer), peer_text(frame.remote_peer), frame.observed_at
    subscriptions = [
        SubscriptionRow(
            network=config.find_network(entry.topic.topic, network),
            origin=origin,
            connection=connection,
            direction=direction,
            local_peer=local_peer,
            remote_peer=remote_peer,
            observed_at=observed_at // 1000,
            subscribe=entry.subscribe,
            topic=entry.topic.topic,
            topic_source=entry.topic.source,
            topic_index=entry.topic.number,
            raw=entry.raw,
            wire_bytes=entry.size,
            kafka_partition=partition,
            kafka_offset=offset,
            entry_index=index,
        )
        for index, entry in enumerate(part.subscriptions)
    ]
    controls = [
        ControlRow(
            network=config.find_network(entry.topic.topic, network),
            origin=origin,
            connection=connection,
            direction=direction,
            local_peer=local_peer,
            remote_peer=remote_peer,
            observed_at=observed_at // 1000,
            kind=entry.kind,
            topic=entry.topic.topic,
            topic_source=entry.topic.source,
            topic_index=entry.topic.number,
            message_ids=entry.message_ids,
            message_id_count=entry.message_id_count,
            peer_count=entry.peer_count,
            backoff=entry.backoff,
            raw=entry.raw,
            wire_bytes=entry.size,
            kafka_partition=partition,
            kafka_offset=offset,
            entry_index=index,
        )
        for index, entry in enumerate(part.controls)
    ]
    return ControlRows(subscriptions, controls, part.unread)


def estimate_size(row: ControlRow) -> int:
    """Estimate the bytes of a row."""
    return ENTRY_ROW_BYTES + 100 * len(row.message_ids or ())
