"""Frames of the table `frames`, decoded again to find the messages that are no longer rejected for the same reason."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from typing import Final, NamedTuple

import duckdb
import pyarrow as pa

from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, RejectedMessage, decode
from kiln.pipelines.decode.frame_row import FrameRow, parse_frame_row
from kiln.schemas.kafka.frames import ORIGINS, list_messages
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected

_COLUMNS: Final = ", ".join(
    f"epoch_us({name})" if name in ("observed_at", "kafka_timestamp") else name
    for name in FrameRow._fields
    if name not in FrameRow._field_defaults  # a frame with messages has none of these
)
_ROWS_AT_ONCE: Final = 1_000


class FramePosition(NamedTuple):
    """Partition and offset of a frame in `kiln.frames`."""

    partition: int
    offset: int


MessagePositions = dict[FramePosition, set[int | None]]
"""Positions of messages in the RPCs of frames; `None` for the frame as a whole."""


class DecodedFrame(NamedTuple):
    """Result of decoding a frame again."""

    items: dict[int, DecodedMessage | RejectedMessage]
    """messages by position in the RPC that are now valid, or rejected for another reason"""
    refused: int
    """number of messages rejected for the same reason"""


def decode_again(frame: Frame, positions: Set[int | None], reason: str, how: DecodeConfig) -> DecodedFrame:
    """Decode a frame again.

    Args:
        frame: The frame.
        positions: Positions of messages that were rejected; if it contains `None`, all messages.
        reason: Reason of the rejection.
        how: Configuration of the decoder.
    """
    items: dict[int, DecodedMessage | RejectedMessage] = {}
    same: set[int | None] = set()
    for item in decode(frame.SerializeToString(), 0, 0, 0, how):
        position = item.ref.position
        if isinstance(item, RejectedMessage) and item.reason == reason:
            same.add(position)
        elif position is not None and (position in positions or None in positions):
            items[position] = item
    if None in same:  # the frame itself is rejected again
        return DecodedFrame({}, 1)
    return DecodedFrame(items, len((same & positions) - {None}))


def select_messages(frame: Frame, positions: Set[int]) -> Frame:
    """Reduce a frame to these messages of its RPC, or return the same frame if it has no other messages."""
    messages = list_messages(frame)
    if isinstance(messages, Rejected) or len(positions) == len(messages):
        return frame
    selected = sorted(positions)
    copy = Frame()
    copy.CopyFrom(frame)
    copy.payload = RPC(publish=[messages[position] for position in selected]).SerializeToString()
    if verdicts := frame.verdicts:  # each access makes a copy
        copy.verdicts = bytes(verdicts[at] if at < len(verdicts) else 0 for at in selected)
    return copy


def read_frames(
    connection: duckdb.DuckDBPyConnection, places: Collection[FramePosition]
) -> Iterator[tuple[FramePosition, Frame]]:
    """Read frames from the view `frames` of the connection, in the order of arrival, with origin REPLAY; skip missing
    ones."""
    if not places:
        return
    wanted = pa.table(
        {
            "kafka_partition": pa.array([at.partition for at in places], pa.int32()),
            "kafka_offset": pa.array([at.offset for at in places], pa.int64()),
        }
    )
    spans: dict[int, tuple[int, int]] = {}
    for at in places:
        low, high = spans.get(at.partition, (at.offset, at.offset))
        spans[at.partition] = (min(low, at.offset), max(high, at.offset))
    # a join alone reads every file; these bounds let DuckDB skip whole files
    bounds = " OR ".join(
        f"(kafka_partition = {partition} AND kafka_offset BETWEEN {low} AND {high})"
        for partition, (low, high) in spans.items()
    )
    connection.register("wanted", wanted)
    answer = connection.execute(
        f"SELECT {_COLUMNS} FROM frames SEMI JOIN wanted USING (kafka_partition, kafka_offset) "
        f"WHERE {bounds} ORDER BY kafka_timestamp, kafka_partition, kafka_offset"
    )
    while rows := answer.fetchmany(_ROWS_AT_ONCE):
        for row in (FrameRow(*cells) for cells in rows):
            frame = parse_frame_row(row._replace(origin=ORIGINS[Frame.REPLAY]))
            yield FramePosition(row.kafka_partition, row.kafka_offset), frame
