"""pipelines.transforms.updates: good copies of UPDATEs to records of `kiln.updates` (docs/DESIGN.md, decision 4)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pipelines.batcher import LogRecord, batch_partition
from pipelines.decode import Decoding
from pipelines.sinks import MAX_REQUEST
from pipelines.transforms import updates as module
from pipelines.transforms.updates import separate
from pipelines.windows import PartitionWindows
from schemas.cid import block_cid
from schemas.frames import MAX_RPC
from schemas.identity import peer_of, peer_text, sign
from schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from schemas.proto.kiln.frame_pb2 import Frame
from schemas.pubsub import write_keepalive, write_query, write_response, write_update
from schemas.records import Epoch, UpdateRecord, decode_batch, decode_update
from schemas.streamid import StreamID
from schemas.topics import Separator, separator_value, topic_name

SCHEMA = Path(__file__).resolve().parents[2] / "schemas" / "kafka" / "updates.schema.json"
VALID = Draft202012Validator(json.loads(SCHEMA.read_text()))

ANNA = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
STREAM = "kjzl6cwe1jw145as2el62s5k2n5xwij7snqu1mngluhpr05xy5wylfswe1zvq39"
MODEL = StreamID(2, block_cid(b"model"))
OTHER = StreamID(2, block_cid(b"another model"))
TIP = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"
CLAY = "/ceramic/testnet-clay"
CONTROLLER = Separator("controller", separator_value(b"did:key:z6Mk"))
EPOCH = Epoch("7d8e", 12)


@pytest.fixture(autouse=True)
def epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no task here to ask for it."""
    monkeypatch.setattr(module, "_epoch", lambda: EPOCH)


def frame(*messages: Message, network: str = "mainnet", origin: str = "LIVE", at: int = 1_700_000_000_123_456) -> bytes:
    return Frame(
        network=network,
        connection=bytes(16),
        observed_at=at * 1000,
        sequence=1,
        origin=Frame.Origin.Value(origin),
        payload=RPC(publish=messages).SerializeToString(),
    ).SerializeToString()


def unsigned(data: bytes, topic: str = CLAY) -> Message:
    return Message(data=data, topic=topic)


def signed(data: bytes, topic: str = CLAY, seqno: bytes = b"\0\1") -> Message:
    message = Message(data=data, topic=topic, seqno=seqno)
    sign(message, ANNA)
    return message


def rows(*values: bytes | None, how: Decoding | None = None) -> list[dict[str, bytes]]:
    """identity, key, value of the copies in records 77, 78 … of partition 3."""
    columns = {
        "partition": pa.array([3] * len(values), type=pa.int32()),
        "offset": pa.array(range(77, 77 + len(values)), type=pa.int64()),
        "stamp": pa.array([0] * len(values), type=pa.int64()),
        "value": pa.array(values, type=pa.binary()),
    }
    batches: Iterator[pa.RecordBatch] = iter([pa.RecordBatch.from_pydict(columns)])
    made = module._update_rows(how or Decoding(default_policy="either"))
    return [row for batch in made(batches) for row in batch.to_pylist()]


def records(*values: bytes | None) -> list[UpdateRecord]:
    found = rows(*values)
    for row in found:
        VALID.validate(json.loads(row["value"]))
    return [decode_update(row["value"]) for row in found]


# ---------------------------------------------------------------- separators


@pytest.mark.parametrize(
    ("topic", "model", "expected"),
    [
        (CONTROLLER, MODEL.text, (CONTROLLER, "topic")),
        (CONTROLLER, None, (CONTROLLER, "topic")),
        (None, MODEL.text, (Separator("model", MODEL.text), "model")),
        (None, None, (None, None)),
    ],
)
def test_the_topic_comes_before_the_model(
    topic: Separator | None, model: str | None, expected: tuple[Separator | None, str | None]
) -> None:
    assert separate(topic, model) == expected


def test_a_model_in_the_message_and_in_the_topic_is_one_separator() -> None:
    """The value in a topic name is that of the header, a StreamID's bytes."""
    topic = topic_name("testnet-clay", Separator("model", separator_value(MODEL.bytes)))
    by_topic, by_model = records(
        frame(unsigned(write_update(STREAM, TIP), topic)), frame(unsigned(write_update(STREAM, TIP, MODEL.text)))
    )
    assert by_topic.separator == by_model.separator
    assert (by_topic.separator_source, by_model.separator_source) == ("topic", "model")


def test_a_claim_does_not_override_the_topic() -> None:
    topic = topic_name("testnet-clay", Separator("model", MODEL.text))
    (record,) = records(frame(unsigned(write_update(STREAM, TIP, OTHER.text), topic)))
    assert record.separator is not None
    assert record.separator.value == MODEL.text


# ---------------------------------------------------------------- records


def test_an_update() -> None:
    (row,) = rows(frame(signed(write_update(STREAM, TIP, MODEL.text))))
    assert row["key"] == f"testnet-clay/model/{MODEL.text}".encode()
    assert json.loads(row["value"]) == {
        "network": "testnet-clay",
        "origin": "LIVE",
        "separator": {"key": "model", "value": MODEL.text},
        "separator_source": "model",
        "stream": STREAM,
        "tip": TIP,
        "from": peer_text(peer_of(ANNA)),
        "message": f"{peer_text(peer_of(ANNA))}/0001",
        "epoch": {"query": "7d8e", "batch": 12},
        "frame": {"partition": 3, "offset": 77, "index": 0},
        "observed_at": 1_700_000_000_123_456,
    }


def test_an_update_without_separator_is_keyed_by_its_stream() -> None:
    (row,) = rows(frame(unsigned(write_update(STREAM, TIP))))
    record = decode_update(row["value"])
    assert (record.separator, record.separator_source, record.from_) == (None, None, None)
    assert row["key"] == STREAM.encode()


def test_only_good_updates_have_rows() -> None:
    forged = signed(write_update(STREAM, TIP))
    forged.signature = bytes(64)
    values = [
        frame(
            unsigned(write_query(STREAM)),
            unsigned(write_response("id", {STREAM: TIP})),
            unsigned(write_keepalive(1)),
            unsigned(b"garbage"),
            forged,
            unsigned(write_update(STREAM, TIP)),
        ),
        b"no frame",
        None,
        frame(Message(data=write_update(STREAM, TIP), topicIndex=1)),
        frame(unsigned(write_update(STREAM, TIP, MODEL.text)), origin="REPLAY"),
    ]
    found = records(*values)
    assert [(record.frame.offset, record.frame.index, record.origin) for record in found] == [
        (77, 5, "LIVE"),
        (81, 0, "REPLAY"),
    ]


def test_copies_of_a_message_have_one_identity_and_origins_do_not_mix() -> None:
    message = signed(write_update(STREAM, TIP))
    values = [frame(message), frame(message, at=1_700_050_000_000_000), frame(message, origin="REPLAY")]
    first, again, replayed = (row["identity"] for row in rows(*values))
    assert first == again
    assert first != replayed


def test_a_message_is_announced_by_each_of_its_networks() -> None:
    data = write_update(STREAM, TIP)
    first, other = rows(frame(unsigned(data)), frame(unsigned(data, "/ceramic/mainnet")))
    assert first["identity"] != other["identity"]


def test_the_batch_query_reads_what_is_written() -> None:
    topic = topic_name("testnet-clay", CONTROLLER)
    values = [row["value"] for row in rows(frame(unsigned(write_update(STREAM, TIP), topic)))]
    log = [LogRecord(0, n, n * 1_000_000, value) for n, value in enumerate((*values, b""))]
    (batch,) = batch_partition(PartitionWindows(1_000_000), iter(log), 256_000)
    assert decode_batch(batch.value).separator.key == "controller"
    assert batch.key == f"testnet-clay/{CONTROLLER.key}/{CONTROLLER.value}".encode()


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(
    st.sampled_from((CLAY, "/ceramic", "elsewhere", ""))
    | names.map(lambda name: f"/ceramic/{name}")
    | names.map(lambda key: f"{CLAY}/sep/{key}/{MODEL.text}"),
    st.sampled_from((None, MODEL.text)),
    st.sampled_from(("mainnet", "local-1")),
    st.sampled_from(("LIVE", "REPLAY")),
    st.integers(-(10**15), 10**15),
)
def test_every_row_is_as_the_schema_says(topic: str, model: str | None, network: str, origin: str, at: int) -> None:
    message = unsigned(write_update(STREAM, TIP, model), topic)
    (record,) = records(frame(message, network=network, origin=origin, at=at))
    assert (record.origin, record.observed_at) == (origin, at)


def test_a_frame_without_a_network_gives_no_record_that_nobody_can_read() -> None:
    assert not records(frame(unsigned(write_update(STREAM, TIP), "elsewhere"), network=""))


@pytest.mark.parametrize("letter", ['"', "\x01"], ids=["twice as long in JSON", "six times as long"])
@pytest.mark.parametrize("length", [4_000, MAX_RPC - 1_000])
def test_what_one_rpc_holds_makes_no_record_that_kafka_refuses(letter: str, length: int) -> None:
    data = write_update(STREAM, TIP, MODEL.text)
    value = frame(unsigned(data, "/ceramic/" + letter * length))
    assert all(len(row["key"]) + len(row["value"]) < MAX_REQUEST for row in rows(value))
