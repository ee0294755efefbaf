"""Number of items in a gossipsub RPC, counted before the protobuf library makes an object of each.

An item takes two bytes on the wire and a hundred in memory: an RPC of 4 MiB can be 2 million empty messages, which take
upb a quarter of a second.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from google.protobuf.descriptor import Descriptor

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC

MAX_ITEMS: Final = 50_000
"""Maximum number of items of one RPC: its fields, and the repeated fields within them. 1 MiB of subscriptions to the
topics of CIP-120 has a fifth as many items, and so have 5,000 message ids in each of IHAVE, IWANT and IDONTWANT."""

_SMALLEST_FIELD: Final = 2  # bytes


class _MessageType(NamedTuple):
    """A message type: by number, its fields that are themselves messages with repeated fields.

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
    except IndexError:  # cut within a field: the parser will say so
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
