"""kiln.schemas.kafka.frames: what a Kafka record holds, and what is said where it holds something else."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.schemas.kafka.frames import (
    MAX_ADDRESS,
    MAX_HELLO,
    MAX_MESSAGES,
    MAX_NETWORK,
    MAX_NOTE,
    MAX_PEER,
    MAX_PROTOCOL,
    MAX_RPC,
    REASONS,
    list_messages,
    read_frame,
    read_rpc,
    read_topic_name,
)
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.proto.kiln import frame_pb2
from kiln.schemas.reject import Rejected
from kiln.schemas.times import MAX_NANOS, MIN_NANOS


def frame(payload: bytes = b"", /, **fields: bytes | int | str) -> frame_pb2.Frame:
    at = 1_700_000_000_000_000_000
    made = frame_pb2.Frame(network="testnet-clay", connection=bytes(16), sequence=1, payload=payload, observed_at=at)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def with_raw_topic(topic: bytes) -> bytes:
    """An RPC of two messages, the first on a topic of raw bytes, the second on "good"."""
    raw = rpc_pb2.Message(data=b"1").SerializeToString() + b"\x22" + bytes([len(topic)]) + topic
    good = rpc_pb2.Message(data=b"2", topic="good").SerializeToString()
    return b"\x12" + bytes([len(raw)]) + raw + b"\x12" + bytes([len(good)]) + good


def reason(result: object) -> str:
    assert isinstance(result, Rejected), result
    assert result.reason in REASONS
    assert result.detail
    return result.reason


def test_a_frame_is_read_as_it_was_written() -> None:
    written = frame(b"\x01\x02", direction=1, origin=1, observed_at=1_700_000_000_123_456_789, verdicts=b"\x01")
    assert read_frame(written.SerializeToString()) == written


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"connection": b""}, "connection"),
        ({"connection": bytes(15)}, "connection"),
        ({"connection": bytes(17)}, "connection"),
        ({"direction": 2}, "direction 2"),
        ({"direction": -1}, "direction -1"),
        ({"origin": 2}, "origin 2"),
        ({"sequence": 0}, "sequence 0"),
        ({"sequence": 2**63}, "sequence"),
    ],
)
def test_a_frame_against_the_contract_is_refused_and_the_field_named(fields: dict[str, bytes | int], word: str) -> None:
    result = read_frame(frame(b"", **fields).SerializeToString())
    assert reason(result) == "frame_invalid"
    assert isinstance(result, Rejected)
    assert word in result.detail


BOUNDS = {
    "network": MAX_NETWORK,
    "local_peer": MAX_PEER,
    "remote_peer": MAX_PEER,
    "protocol": MAX_PROTOCOL,
    "payload": MAX_RPC,
    "hello_in": MAX_HELLO,
    "hello_out": MAX_HELLO,
    "verdicts": MAX_MESSAGES,
    "remote_address": MAX_ADDRESS,
    "agent": MAX_NOTE,
    "end_reason": MAX_NOTE,
}
"""The longest value of each field that has no fixed length."""


def test_every_field_of_a_frame_has_a_bound() -> None:
    kinds = frame_pb2.Frame.DESCRIPTOR.fields_by_name
    lengths = {name for name, field in kinds.items() if field.type in (field.TYPE_BYTES, field.TYPE_STRING)}
    assert lengths == {*BOUNDS, "connection"}
    assert set(kinds) - lengths == {"direction", "origin", "observed_at", "sequence", "declared_length", "dialled"}


@pytest.mark.parametrize("name", BOUNDS)
@given(st.integers(0, 3), st.integers(1, 3 * 1024 * 1024))
@settings(max_examples=10)
def test_a_field_is_read_up_to_its_bound_and_refused_beyond(name: str, under: int, over: int) -> None:
    kind = frame_pb2.Frame.DESCRIPTOR.fields_by_name[name].type

    def of_length(length: int) -> frame_pb2.Frame | Rejected:
        value = bytes(length) if kind == FieldDescriptor.TYPE_BYTES else "x" * length
        return read_frame(frame(b"", **{name: value}).SerializeToString())

    assert not isinstance(of_length(BOUNDS[name] - under), Rejected)
    refused = of_length(BOUNDS[name] + over)
    assert reason(refused) == "frame_invalid"
    assert isinstance(refused, Rejected)
    assert name in refused.detail
    assert len(refused.detail) < 200


@given(st.integers(-(2**63), MIN_NANOS - 1) | st.integers(MAX_NANOS + 1, 2**63 - 1))
def test_a_frame_of_another_time_than_2000_to_2099_is_refused(observed_at: int) -> None:
    assert reason(read_frame(frame(b"", observed_at=observed_at).SerializeToString())) == "frame_invalid"


@pytest.mark.parametrize("observed_at", [MIN_NANOS, MAX_NANOS])
def test_the_bounds_of_time_are_read(observed_at: int) -> None:
    assert not isinstance(read_frame(frame(b"", observed_at=observed_at).SerializeToString()), Rejected)


@pytest.mark.parametrize("value", [None, b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe"])
def test_what_is_no_frame_protobuf_is_malformed(value: bytes | None) -> None:
    assert reason(read_frame(value)) == "frame_malformed"


def test_an_empty_record_is_not_a_frame() -> None:
    assert reason(read_frame(b"")) == "frame_invalid"


@given(st.binary(max_size=300))
def test_no_bytes_raise(value: bytes) -> None:
    result = read_frame(value)
    if isinstance(result, frame_pb2.Frame):
        list_messages(result)
    read_rpc(value)
    for message in (found for found in [list_messages(frame(value))] if not isinstance(found, Rejected)):
        for each in message:
            read_topic_name(each)


def test_messages_keep_their_order() -> None:
    rpc = rpc_pb2.RPC(publish=[rpc_pb2.Message(data=bytes([i])) for i in range(5)])
    found = list_messages(frame(rpc.SerializeToString()))
    assert not isinstance(found, Rejected)
    assert [(i, m.data) for i, m in enumerate(found)] == [(i, bytes([i])) for i in range(5)]


def test_a_closing_frame_and_a_datagram_have_no_messages() -> None:
    assert list_messages(frame()) == ()
    assert list_messages(frame(b"d1:ad2:id20:", protocol="bep50")) == ()


def test_a_cut_rpc_is_oversized_even_if_what_is_left_of_it_parses() -> None:
    whole = rpc_pb2.RPC(publish=[rpc_pb2.Message(data=b"x")]).SerializeToString()
    assert reason(list_messages(frame(whole, declared_length=MAX_RPC + 1))) == "rpc_oversized"


@pytest.mark.parametrize("payload", [b"\x12\x05\x0a", b"\x0b", b"\xff" * 12])
def test_a_malformed_rpc_says_so(payload: bytes) -> None:
    assert reason(list_messages(frame(payload))) == "rpc_malformed"


def test_a_topic_that_is_not_utf8_harms_only_its_own_message() -> None:
    found = list_messages(frame(with_raw_topic(b"\xff\xfe")))
    assert not isinstance(found, Rejected)
    assert reason(read_topic_name(found[0])) == "topic_not_utf8"
    assert read_topic_name(found[1]) == "good"


def test_a_topic_may_be_absent_empty_or_beside_an_index() -> None:
    assert read_topic_name(rpc_pb2.Message(topicIndex=1)) is None
    assert read_topic_name(rpc_pb2.Message(topic="")) == ""
    assert read_topic_name(rpc_pb2.Message(topic="name", topicIndex=1)) == "name"


def test_field_3_of_a_subscription_does_not_hide_the_name() -> None:
    """go-libp2p-pubsub ≥ 0.16 sends requestsPartial = 3 and supportsSendingPartial = 4 in every SubOpts."""
    wire = b"\x0a\x0c" + bytes.fromhex("0801") + b"\x12\x04test" + bytes.fromhex("18002000")
    rpc = read_rpc(wire)
    assert isinstance(rpc, rpc_pb2.RPC)
    assert rpc.subscriptions[0].topicid == "test"


def test_unknown_fields_survive() -> None:
    wire = b"\x12\x09" + b"\x12\x01x" + b"\xa2\x06\x03abc"
    rpc = read_rpc(wire)
    assert isinstance(rpc, rpc_pb2.RPC)
    assert rpc.SerializeToString() == wire
