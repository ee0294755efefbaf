"""The tap: what was on the wire, as Frames that `kiln.schemas.kafka.frames` reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.capture.tap import ConnectionTap, Direction
from kiln.schemas.kafka.frames import CUT_PAYLOAD, MAX_RPC, read_frame
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.times import MIN_NANOS

ID = bytes(range(16))
LOCAL, REMOTE = b"\x00\x24local", b"\x00\x24remote"


def connection(protocol: str = "/meshsub/1.3.0") -> ConnectionTap:
    return ConnectionTap("local-test", ID, LOCAL, REMOTE, protocol, b"\x04\x7f\x00\x00\x01\x06\x00\x50")


def read(value: bytes) -> Frame:
    frame = read_frame(value)
    assert isinstance(frame, Frame)
    return frame


def hello(*hashes: bytes) -> bytes:
    rpc = rpc_pb2.RPC()
    rpc.subscriptions.add(subscribe=True, topicid="/ceramic/local-test")
    rpc.control.extensions.topicTableExtension.topicBundleHashes.extend(hashes)
    return rpc.SerializeToString()


def table(*hashes: bytes) -> bytes:
    return rpc_pb2.ExtTopicTable(topicBundleHashes=hashes).SerializeToString()


def test_frame_has_all_that_is_known() -> None:
    frame = read(connection().frame("IN", b"\x12\x00", 1_700_000_000_000_000_123, b"\x01"))
    assert frame == Frame(
        network="local-test",
        connection=ID,
        direction=Frame.IN,
        local_peer=LOCAL,
        remote_peer=REMOTE,
        protocol="/meshsub/1.3.0",
        observed_at=1_700_000_000_000_000_123,
        payload=b"\x12\x00",
        sequence=1,
        verdicts=b"\x01",
        origin=Frame.LIVE,
        remote_address=b"\x04\x7f\x00\x00\x01\x06\x00\x50",
    )


@given(
    st.lists(st.tuples(st.sampled_from(("IN", "OUT")), st.binary(max_size=50), st.binary(max_size=3)), max_size=20),
)
def test_any_bytes_are_captured_and_numbered_by_direction(calls: list[tuple[Direction, bytes, bytes]]) -> None:
    tapped = connection()
    sequences = {"IN": 0, "OUT": 0}
    for at, (direction, payload, verdicts) in enumerate(calls, MIN_NANOS):
        frame = read(tapped.frame(direction, payload, at, verdicts))
        sequences[direction] += 1
        assert (frame.payload, frame.verdicts, frame.observed_at) == (payload, verdicts, at)
        assert frame.sequence == sequences[direction]
        assert frame.direction == (Frame.IN if direction == "IN" else Frame.OUT)
    closing = [read(value) for value in tapped.close(MIN_NANOS + 99)]
    assert [(frame.direction, frame.sequence, frame.payload, frame.verdicts) for frame in closing] == [
        (Frame.IN, sequences["IN"] + 1, b"", b""),
        (Frame.OUT, sequences["OUT"] + 1, b"", b""),
    ]


def test_hellos_travel_in_every_later_frame_of_both_directions() -> None:
    tapped = connection()
    ours = read(tapped.frame("OUT", hello(b"AAAA"), 1))
    theirs = read(tapped.frame("IN", hello(b"BBBB", b"AAAA"), 2))
    later = [read(tapped.frame("IN", b"", 3)), read(tapped.frame("OUT", b"", 4)), *map(read, tapped.close(5))]
    assert (ours.hello_in, ours.hello_out) == (b"", table(b"AAAA"))
    for frame in [theirs, *later]:
        assert (frame.hello_in, frame.hello_out) == (table(b"BBBB", b"AAAA"), table(b"AAAA"))


def test_only_the_first_rpc_is_a_hello() -> None:
    tapped = connection()
    tapped.frame("IN", b"", 1)
    assert read(tapped.frame("IN", hello(b"AAAA"), 2)).hello_in == b""


@pytest.mark.parametrize(
    "payload",
    [b"\xff", hello(b"AAAA", b"AAAA"), hello(b"AAA"), hello(*(n.to_bytes(4, "big") for n in range(257))), b""],
    ids=["malformed", "repeats", "hash_length", "too_many", "empty"],
)
def test_refused_hello_is_captured_and_not_carried(payload: bytes) -> None:
    tapped = connection()
    assert read(tapped.frame("IN", payload, 1)).payload == payload
    assert read(tapped.frame("OUT", b"", 2)).hello_in == b""


def test_hello_full_of_unknown_fields_does_not_swell_each_frame() -> None:
    rpc = rpc_pb2.RPC()
    stuffed = table(b"AAAA") + b"\x7a\x80\x80\x40" + bytes(1 << 20)  # field 15, 1 MiB
    rpc.control.extensions.topicTableExtension.ParseFromString(stuffed)
    tapped = connection()
    assert len(read(tapped.frame("IN", rpc.SerializeToString(), 1)).payload) > 1 << 20
    assert read(tapped.frame("IN", b"", 2)).hello_in == table(b"AAAA")


def test_rpc_over_4_mib_is_cut() -> None:
    tapped = connection()
    large = bytes(MAX_RPC) + b"\x01"
    whole = read(tapped.frame("IN", large[:-1], 1))
    cut_here = read(tapped.frame("IN", large, 2))
    cut_before = read(tapped.frame("IN", large[:CUT_PAYLOAD], 3, declared_length=5 << 20))
    assert (len(whole.payload), whole.declared_length) == (MAX_RPC, 0)
    assert (len(cut_here.payload), cut_here.declared_length) == (CUT_PAYLOAD, MAX_RPC + 1)
    assert (len(cut_before.payload), cut_before.declared_length) == (CUT_PAYLOAD, 5 << 20)
    after = read(tapped.frame("IN", b"x", 4))
    assert (after.declared_length, after.verdicts) == (0, b"")


def test_datagrams_have_no_hello() -> None:
    assert read(connection("bep50").frame("IN", hello(b"AAAA"), 1)).hello_in == b""


def test_the_first_closing_frame_is_the_record_of_the_connection() -> None:
    tapped = connection()
    tapped.frame("IN", hello(b"AAAA"), MIN_NANOS)
    first, second = map(read, tapped.close(MIN_NANOS + 1, "kubo/1" * 99, "gone", False))
    assert (first.direction, first.sequence, first.payload) == (Frame.IN, 2, b"")
    assert (first.agent, first.end_reason) == (("kubo/1" * 99)[:256], "gone")
    assert (first.HasField("dialled"), first.dialled) == (True, False)
    assert (second.agent, second.end_reason, second.HasField("dialled")) == ("", "", False)


def test_nothing_follows_the_closing_frames() -> None:
    tapped = connection()
    assert len(tapped.close(1)) == 2
    assert tapped.close(2) == []
    with pytest.raises(ValueError, match="is closed"):
        tapped.frame("IN", b"x", 3)


def test_connection_id_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="15 bytes, not 16"):
        ConnectionTap("local-test", ID[:-1], LOCAL, REMOTE, "/meshsub/1.3.0")


BEYOND: dict[str, bytes | str] = {
    "network": "n" * 257,
    "local_peer": bytes(65),
    "remote_peer": bytes(65),
    "protocol": "p" * 257,
    "remote_address": bytes(1025),
}


@pytest.mark.parametrize("name", BEYOND)
def test_no_connection_begins_whose_frames_nobody_would_read(name: str) -> None:
    fields: dict[str, bytes | str] = {
        "network": "local-test",
        "local_peer": LOCAL,
        "remote_peer": REMOTE,
        "protocol": "/meshsub/1.3.0",
        "remote_address": b"",
    }
    with pytest.raises(ValueError, match=name):
        ConnectionTap(connection=ID, **{**fields, name: BEYOND[name]})  # type: ignore[arg-type]  # each of its own type


@given(st.binary(max_size=40), st.integers(-(2**63), 2**63 - 1), st.integers(0, 12_000), st.sampled_from(("IN", "OUT")))
def test_every_frame_keeps_the_bounds(payload: bytes, at: int, verdicts: int, direction: Direction) -> None:
    made = connection()
    for sent in (payload, payload * 200_000):
        assert not isinstance(read_frame(made.frame(direction, sent, at, bytes(verdicts))), Rejected)
