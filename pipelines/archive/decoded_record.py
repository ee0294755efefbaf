"""One record of `kiln.frames`, decoded in Python: its messages and faults, and the rows of its parts.

This is the definition of what the native core decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kiln.pipelines.archive.control_rows import ControlRows, build_control_rows, read_control_rpc
from kiln.pipelines.archive.rows import CopyRow, build_copy_row
from kiln.pipelines.decode.decoder import (
    DecodedMessage,
    FrameDecoder,
    MessageRef,
    RejectedMessage,
    build_frame_key,
    reject_failed,
    reject_unreadable,
)
from kiln.pipelines.decode.frame_row import FrameRow, build_frame_row
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.schemas.kafka.frames import RPC_TOO_COSTLY, read_frame
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected


class DecodedRecord(NamedTuple):
    """A decoded record of `kiln.frames`, and the rows of its parts."""

    items: list[DecodedMessage | RejectedMessage]
    copies: Sequence[CopyRow] = ()
    control: ControlRows = ControlRows()
    row: FrameRow | None = None
    """of `frames`; `None` if the record is not a Frame, or has no row"""


def decode_record(decoder: FrameDecoder, partition: int, offset: int, stamp: int, value: bytes | None) -> DecodedRecord:
    """Decode one record. If this fails, the record is a fault of the stage `archive`, and stays in `frames` if it has a
    row there."""
    row: FrameRow | None = None
    try:
        frame = read_frame(value)
        if isinstance(frame, Rejected):
            return DecodedRecord([reject_unreadable(frame, value, partition, offset, stamp)])
        row = build_frame_row(partition, offset, stamp, frame)
        return decode_parts(decoder, frame, partition, offset)._replace(row=row)
    except PROCESSING_ERRORS as error:  # all of the above is pure: the record alone has caused this
        fault = reject_failed("archive", error, MessageRef(partition, offset, None), value or b"", stamp)
        return DecodedRecord([fault], row=row)


def decode_parts(decoder: FrameDecoder, frame: Frame, partition: int, offset: int) -> DecodedRecord:
    """Decode a frame into the rows of its parts. Its messages are decoded even if its control part cannot be read."""
    rpc = read_control_rpc(frame)  # parsed once for its messages and its control part
    items = decoder.decode_frame(frame, partition, offset, rpc)
    copies = [build_copy_row(item, frame) for item in items if item.copy is not None]
    control = ControlRows()
    ref, observed_at = MessageRef(partition, offset, None), frame.observed_at // 1000
    try:
        if rpc is not None:
            control = build_control_rows(frame, rpc, decoder.config, partition, offset)
        if control.unread:
            read = len(control.subscriptions) + len(control.controls)
            detail = f"{read + control.unread} subscriptions and control entries, of which the first {read} are read"
            key = build_frame_key(frame)
            items.append(RejectedMessage(ref, "rpc", RPC_TOO_COSTLY, detail, b"", observed_at, key))  # frame has bytes
    except PROCESSING_ERRORS as error:  # pure: the frame alone has caused this
        items.append(reject_failed("archive", error, ref, frame.payload, observed_at, build_frame_key(frame)))
    return DecodedRecord(items, copies, control)
