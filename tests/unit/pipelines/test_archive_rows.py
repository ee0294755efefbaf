"""pipelines.transforms.archive: a frame to its row of `frames` and its rows of `copies`, in the tables' columns."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from pipelines.spark.rows import RowBuffer, arrow_schema
from pipelines.transforms.archive import COPIES, FRAMES, copy_rows, frame_row
from schemas.frames import read_frame
from schemas.identity import peer_of, peer_text, sign
from schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from schemas.proto.kiln.frame_pb2 import Frame
from schemas.reject import Rejected
from schemas.tables import TABLES, Column
from schemas.topic_table import Bundles, hello_bytes

ANNA, BERT = Ed25519PrivateKey.from_private_bytes(b"a" * 32), Ed25519PrivateKey.from_private_bytes(b"b" * 32)

NO_BUNDLES = Bundles()


def frame(**fields: object) -> Frame:
    made = Frame(
        network="mainnet",
        connection=b"0123456789abcdef",
        direction=Frame.IN,
        local_peer=peer_of(ANNA),
        remote_peer=peer_of(BERT),
        protocol="/meshsub/1.2.0",
        observed_at=1_700_000_000_123_456_789,
        payload=b"payload",
        hello_in=b"theirs",
        hello_out=b"ours",
        sequence=7,
        verdicts=b"\1",
        origin=Frame.REPLAY,
        remote_address=b"address",
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def named(columns: tuple[Column, ...], row: tuple[object, ...]) -> dict[str, object]:
    return dict(zip((column.name for column in columns), row, strict=True))


def to_arrow(columns: tuple[Column, ...], *rows: tuple[object, ...]) -> pa.RecordBatch:
    buffer = RowBuffer(arrow_schema(columns))
    for row in rows:
        buffer.add(row)
    (batch,) = buffer.drain()
    for column, found in zip(columns, batch.columns, strict=True):
        assert column.nullable or found.null_count == 0, f"{column.name} is null"
    return batch


def test_a_frame_is_in_its_row_byte_for_byte() -> None:
    row = named(FRAMES, frame_row(3, 77, 1_800_000_000_000_000, frame()))
    assert TABLES["frames"].columns == FRAMES
    assert row == {
        "network": "mainnet",
        "connection": b"0123456789abcdef",
        "direction": "IN",
        "local_peer": peer_text(peer_of(ANNA)),
        "remote_peer": peer_text(peer_of(BERT)),
        "protocol": "/meshsub/1.2.0",
        "observed_at": 1_700_000_000_123_456,
        "sequence": 7,
        "payload": b"payload",
        "hello_in": b"theirs",
        "hello_out": b"ours",
        "verdicts": b"\1",
        "origin": "REPLAY",
        "remote_address": b"address",
        "declared_length": 0,
        "kafka_partition": 3,
        "kafka_offset": 77,
        "kafka_timestamp": 1_800_000_000_000_000,
    }


@pytest.mark.parametrize(
    ("fields", "column", "found"),
    [
        ({"direction": Frame.OUT}, "direction", "OUT"),
        ({"origin": Frame.LIVE}, "origin", "LIVE"),
        ({"payload": b""}, "payload", b""),
        ({"declared_length": 5_000_000}, "declared_length", 5_000_000),
        ({"protocol": "bep50", "remote_peer": b"\x01" * 20}, "remote_peer", "01" * 20),
        ({"protocol": "bep50", "local_peer": b"\xff" * 20}, "local_peer", "ff" * 20),
    ],
)
def test_a_column(fields: dict[str, object], column: str, found: object) -> None:
    assert named(FRAMES, frame_row(0, 0, 0, frame(**fields)))[column] == found


@given(
    st.builds(
        dict,
        network=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5),
        local_peer=st.binary(max_size=40),
        remote_peer=st.binary(max_size=40),
        protocol=st.sampled_from(("/meshsub/1.2.0", "bep50", "")),
        observed_at=st.integers(-(2**63), 2**63 - 1),
        payload=st.binary(max_size=40),
        hello_in=st.binary(max_size=10),
        sequence=st.integers(1, 2**63 - 1),
        declared_length=st.integers(0, 2**63 - 1),
        verdicts=st.binary(max_size=3),
    )
)
def test_whatever_is_a_frame_has_a_row_that_arrow_takes(fields: dict[str, object]) -> None:
    made = frame(**fields)
    assert not isinstance(read_frame(made.SerializeToString()), Rejected)
    (row,) = to_arrow(FRAMES, frame_row(0, 0, 0, made)).select(["payload", "sequence"]).to_pylist()
    assert row == {"payload": fields["payload"], "sequence": fields["sequence"]}


def test_a_length_beyond_a_bigint_does_not_stop_the_query() -> None:
    read = read_frame(frame(declared_length=2**63).SerializeToString())
    if not isinstance(read, Rejected):
        to_arrow(FRAMES, frame_row(0, 0, 0, read))


# ---------------------------------------------------------------- copies


def rpc(*messages: Message) -> bytes:
    return RPC(publish=messages).SerializeToString()


def copies(made: Frame, bundles: Bundles = NO_BUNDLES) -> list[dict[str, object]]:
    return [named(COPIES, row) for row in copy_rows(3, 77, made, bundles)]


def signed(topic: str) -> Message:
    message = Message(data=b"data", topic=topic, seqno=b"\0\1")
    sign(message, ANNA)
    return message


def test_every_message_in_a_frame_has_a_row() -> None:
    messages = [signed("/ceramic/testnet-clay"), Message(data=b"garbage", topic="/ceramic/mainnet"), Message()]
    made = frame(payload=rpc(*messages), verdicts=b"\1\4")
    assert TABLES["copies"].columns == COPIES
    first, second, third = copies(made)
    assert first == {
        "network": "testnet-clay",
        "message": f"{peer_text(peer_of(ANNA))}/0001",
        "remote_peer": peer_text(peer_of(BERT)),
        "observed_at": 1_700_000_000_123_456,
        "verdict": 1,
        "kafka_partition": 3,
        "kafka_offset": 77,
        "message_index": 0,
    }
    assert (second["message"], second["network"]) == ("sha256/" + hashlib.sha256(b"garbage").hexdigest(), "mainnet")
    assert [row["verdict"] for row in (first, second, third)] == [1, 4, 0]
    assert [row["message_index"] for row in (first, second, third)] == [0, 1, 2]
    to_arrow(COPIES, *copy_rows(3, 77, made, NO_BUNDLES))


def test_the_network_is_the_topics_else_the_frames() -> None:
    payload = rpc(
        Message(topic="/ceramic/testnet-clay"),
        Message(topic="elsewhere"),
        Message(topicIndex=1),
        Message(topic="?????"),
    ).replace(b"?????", b"abc\xff\xfe")
    assert [row["network"] for row in copies(frame(payload=payload))] == [
        "testnet-clay",
        "mainnet",
        "mainnet",
        "mainnet",
    ]


def test_the_network_of_an_indexed_topic_is_that_of_its_name() -> None:
    bundles = Bundles({"clay": ["/ceramic/testnet-clay"]})
    message = signed("/ceramic/testnet-clay")
    message.ClearField("topic")
    message.topicIndex = 1
    made = frame(payload=rpc(message), hello_in=hello_bytes(bundles), hello_out=hello_bytes(bundles))
    (found,), (unknown,) = copies(made, bundles), copies(made)
    assert (found["network"], unknown["network"]) == ("testnet-clay", "mainnet")
    assert found["message"] == unknown["message"] == f"{peer_text(peer_of(ANNA))}/0001"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"direction": Frame.OUT, "payload": rpc(Message(data=b"x"))}, id="sent by us"),
        pytest.param({"payload": b""}, id="closing frame"),
        pytest.param({"payload": rpc()}, id="no messages"),
        pytest.param({"payload": rpc(Message(data=b"x"))[:-1]}, id="cut"),
        pytest.param({"payload": rpc(Message(data=b"x")), "declared_length": 5_000_000}, id="too long"),
        pytest.param({"payload": rpc(Message(data=b"x")), "protocol": "bep50"}, id="datagram"),
    ],
)
def test_what_has_no_copies(fields: dict[str, object]) -> None:
    assert copies(frame(**fields)) == []
