"""kiln.pipelines.sink.transform: records of each topic to rows of the tables filled from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kiln.pipelines.delta.arrow_rows import RowBuffer, build_arrow_schema
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.kafka_ranges import RECORDS
from kiln.pipelines.runtime.row_packing import pack, pack_rows, unpack_rows
from kiln.pipelines.sink.rows import (
    LOG_TIME,
    RECEIVED_COLUMNS,
    ROW_TYPES,
    UpdatesRow,
    read_record,
    read_stored_identities,
)
from kiln.pipelines.sink.transform import (
    IDENTITY,
    OUTPUT_TABLES,
    SINK_FILES,
    apply_log_time,
    read_records,
    write_rows,
)
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.records import (
    TICK,
    BatchRecord,
    BlockRecord,
    Coordinates,
    Epoch,
    PublicationRecord,
    QuarantineRecord,
    Record,
    SeparatorRecord,
    StreamRecord,
    UpdateRecord,
    build_quarantine_key,
    encode,
)
from kiln.schemas.queries import QUERIES
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID
from kit.batch_blocks import write_blocks

TOPICS = QUERIES["sink"].reads
SEPARATOR = SeparatorRecord("model", "ka")
STREAMS = sorted(StreamID(3, compute_cid(b"genesis %d" % n)).text for n in range(2))
TIPS = sorted(compute_cid(b"tip %d" % n) for n in range(3))
NOW = 1_800_000_000_000_000


def update(separator: SeparatorRecord | None = SEPARATOR, author: str | None = "12D3author") -> UpdateRecord:
    return UpdateRecord(
        network="mainnet",
        origin="LIVE",
        separator=separator,
        separator_source="topic" if separator else None,
        stream=STREAMS[0],
        tip=cid_text(TIPS[0]),
        from_=author,
        message_id="12D3author/0001",
        epoch=Epoch("query", 3),
        frame=Coordinates(1, 2, 3),
        observed_at=1_700_000_000_000_001,
    )


(BLOCK,) = write_blocks({STREAMS[0]: TIPS[:2], STREAMS[1]: TIPS[2:]})
BATCH = BatchRecord("mainnet", "REPLAY", SEPARATOR, BLOCK.cid, BLOCK.data, NOW - 2_000_000, NOW - 1_000_000)
RECEIPT = PublicationRecord(
    batch_cid=BLOCK.cid,
    transport="gossipsub",
    published_at=1_700_000_000_000_002,
    topic="/ceramic/mainnet",
    target=None,
    peer_count=5,
    error=None,
)
FAULT = QuarantineRecord("rpc", "rpc_malformed", "3 bytes are not an RPC protobuf", b"\xff\0\1", 1_700_000_000_000_003)
STREAM = StreamRecord("mainnet", STREAMS[0], SEPARATOR, 1_700_000_000_000_004)
FETCHED = BlockRecord("mainnet", BLOCK.cid, 1_700_000_000_000_005, SEPARATOR, BLOCK.data)


def rows(
    topic: str, value: bytes | Record, key: bytes = b"", offset: int = 77, now: int = NOW
) -> list[tuple[str, dict[str, object]]]:
    """(table, row by column) of all that a record says; each row must fit its table."""
    found = []
    for table, identity, row in read_record(
        topic, 3, offset, now, key, value if isinstance(value, bytes) else encode(value)
    ):
        columns = TABLES[table].columns if table in TABLES else RECEIVED_COLUMNS
        assert identity
        buffer = RowBuffer(build_arrow_schema(columns))
        buffer.add(row)
        assert [batch.num_rows for batch in buffer.drain()] == [1]
        named = dict(zip((column.name for column in columns), row, strict=True))
        assert not [column.name for column in columns if not column.nullable and named[column.name] is None]
        found.append((table, named))
    return found


def identities(topic: str, value: bytes | Record, key: bytes = b"", offset: int = 77, now: int = NOW) -> list[object]:
    raw = value if isinstance(value, bytes) else encode(value)
    return [(table, identity) for table, identity, _ in read_record(topic, 3, offset, now, key, raw)]


def test_an_update() -> None:
    assert rows("updates", update()) == [
        (
            "updates",
            {
                "network": "mainnet",
                "origin": "LIVE",
                "message_id": "12D3author/0001",
                "from_peer": "12D3author",
                "separator_key": "model",
                "separator_value": "ka",
                "separator_source": "topic",
                "stream": STREAMS[0],
                "tip": cid_text(TIPS[0]),
                "observed_at": 1_700_000_000_000_001,
                "log_time": NOW,
                "log_partition": 3,
                "log_offset": 77,
            },
        ),
        (
            "tips",
            {
                "network": "mainnet",
                "stream": STREAMS[0],
                "tip": cid_text(TIPS[0]),
                "source": "update",
                "batch_cid": None,
                "observed_at": 1_700_000_000_000_001,
            },
        ),
    ]


def test_an_update_without_separator_or_author_is_kept() -> None:
    (_, row), _ = rows("updates", update(None, None))
    assert (row["separator_key"], row["separator_value"], row["separator_source"]) == (None, None, None)
    assert row["from_peer"] is None
    assert row["stream"] == STREAMS[0]


def test_a_batch_and_its_tips() -> None:
    (table, batch), *tips = rows("batches", BATCH)
    assert table == "batches"
    assert batch == {
        "batch_cid": BLOCK.cid,
        "network": "mainnet",
        "origin": "REPLAY",
        "separator_key": "model",
        "separator_value": "ka",
        "opened_at": NOW - 2_000_000,
        "closed_at": NOW - 1_000_000,
        "emitted_at": NOW,
        "stream_count": 2,
        "tip_count": 3,
        "block_bytes": len(BLOCK.data),
        "block": BLOCK.data,
    }
    assert tips == [
        ("batch_tips", {"batch_cid": BLOCK.cid, "stream": STREAMS[0], "tip": cid_text(TIPS[0])}),
        ("batch_tips", {"batch_cid": BLOCK.cid, "stream": STREAMS[0], "tip": cid_text(TIPS[1])}),
        ("batch_tips", {"batch_cid": BLOCK.cid, "stream": STREAMS[1], "tip": cid_text(TIPS[2])}),
    ]


def test_a_publication() -> None:
    assert rows("publications", RECEIPT) == [
        (
            "publications",
            {
                "batch_cid": BLOCK.cid,
                "transport": "gossipsub",
                "topic": "/ceramic/mainnet",
                "target": None,
                "peer_count": 5,
                "published_at": 1_700_000_000_000_002,
                "error": None,
            },
        )
    ]


@pytest.mark.parametrize("separator", [SEPARATOR, None])
def test_what_is_known_of_a_stream(separator: SeparatorRecord | None) -> None:
    without = None if separator else "sep_missing"
    ((table, row),) = rows("streams", StreamRecord("mainnet", STREAMS[0], separator, NOW, without=without))
    assert table == "streams"
    assert row == {
        "network": "mainnet",
        "stream": STREAMS[0],
        "separator_key": separator and separator.key,
        "separator_value": separator and separator.value,
        "source": "genesis",
    }


def test_a_block_of_somebody_elses_batch() -> None:
    assert rows("blocks", FETCHED) == [
        (
            "received",
            {
                "network": "mainnet",
                "stream": stream,
                "tip": cid_text(tip),
                "batch_cid": BLOCK.cid,
                "observed_at": 1_700_000_000_000_005,
                "separator_key": "model",
                "separator_value": "ka",
            },
        )
        for stream, tip in ((STREAMS[0], TIPS[0]), (STREAMS[0], TIPS[1]), (STREAMS[1], TIPS[2]))
    ]


def test_a_bad_entry_of_somebody_elses_block_is_quarantined_and_its_good_tips_are_taken() -> None:
    block = BLOCK.data.replace(b"\x64tips\xa2", b"\x64tips\xa3") + b"\x61a\x80"
    (_, first), *others, (table, row) = rows("blocks", structs.replace(FETCHED, block=block))
    assert [first["tip"], *(each["tip"] for _, each in others)] == [cid_text(tip) for tip in TIPS]
    assert (table, row["stage"], row["reason"], row["data"]) == ("quarantine", "sink", "entry_malformed", b"\x61a\x80")
    assert row["observed_at"] == FETCHED.observed_at
    assert BLOCK.cid in str(row["detail"])


def test_a_block_that_could_not_be_had_has_no_rows() -> None:
    assert rows("blocks", BlockRecord("mainnet", BLOCK.cid, NOW, SEPARATOR, None, "block_unavailable")) == []


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (build_quarantine_key(1, 2, 3), (1, 2, 3, None)),
        (build_quarantine_key(1, 2), (1, 2, None, None)),
        (BLOCK.cid.encode(), (None, None, None, BLOCK.cid)),
    ],
    ids=["message", "frame", "block"],
)
def test_what_is_in_quarantine(key: bytes, place: tuple[object, ...]) -> None:
    ((table, row),) = rows("quarantine", FAULT, key)
    assert table == "quarantine"
    assert (row["kafka_partition"], row["kafka_offset"], row["message_index"], row["cid"]) == place
    assert {name: row[name] for name in ("stage", "reason", "detail", "data", "observed_at")} == {
        "stage": "rpc",
        "reason": "rpc_malformed",
        "detail": "3 bytes are not an RPC protobuf",
        "data": b"\xff\0\1",
        "observed_at": 1_700_000_000_000_003,
    }


def test_the_column_cid_holds_cids_only() -> None:
    ((_, row),) = rows("quarantine", FAULT, b"updates/3/77")
    assert row["cid"] is None


# ---------------------------------------------------------------- what cannot be read

GOOD: dict[str, bytes] = {
    "updates": encode(update()),
    "batches": encode(BATCH),
    "publications": encode(RECEIPT),
    "quarantine": encode(FAULT),
    "streams": encode(STREAM),
    "blocks": encode(FETCHED),
}


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("value", [b"garbage", b"\xff\xfe", b"[]", b"{}", b"{", b'{"batch_cid": NaN}'])
def test_a_record_that_cannot_be_read_is_quarantined_itself(topic: str, value: bytes) -> None:
    ((table, row),) = rows(topic, value, b"1/2/3")
    assert table == "quarantine"
    assert (row["stage"], row["reason"], row["data"], row["observed_at"]) == ("sink", "record_malformed", value, NOW)
    assert str(row["detail"]).startswith(f"record 3/77 of {topic}: ")
    assert row["kafka_offset"] is None  # it came from no frame


@pytest.mark.parametrize("topic", TOPICS)
def test_text_that_is_not_utf8_is_quarantined(topic: str) -> None:
    value = GOOD[topic].replace(b"mai", b"ma\xff", 1).replace(b"rpc_", b"rpc\xff", 1)
    assert value != GOOD[topic]
    assert [table for table, _ in rows(topic, value, b"1/2/3")] == ["quarantine"]


@pytest.mark.parametrize("block", [b"", b"\xff", b"\xa0", b"\xa1\x64tips\x01", BLOCK.data[:-1], BLOCK.data + b"\0"])
def test_a_batch_whose_block_cannot_be_read_is_quarantined_whole(block: bytes) -> None:
    value = encode(BatchRecord("mainnet", "LIVE", SEPARATOR, BLOCK.cid, block, NOW, NOW + 1))
    ((table, row),) = rows("batches", value)
    assert (table, row["reason"], row["data"]) == ("quarantine", "record_malformed", value)


def test_another_fault_at_the_offset_of_an_earlier_topic_is_another_row() -> None:
    other = structs.replace(FAULT, data=b"another")
    identities = [
        identity
        for fault in (FAULT, FAULT, other)
        for _, identity, _ in read_record("quarantine", 0, 0, NOW, build_quarantine_key(1, 2), encode(fault))
    ]
    assert identities[0] == identities[1] != identities[2]


def test_a_quarantine_key_that_is_not_text_is_quarantined() -> None:
    ((table, row),) = rows("quarantine", FAULT, b"\xff")
    assert (table, row["reason"], row["data"]) == ("quarantine", "record_malformed", encode(FAULT))


def field_names(document: dict[str, object], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each field of a JSON document, those of nested documents included."""
    for name, value in document.items():
        yield (*at, name)
        if isinstance(value, dict):
            yield from field_names(value, (*at, name))


FIELDS = [(topic, path) for topic, value in GOOD.items() for path in field_names(json.loads(value))]


@pytest.mark.parametrize(("topic", "path"), FIELDS, ids=[f"{topic}-{'.'.join(path)}" for topic, path in FIELDS])
def test_a_record_with_a_misnamed_field_is_quarantined(topic: str, path: tuple[str, ...]) -> None:
    document = json.loads(GOOD[topic])
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    inner["y" + path[-1][1:]] = inner.pop(path[-1])
    value = json.dumps(document).encode()
    ((table, row),) = rows(topic, value, b"1/2/3")
    assert (table, row["stage"], row["reason"], row["data"]) == ("quarantine", "sink", "record_malformed", value)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_record_of_a_later_version_is_quarantined_and_the_detail_names_the_field(topic: str) -> None:
    value = GOOD[topic][:-1] + b',"since":"version 9"}'
    ((table, row),) = rows(topic, value, b"1/2/3")
    assert (table, row["reason"], row["data"]) == ("quarantine", "record_malformed", value)
    assert row["detail"] == f"record 3/77 of {topic}: Object contains unknown field `since`"


@pytest.mark.parametrize(
    ("topic", "record", "change", "detail"),
    [
        pytest.param(
            "blocks",
            FETCHED,
            {"block": None},
            "a block record has either the block or the reason why it is missing",
            id="neither a block nor a reason",
        ),
        pytest.param(
            "blocks",
            FETCHED,
            {"reason": "block_unavailable"},
            "a block record has either the block or the reason why it is missing",
            id="a block and a reason",
        ),
        pytest.param(
            "blocks",
            FETCHED,
            {"separator": None},
            "Expected `object`, got `null` - at `$.separator`",
            id="a block with no separator",
        ),
        pytest.param(
            "publications",
            RECEIPT,
            {"peer_count": 0},
            "a publication has either a peer_count or an error",
            id="a publication to nobody with no error",
        ),
        pytest.param(
            "publications",
            RECEIPT,
            {"error": "too old"},
            "a publication has either a peer_count or an error",
            id="a publication to peers with an error",
        ),
        pytest.param(
            "streams",
            STREAM,
            {"separator": None},
            "a stream needs either `separator` or `without`, the reason for having none, and not both",
            id="a stream with no separator and no reason",
        ),
        pytest.param(
            "streams",
            STREAM,
            {"without": "sep_missing"},
            "a stream needs either `separator` or `without`, the reason for having none, and not both",
            id="a stream with a separator and a reason why it has none",
        ),
    ],
)
def test_a_record_that_contradicts_itself_is_quarantined(
    topic: str, record: Record, change: dict[str, object], detail: str
) -> None:
    value = json.dumps(json.loads(encode(record)) | change).encode()
    ((table, row),) = rows(topic, value, b"1/2/3")
    assert (table, row["reason"], row["data"]) == ("quarantine", "record_malformed", value)
    assert row["detail"] == f"record 3/77 of {topic}: {detail}"


@pytest.mark.parametrize("topic", TOPICS)
def test_a_record_that_is_deep_where_nobody_reads_is_quarantined(topic: str) -> None:
    value = GOOD[topic][:-1] + b',"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    assert [table for table, _ in rows(topic, value, b"1/2/3")] == ["quarantine"]


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(b"1/" + b"9" * 5_000, id="offset of 5,000 digits"),
        pytest.param(b"1/%d" % 2**63, id="offset beyond a BIGINT"),
        pytest.param(b"%d/1" % 2**31, id="partition beyond an INT"),
    ],
)
def test_a_quarantine_key_with_a_number_beyond_its_column_stops_nothing(key: bytes) -> None:
    assert [table for table, _ in rows("quarantine", FAULT, key)] == ["quarantine"]


@given(st.sampled_from(TOPICS), st.binary(max_size=30), st.data())
def test_no_damage_to_a_record_stops_it_or_loses_it(topic: str, key: bytes, data: st.DataObject) -> None:
    value = bytearray(GOOD[topic])
    for _ in range(data.draw(st.integers(0, 3))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    assert rows(topic, bytes(value), key)


# ---------------------------------------------------------------- what makes a row one


def test_a_record_written_twice_is_one() -> None:
    for topic, value in GOOD.items():
        assert identities(topic, value, b"1/2/3") == identities(topic, value, b"1/2/3", offset=99, now=NOW + 1)


def test_two_malformed_records_are_two_though_they_are_equal() -> None:
    assert identities("updates", b"garbage", offset=1) != identities("updates", b"garbage", offset=2)


def test_an_update_is_known_by_its_message_and_a_tip_by_itself() -> None:
    again = update()
    again = UpdateRecord(
        **{name: getattr(again, name) for name in again.__struct_fields__ if name != "message_id"},
        message_id="other/0001",
    )
    (first, tip), (second, same) = identities("updates", update()), identities("updates", again)
    assert first != second
    assert tip == same


def test_a_batch_is_known_by_its_window_and_its_tips_by_the_block() -> None:
    later = BatchRecord("mainnet", "REPLAY", SEPARATOR, BLOCK.cid, BLOCK.data, NOW + 5_000_000, NOW + 6_000_000)
    (first, *tips), (second, *same) = identities("batches", BATCH), identities("batches", later)
    assert first != second
    assert tips == same


def test_faults_in_one_place_are_as_many_as_their_reasons() -> None:
    other = QuarantineRecord("rpc", "rpc_malformed", "another", b"", NOW)
    assert identities("quarantine", FAULT, b"1/2") != identities("quarantine", other, b"1/2")
    assert identities("quarantine", FAULT, b"1/2") != identities("quarantine", FAULT, b"1/3")


# ---------------------------------------------------------------- Arrow in, packed rows out

Record6 = tuple[str, int, int, int, bytes | None, bytes | None]
"""Topic, partition, offset, stamp, key, value."""


class PackedRow(NamedTuple):
    table: str
    identity: bytes
    row: tuple[object, ...]


def table_rows(records: Sequence[Record6]) -> list[PackedRow]:
    """As `every_row`, without what tells the clock."""
    return [row for row in every_row(records) if row.table != LOG_TIME]


def batches_of(records: Sequence[Record6]) -> Iterator[pa.RecordBatch]:
    names = ("topic", "partition", "offset", "stamp", "key", "value")
    types = (pa.string(), pa.int32(), pa.int64(), pa.int64(), pa.binary(), pa.binary())
    arrays = [pa.array(column, type=kind) for column, kind in zip(zip(*records, strict=True), types, strict=True)]
    yield pa.RecordBatch.from_arrays(arrays, names=names)


def every_row(records: Sequence[Record6]) -> list[PackedRow]:
    found = []
    for batch in pack_rows(read_records(batches_of(records)), IDENTITY, NOW):
        assert batch.schema.names == ["kind", "identity", "data", "seen_at"]
        for row in batch.to_pylist():
            assert row["seen_at"] == datetime.fromtimestamp(NOW // 1_000_000, UTC)
            data = msgspec.msgpack.decode(row["data"], type=ROW_TYPES[row["kind"]])
            found.append(PackedRow(row["kind"], row["identity"], data))
    return found


def test_each_row_is_packed_under_the_name_of_its_table() -> None:
    records = [(topic, 0, n, n, b"1/2/3", value) for n, (topic, value) in enumerate(GOOD.items())]
    found = table_rows(records)
    assert [row.table for row in found] == [
        "updates",
        "tips",
        "batches",
        "batch_tips",
        "batch_tips",
        "batch_tips",
        "publications",
        "quarantine",
        "streams",
        "received",
        "received",
        "received",
    ]
    said = [
        (table, row)
        for topic, _, offset, at, key, value in records
        for table, _, row in read_record(topic, 0, offset, at, key, value)
    ]
    assert [(row.table, row.row) for row in found] == said
    assert all(len(row.identity) == 16 for row in found)
    assert len({row.identity for row in found}) == len(found)


def test_a_tick_has_no_rows() -> None:
    assert table_rows([("updates", 0, 0, 5, None, TICK), ("updates", 0, 1, 6, None, None)]) == []


@pytest.mark.parametrize("value", [b"", None])
@pytest.mark.parametrize("topic", TOPICS)
def test_an_empty_record_that_is_no_tick_is_quarantined(topic: str, value: bytes | None) -> None:
    (row,) = table_rows([(topic, 0, 0, 5, b"1/2/3", value)])
    assert row.table == "quarantine"
    columns = [column.name for column in TABLES["quarantine"].columns]
    found = dict(zip(columns, row.row, strict=True))
    assert (found["reason"], found["data"]) == ("record_malformed", b"")


def log_times(records: Sequence[Record6]) -> list[object]:
    return [row.row.log_time for row in table_rows(records) if isinstance(row.row, UpdatesRow)]


def test_the_time_of_an_update_is_the_greatest_stamp_of_its_partition_so_far() -> None:
    value = GOOD["updates"]
    stamps = [(0, 20, value), (0, 30, TICK), (0, 10, value), (1, 10, value), (0, 40, value)]
    records = [("updates", partition, n, stamp, b"", each) for n, (partition, stamp, each) in enumerate(stamps)]
    assert log_times(records) == [20, 30, 10, 40]


def test_the_clock_of_each_partition_is_told_ticks_included() -> None:
    value = GOOD["updates"]
    stamps = [(0, 20, value), (0, 30, TICK), (0, 10, value), (1, 10, value)]
    records = [
        ("updates", partition, n, stamp, b"" if each else None, each)
        for n, (partition, stamp, each) in enumerate(stamps)
    ]
    told = [row.row for row in every_row(records) if row.table == LOG_TIME]
    assert sorted(told) == [(0, 30), (1, 10)]


def test_the_clock_of_another_micro_batch_is_another_row() -> None:
    """Were it not, the operator would drop it, and the clock would stand still."""
    (first,), (second,) = ([row.identity for row in every_row([("updates", 0, at, 20, None, TICK)])] for at in (1, 2))
    assert first != second


@pytest.mark.parametrize(("partition", "at", "found"), [(0, 10, 30), (0, 30, 30), (0, 40, 40), (1, 10, 10)])
def test_log_time_spans_micro_batches_and_never_goes_back(partition: int, at: int, found: int) -> None:
    ((_, _, row), _) = read_record("updates", partition, 77, at, b"", GOOD["updates"])
    assert isinstance(row, UpdatesRow)
    assert apply_log_time(row, {0: 30}) == row._replace(log_time=found)


# ---------------------------------------------------------------- packed rows in, files out


def test_rows_are_in_the_files_of_their_tables_and_the_rest_goes_on(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    lake.create(OUTPUT_TABLES)
    records = [(topic, 3, 70 + n, 500 + n, b"1/2/3", value) for n, (topic, value) in enumerate(GOOD.items())]
    rows = every_row(records)
    batch = pa.RecordBatch.from_pylist(
        [{"kind": row.table, "data": pack(row.row)} for row in rows],
        pa.schema([("kind", pa.string()), ("data", pa.binary())]),
    )
    *others, last = (
        row for made in write_rows(unpack_rows([batch], ROW_TYPES), lake, {3: 900}) for row in made.to_pylist()
    )
    assert [(row["kind"], row["data"]) for row in others] == [
        (row.table, pack(row.row)) for row in rows if row.table not in OUTPUT_TABLES
    ]
    assert last["kind"] == SINK_FILES
    files = msgspec.msgpack.decode(last["data"], type=list[DataFile])
    assert {file.table for file in files} == set(OUTPUT_TABLES)
    for file in files:
        arrow = build_arrow_schema(TABLES[file.table].columns)
        found = pq.read_table(tmp_path / file.table / file.name).cast(arrow)
        expected = [row.row for row in rows if row.table == file.table]
        if file.table == "updates":  # log time is later than the stamps of these records
            expected = [row._replace(log_time=900) for row in expected if isinstance(row, UpdatesRow)]
        columns = [
            pa.array(column, field.type) for column, field in zip(zip(*expected, strict=True), arrow, strict=True)
        ]
        assert found.equals(pa.Table.from_arrays(columns, schema=arrow))


def test_a_task_without_rows_writes_no_file(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    lake.create(OUTPUT_TABLES)
    (batch,) = write_rows((), lake, {})
    assert [tuple(row.values()) for row in batch.to_pylist()] == [(SINK_FILES, pack([]))]


def test_the_identities_of_records_are_known_from_their_rows(tmp_path: Path) -> None:
    """`kiln recover` rebuilds the deduplication state of `sink` from its tables."""
    lake = Lake(str(tmp_path))
    lake.create(QUERIES["sink"].tables)
    keys = (b"1/2/3", b"1/2", b"updates/3/77", BLOCK.cid.encode())
    records = [*((topic, value, b"1/2/3") for topic, value in GOOD.items()), ("updates", b"garbage", b"")]
    records += [("quarantine", encode(FAULT), key) for key in keys]
    listed = [(topic, 3, number, NOW, key, value) for number, (topic, value, key) in enumerate(records)]
    columns = zip(*listed, strict=True)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, RECORDS, strict=True)], schema=RECORDS
    )
    decoded = [row for row in read_records(iter([batch])) if row.kind != LOG_TIME]
    outputs = [each for batch in write_rows(decoded, lake, {}) for each in batch.to_pylist()]
    (written,) = [each["data"] for each in outputs if each["kind"] == SINK_FILES]
    for number, file in enumerate(msgspec.msgpack.decode(written, type=list[DataFile])):
        DeltaRsCommits(lake).commit(file.table, [file], WriteId("query", number))
    stored = set(read_stored_identities(lake))
    assert {row.kind for row in decoded} >= set(QUERIES["sink"].tables)
    assert {row.identities for row in decoded if row.kind in QUERIES["sink"].tables} <= stored
