"""Control part of an RPC: what protobuf has of it, entry by entry, is what the reader returns."""

from __future__ import annotations

import gzip
import struct
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import VECTORS
from kiln.schemas.kafka.topics import MAX_TOPIC
from kiln.schemas.proto.gossipsub.rpc_pb2 import (
    RPC,
    ControlExtensions,
    ControlGraft,
    ControlIDontWant,
    ControlIHave,
    ControlIWant,
    ControlMessage,
    ControlPrune,
    ExtTopicTable,
    Message,
    PeerInfo,
)
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import write_varint
from kiln.schemas.wire.control import (
    MAX_ENTRIES,
    MAX_IDS,
    ControlPart,
    TopicReference,
    has_control_part,
)
from kit.control_truth import check_control_part, read_control_part
from kit.cpu_time import measure_cpu

UNKNOWN = b"\xa2\x06\x02hi"  # field 100
NAMED = TopicReference("a", "name")


def read(rpc: RPC | bytes) -> ControlPart:
    part = read_control_part(rpc if isinstance(rpc, bytes) else rpc.SerializeToString())
    assert isinstance(part, ControlPart)
    return part


# ---------------------------------------------------------------- any RPC

names = st.sampled_from(["a", "b", "z", ""])
indices = st.integers(0, 4)
ids = st.lists(st.binary(max_size=40), max_size=4)
topics = st.fixed_dictionaries({}, optional={"topicID": names, "topicIndex": indices})
sub_opts = st.builds(
    lambda subscribe, topic: RPC.SubOpts(subscribe=subscribe, **topic),
    st.booleans(),
    st.fixed_dictionaries({}, optional={"topicid": names, "topicIndex": indices}),
)
controls = st.builds(
    ControlMessage,
    ihave=st.lists(st.builds(lambda topic, ids: ControlIHave(messageIDs=ids, **topic), topics, ids), max_size=3),
    iwant=st.lists(st.builds(ControlIWant, messageIDs=ids), max_size=3),
    idontwant=st.lists(st.builds(ControlIDontWant, messageIDs=ids), max_size=3),
    graft=st.lists(st.builds(lambda topic: ControlGraft(**topic), topics), max_size=3),
    prune=st.lists(
        st.builds(
            lambda topic, peers, more: ControlPrune(peers=[PeerInfo()] * peers, **topic, **more),
            topics,
            st.integers(0, 3),
            st.fixed_dictionaries({}, optional={"backoff": st.integers(0, 2**63 - 1)}),
        ),
        max_size=3,
    ),
)
rpcs = st.builds(
    lambda subscriptions, publish, control: RPC(subscriptions=subscriptions, publish=publish, control=control),
    st.lists(sub_opts, max_size=3),
    st.lists(st.builds(Message, data=st.binary(max_size=9)), max_size=3),
    st.none() | controls,
)


pieces = rpcs.map(RPC.SerializeToString) | st.sampled_from([UNKNOWN, b"\x1a\x05" + UNKNOWN]) | st.binary(max_size=9)


@given(rpcs.map(RPC.SerializeToString) | st.lists(pieces, max_size=3).map(b"".join))
def test_protobuf_reads_the_same_of_any_bytes(payload: bytes) -> None:
    check_control_part(payload)


@given(rpcs.map(RPC.SerializeToString), st.integers(0, 200), st.binary(max_size=2))
def test_protobuf_reads_the_same_where_bytes_were_changed(payload: bytes, at: int, changed: bytes) -> None:
    check_control_part(payload[:at] + changed + payload[at + 1 :])


# ---------------------------------------------------------------- what is special


def test_an_rpc_that_only_publishes_has_none() -> None:
    published = RPC(publish=[Message(data=bytes(200)), Message(), Message(data=bytes(20_000))])
    assert not has_control_part(published.SerializeToString())
    assert has_control_part(published.SerializeToString() + b"\x1a\x00")
    padded = b"\x12\x80\x80\x80\x80\x80\x00"  # a length of 0 in six bytes, which protobuf reads
    assert read(padded + RPC(subscriptions=[RPC.SubOpts(topicid="a")]).SerializeToString()).subscriptions
    assert has_control_part(padded + b"\x0a\x00")


@pytest.mark.parametrize(
    ("payload", "kinds", "raws"),
    [
        pytest.param(UNKNOWN, ["UNKNOWN"], [UNKNOWN], id="of the RPC"),
        pytest.param(b"\x1a\x05" + UNKNOWN, ["UNKNOWN"], [UNKNOWN], id="of the control message"),
        pytest.param(b"\x1a\x07\x1a\x05" + UNKNOWN, ["GRAFT"], [UNKNOWN], id="of a GRAFT"),
        pytest.param(
            b"\x1a\x0a\x12\x08\x0a\x01i" + UNKNOWN,
            ["IWANT"],
            [UNKNOWN],
            id="of an IWANT, whose ids are in their column",
        ),
        pytest.param(b"\x1a\x07\x32\x05" + UNKNOWN, ["EXTENSIONS"], [UNKNOWN], id="of the extensions"),
        pytest.param(
            b"\x1a\x02\x1a\x00" + UNKNOWN, ["GRAFT", "UNKNOWN"], [None, UNKNOWN], id="beside an entry without one"
        ),
    ],
)
def test_fields_that_kiln_does_not_know_are_kept(payload: bytes, kinds: list[str], raws: list[bytes | None]) -> None:
    part = read(payload)
    assert [each.kind for each in part.controls] == kinds
    assert [each.raw for each in part.controls] == raws


def test_unknown_fields_of_a_subscription_are_kept() -> None:
    entry = b"\x08\x01\x12\x01a" + UNKNOWN
    assert read(b"\x0a" + bytes([len(entry)]) + entry).subscriptions[0][:3] == (True, NAMED, entry)


def test_a_hello_is_an_entry() -> None:
    extensions = ControlExtensions(topicTableExtension=ExtTopicTable(topicBundleHashes=[b"hash"]))
    (entry,) = read(RPC(control=ControlMessage(extensions=extensions))).controls
    assert (entry.kind, entry.raw) == ("EXTENSIONS", extensions.SerializeToString())


def test_the_longest_topic_is_text() -> None:
    topic = "x" * MAX_TOPIC
    (entry,) = read(RPC(control=ControlMessage(graft=[ControlGraft(topicID=topic)]))).controls
    assert (entry.topic, entry.raw) == (TopicReference(topic, "name"), None)


@pytest.mark.parametrize("topic", [b"\xff\xfe", b"x" * (MAX_TOPIC + 1)], ids=["not UTF-8", "too long"])
def test_a_topic_that_cannot_be_text_is_kept_as_bytes(topic: bytes) -> None:
    graft = b"\x0a" + write_varint(len(topic)) + topic
    rpc = RPC()
    rpc.control.graft.append(ControlGraft.FromString(graft))
    (entry,) = read(rpc).controls
    assert entry.topic == TopicReference(None, "name")
    assert entry.raw == graft


# ---------------------------------------------------------------- bounds


def test_a_million_ids_are_one_entry_with_a_count() -> None:
    body = b"\x0a\x01a" + b"\x12\x00" * 1_000_000
    entry = b"\x0a" + b"\x83\x89\x7a" + body
    assert len(body) == 0x03 | 0x09 << 7 | 0x7A << 14
    payload = b"\x1a" + b"\x87\x89\x7a" + entry
    with measure_cpu() as cost:
        (have,) = read(payload).controls
    assert (have.kind, have.topic, have.message_id_count) == ("IHAVE", NAMED, 1_000_000)
    assert have.message_ids == [""] * MAX_IDS
    assert have.size == len(entry)
    assert cost.steps < 5e6  # as an RPC of millions of items may cost


def test_ids_are_listed_up_to_a_number_for_the_whole_rpc() -> None:
    rpc = RPC(control=ControlMessage(iwant=[ControlIWant(messageIDs=[b"i"] * 3000)] * 3))
    entries = read(rpc).controls
    assert [len(each.message_ids or ()) for each in entries] == [3000, MAX_IDS - 3000, 0]
    assert [each.message_id_count for each in entries] == [3000] * 3


def test_entries_are_read_up_to_a_number() -> None:
    rpc = RPC(subscriptions=[RPC.SubOpts()] * 12_000, control=ControlMessage(graft=[ControlGraft()] * 9000))
    part = read(rpc)
    assert (len(part.subscriptions), len(part.controls)) == (12_000, MAX_ENTRIES - 12_000)
    assert part.unread == 1000


def test_millions_of_entries_are_not_parsed() -> None:
    answer = read_control_part(b"\x0a\x00" * 2_000_000)
    assert isinstance(answer, Rejected)
    assert answer.reason == "rpc_too_costly"


# ---------------------------------------------------------------- captures


def payloads(name: str) -> Iterator[tuple[str, bytes]]:
    """Direction and RPC of each record of a capture file, without Kiln's own reader."""
    data, at = gzip.decompress((VECTORS / "captures" / f"{name}.rpc.gz").read_bytes()), 0
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        record, at = data[at + 4 : at + 4 + size], at + 4 + size
        start = 10
        for _ in range(3):
            start += 2 + struct.unpack_from(">H", record, start)[0]
        yield chr(record[1]), record[start:]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("go4tt", {"SUBSCRIBE": 49, "GRAFT": 23, "PRUNE": 2, "IDONTWANT": 12}),
        (
            "go4nosign",
            {"SUBSCRIBE": 37, "GRAFT": 12, "PRUNE": 3, "IDONTWANT": 2, "IHAVE": 49, "IWANT": 4, "UNKNOWN": 2},
        ),
    ],
)
def test_captures_have_as_many_entries_as_protobuf_counts(name: str, known: dict[str, int]) -> None:
    # UNKNOWN is the RPC of the test extension, which has no field of Kiln's
    expected, found = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for direction, payload in payloads(name):
        rpc, part = RPC.FromString(payload), read(payload)
        expected[direction, "SUBSCRIBE"] += len(rpc.subscriptions)
        for kind in ("IHAVE", "IWANT", "GRAFT", "PRUNE", "IDONTWANT"):
            expected[direction, kind] += len(getattr(rpc.control, kind.lower()))
        expected[direction, "UNKNOWN"] += payload == b"\x92\x91\xe2\x18\x00"
        found[direction, "SUBSCRIBE"] += len(part.subscriptions)
        found.update((direction, each.kind) for each in part.controls if each.kind != "EXTENSIONS")
    assert +found == +expected
    assert {kind: found["R", kind] for kind in known} == known
