"""Reader of subscriptions and control entries (IHAVE, GRAFT …) in a gossipsub RPC. It never raises.

Source: libp2p specs, pubsub/README.md and pubsub/gossipsub/gossipsub-v1.{0,1,2,3}.md; the topic table draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, Literal, NamedTuple

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from kiln.schemas.kafka.frames import MAX_ITEMS, RPC_MALFORMED, RPC_TOO_COSTLY, has_too_many_entries
from kiln.schemas.kafka.topics import MAX_TOPIC
from kiln.schemas.proto.gossipsub.rpc_pb2 import (
    RPC,
    ControlGraft,
    ControlIDontWant,
    ControlIHave,
    ControlIWant,
    ControlMessage,
    ControlPrune,
)
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.message_id import format_gossip_id
from kiln.schemas.wire.topic_table import TopicSource, TopicTable

Kind = Literal["IHAVE", "IWANT", "IDONTWANT", "GRAFT", "PRUNE", "EXTENSIONS", "UNKNOWN"]

MAX_ENTRIES: Final = 20_000
"""Maximum number of subscriptions and control entries that are read from one RPC. 1 MiB of subscriptions to the topics
of CIP-120 has half as many."""
MAX_IDS: Final = 5_000
"""Maximum number of message ids that are read from one RPC; further ids are only counted. go-libp2p-pubsub sends at
most this many in an IHAVE."""
MAX_RAW: Final = 64 * 1024
"""Maximum number of bytes in `raw` of an entry. The frame contains all bytes."""

_PUBLISH_TAG: Final = 0x12


class TopicReference(NamedTuple):
    """Topic of a subscription or control entry."""

    topic: str | None = None
    """name of the topic; `None` if the entry has no topic, its index cannot be resolved, or its name is invalid"""
    source: TopicSource | None = None
    """form of the topic on the wire; `None` if the entry has no topic"""
    number: int | None = None
    """index on the wire, if there was no name"""


class SubscriptionEntry(NamedTuple):
    """A SUBSCRIBE or an UNSUBSCRIBE."""

    subscribe: bool
    topic: TopicReference
    raw: bytes | None
    """bytes of the entry, if it has unknown fields, or a topic that `topic` does not represent completely"""
    size: int
    """size on the wire in bytes"""


class ControlEntry(NamedTuple):
    """An entry of a gossipsub control message. Fields that its kind does not have are `None`."""

    kind: Kind
    topic: TopicReference
    message_ids: list[str] | None
    """the first message ids, in the form of the column `message_id`"""
    message_id_count: int | None
    """number of all message ids"""
    peer_count: int | None
    """number of peers in the peer exchange of a PRUNE"""
    backoff: int | None
    """backoff in seconds"""
    raw: bytes | None
    """bytes of the entry without message ids, if it has unknown fields, or a topic that `topic` does not represent
    completely"""
    size: int
    """size on the wire in bytes"""


class ControlPart(NamedTuple):
    """Subscriptions and control entries of an RPC."""

    subscriptions: list[SubscriptionEntry]
    controls: list[ControlEntry]
    unread: int = 0
    """number of entries beyond MAX_ENTRIES, which are left out"""


def has_control_part(payload: bytes) -> bool:
    """Return true if an RPC has a field other than `publish`. Invalid bytes may give either result."""
    at, end = 0, len(payload)
    while at < end:
        if payload[at] != _PUBLISH_TAG:
            return True
        size = shift = 0
        while True:
            at += 1
            if at >= end:
                return False
            if shift > 28:  # padded: the parser decides
                return True
            size |= (payload[at] & 0x7F) << shift
            if payload[at] < 0x80:
                break
            shift += 7
        at += 1 + size
    return False


def parse_control_rpc(payload: bytes) -> RPC | Rejected:
    """Parse an RPC of which only subscriptions and control entries are needed.

    Returns:
        The RPC, or a rejection: rpc_malformed if the payload is not an RPC, rpc_too_costly if it has more than
        `MAX_ITEMS` nested messages. A returned RPC may still have a million message ids.
    """
    if has_too_many_entries(payload):
        return Rejected(RPC_TOO_COSTLY, f"{len(payload)} bytes hold more than {MAX_ITEMS} items")
    try:
        return RPC.FromString(payload)
    except DecodeError:
        return Rejected(RPC_MALFORMED, f"{len(payload)} bytes are not an RPC protobuf")


def list_control_entries(
    rpc: RPC, table: TopicTable, format_id: Callable[[bytes], str] = format_gossip_id
) -> ControlPart:
    """List the subscriptions and control entries of an RPC.

    Args:
        rpc: The RPC, parsed by `parse_control_rpc`.
        table: Topic table of the connection, for topic indices.
        format_id: Function that converts a message id to the form of the column `message_id`.
    """
    is_known = _has_no_unknown_fields(rpc)
    subscriptions = [
        _read_subscription(subscription, table, is_known) for subscription in islice(rpc.subscriptions, MAX_ENTRIES)
    ]
    controls = list(islice(_read_entries(rpc, table, format_id, is_known), MAX_ENTRIES - len(subscriptions)))
    if len(subscriptions) + len(controls) < MAX_ENTRIES:
        return ControlPart(subscriptions, controls)
    control = rpc.control
    count = len(control.ihave) + len(control.iwant) + len(control.graft) + len(control.prune) + len(control.idontwant)
    count += len(rpc.subscriptions)
    return ControlPart(subscriptions, controls, max(0, count - MAX_ENTRIES))


def _has_no_unknown_fields(rpc: RPC) -> bool:
    """Return true if `rpc.proto` declares all fields of the RPC. Fields of published messages are not checked."""
    rest = RPC()
    rest.CopyFrom(rpc)
    rest.ClearField("publish")
    size = rest.ByteSize()
    rest.DiscardUnknownFields()
    return rest.ByteSize() == size


def _read_subscription(entry: RPC.SubOpts, table: TopicTable, is_known: bool) -> SubscriptionEntry:
    if entry.HasField("topicid"):  # next to a name, field 3 is `requestsPartial` of the partial messages extension
        topic = _resolve(entry.topicid, None, table)
    else:
        topic = _resolve(None, entry.topicIndex if entry.HasField("topicIndex") else None, table)
    raw = _read_raw(entry, topic, is_known)
    return SubscriptionEntry(entry.subscribe, topic, raw, _compute_wire_size(entry.ByteSize()))


def _read_entries(
    rpc: RPC, table: TopicTable, format_id: Callable[[bytes], str], is_known: bool
) -> Iterator[ControlEntry]:
    """Yield the control entries. The last one has the unknown fields of the RPC and of its control message, if any."""
    if rpc.HasField("control"):
        control = rpc.control
        left = MAX_IDS
        for have in control.ihave:
            topic = _read_topic(have, table)
            ids, count, size = _read_ids(have, left, format_id)
            left -= len(ids)
            yield ControlEntry("IHAVE", topic, ids, count, None, None, _read_raw(have, topic, is_known), size)
        for want in control.iwant:
            ids, count, size = _read_ids(want, left, format_id)
            left -= len(ids)
            yield ControlEntry("IWANT", _NO_TOPIC, ids, count, None, None, _read_raw(want, _NO_TOPIC, is_known), size)
        for graft in control.graft:
            topic, size = _read_topic(graft, table), _compute_wire_size(graft.ByteSize())
            yield ControlEntry("GRAFT", topic, None, None, None, None, _read_raw(graft, topic, is_known), size)
        for prune in control.prune:
            topic, size = _read_topic(prune, table), _compute_wire_size(prune.ByteSize())
            backoff = min(prune.backoff, _MAX_BIGINT) if prune.HasField("backoff") else None
            raw = _read_raw(prune, topic, is_known)
            yield ControlEntry("PRUNE", topic, None, None, len(prune.peers), backoff, raw, size)
        for dont in control.idontwant:
            ids, count, size = _read_ids(dont, left, format_id)
            left -= len(ids)
            raw = _read_raw(dont, _NO_TOPIC, is_known)
            yield ControlEntry("IDONTWANT", _NO_TOPIC, ids, count, None, None, raw, size)
        if control.HasField("extensions"):
            extensions = control.extensions.SerializeToString()
            size = _compute_wire_size(len(extensions))
            yield ControlEntry("EXTENSIONS", _NO_TOPIC, None, None, None, None, extensions[:MAX_RAW], size)
    if not is_known and (unknown := _read_unknown_fields(rpc)):
        yield ControlEntry("UNKNOWN", _NO_TOPIC, None, None, None, None, unknown[:MAX_RAW], len(unknown))


_NO_TOPIC: Final = TopicReference()
_MAX_BIGINT: Final = 2**63 - 1


def _read_topic(entry: ControlIHave | ControlGraft | ControlPrune, table: TopicTable) -> TopicReference:
    if entry.HasField("topicID"):
        return _resolve(entry.topicID, None, table)
    return _resolve(None, entry.topicIndex if entry.HasField("topicIndex") else None, table)


def _resolve(name: str | bytes | None, index: int | None, table: TopicTable) -> TopicReference:
    """Resolve a topic by name or index. If there are both, the name counts."""
    if name is not None:
        # proto2 strings are not validated on parsing; upb returns bytes for those that are not UTF-8
        return TopicReference(name if isinstance(name, str) and len(name) <= MAX_TOPIC else None, "name")
    if index is None:
        return _NO_TOPIC
    topic = table.resolve(index)
    return TopicReference(None if isinstance(topic, Rejected) else topic, "index", index)


def _read_ids(
    entry: ControlIHave | ControlIWant | ControlIDontWant, left: int, format_id: Callable[[bytes], str]
) -> tuple[list[str], int, int]:
    """Return the first `left` message ids as text, the number of all ids, and the entry's size on the wire in bytes."""
    ids = entry.messageIDs
    return [format_id(raw) for raw in ids[:left]], len(ids), _compute_wire_size(entry.ByteSize())


def _read_raw(entry: ProtobufMessage, topic: TopicReference, is_known: bool) -> bytes | None:
    """Return the bytes of an entry without message ids, if it has unknown fields, or a topic that `topic` does not
    represent completely; otherwise `None`."""
    names_more = topic.source is not None and (
        topic.topic is None or (topic.source == "name" and entry.HasField("topicIndex"))
    )
    if is_known and not names_more:
        return None
    rest = _copy_without(entry, ("messageIDs",) if "messageIDs" in entry.DESCRIPTOR.fields_by_name else ())
    raw = rest.SerializeToString()
    rest.DiscardUnknownFields()
    return raw[:MAX_RAW] if names_more or rest.ByteSize() < len(raw) else None


def _read_unknown_fields(rpc: RPC) -> bytes:
    """Return the encoded unknown fields of an RPC and of its control message."""
    rests = (_copy_without(rpc, _RPC_FIELDS), _copy_without(rpc.control, _CONTROL_FIELDS))
    return b"".join(rest.SerializeToString() for rest in rests)


def _copy_without(message: ProtobufMessage, names: Iterable[str]) -> ProtobufMessage:
    rest = type(message)()
    rest.CopyFrom(message)
    for name in names:
        rest.ClearField(name)
    return rest


_RPC_FIELDS: Final = tuple(RPC.DESCRIPTOR.fields_by_name)
_CONTROL_FIELDS: Final = tuple(ControlMessage.DESCRIPTOR.fields_by_name)


def _compute_wire_size(size: int) -> int:
    """Compute the size in bytes of a protobuf field with its tag and length, from the size of its content."""
    return size + 2 if size < 0x80 else size + 1 + (size.bit_length() + 6) // 7
