"""Reader of Frames and of the gossipsub RPCs in them (docs/design/contracts.md, Frame).

No bytes make a function here raise: invalid bytes give a `Rejected` with one of `REASONS`.

The items of an RPC are counted before protobuf creates an object for each. An empty message takes two bytes on the wire
and a hundred in memory, so an RPC of 4 MiB could contain 2 million of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from kiln.schemas.kafka.topics import MAX_TOPIC
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln import frame_pb2
from kiln.schemas.reject import Rejected
from kiln.schemas.times import MAX_NANOS, MIN_NANOS

MAX_ITEMS: Final = 50_000
"""Maximum number of items in one RPC: its fields, and the fields of nested messages that can repeat. Honest peers stay
far below: 1 MiB of subscriptions to the topics of CIP-120 has a fifth as many items."""

_SMALLEST_FIELD: Final = 2  # bytes


class _MessageType(NamedTuple):
    """A protobuf message type, for counting items."""

    nested: dict[int, _MessageType]
    """by field number, the types of messages that can contain repeated fields; any other field counts as one item"""


def has_too_many_items(payload: bytes, limit: int = MAX_ITEMS) -> bool:
    """Return true if an RPC has more than `limit` items (`MAX_ITEMS`). It takes at most `limit` steps.

    The count ends at bytes that are not valid protobuf.
    """
    if len(payload) <= limit * _SMALLEST_FIELD:
        return False
    return _has_more(payload, _RPC, limit)


def has_too_many_entries(payload: bytes) -> bool:
    """Return true if an RPC has more than `MAX_ITEMS` nested messages, for each of which the parser creates an object.

    Unlike in `has_too_many_items`, the message ids in IHAVE, IWANT and IDONTWANT do not count.
    """
    return len(payload) > MAX_ITEMS * _SMALLEST_FIELD and _has_more(payload, _ENTRIES, MAX_ITEMS)


def _has_more(payload: bytes, kind: _MessageType, limit: int) -> bool:
    try:
        return _count_down(payload, 0, len(payload), kind, limit) < 0
    except IndexError:  # cut within a field: the parser rejects the RPC
        return False


def _count_down(payload: bytes, at: int, end: int, kind: _MessageType, left: int) -> int:
    """Return `left` minus the number of items between two positions of the payload, or -1 as soon as it is negative."""
    while at < end and left >= 0:
        left -= 1
        tag, at = _read_varint(payload, at)
        wire_type = tag & 7
        if wire_type == 0:
            _, at = _read_varint(payload, at)
        elif wire_type == 1:
            at += 8
        elif wire_type == 2:
            size, at = _read_varint(payload, at)
            if (nested := kind.nested.get(tag >> 3)) is not None:
                left = _count_down(payload, at, min(at + size, end), nested, left)
            at += size
        elif wire_type == 5:
            at += 4
    return left


def _read_varint(payload: bytes, at: int) -> tuple[int, int]:
    byte = payload[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = payload[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise IndexError("a varint of more than ten bytes")


def _read_type(descriptor: Descriptor, *, count_values: bool) -> _MessageType:
    kinds = [(field.number, field.message_type) for field in descriptor.fields if field.message_type is not None]
    return _MessageType(
        {
            number: _read_type(kind, count_values=count_values)
            for number, kind in kinds
            if _can_repeat(kind, count_values)
        }
    )


def _can_repeat(kind: Descriptor, count_values: bool) -> bool:
    return any(
        (field.is_repeated and (count_values or field.message_type is not None))
        or (field.message_type and _can_repeat(field.message_type, count_values))
        for field in kind.fields
    )


_RPC: Final = _read_type(RPC.DESCRIPTOR, count_values=True)
_ENTRIES: Final = _read_type(RPC.DESCRIPTOR, count_values=False)


FRAME_MALFORMED: Final = "frame_malformed"
FRAME_INVALID: Final = "frame_invalid"
RPC_MALFORMED: Final = "rpc_malformed"
RPC_OVERSIZED: Final = "rpc_oversized"
RPC_TOO_MANY: Final = "rpc_too_many_messages"
RPC_TOO_COSTLY: Final = "rpc_too_costly"
TOO_MANY_VERDICTS: Final = "rpc_too_many_verdicts"
TOPIC_NOT_UTF8: Final = "topic_not_utf8"
TOPIC_TOO_LONG: Final = "topic_too_long"
METADATA_ONLY: Final = "metadata_only"
HISTORY: Final = "history"
"""Quarantine stage of input from capture and log files."""
REASONS: Final = (
    FRAME_MALFORMED,
    FRAME_INVALID,
    RPC_MALFORMED,
    RPC_OVERSIZED,
    RPC_TOO_MANY,
    RPC_TOO_COSTLY,
    TOO_MANY_VERDICTS,
    TOPIC_NOT_UTF8,
    TOPIC_TOO_LONG,
    METADATA_ONLY,
)

CONNECTION_BYTES: Final = 16
# Largest RPC, in bytes, that a frame stores whole; the bridge's settings may allow less. Of a larger RPC, the frame
# stores the first CUT_PAYLOAD bytes, and the length in declared_length.
MAX_RPC: Final = 4 * 1024 * 1024
CUT_PAYLOAD: Final = 64 * 1024
# Maximum number of messages that are read from an RPC. An empty message has 2 bytes there, and hundreds in its rows.
MAX_MESSAGES: Final = 5000
MAX_NETWORK: Final = 256
# The row of each message repeats the peer id. libp2p's peer ids have 34 to 42 bytes (peer-ids.md), DHT node ids 20.
MAX_PEER: Final = 64
MAX_PROTOCOL: Final = 256
MAX_HELLO: Final = 16 * 1024  # 256 bundle hashes take 1.5 KiB; a hello may have fields that Kiln does not know
MAX_NOTE: Final = 256  # characters of the agent, and of the reason why a connection ended
MAX_ADDRESS: Final = 1024  # a multiaddr through a relay has some 150 bytes
BEP50: Final = "bep50"

DIRECTIONS: Final = ("IN", "OUT")
ORIGINS: Final = ("LIVE", "REPLAY")

# If all fields except peer ids and payload have at most this many bytes in total, no field exceeds its limit.
_SHORT: Final = min(MAX_NETWORK, MAX_PROTOCOL, MAX_HELLO, MAX_ADDRESS, MAX_NOTE, MAX_MESSAGES)
_MAX_BIGINT: Final = 2**63 - 1  # sequence and declared_length are BIGINTs in Delta
_OVERSIZED: Final = Rejected(RPC_OVERSIZED, "the RPC was longer than the limit, and was truncated when it was captured")


def read_frame(value: bytes | None) -> frame_pb2.Frame | Rejected:
    """Read the Frame in the value of a record of `kiln.frames`.

    Returns:
        The Frame, or a rejection: frame_malformed if the value is not a Frame protobuf, frame_invalid if a field of it
        exceeds its limit.
    """
    if value is None:
        return Rejected(FRAME_MALFORMED, "the record has no value")
    try:
        frame = frame_pb2.Frame.FromString(value)
    except DecodeError:
        return Rejected(FRAME_MALFORMED, f"{len(value)} bytes are not a Frame protobuf")
    fault = _find_invalid_field(frame, len(value))
    return frame if fault is None else Rejected(FRAME_INVALID, fault)


def find_frame_fault(frame: frame_pb2.Frame) -> Rejected | None:
    """Return the rejection frame_invalid if a field of a Frame exceeds its limit.

    Fields that the rows of up to 5,000 messages repeat must be small, and numbers must fit the columns of the tables
    (docs/design/contracts.md, Frame).
    """
    fault = _find_invalid_field(frame, frame.ByteSize())
    return None if fault is None else Rejected(FRAME_INVALID, fault)


def _find_invalid_field(frame: frame_pb2.Frame, size: int) -> str | None:
    """Describe the first field that exceeds its limit, or return `None`.

    Args:
        size: Size of the Frame as protobuf, in bytes. If it shows that a field is within its limit, the field is not
            read, because reading it would copy its bytes.
    """
    if len(frame.connection) != CONNECTION_BYTES:
        return f"connection has {len(frame.connection)} bytes, not {CONNECTION_BYTES}"
    # proto3 enums are open: an unknown number survives parsing
    if not 0 <= frame.direction <= 1:
        return f"direction {frame.direction} is unknown"
    if not 0 <= frame.origin <= 1:
        return f"origin {frame.origin} is unknown"
    if not 0 < frame.sequence <= _MAX_BIGINT:
        return f"sequence {frame.sequence} is not in 1…2^63-1"
    if frame.declared_length > _MAX_BIGINT:
        return f"declared_length {frame.declared_length} is beyond 2^63-1"
    if not 0 < len(frame.network) <= MAX_NETWORK:
        return f"network has {len(frame.network)} characters, not 1 to {MAX_NETWORK}"
    if not MIN_NANOS <= (at := frame.observed_at) <= MAX_NANOS:
        return f"observed_at is {at} ns, not in the years 2000 to 2099"
    if (length := len(frame.remote_peer)) > MAX_PEER:
        return f"remote_peer has {length} bytes; a peer id has at most {MAX_PEER}"
    if (length := len(frame.local_peer)) > MAX_PEER:
        return f"local_peer has {length} bytes; a peer id has at most {MAX_PEER}"
    if (length := len(frame.payload)) > MAX_RPC:
        return f"payload has {length} bytes; an RPC over {MAX_RPC} must be cut, with its length in declared_length"
    return None if size - length <= _SHORT else _find_invalid_long_field(frame)


def _find_invalid_long_field(frame: frame_pb2.Frame) -> str | None:
    if (size := len(frame.protocol)) > MAX_PROTOCOL:
        return f"protocol has {size} characters; at most {MAX_PROTOCOL} are read"
    if (size := len(frame.hello_in)) > MAX_HELLO:
        return f"hello_in has {size} bytes; at most {MAX_HELLO} are read"
    if (size := len(frame.hello_out)) > MAX_HELLO:
        return f"hello_out has {size} bytes; at most {MAX_HELLO} are read"
    if (size := len(frame.remote_address)) > MAX_ADDRESS:
        return f"remote_address has {size} bytes; at most {MAX_ADDRESS} are read"
    for name, note in (("agent", frame.agent), ("end_reason", frame.end_reason)):
        if len(note) > MAX_NOTE:
            return f"{name} has {len(note)} characters; at most {MAX_NOTE} are read"
    if (size := len(frame.verdicts)) > MAX_MESSAGES:  # fewer verdicts than messages are no fault
        return f"verdicts has {size} bytes; a frame has at most {MAX_MESSAGES}"
    return None


def read_rpc(payload: bytes) -> rpc_pb2.RPC | Rejected:
    """Parse the gossipsub RPC in a frame's payload.

    Returns:
        The RPC, or a rejection: rpc_malformed if the bytes are not an RPC, rpc_too_costly if it has more than
        `MAX_ITEMS` items.
    """
    if has_too_many_items(payload):
        return Rejected(RPC_TOO_COSTLY, f"{len(payload)} bytes hold more than {MAX_ITEMS} items")
    try:
        return rpc_pb2.RPC.FromString(payload)
    except DecodeError:
        return Rejected(RPC_MALFORMED, f"{len(payload)} bytes are not an RPC protobuf")


def list_messages(frame: frame_pb2.Frame, rpc: rpc_pb2.RPC | None = None) -> Sequence[rpc_pb2.Message] | Rejected:
    """List the gossipsub messages in a frame. A message's position in the list is its `message_index` in the tables.

    Args:
        rpc: The RPC in the frame's payload, if the caller has parsed it already.

    Returns:
        The messages, or a rejection: rpc_oversized if the frame has only the beginning of the RPC, otherwise a
        rejection of `read_rpc`. A closing frame and a BEP 50 datagram have no messages.
    """
    if frame.declared_length:
        return _OVERSIZED
    payload = frame.payload
    if not payload or frame.protocol == BEP50:
        return ()
    if rpc is not None and not has_too_many_items(payload):
        return rpc.publish
    read = read_rpc(payload)
    return read if isinstance(read, Rejected) else read.publish


def read_topic_name(message: rpc_pb2.Message) -> str | Rejected | None:
    """Read the topic name of a message.

    Returns:
        The name, which may be empty; a rejection, topic_not_utf8 or topic_too_long; or `None` if the message has no
        name. Only then does its topic index count.
    """
    if not message.HasField("topic"):
        return None
    topic: str | bytes = message.topic
    # proto2 strings are not validated on parsing; upb returns bytes for those that are not UTF-8
    if isinstance(topic, bytes):
        return Rejected(TOPIC_NOT_UTF8, f"topic 0x{topic[:64].hex()} is not UTF-8")
    if len(topic) > MAX_TOPIC:
        return Rejected(TOPIC_TOO_LONG, f"a topic of {len(topic)} characters; at most {MAX_TOPIC} are read")
    return topic
