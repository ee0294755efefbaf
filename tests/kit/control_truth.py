"""The control part of an RPC as protobuf alone reads it, for comparison with `kiln.schemas.wire.control`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from kiln.schemas.kafka.frames import RPC_MALFORMED, RPC_TOO_COSTLY, has_too_many_entries
from kiln.schemas.kafka.topics import MAX_TOPIC
from kiln.schemas.proto.gossipsub.rpc_pb2 import (
    RPC,
    ControlGraft,
    ControlIDontWant,
    ControlIHave,
    ControlIWant,
    ControlPrune,
)
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.control import (
    MAX_ENTRIES,
    MAX_IDS,
    MAX_RAW,
    ControlPart,
    TopicReference,
    has_control_part,
    list_control_entries,
    parse_control_rpc,
)
from kiln.schemas.wire.message_id import format_gossip_id
from kiln.schemas.wire.topic_table import BundleSet, TopicTable

BUNDLES: Final = BundleSet({"all": ["a", "b", "c"]})
TABLE: Final = TopicTable(tuple(BUNDLES), BUNDLES)
_NAMES: Final = {1: "a", 2: "b", 3: "c"}

Entry = RPC.SubOpts | ControlIHave | ControlIWant | ControlGraft | ControlPrune | ControlIDontWant


class Expected(NamedTuple):
    """An entry, with the fields of `ControlEntry`."""

    kind: str
    topic: TopicReference
    message_ids: list[str] | None
    message_id_count: int | None
    peer_count: int | None
    backoff: int | None
    raw: bytes | None


def read_control_part(payload: bytes) -> ControlPart | Rejected:
    rpc = parse_control_rpc(payload)
    return rpc if isinstance(rpc, Rejected) else list_control_entries(rpc, TABLE, format_gossip_id)


def check_control_part(payload: bytes, longest: int = 10_000) -> None:
    """Assert that Kiln and protobuf read the same control part from any bytes. In payloads of up to `longest` bytes,
    entries are compared one by one; in longer payloads, only their number and size.
    """
    part = read_control_part(payload)
    if has_too_many_entries(payload):
        assert isinstance(part, Rejected)
        assert part.reason == RPC_TOO_COSTLY
        return
    try:
        rpc = RPC.FromString(payload)
    except DecodeError:
        assert isinstance(part, Rejected)
        assert part.reason == RPC_MALFORMED
        return
    assert isinstance(part, ControlPart)
    assert has_control_part(payload) or not (part.subscriptions or part.controls)
    control = rpc.control
    entries = [*control.ihave, *control.iwant, *control.graft, *control.prune, *control.idontwant]
    counted = [each for each in part.controls if each.kind not in ("EXTENSIONS", "UNKNOWN")]
    assert len(part.subscriptions) == min(len(rpc.subscriptions), MAX_ENTRIES)
    assert len(part.subscriptions) + len(counted) + part.unread == len(rpc.subscriptions) + len(entries)
    if part.unread:
        return
    # an RPC is made of its messages, of its entries, and of one header of the control message: nothing is left out
    sizes = sum(each.size for each in part.subscriptions) + sum(each.size for each in part.controls)
    published = sum(RPC(publish=[each]).ByteSize() for each in rpc.publish)
    header = RPC(control=control).ByteSize() - control.ByteSize() if rpc.HasField("control") else 0
    assert sizes + published + header == rpc.ByteSize()
    if len(payload) <= longest:
        assert [(each.subscribe, each.topic, each.raw) for each in part.subscriptions] == [
            (each.subscribe, topic := expected_topic(each), _expected_raw(each, topic)) for each in rpc.subscriptions
        ]
        assert [each[:-1] for each in counted] == list(expected_entries(rpc))
        extensions = [control.extensions.SerializeToString()] if control.HasField("extensions") else []
        assert [each.raw for each in part.controls if each.kind == "EXTENSIONS"] == extensions


def expected_entries(rpc: RPC) -> Iterator[Expected]:
    """Yield the entries of the five kinds."""
    control, left = rpc.control, MAX_IDS
    kinds = (("IHAVE", control.ihave), ("IWANT", control.iwant), ("GRAFT", control.graft), ("PRUNE", control.prune))
    for kind, entries in (*kinds, ("IDONTWANT", control.idontwant)):
        for each in entries:
            topic, ids, count, peers, backoff = TopicReference(), None, None, None, None
            if isinstance(each, ControlIHave | ControlGraft | ControlPrune):
                topic = expected_topic(each)
            if isinstance(each, ControlIHave | ControlIWant | ControlIDontWant):
                count = len(each.messageIDs)
                ids = [format_gossip_id(raw) for raw in islice(each.messageIDs, left)]
                left -= len(ids)
            if isinstance(each, ControlPrune):
                peers = len(each.peers)
                backoff = min(each.backoff, 2**63 - 1) if each.HasField("backoff") else None
            yield Expected(kind, topic, ids, count, peers, backoff, _expected_raw(each, topic))


def expected_topic(entry: RPC.SubOpts | ControlIHave | ControlGraft | ControlPrune) -> TopicReference:
    """Return the topic of an entry: by its name if it has one, else by its index."""
    fields = {field.name: value for field, value in entry.ListFields()}  # only those that are on the wire
    name, number = fields.get("topicid", fields.get("topicID")), fields.get("topicIndex")
    if name is not None:
        return TopicReference(name if isinstance(name, str) and len(name) <= MAX_TOPIC else None, "name")
    return TopicReference() if number is None else TopicReference(_NAMES.get(number), "index", number)


def _expected_raw(entry: Entry, topic: TopicReference) -> bytes | None:
    """Return the bytes of an entry without its ids, or `None` if the columns contain the whole entry."""
    names = {field.name for field, _ in entry.ListFields()}
    known = type(entry).FromString(entry.SerializeToString())
    known.DiscardUnknownFields()
    both = topic.source == "name" and "topicIndex" in names
    if known.ByteSize() == entry.ByteSize() and not both and (topic.source is None or topic.topic is not None):
        return None
    rest = type(entry).FromString(entry.SerializeToString())
    if isinstance(rest, ControlIHave | ControlIWant | ControlIDontWant):
        rest.ClearField("messageIDs")
    return rest.SerializeToString()[:MAX_RAW]
