"""kiln.pipelines.archive.transform: records of `kiln.frames` to rows of `frames`, `copies` and `messages`, as files
hold them, and to what goes to quarantine."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kiln.pipelines.archive import transform
from kiln.pipelines.archive.record_decoder import DECODE_RESULT, FAULT, PARTS, DecodeResult, decode_records
from kiln.pipelines.archive.rows import FaultRow, MessageRow, build_copy_row, build_fault_rows, build_message_row
from kiln.pipelines.archive.transform import (
    ARCHIVE_OUTPUT,
    IDENTITIES,
    PACKED_TYPES,
    ArchiveOutput,
    build_stages,
)
from kiln.pipelines.decode.breaker import AuthorTally
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, FrameDecoder, RejectedMessage, decode
from kiln.pipelines.decode.frame_row import build_frame_row
from kiln.pipelines.decode.identities import compute_fault_identity, compute_identities
from kiln.pipelines.delta.arrow_rows import RowBuffer, build_arrow_schema
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.frame_ranges import build_range_key
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig, filter_new_copies
from kiln.pipelines.runtime.row_packing import pack_rows, unpack_rows
from kiln.schemas.delta.tables import TABLES, Column
from kiln.schemas.kafka.frames import DIRECTIONS, MAX_MESSAGES, read_frame
from kiln.schemas.kafka.records import Epoch, decode_quarantine, parse_quarantine_key
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message, PeerInfo
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.times import MAX_NANOS, MIN_NANOS
from kiln.schemas.wire.identity import compute_peer_id, peer_text, sign
from kiln.schemas.wire.pubsub import write_batch_update, write_keepalive, write_query, write_response, write_update
from kiln.schemas.wire.topic_table import BundleSet, write_hello
from kiln.schemas.wire.topics import Separator
from kit import engines
from kit.cpu_time import measure_cpu

STREAM = "kjzl6cwe1jw145as2el62s5k2n5xwij7snqu1mngluhpr05xy5wylfswe1zvq39"
MODEL = "k2t6wz4z9kggqqnbn3vqggh2z4fe9jctr9vvbc1em2yho0qnzzrtzz1n2hr4lq"
TIP = "bafyreigtsyqmmvgtal3y2ahcs277xjk5prvb673lb3li2i2egz2nhp6u4y"
CLAY = "/ceramic/testnet-clay"

ANNA, BERT = Ed25519PrivateKey.from_private_bytes(b"a" * 32), Ed25519PrivateKey.from_private_bytes(b"b" * 32)

NO_BUNDLES = BundleSet()
NOW = 1_800_000_000_000_000
TASK = b"the task's digest"


def frame(**fields: object) -> Frame:
    made = Frame(
        network="mainnet",
        connection=b"0123456789abcdef",
        direction=Frame.IN,
        local_peer=compute_peer_id(ANNA),
        remote_peer=compute_peer_id(BERT),
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
    buffer = RowBuffer(build_arrow_schema(columns))
    for row in rows:
        buffer.add(row)
    (batch,) = buffer.drain()
    for column, found in zip(columns, batch.columns, strict=True):
        assert column.nullable or found.null_count == 0, f"{column.name} is null"
    return batch


def test_a_frame_is_in_its_row_byte_for_byte() -> None:
    row = named(TABLES["frames"].columns, build_frame_row(3, 77, 1_800_000_000_000_000, frame()))
    assert row == {
        "network": "mainnet",
        "connection": b"0123456789abcdef",
        "direction": "IN",
        "local_peer": peer_text(compute_peer_id(ANNA)),
        "remote_peer": peer_text(compute_peer_id(BERT)),
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
        "agent": None,
        "end_reason": None,
        "dialled": None,
    }


@pytest.mark.parametrize(
    ("fields", "column", "found"),
    [
        ({"direction": Frame.OUT}, "direction", "OUT"),
        ({"origin": Frame.LIVE}, "origin", "LIVE"),
        ({"payload": b""}, "payload", b""),
        ({"payload": b"", "agent": "kubo/1", "dialled": False}, "agent", "kubo/1"),
        ({"payload": b"", "end_reason": "gone", "dialled": True}, "end_reason", "gone"),
        ({"payload": b"", "end_reason": "gone", "dialled": False}, "dialled", False),
        ({"payload": b""}, "dialled", None),
        ({"declared_length": 5_000_000}, "declared_length", 5_000_000),
        ({"protocol": "bep50", "remote_peer": b"\x01" * 20}, "remote_peer", "01" * 20),
        ({"protocol": "bep50", "local_peer": b"\xff" * 20}, "local_peer", "ff" * 20),
    ],
)
def test_a_column(fields: dict[str, object], column: str, found: object) -> None:
    assert named(TABLES["frames"].columns, build_frame_row(0, 0, 0, frame(**fields)))[column] == found


@given(
    st.builds(
        dict,
        network=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5),
        local_peer=st.binary(max_size=40),
        remote_peer=st.binary(max_size=40),
        protocol=st.sampled_from(("/meshsub/1.2.0", "bep50", "")),
        observed_at=st.integers(MIN_NANOS, MAX_NANOS),
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
    (row,) = (
        to_arrow(TABLES["frames"].columns, build_frame_row(0, 0, 0, made)).select(["payload", "sequence"]).to_pylist()
    )
    assert row == {"payload": fields["payload"], "sequence": fields["sequence"]}


def test_a_length_beyond_a_bigint_does_not_stop_the_query() -> None:
    read = read_frame(frame(declared_length=2**63).SerializeToString())
    if not isinstance(read, Rejected):
        to_arrow(TABLES["frames"].columns, build_frame_row(0, 0, 0, read))


# ---------------------------------------------------------------- records in, files and packed rows out


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    made = Lake(str(tmp_path_factory.mktemp("lake")))
    made.create(("frames", *PARTS, "messages"))
    return made


def in_files(lake: Lake, files: Sequence[DataFile]) -> list[dict[str, object]]:
    """The rows in files, with times as µs."""
    found: list[dict[str, object]] = []
    for file in files:
        table = pq.read_table(Path(lake.table(file.table)) / file.name)
        for place, field in enumerate(table.schema):
            if pa.types.is_timestamp(field.type):
                table = table.set_column(place, field.name, table[field.name].cast(pa.int64()))
        assert table.num_rows == file.rows
        found += table.to_pylist()
    return found


class PackedRow(NamedTuple):
    kind: str
    early: bytes
    late: bytes
    row: MessageRow | FaultRow


class Made(NamedTuple):
    """What `pack_rows` makes of records."""

    rows: list[PackedRow]
    passed: DecodeResult
    frames: list[dict[str, object]]
    copies: list[dict[str, object]]
    subscriptions: list[dict[str, object]]
    controls: list[dict[str, object]]


Record = Frame | bytes | None


def batches_of(*records: tuple[int, int, Record]) -> Iterator[pa.RecordBatch]:
    """Records (partition, offset, value) as Arrow batches of two records."""
    values = [
        (part, at, 1_600_000_000_000_000 + at, value.SerializeToString() if isinstance(value, Frame) else value)
        for part, at, value in records
    ]
    types = {"partition": pa.int32(), "offset": pa.int64(), "stamp": pa.int64(), "value": pa.binary()}
    for start in range(0, len(values), 2):
        columns = zip(*values[start : start + 2], strict=True)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types.values(), strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, names=list(types))


def packed_batch(kind: str, data: bytes) -> pa.RecordBatch:
    """A row as Spark's operators give it on."""
    return pa.RecordBatch.from_pydict({"kind": pa.array([kind]), "data": pa.array([data], pa.binary())})


def first_packed(batches: Iterator[pa.RecordBatch], how: DecodeConfig, lake: Lake) -> Iterator[pa.RecordBatch]:
    with patch.object(transform, "compute_task_digest", lambda: TASK):
        yield from pack_rows(build_stages(how, lake).decode(batches), IDENTITIES, NOW)


def make(lake: Lake, *records: tuple[int, int, Record], how: DecodeConfig | None = None) -> Made:
    engines.check_records(list(batches_of(*records)), how or DecodeConfig("either"))
    rows: list[PackedRow] = []
    told: list[DecodeResult] = []
    for batch in first_packed(batches_of(*records), how or DecodeConfig("either"), lake):
        assert batch.schema.names == ["kind", "early", "late", "data", "seen_at"]
        assert batch.column("seen_at").cast(pa.int64()).to_pylist() == [NOW] * batch.num_rows
        for each in batch.to_pylist():
            (row,) = (item.row for item in unpack_rows([packed_batch(each["kind"], each["data"])], PACKED_TYPES))
            if each["kind"] == DECODE_RESULT:
                assert each["early"] == each["late"] == TASK
                assert isinstance(row, DecodeResult)
                told.append(row)
            else:
                assert not told, "what a task tells of itself comes last"
                assert isinstance(row, MessageRow | FaultRow)
                rows.append(PackedRow(each["kind"], each["early"], each["late"], row))
    (passed,) = told
    parts = {table: in_files(lake, [file for file in passed.parts if file.table == table]) for table in PARTS}
    return Made(rows, passed, in_files(lake, passed.frames), **parts)


def in_turn(*values: Record) -> list[tuple[int, int, Record]]:
    return [(3, 77 + number, value) for number, value in enumerate(values)]


# ---------------------------------------------------------------- subscriptions and controls


def control_rpc() -> RPC:
    made = RPC(
        subscriptions=[RPC.SubOpts(subscribe=True, topicid=CLAY), RPC.SubOpts(subscribe=False, topicIndex=1)],
        publish=[Message(data=b"garbage", topic=CLAY)],
    )
    made.control.ihave.add(topicIndex=1, messageIDs=[compute_peer_id(ANNA) + b"\0\1", bytes(32), b"?"])
    made.control.prune.add(topicID="elsewhere", backoff=60, peers=[PeerInfo(), PeerInfo()])
    made.control.graft.add(topicIndex=9)
    return made


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_entry_of_an_rpc_has_a_row_in_either_direction(lake: Lake, direction: str) -> None:
    bundles = BundleSet({"clay": [CLAY]})
    hello = write_hello(bundles)
    made = frame(payload=control_rpc().SerializeToString(), verdicts=b"", hello_in=hello, hello_out=hello)
    made.direction = Frame.IN if direction == "IN" else Frame.OUT
    rows = make(lake, (3, 77, made), how=DecodeConfig(bundles=bundles))
    one, two = rows.subscriptions
    assert one == {
        "network": "testnet-clay",
        "origin": "REPLAY",
        "connection": made.connection,
        "direction": direction,
        "local_peer": peer_text(compute_peer_id(ANNA)),
        "remote_peer": peer_text(compute_peer_id(BERT)),
        "observed_at": 1_700_000_000_123_456,
        "subscribe": True,
        "topic": CLAY,
        "topic_source": "name",
        "topic_index": None,
        "raw": None,
        "wire_bytes": 4 + len(CLAY) + 2,
        "kafka_partition": 3,
        "kafka_offset": 77,
        "entry_index": 0,
    }
    by_index = {"subscribe": False, "topic_source": "index", "topic_index": 1, "wire_bytes": 6, "entry_index": 1}
    assert two == one | by_index
    names = ("kind", "network", "topic", "topic_source", "topic_index", "message_id_count", "peer_count", "backoff")
    assert [tuple(row[name] for name in names) for row in rows.controls] == [
        ("IHAVE", "testnet-clay", CLAY, "index", 1, 3, None, None),
        ("GRAFT", "mainnet", None, "index", 9, None, None, None),
        ("PRUNE", "mainnet", "elsewhere", "name", None, None, 2, 60),
    ]
    assert [row["entry_index"] for row in rows.controls] == [0, 1, 2]
    signed_id = f"{peer_text(compute_peer_id(ANNA))}/0001"
    assert rows.controls[0]["message_ids"] == [signed_id, f"sha256/{bytes(32).hex()}", b"?".hex()]
    assert [row["raw"] for row in rows.controls] == [None, b"\x10\x09", None]
    assert len(rows.copies) == (direction == "IN")
    assert rows.passed.entries == {"SUBSCRIBE": 1, "UNSUBSCRIBE": 1, "IHAVE": 1, "GRAFT": 1, "PRUNE": 1}


@pytest.mark.parametrize(
    "changed",
    [{"declared_length": 5_000_000}, {"protocol": "bep50"}, {"payload": b""}, {"payload": b"\x1a\xff"}],
    ids=["cut", "a datagram", "the end of a connection", "no RPC"],
)
def test_a_frame_without_an_rpc_has_no_entries(lake: Lake, changed: dict[str, object]) -> None:
    made = make(lake, (3, 77, frame(**{"payload": control_rpc().SerializeToString(), **changed})))
    assert made.subscriptions == made.controls == []
    assert len(made.frames) == 1


def test_entries_beyond_what_is_read_are_one_fault(lake: Lake) -> None:
    payload = RPC(subscriptions=[RPC.SubOpts()] * 20_002).SerializeToString()
    sent = frame(payload=payload, verdicts=b"", hello_in=b"", hello_out=b"")
    made = make(lake, *in_turn(sent, sent))  # of a frame that comes twice, too
    assert len(made.subscriptions) == 20_000
    assert {row.early for row in made.rows} == {made.rows[0].early}
    assert {(row.kind, row.row[0]) for row in made.rows} == {(FAULT, "rpc_too_costly")}
    value = made.rows[0].row[3]
    assert isinstance(value, bytes)
    detail = "20002 subscriptions and control entries, of which the first 20000 are read"
    assert decode_quarantine(value).detail == detail


# ---------------------------------------------------------------- copies


def rpc(*messages: Message) -> bytes:
    return RPC(publish=messages).SerializeToString()


def copies(lake: Lake, made: Frame, bundles: BundleSet = NO_BUNDLES) -> list[dict[str, object]]:
    """Rows of `copies`, out of the file that a task wrote; what the decoder makes of the frame is the same."""
    how = DecodeConfig(bundles=bundles)
    items = [item for item in FrameDecoder(how).decode_frame(made, 3, 77) if item.copy is not None]
    found = make(lake, (3, 77, made), how=how).copies
    assert found == [named(TABLES["copies"].columns, build_copy_row(item, made)) for item in items]
    return found


def signed(topic: str, data: bytes = b"data", seqno: bytes = b"\0\1", key: Ed25519PrivateKey = ANNA) -> Message:
    message = Message(data=data, topic=topic, seqno=seqno)
    sign(message, key)
    return message


def test_every_message_in_a_frame_has_a_row(lake: Lake) -> None:
    messages = [signed(CLAY), Message(data=b"garbage", topic="/ceramic/mainnet"), Message()]
    made = frame(payload=rpc(*messages), verdicts=b"\1\4")
    first, second, third = copies(lake, made)
    assert first == {
        "network": "testnet-clay",
        "message_id": f"{peer_text(compute_peer_id(ANNA))}/0001",
        "remote_peer": peer_text(compute_peer_id(BERT)),
        "observed_at": 1_700_000_000_123_456,
        "verdict": "valid",
        "kafka_partition": 3,
        "kafka_offset": 77,
        "message_index": 0,
    }
    assert (second["message_id"], second["network"]) == ("sha256/" + hashlib.sha256(b"garbage").hexdigest(), "mainnet")
    assert [row["verdict"] for row in (first, second, third)] == ["valid", "against_policy", "not_checked"]
    assert [row["message_index"] for row in (first, second, third)] == [0, 1, 2]


def test_the_network_is_the_topics_else_the_frames(lake: Lake) -> None:
    payload = rpc(
        Message(topic=CLAY),
        Message(topic="elsewhere"),
        Message(topicIndex=1),
        Message(topic="?????"),
    ).replace(b"?????", b"abc\xff\xfe")
    assert [row["network"] for row in copies(lake, frame(payload=payload))] == [
        "testnet-clay",
        "mainnet",
        "mainnet",
        "mainnet",
    ]


def test_the_network_of_an_indexed_topic_is_that_of_its_name(lake: Lake) -> None:
    bundles = BundleSet({"clay": [CLAY]})
    message = signed(CLAY)
    message.ClearField("topic")
    message.topicIndex = 1
    made = frame(payload=rpc(message), hello_in=write_hello(bundles), hello_out=write_hello(bundles))
    (found,), (unknown,) = copies(lake, made, bundles), copies(lake, made)
    assert (found["network"], unknown["network"]) == ("testnet-clay", "mainnet")
    assert found["message_id"] == unknown["message_id"] == f"{peer_text(compute_peer_id(ANNA))}/0001"


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
def test_what_has_no_copies(lake: Lake, fields: dict[str, object]) -> None:
    made = frame(**fields)
    assert copies(lake, made) == []
    assert [row["payload"] for row in make(lake, (3, 77, made)).frames] == [fields["payload"]]


def test_what_is_no_copy_has_no_row() -> None:
    (fault,) = decode(b"\xff", 3, 77, 0, DecodeConfig())
    with pytest.raises(ValueError, match="not a message"):
        build_copy_row(fault, frame())


# ---------------------------------------------------------------- one decode for all tables


UPDATE = signed(CLAY, write_update(STREAM, TIP, MODEL))
ASKED = Message(data=write_query(STREAM), topic=CLAY)
ANSWER = signed(CLAY, write_response("id", {STREAM: TIP}), b"\0\2")
GARBAGE = signed(CLAY, b"garbage", b"\0\3")


def heard(*messages: Message, **fields: object) -> Frame:
    """A frame whose messages the bridge has not checked."""
    return frame(**{"payload": rpc(*messages), "verdicts": b"", "hello_in": b"", "hello_out": b"", **fields})


def test_the_rows_of_a_frame_are_in_the_file(lake: Lake) -> None:
    made = make(lake, (3, 77, frame()))
    assert made.frames == [named(TABLES["frames"].columns, build_frame_row(3, 77, 1_600_000_000_000_077, frame()))]


def test_a_message_and_a_fault_are_packed_with_what_they_are_known_by(lake: Lake) -> None:
    how = DecodeConfig("either")
    sent = heard(ANSWER, ASKED, GARBAGE)
    made = make(lake, *in_turn(sent))
    items = list(decode(sent.SerializeToString(), 3, 77, 0, how))
    assert [row.kind for row in made.rows] == ["messages", "messages", FAULT]
    for row, item in zip(made.rows, items, strict=True):
        if isinstance(item, DecodedMessage):
            assert {row.early, row.late} == set(compute_identities(item, "", how.unsigned_horizon))
            assert row.row == build_message_row(item)
        else:
            assert row.early == row.late == compute_fault_identity(item)
            ((_, expected),) = build_fault_rows(item)
            assert row.row == expected
    fault = made.rows[2].row
    assert isinstance(fault, FaultRow)
    reason, author, key, value = fault
    assert (reason, author) == ("invalid_json", peer_text(compute_peer_id(ANNA)))
    assert parse_quarantine_key(key)[:3] == (3, 77, 2)
    assert decode_quarantine(value).data == b"garbage"


def test_copies_of_a_message_are_all_kept_and_pass_the_task_once(lake: Lake) -> None:
    sent = [heard(UPDATE, UPDATE), heard(UPDATE, sequence=8), heard(UPDATE, connection=b"c" * 16)]
    made = make(lake, *in_turn(*sent))
    assert [(row["kafka_offset"], row["message_index"]) for row in made.copies] == [(77, 0), (77, 1), (78, 0), (79, 0)]
    assert [row.kind for row in made.rows] == ["messages"]
    assert made.passed.valid_copies == 4
    assert [row["kafka_offset"] for row in made.frames] == [77, 78, 79]


@pytest.mark.parametrize("echo_at", [0, 1, 2, None])
def test_a_published_batch_is_one_message_and_its_sent_frames_are_no_copies(lake: Lake, echo_at: int | None) -> None:
    batch = signed(CLAY, write_batch_update(Separator("model", MODEL), TIP))
    frames = [heard(batch, direction=Frame.OUT, sequence=n, connection=bytes([n]) * 16, verdicts=b"\1") for n in (1, 2)]
    if echo_at is not None:
        frames.insert(echo_at, heard(batch, sequence=9))
    made = make(lake, *in_turn(*frames))
    assert [(row.kind, row.row[0]) for row in made.rows] == [("messages", f"{peer_text(compute_peer_id(ANNA))}/0001")]
    echoes = [] if echo_at is None else [77 + echo_at]
    assert [row["kafka_offset"] for row in made.copies] == echoes
    assert made.passed.valid_copies == len(echoes)


def test_a_file_is_asked_for_every_copy(lake: Lake, tmp_path: Path) -> None:
    """A copy passed, and the micro-batch is done anew with an earlier copy beside it, as after `kiln recover`."""
    remembered = DedupStoreConfig(str(tmp_path / "remembered"), 1_000)
    later, earlier = (5, 90, heard(UPDATE, sequence=8)), (3, 77, heard(UPDATE))
    for records in ([later], [earlier, later], [earlier]):
        decoded = decode_records(batches_of(*records), DecodeConfig("either"), lake, TASK, native_core=False)
        chunks = (list(chunk.items) for chunk in decoded)
        new = chain.from_iterable(filter_new_copies(chunks, remembered, 0, Epoch("q", 0)))
        passed = [item.position for item in new if item.kind == "messages"]
        assert passed == (["5/90/0"] if later in records else [])


def test_chunks_are_small_in_number_and_by_the_frames_that_their_copies_keep_in_memory(lake: Lake) -> None:
    """Else a thousand small messages, each beside megabytes that nobody reads, could fill the memory."""
    large = [heard(signed(CLAY, b"{}", bytes((n,))), Message(data=b"x" * (5 << 20)), sequence=1 + n) for n in range(8)]
    small = [heard(ASKED, ANSWER, sequence=9 + n) for n in range(1_250)]
    for frames, lengths in ((large, [8, 8, 1]), (small, [1_000, 1_000, 501])):
        records = batches_of(*in_turn(*frames))
        chunks = decode_records(records, DecodeConfig("either"), lake, TASK, native_core=False)
        assert [len(chunk.items) for chunk in chunks] == lengths


def test_a_frame_that_comes_twice_is_written_once(lake: Lake) -> None:
    """The bridge was killed and sent it again. A fault in it is known as the one that was there."""
    sent, other = heard(UPDATE, GARBAGE), heard(GARBAGE, sequence=8)
    made = make(lake, *in_turn(sent, other, sent))
    assert [row["kafka_offset"] for row in made.frames] == [77, 78]
    assert [row["kafka_offset"] for row in made.copies] == [77, 77, 78]
    faults = [row.early for row in made.rows if row.kind == FAULT]
    assert (len(faults), len(set(faults))) == (3, 2)
    assert made.passed.valid_copies == 2
    assert made.passed.frame_ranges == {build_range_key(b"0123456789abcdef", "IN"): [(7, 8)]}


def test_a_task_says_what_it_has_read_of_each_partition(lake: Lake) -> None:
    records: list[tuple[int, int, Record]] = [
        *((0, 5 + n, heard(UPDATE, sequence=1 + n)) for n in range(3)),
        (2, 40, b"no frame"),
        (2, 41, None),
    ]
    made = make(lake, *records)
    assert made.passed.spans == {0: (5, 7), 2: (40, 41)}
    assert [row.kind for row in made.rows] == ["messages", FAULT, FAULT]
    assert {row.row[0] for row in made.rows[1:]} == {"frame_malformed"}
    assert [row["kafka_offset"] for row in made.frames] == [5, 6, 7]


def test_a_task_without_records_says_and_writes_nothing(lake: Lake) -> None:
    assert list(decode_records(batches_of(), DecodeConfig(), lake, TASK)) == []


def test_a_task_without_frames_writes_no_file(lake: Lake) -> None:
    made = make(lake, *in_turn(b"no frame"))
    assert (made.passed.frames, made.passed.parts) == ([], [])


def test_frames_of_many_messages_make_batches_of_bounded_length(lake: Lake) -> None:
    sent = (
        (0, number, heard(*(Message(data=write_keepalive(number * 4_000 + n, "1"), topic=CLAY) for n in range(4_000))))
        for number in range(3)
    )
    lengths = [batch.num_rows for batch in first_packed(batches_of(*sent), DecodeConfig("none"), lake)]
    assert max(lengths) == 5_000
    assert sum(lengths) == 12_001


def test_forty_thousand_empty_messages_are_five_thousand_rows_and_one_for_the_rest(lake: Lake) -> None:
    flood = heard()
    flood.payload = b"\x12\x00" * 40_000
    flood.verdicts = bytes(MAX_MESSAGES)
    with measure_cpu() as cost:
        made = make(lake, (0, 0, flood))
    assert cost.steps < 5e7
    assert Counter(row.row[0] for row in made.rows) == {"topic_missing": MAX_MESSAGES, "rpc_too_many_messages": 1}
    assert len({row.early for row in made.rows}) == MAX_MESSAGES + 1
    assert len(made.copies) == MAX_MESSAGES
    (frame,) = made.frames
    assert frame["payload"] == flood.payload


# ---------------------------------------------------------------- the second stage


class Second(NamedTuple):
    """What `written` makes of rows."""

    told: ArchiveOutput
    others: list[tuple[str, bytes | None, bytes]]
    messages: list[dict[str, object]]


def write(lake: Lake, *rows: tuple[str, bytes]) -> Second:
    batches = (packed_batch(kind, data) for kind, data in rows)
    output = build_stages(DecodeConfig(), lake).write(batches)
    found = [tuple(row.values()) for batch in output for row in batch.to_pylist()]
    kind, _, value = found.pop()
    assert kind == ARCHIVE_OUTPUT
    told = msgspec.msgpack.decode(value, type=ArchiveOutput)
    return Second(told, found, in_files(lake, told.messages))


def first_stage(lake: Lake, *values: Record) -> list[tuple[str, bytes]]:
    made = first_packed(batches_of(*in_turn(*values)), DecodeConfig("either"), lake)
    return [(row["kind"], row["data"]) for batch in made for row in batch.to_pylist()]


def as_read(row: tuple[object, ...]) -> dict[str, object]:
    """A row of `messages` as a file gives it back."""
    found = named(TABLES["messages"].columns, row)
    tips = found["tips"]
    return {**found, "tips": list(map(tuple, tips)) if isinstance(tips, list) else None}


def test_messages_are_in_the_file_as_they_were_decoded(lake: Lake) -> None:
    sent = heard(UPDATE, ANSWER, ASKED, Message(data=write_keepalive(5, "2.35.0", "0.9"), topic=CLAY))
    items = [
        item
        for item in decode(sent.SerializeToString(), 3, 77, 0, DecodeConfig("either"))
        if isinstance(item, DecodedMessage)
    ]
    found = write(lake, *first_stage(lake, sent))
    assert found.messages == [as_read(build_message_row(item)) for item in items]
    assert found.messages[1]["tips"] == [(STREAM, TIP)]
    assert found.told.counts == {"UPDATE": 1, "RESPONSE": 1, "QUERY": 1, "KEEPALIVE": 1}
    assert [kind for kind, _, _ in found.others] == [DECODE_RESULT]


def test_faults_go_on_to_quarantine_and_what_a_task_told_goes_on(lake: Lake) -> None:
    rows = first_stage(lake, heard(GARBAGE, ASKED), b"no frame")
    found = write(lake, *rows)
    (_, key, value), (_, other_key, other), (_, none, told) = found.others
    assert [kind for kind, _, _ in found.others] == [FAULT, FAULT, DECODE_RESULT]
    assert none is None
    assert key is not None
    assert other_key is not None
    assert (parse_quarantine_key(key)[:3], decode_quarantine(value).data) == ((3, 77, 0), b"garbage")
    assert (parse_quarantine_key(other_key)[:3], decode_quarantine(other).data) == ((3, 78, None), b"no frame")
    assert msgspec.msgpack.decode(told, type=DecodeResult).spans == {3: (77, 78)}
    assert (found.told.faults, found.told.counts) == (2, {"invalid_json": 1, "frame_malformed": 1, "QUERY": 1})


def test_what_decoded_and_what_did_not_is_counted_for_each_signer(lake: Lake) -> None:
    messages = [signed(CLAY, write_update(STREAM, TIP, MODEL), b"\0%c" % number) for number in range(3)]
    garbage = [signed(CLAY, b"garbage", b"\1%c" % number, key) for number, key in enumerate((ANNA, BERT, BERT))]
    unsigned = [ASKED, Message(data=b"garbage", topic=CLAY)]
    found = write(lake, *first_stage(lake, heard(*messages, *garbage, *unsigned)))
    assert sorted(found.told.tallies) == sorted(
        [AuthorTally(peer_text(compute_peer_id(ANNA)), 3, 1), AuthorTally(peer_text(compute_peer_id(BERT)), 0, 2)]
    )


def test_a_task_without_rows_says_that_it_wrote_nothing(lake: Lake) -> None:
    found = write(lake)
    assert (found.others, found.told) == ([], ArchiveOutput([], {}, 0, []))


numbers = count(1)
jsons = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from((STREAM, TIP, MODEL, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, "\ud800", "\0", "\U0001f600")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("typ", "stream", "doc", "tip", "model", "id", "tips", "ts", STREAM)), inner)
    ),
    max_leaves=8,
)


def mostly(name: str, good: object) -> st.SearchStrategy[dict[str, object]]:
    return st.just({name: good}) | jsons.map(lambda value: {name: value}) | st.just({})


contents = st.tuples(
    st.sampled_from((0, 1, 2, 3, 4)).map(lambda typ: {"typ": typ}),
    mostly("stream", STREAM),
    mostly("tip", TIP),
    mostly("model", MODEL),
    mostly("id", "id"),
    mostly("tips", {STREAM: TIP}),
    mostly("ts", 5),
    mostly("ver", "2.35.0"),
    mostly("ipfsVer", "0.9"),
    mostly("sep", "model/a"),
    mostly("batch", TIP),
).map(lambda parts: json.dumps({name: value for part in parts for name, value in part.items()}).encode())


@given(st.lists(contents | st.binary(max_size=30), max_size=5), st.integers(MIN_NANOS, MAX_NANOS))
def test_whatever_a_peer_sends_is_in_the_files_or_in_quarantine(lake: Lake, datas: list[bytes], at: int) -> None:
    sent = heard(*(Message(data=data, topic=CLAY) for data in datas), observed_at=at, sequence=next(numbers))
    items = list(decode(sent.SerializeToString(), 3, 77, 0, DecodeConfig("either")))
    found = write(lake, *first_stage(lake, sent))
    (told,) = (value for kind, _, value in found.others if kind == DECODE_RESULT)
    first: dict[tuple[bytes, ...], DecodedMessage] = {}
    for item in items:
        if isinstance(item, DecodedMessage):
            first.setdefault(compute_identities(item, "", 120_000_000), item)
    expected = [as_read(build_message_row(item)) for item in first.values()]
    assert found.messages == expected
    assert found.told.faults == sum(isinstance(item, RejectedMessage) for item in items)
    assert sum(file.rows for file in msgspec.msgpack.decode(told, type=DecodeResult).parts) == len(datas)
