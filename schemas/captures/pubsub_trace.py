"""Reader of traces of go-libp2p-pubsub, written by JSONTracer (one JSON object per line) or PBTracer (protobuf).

A trace has no message data. Each DELIVER_MESSAGE or DUPLICATE_MESSAGE describes a received copy of a message: its id,
topic, sender and time. These events become Frames whose message has author, seqno and topic but no data, so the table
`copies` gets a row, and the incomplete message goes to quarantine. The message id must be go-libp2p-pubsub's default:
the author's peer id, then the seqno. All other events become `UnreadableItem`s with the reason metadata_only.

Source: go-libp2p-pubsub v0.12.0, pb/trace.proto, tracer.go, pubsub.go (DefaultMsgIdFn).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec
from google.protobuf.message import DecodeError

from kiln.schemas.captures.items import (
    FILE_DAMAGED,
    FILE_ENDS_EARLY,
    LINE_MALFORMED,
    FileSource,
    Item,
    LogFrames,
    LoggedMessage,
    UnreadableItem,
)
from kiln.schemas.captures.lines import (
    MAX_LINE,
    QUARANTINED_LINE_BYTES,
    WHOLE,
    FileRange,
    read_blocks,
    read_log,
)
from kiln.schemas.kafka.frames import METADATA_ONLY
from kiln.schemas.proto.pubsub_trace.trace_pb2 import TraceEvent
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import split_peer

JSON_NAME: Final = "pubsub-trace-json"
PB_NAME: Final = "pubsub-trace-pb"

_TYPES: Final = (
    "PUBLISH_MESSAGE",
    "REJECT_MESSAGE",
    "DUPLICATE_MESSAGE",
    "DELIVER_MESSAGE",
    "ADD_PEER",
    "REMOVE_PEER",
    "RECV_RPC",
    "SEND_RPC",
    "DROP_RPC",
    "JOIN",
    "LEAVE",
    "GRAFT",
    "PRUNE",
)
_DUPLICATE: Final = _TYPES.index("DUPLICATE_MESSAGE")
_DELIVER: Final = _TYPES.index("DELIVER_MESSAGE")
_MAX_UVARINT: Final = 5  # bytes of the length before a record


class _Copy(msgspec.Struct):
    messageID: bytes = b""  # noqa: N815 - go's name for the field
    receivedFrom: bytes = b""  # noqa: N815 - as above
    topic: str = ""


class _Event(msgspec.Struct):
    type: int
    peerID: bytes  # noqa: N815 - go's name for the field
    timestamp: int
    duplicateMessage: _Copy | None = None  # noqa: N815 - as above
    deliverMessage: _Copy | None = None  # noqa: N815 - as above


_EVENTS: Final = msgspec.json.Decoder(_Event)


# ---------------------------------------------------------------- JSON


def sniff_json(line: bytes) -> bool:
    """Return true if a line is an event that JSONTracer wrote."""
    try:
        _EVENTS.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def read_json(file: BinaryIO, source: FileSource, part: FileRange = WHOLE) -> Iterator[Item]:
    return read_log(JSON_NAME, read_line, file, source, part)


def read_line(line: bytes) -> LoggedMessage | Rejected:
    try:
        event = _EVENTS.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Rejected(LINE_MALFORMED, f"not an event of a trace: {error}")
    copy = {_DUPLICATE: event.duplicateMessage, _DELIVER: event.deliverMessage}.get(event.type)
    return _build_message(event.type, event.peerID, event.timestamp, copy)


# ---------------------------------------------------------------- protobuf


def sniff_pb(first: bytes) -> bool:
    """Return true if the first bytes of a file are an event that PBTracer wrote."""
    head = _read_uvarint(first)
    if head is None:
        return False
    length, start = head
    # A shorter record is no event. A longer one cannot be the first event, which is about a peer or a topic.
    if not 30 <= length <= min(4096, len(first) - start):
        return False
    event = _decode_event(first[start : start + length])
    return event is not None and event.timestamp > 0 and split_peer(event.peerID) is not None


def read_pb(file: BinaryIO, source: FileSource, part: FileRange = WHOLE) -> Iterator[Item]:
    """Read the items of a protobuf trace. Reading ends at an invalid length, because the next event cannot be found.

    `part` is always WHOLE, because such a file cannot be split.

    Raises:
        DamagedError: The compressed data is damaged after the last event.
    """
    frames = LogFrames(PB_NAME, source)
    buffer = bytearray()
    number, position = part.first, 0
    for block in read_blocks(file):
        del buffer[:position]
        buffer += block
        position = 0
        while (head := _read_uvarint(memoryview(buffer)[position : position + _MAX_UVARINT].tobytes())) is not None:
            length, size = head
            if not 0 < length <= MAX_LINE:
                detail = f"an event of {length} bytes, which no trace has; at most {MAX_LINE} are read"
                yield UnreadableItem(
                    number, bytes(buffer[position : position + QUARANTINED_LINE_BYTES]), FILE_DAMAGED, detail
                )
                return
            start = position + size
            if len(buffer) < start + length:
                break
            position = start + length
            yield _build_item(frames, number, bytes(buffer[start:position]))
            number += 1
        else:
            if len(buffer) - position >= _MAX_UVARINT:
                rest = bytes(buffer[position : position + QUARANTINED_LINE_BYTES])
                yield UnreadableItem(
                    number, rest, FILE_DAMAGED, "the length of an event is not a varint of up to 5 bytes"
                )
                return
    if position < len(buffer):
        yield UnreadableItem(
            number,
            bytes(buffer[position : position + QUARANTINED_LINE_BYTES]),
            FILE_ENDS_EARLY,
            "the file ends inside an event",
        )


def _build_item(frames: LogFrames, number: int, raw: bytes) -> Item:
    event = _decode_event(raw)
    if event is None:
        return UnreadableItem(number, raw, LINE_MALFORMED, f"{len(raw)} bytes are not an event of a trace")
    copy = None
    if event.type == _DUPLICATE and event.HasField("duplicateMessage"):
        duplicate = event.duplicateMessage
        copy = _decode_copy(duplicate.messageID, duplicate.receivedFrom, duplicate.topic)
    elif event.type == _DELIVER and event.HasField("deliverMessage"):
        delivered = event.deliverMessage
        copy = _decode_copy(delivered.messageID, delivered.receivedFrom, delivered.topic)
    logged = _build_message(event.type, event.peerID, event.timestamp, copy)
    if isinstance(logged, Rejected):
        return UnreadableItem(number, raw, logged.reason, logged.detail)
    return frames.build_frame(number, raw, logged)


def _decode_event(raw: bytes) -> TraceEvent | None:
    try:
        event = TraceEvent.FromString(raw)
    except DecodeError:
        return None
    return event if event.HasField("type") and event.HasField("peerID") and event.HasField("timestamp") else None


def _decode_copy(message_id: bytes, received_from: bytes, topic: str | bytes) -> _Copy:
    # proto2 strings are not validated on parsing; upb returns bytes for those that are not UTF-8
    return _Copy(message_id, received_from, topic if isinstance(topic, str) else topic.decode(errors="replace"))


def _read_uvarint(data: bytes) -> tuple[int, int] | None:
    """Read a uvarint of up to 5 bytes. Return its value and length, or `None` if it is incomplete or longer."""
    value = 0
    for index, byte in enumerate(data[:_MAX_UVARINT]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, index + 1
    return None


# ---------------------------------------------------------------- either


def _build_message(kind: int, node: bytes, at: int, copy: _Copy | None) -> LoggedMessage | Rejected:
    name = _TYPES[kind] if 0 <= kind < len(_TYPES) else f"of type {kind}"
    if copy is None:
        return Rejected(
            METADATA_ONLY, f"an event {name}: a trace has no message data, and this event is not a received copy"
        )
    if copy.receivedFrom == node:
        return Rejected(METADATA_ONLY, f"the event {name} has no data of the message, which the node itself published")
    identity = split_peer(copy.messageID)
    if identity is None or not identity[1]:
        message_id = copy.messageID[:64].hex()
        detail = f"an event {name} without the data, and the message id 0x{message_id} has no author and seqno"
        return Rejected(METADATA_ONLY, detail)
    author, seqno = identity
    return LoggedMessage(copy.topic, None, author, seqno, node, copy.receivedFrom, at)
