"""A record at which Kiln itself fails goes to quarantine, and all others go on: each task, with a fault put into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kiln.pipelines.archive import record_decoder
from kiln.pipelines.archive import rows as archive_rows
from kiln.pipelines.archive import transform as archive
from kiln.pipelines.archive.rows import CopyRow, MessageRow, build_control_rows, build_message_row
from kiln.pipelines.backfill import copies as history_copies
from kiln.pipelines.backfill.copies import RunTarget
from kiln.pipelines.backfill.terms import TimeRange
from kiln.pipelines.batch import offset_range as stretch
from kiln.pipelines.batch.batching import BatchConfig, BatchOutput, batch_offset_ranges
from kiln.pipelines.batch.windows import PartitionWindows
from kiln.pipelines.decode import decoder as decode
from kiln.pipelines.decode.breaker import AuthorTally
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.decode.frame_row import FrameRow, build_frame_row
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.row_packing import UniqueRow
from kiln.pipelines.sink import rows as sink_rows
from kiln.pipelines.sink import transform as sink
from kiln.pipelines.updates import row_builder
from kiln.pipelines.updates import transform as updates
from kiln.pipelines.updates.separators import SeparatorConfig, resolve_separator
from kiln.schemas.kafka.records import (
    Coordinates,
    Epoch,
    SeparatorRecord,
    UpdateRecord,
    decode_batch,
    decode_quarantine,
    decode_update,
    encode,
)
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.batch_block import read_block
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import compute_peer_id, peer_text, sign
from kiln.schemas.wire.pubsub import read_message, write_query, write_update
from kiln.schemas.wire.streamid import StreamID
from kit.plain_batcher import read_range

MODEL = StreamID(2, compute_cid(b"model")).text
STREAMS = [StreamID(3, compute_cid(b"genesis %d" % number)).text for number in range(3)]
TIPS = [cid_text(compute_cid(b"tip %d" % number)) for number in range(3)]
TOPIC = "/ceramic/local-test"
BAD = 1
"""The record, of three, at which the task fails."""

Function = TypeVar("Function", bound=Callable[..., object])


def failing(function: Callable[..., object], marker: str, error: Exception) -> Callable[..., object]:
    """The function, which raises where one of its arguments says the marker."""

    def fails(*arguments: object) -> object:
        if any(marker in repr(argument) for argument in arguments):
            raise error
        return function(*arguments)

    return fails


def frames(*datas: bytes) -> list[Frame]:
    """A frame for each message."""
    return [
        Frame(
            network="local-test",
            connection=bytes(16),
            remote_peer=b"peer",
            observed_at=1_700_000_000_000_000_000 + number,
            sequence=1 + number,
            payload=RPC(publish=[Message(data=data, topic=TOPIC)]).SerializeToString(),
        )
        for number, data in enumerate(datas)
    ]


UPDATES = frames(*(write_update(stream, tip, MODEL) for stream, tip in zip(STREAMS, TIPS, strict=True)))


def batches_of(*values: bytes, **more: object) -> Iterator[pa.RecordBatch]:
    """Records 77, 78 … of partition 3."""
    count = len(values)
    columns = {
        "partition": pa.array([3] * count, pa.int32()),
        "offset": pa.array(range(77, 77 + count), pa.int64()),
        "stamp": pa.array([1_700_000_000_000_000] * count, pa.int64()),
        **{name: pa.array([value] * count) for name, value in more.items()},
        "value": pa.array(values, pa.binary()),
    }
    return iter([pa.RecordBatch.from_pydict(columns)])


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"))
    made.create(("frames", *record_decoder.PARTS, "messages", *sink.OUTPUT_TABLES))
    return made


def column(lake: Lake, files: list[DataFile], table: str, name: str) -> list[object]:
    return [
        value
        for file in files
        if file.table == table
        for value in pq.read_table(Path(lake.table(table)) / file.name)[name].to_pylist()
    ]


def archive_batches(lake: Lake, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The output of a task of the query `archive`."""
    config = DecodeConfig("either")
    writer = archive.OutputWriter(config, lake)
    chunks = record_decoder.decode_records(batches, config, lake, b"task", native_core=False)
    return chain(writer.write(item for chunk in chunks for item in chunk.items), writer.finish())


def archived(lake: Lake, *records: Frame) -> tuple[list[DataFile], list[tuple[bytes, bytes]]]:
    """The files of the query `archive`, and key and value of its records for quarantine."""
    batches = batches_of(*(record.SerializeToString() for record in records))
    rows = [row for batch in archive_batches(lake, batches) for row in batch.to_pylist()]
    files: list[DataFile] = []
    for row in rows:
        if row["kind"] == record_decoder.DECODE_RESULT:
            passed = msgspec.msgpack.decode(row["value"], type=record_decoder.DecodeResult)
            files += passed.frames + passed.parts
        elif row["kind"] == archive.ARCHIVE_OUTPUT:
            files += msgspec.msgpack.decode(row["value"], type=archive.ArchiveOutput).messages
    return files, [(row["key"], row["value"]) for row in rows if row["kind"] == record_decoder.FAULT]


@pytest.mark.parametrize(
    ("module", "function", "stage", "key", "whole", "has_frame"),
    [
        (decode, "read_message", "decode", b"3/78/0", False, True),
        (decode, "list_messages", "decode", b"3/78", False, True),
        (archive_rows, "read_frame", "archive", b"3/78", True, False),
        (archive_rows, "build_frame_row", "archive", b"3/78", True, False),
        (archive_rows, "build_copy_row", "archive", b"3/78", True, True),
        (archive, "build_message_row", "archive", b"3/78/0", False, True),
    ],
)
@pytest.mark.parametrize(
    "error", [OverflowError("too large"), AssertionError(), msgspec.ValidationError("no"), KeyError(1)]
)
def test_archive_goes_on(
    module: object,
    function: str,
    stage: str,
    key: bytes,
    whole: bool,
    has_frame: bool,
    error: Exception,
    lake: Lake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, function, failing(getattr(module, function), TIPS[BAD], error))
    files, [(found_key, value)] = archived(lake, *UPDATES)
    fault = decode_quarantine(value)
    assert (found_key, fault.stage, fault.reason) == (key, stage, "processing_failed")
    assert fault.detail.startswith(type(error).__name__)
    assert "test_one_bad_record.py" in fault.detail
    assert TIPS[BAD].encode() in fault.data
    assert (fault.data == UPDATES[BAD].SerializeToString()) == whole
    assert column(lake, files, "messages", "tip") == [TIPS[0], TIPS[2]]
    assert column(lake, files, "frames", "kafka_offset") == ([77, 78, 79] if has_frame else [77, 79])


def test_the_other_messages_of_the_frame_go_on(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    (frame,) = frames(b"")
    published = [Message(data=write_query(stream), topic=TOPIC) for stream in STREAMS]
    frame.payload = RPC(publish=published).SerializeToString()
    monkeypatch.setattr(decode, "read_message", failing(read_message, STREAMS[BAD], TypeError()))
    files, [(key, _)] = archived(lake, frame)
    assert key == b"3/77/1"
    assert column(lake, files, "messages", "stream") == [STREAMS[0], STREAMS[2]]


def test_a_fault_of_kilns_own_in_a_good_message_counts_for_the_breaker(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a new build fails at all messages, `archive` is to be held, and not to go on with nothing but faults."""
    key = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
    message = Message(data=write_query(STREAMS[BAD]), topic=TOPIC, seqno=bytes(8))
    sign(message, key)
    (frame,) = frames(b"")
    frame.payload = RPC(publish=[message]).SerializeToString()
    monkeypatch.setattr(decode, "read_message", failing(read_message, STREAMS[BAD], TypeError()))
    output = archive_batches(lake, batches_of(frame.SerializeToString()))
    rows = [row for batch in output for row in batch.to_pylist()]
    (wrote,) = (row["value"] for row in rows if row["kind"] == archive.ARCHIVE_OUTPUT)
    assert msgspec.msgpack.decode(wrote, type=archive.ArchiveOutput).tallies == [
        AuthorTally(peer_text(compute_peer_id(key)), 0, 1)
    ]


@pytest.mark.parametrize(
    ("module", "function", "table", "key"),
    [
        (archive_rows, "build_frame_row", "frames", b"3/78"),
        (archive_rows, "build_copy_row", "copies", b"3/78/0"),
        (archive, "build_message_row", "messages", b"3/78/0"),
    ],
)
def test_a_row_that_its_table_cannot_hold_is_quarantined_alone(
    module: object, function: str, table: str, key: bytes, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Callable[..., FrameRow | CopyRow | MessageRow] = getattr(module, function)

    def beyond_a_bigint(*arguments: object) -> FrameRow | CopyRow | MessageRow:
        row = make(*arguments)
        if TIPS[BAD] not in repr(arguments):
            return row
        return row._replace(kafka_offset=2**70) if table == "frames" else row._replace(observed_at=2**70)

    monkeypatch.setattr(module, function, beyond_a_bigint)
    files, [(found_key, value)] = archived(lake, *UPDATES)
    assert decode_quarantine(value).reason == "processing_failed"
    assert found_key == (b"3/%d" % 2**70 if table == "frames" else key)
    assert len(column(lake, files, table, "observed_at")) == 2


def test_entries_that_cannot_be_read_keep_no_message_back(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = failing(build_control_rows, TIPS[BAD], OverflowError("too large"))
    monkeypatch.setattr(archive_rows, "build_control_rows", fails)
    sent = [Frame.FromString(each.SerializeToString()) for each in UPDATES]
    for each in sent:
        each.payload += RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid=TOPIC)]).SerializeToString()
    files, [(key, value)] = archived(lake, *sent)
    assert (key, decode_quarantine(value).reason) == (b"3/78", "processing_failed")
    assert column(lake, files, "messages", "tip") == TIPS


@pytest.mark.parametrize("error", [OSError("disk"), MemoryError(), RuntimeError("no store")])
def test_what_is_no_fault_of_a_record_stops_the_task(
    error: Exception, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark then tries again; a record is not given up because a disk was full."""
    monkeypatch.setattr(archive_rows, "build_frame_row", failing(build_frame_row, TIPS[BAD], error))
    with pytest.raises(type(error)):
        archived(lake, *UPDATES)
    assert not isinstance(error, PROCESSING_ERRORS)


def test_updates_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        row_builder, "resolve_separator", failing(resolve_separator, STREAMS[BAD], OverflowError("too large"))
    )
    batches = batches_of(*(frame.SerializeToString() for frame in UPDATES))
    rows = list(updates.build_copies(batches, DecodeConfig("either"), SeparatorConfig(), Epoch("query", 3)))
    assert [row.topic for row in rows] == ["updates", "quarantine", "updates"]
    fault = decode_quarantine(rows[1].value)
    assert (rows[1].key, fault.stage, fault.reason) == (b"3/78/0", "updates", "processing_failed")
    assert TIPS[BAD].encode() in fault.data
    assert len({row.identity for row in rows}) == 3


def update(number: int) -> bytes:
    return encode(
        UpdateRecord(
            network="local-test",
            origin="LIVE",
            separator=SeparatorRecord("model", "ka"),
            separator_source="topic",
            stream=STREAMS[number],
            tip=TIPS[number],
            from_=None,
            message_id=f"message {number}",
            epoch=Epoch("query", 3),
            frame=Coordinates(1, 2, number),
            observed_at=1_700_000_000_000_000,
        )
    )


def batched(*records: bytes) -> list[BatchOutput]:
    numbers = range(len(records))
    read = read_range([77 + at for at in numbers], [1_700_000_000_000_000 + at for at in numbers], records)
    closing = read_range([99], [1_800_000_000_000_000], [b""])
    windows = PartitionWindows(1_000_000)
    return list(batch_offset_ranges(windows, 3, (read, closing), BatchConfig().block_limit))


def test_batch_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretch, "decode_update", failing(decode_update, STREAMS[BAD], OverflowError("x")))
    outputs = batched(*map(update, range(3)))
    (fault,) = (output for output in outputs if output.topic == "quarantine")
    record = decode_quarantine(fault.value)
    assert (fault.key, record.stage, record.reason) == (b"updates/3/78", "batch", "processing_failed")
    assert record.data == update(BAD)
    (block,) = (output.value for output in outputs if output.topic == "batches")
    assert len(read_block(decode_batch(block).block)) == 2


@given(st.integers(5, 8))
def test_an_update_as_long_as_a_topic_takes_fits_quarantine(mebibytes: int) -> None:
    """In one record, base64 would make it longer than the broker takes, and the query would end at each start."""
    value = b"{" * (mebibytes << 20)
    faults = [output for output in batched(value) if output.topic == "quarantine"]
    assert max(len(fault.value) for fault in faults) < 8 << 20
    assert b"".join(decode_quarantine(fault.value).data for fault in faults) == value


def test_sink_goes_on(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = failing(sink_rows._read_update, STREAMS[BAD], OverflowError("x"))
    monkeypatch.setitem(sink_rows._READERS, "updates", fails)
    batches = batches_of(*map(update, range(3)), topic="updates", key=b"key")
    order = ["topic", "partition", "offset", "stamp", "key", "value"]
    files = written_by_sink(sink.read_records(each.select(order) for each in batches), lake)
    assert column(lake, files, "updates", "tip") == [TIPS[0], TIPS[2]]
    assert column(lake, files, "quarantine", "reason") == ["processing_failed"]
    assert column(lake, files, "quarantine", "data") == [update(BAD)]
    (detail,) = column(lake, files, "quarantine", "detail")
    assert str(detail).startswith("record 3/78 of updates: OverflowError")


def written_by_sink(rows: Iterable[UniqueRow[object]], lake: Lake) -> list[DataFile]:
    told = [row for batch in sink.write_rows(rows, lake, {}) for row in batch.to_pylist()]
    (wrote,) = (row["data"] for row in told if row["kind"] == sink.SINK_FILES)
    return msgspec.msgpack.decode(wrote, type=list[DataFile])


def test_a_row_that_its_table_cannot_hold_does_not_stop_sink(lake: Lake) -> None:
    receipts = [("cid", "gossipsub", "topic", None, peers, 1_000_000, None) for peers in (1, 2**70, 3)]
    files = written_by_sink([UniqueRow("publications", (), "", row, 0) for row in receipts], lake)
    assert column(lake, files, "publications", "peer_count") == [1, 3]
    (detail,) = column(lake, files, "quarantine", "detail")
    assert "publications" in str(detail)
    assert column(lake, files, "quarantine", "reason") == ["processing_failed"]


def test_a_backfill_goes_on(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_copies, "build_message_row", failing(build_message_row, TIPS[BAD], ValueError("no")))
    config = DecodeConfig("either")
    decoder, copies = (
        decode.FrameDecoder(config),
        history_copies.CopyDecoder(config, RunTarget(lake, lake, TimeRange(0, 1))),
    )
    found = [
        copies._hold(item)
        for at, frame in enumerate(UPDATES)
        for item in decoder.decode_frame(frame, 3, 77 + at)
        if isinstance(item, decode.DecodedMessage)
    ]
    (fault,) = (item for item in found if isinstance(item, decode.RejectedMessage))
    assert (fault.ref, fault.reason) == ((3, 78, 0), "processing_failed")
    assert Message.FromString(fault.data) == RPC.FromString(UPDATES[BAD].payload).publish[0]
    assert len(found) == 3


# ---------------------------------------------------------------- Arrow

NUMBERS = pa.schema([("number", pa.int32()), ("text", pa.string())])


@given(st.lists(st.integers(-(2**33), 2**33), max_size=40), st.integers(1, 7))
def test_rows_that_cannot_be_converted_are_refused_one_by_one(numbers: list[int], most: int) -> None:
    refused: list[object] = []
    buffer = RowBuffer(NUMBERS, most, lambda row, error: refused.append(row[0]))
    kept: list[int] = []
    for number in numbers:
        if buffer.add((number, "x")):
            kept += (each for batch in buffer.drain() for each in batch["number"].to_pylist())
    kept += (each for batch in buffer.drain() for each in batch["number"].to_pylist())
    fits = [-(2**31) <= number < 2**31 for number in numbers]
    assert kept == [number for number, fit in zip(numbers, fits, strict=True) if fit]
    assert refused == [number for number, fit in zip(numbers, fits, strict=True) if not fit]


@pytest.mark.slow
def test_rows_of_more_bytes_than_a_column_holds_are_several_batches() -> None:
    """5,000 rows of one frame with a value of 600,000 bytes were: Arrow holds 2 GiB in a column of a batch."""
    text = "x" * 600_000
    buffer = RowBuffer(pa.schema([("text", pa.string())]))
    for _ in range(4_000):
        buffer.add((text,))
    assert sum(batch.num_rows for batch in buffer.drain()) == 4_000


def test_a_value_that_repeats_is_in_memory_once(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[pa.RecordBatch] = []
    monkeypatch.setattr(TableFiles, "_write", lambda self, batch: written.append(batch))
    files = TableFiles(lake, "copies")
    for number in range(5_000):
        files.add(("n" * 4_000, f"message {number}", "peer", 1_000_000, "valid", 3, 77, number))
    files.close()
    assert sum(batch.num_rows for batch in written) == 5_000
    assert sum(batch.nbytes for batch in written) < 1_000_000
