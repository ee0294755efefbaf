"""Rows of the tables `subscriptions` and `controls` of a frame, in either direction."""

from __future__ import annotations

from typing import Final, NamedTuple

from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.delta.arrow_rows import select_columns
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.frames import BEP50, DIRECTIONS, ORIGINS
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.control import has_control_part, list_control_entries, parse_control_rpc
from kiln.schemas.wire.identity import peer_text
from kiln.schemas.wire.topic_table import negotiate_table

_Row = tuple[object, ...]

SUBSCRIPTIONS: Final = select_columns(TABLES["subscriptions"])
CONTROLS: Final = select_columns(TABLES["controls"])

ENTRY_ROW_BYTES: Final = 500
"""approximate bytes of a row, in addition to its message ids"""


class ControlRows(NamedTuple):
    """Rows of one frame."""

    subscriptions: list[_Row]
    controls: list[_Row]
    unread: int = 0
    """number of entries beyond the limit for one RPC"""


NO_CONTROL_ROWS: Final = ControlRows([], [])


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
    """Build the rows of a frame, in the orders of SUBSCRIPTIONS and CONTROLS.

    The network of a row is that of its topic, as in the table `messages`, and without a topic that of the frame. `rpc`
    is the frame's.
    """
    table = negotiate_table(frame.hello_in, frame.hello_out, config.bundles).table
    part = list_control_entries(rpc, table, config.message_ids.format)
    network = frame.network
    head = (
        ORIGINS[frame.origin],
        frame.connection,
        DIRECTIONS[frame.direction],
        peer_text(frame.local_peer),
        peer_text(frame.remote_peer),
        frame.observed_at // 1000,
    )
    subscriptions: list[_Row] = [
        (
            config.find_network(entry.topic.topic, network),
            *head,
            entry.subscribe,
            *entry.topic,
            entry.raw,
            entry.size,
            partition,
            offset,
            index,
        )
        for index, entry in enumerate(part.subscriptions)
    ]
    controls: list[_Row] = [
        (
            config.find_network(entry.topic.topic, network),
            *head,
            entry.kind,
            *entry.topic,
            entry.message_ids,
            entry.message_id_count,
            entry.peer_count,
            entry.backoff,
            entry.raw,
            entry.size,
            partition,
            offset,
            index,
        )
        for index, entry in enumerate(part.controls)
    ]
    return ControlRows(subscriptions, controls, part.unread)


def estimate_size(row: _Row) -> int:
    """Estimate the bytes of a row of `controls`."""
    ids = row[_IDS]
    return ENTRY_ROW_BYTES + (100 * len(ids) if isinstance(ids, list) else 0)


_IDS: Final = next(index for index, column in enumerate(CONTROLS) if column.name == "message_ids")
