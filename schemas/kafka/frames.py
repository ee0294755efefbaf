"""Reader of Frames and the gossipsub RPCs in them (docs/design, Contracts).

Nothing here raises on any bytes: a failure is a returned Rejected with one of REASONS.

The items of an RPC are counted before the protobuf library makes an object of each: an item takes two bytes on the wire
and a hundred in memory, and an RPC of 4 MiB can be 2 million empty messages, which take upb a quarter of a second.
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
"""Maximum number of items of one RPC: its fields, and the repeated fields within them. 1 MiB of subscriptions to the
topics of CIP-120 has a fifth as many items, and so have 5,000 message ids in each of IHAVE, IWANT and IDONTWANT."""

_SMALLEST_FIELD: Final = 2  # bytes


class _MessageType(NamedTuple):
    """A message type, with those of its fields, by number, that are themselves messages with repeated fields.

    The parser makes no objects for other contents, so a publish entry is one item whatever it contains.
    """

    nested: dict[int, _MessageType]


def has_too_many_items(payload: bytes, limit: int = MAX_ITEMS) -> bool:
    """Return whether an RPC has more than `limit` items. Bytes that are not a protobuf end the count.

    This takes no time if the payload is too short for `limit` items, and otherwise at most `limit` steps.
    """
    if len(payload) <= limit * _SMALLEST_FIELD:
        return False
    return _has_more(payload, _RPC, limit)


def has_too_many_entries(payload: bytes, limit: int = MAX_ITEMS) -> bool:
    """Return whether an RPC has more than `limit` items that are messages, for each of which the parser makes an
    object.

    The ids in an IHAVE, IWANT or IDONTWANT do not count: they stay bytes until they are read.
    """
    return len(payload) > limit * _SMALLEST_FIELD and _has_more(payload, _ENTRIES, limit)


def _has_more(payload: bytes, kind: _MessageType, limit: int) -> bool:
    try:
        return _count_down(payload, 0, len(payload), kind, limit) < 0
    except IndexError:  # cut within a field: the parser rejects the RPC
        return False


def _count_down(payload: bytes, at: int, end: int, kind: _MessageType, left: int) -> int:
    """Subtract the fields of a message between two positions from `left`, and stop below 0."""
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
"""Stage in quarantine of faults in capture files."""
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
# Longest RPC that a frame stores whole; the bridge's settings may allow less. Of a longer one, the frame has the first
# CUT_PAYLOAD bytes and the declared_length.
MAX_RPC: Final = 4 * 1024 * 1024
CUT_PAYLOAD: Final = 64 * 1024
# Messages of one RPC that are read. An empty message takes two bytes in the RPC, and hundreds in each later step.
MAX_MESSAGES: Final = 5000
MAX_NETWORK: Final = 256
# A peer id is in a row of each message of a frame. libp2p's have 34 to 42 bytes (peer-ids.md), a DHT node id has 20.
MAX_PEER: Final = 64
MAX_PROTOCOL: Final = 256
MAX_HELLO: Final = 16 * 1024  # 256 bundle hashes take 1.5 KiB; a hello may have fields that Kiln does not know
MAX_NOTE: Final = 256  # characters of the agent, and of the reason why a connection ended
MAX_ADDRESS: Final = 1024  # a multiaddr through a relay has some 150 bytes
BEP50: Final = "bep50"

DIRECTIONS: Final = ("IN", "OUT")
ORIGINS: Final = ("LIVE", "REPLAY")

# If all fields except peer ids and payload have at most this many bytes together, none exceeds its limit.
_SHORT: Final = min(MAX_NETWORK, MAX_PROTOCOL, MAX_HELLO, MAX_ADDRESS, MAX_NOTE, MAX_MESSAGES)
_MAX_BIGINT: Final = 2**63 - 1  # sequence and declared_length are BIGINTs in Delta
_OVERSIZED: Final = Rejected(RPC_OVERSIZED, "the RPC was longer than the limit, and was truncated when it was captured")


def read_frame(value: bytes | None) -> frame_pb2.Frame | Rejected:
    """Read the Frame in a record value of `kiln.frames`.

    Returns:
        The Frame, or a rejection: frame_malformed if the value is not a Frame protobuf, or frame_invalid as
        `find_frame_fault` returns it.
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
    """Check every field of a Frame against its limit, and return frame_invalid if one exceeds it.

    Fields that repeat in the rows of 5,000 messages must be small, and numbers must fit the columns of the tables
    (docs/design/contracts.md, Frame).
    """
    fault = _find_invalid_field(frame, frame.ByteSize())
    return None if fault is None else Rejected(FRAME_INVALID, fault)


def _find_invalid_field(frame: frame_pb2.Frame, size: int) -> str | None:
    """Describe the first field that exceeds its limit.

    `size` is the size of the frame as protobuf. Each access to a field copies its bytes, so fields that are
    within their limits in any frame of this size are not read.
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
    if (size := len(frame.verdicts)) > MAX_MESSAGES:  # an unknown verdict counts as none: readers check the message
        return f"verdicts has {size} bytes; a frame has at most {MAX_MESSAGES}"
    return None


def read_rpc(payload: bytes) -> rpc_pb2.RPC | Rejected:
    """Read the gossipsub RPC in a frame's payload.

    Returns:
        The RPC, or a rejection: rpc_malformed if the bytes are not an RPC, rpc_too_costly if it has more items than any
        honest peer sends.
    """
    if has_too_many_items(payload):
        return Rejected(RPC_TOO_COSTLY, f"{len(payload)} bytes hold more than {MAX_ITEMS} items")
    try:
        return rpc_pb2.RPC.FromString(payload)
    except DecodeError:
        return Rejected(RPC_MALFORMED, f"{len(payload)} bytes are not an RPC protobuf")


def list_messages(frame: frame_pb2.Frame, rpc: rpc_pb2.RPC | None = None) -> Sequence[rpc_pb2.Message] | Rejected:
    """List the messages published in one frame; the index of a message is its position.

    Args:
        frame: The frame.
        rpc: The RPC in the frame's payload, if the caller has parsed it.

    Returns:
        The messages, none for a closing frame and for bep50 datagrams; or a rejection: rpc_oversized if the RPC was
        truncated, else as `read_rpc`.
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
    """Read the topic name of a message. A name, even an empty one, takes precedence over an index.

    Returns:
        None if the message has no name, or a rejection: topic_not_utf8 or topic_too_long.
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
