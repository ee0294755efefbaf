"""kiln.pipelines.delta.arrow_rows: table columns as Arrow and as Spark DDL, and rows on their way to Arrow."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.pipelines.archive import transform as archive
from kiln.pipelines.archive.rows import ControlRow, CopyRow, MessageRow, SubscriptionRow
from kiln.pipelines.decode.frame_row import FrameRow
from kiln.pipelines.delta.arrow_rows import RowBuffer, build_arrow_schema, build_ddl, select_columns
from kiln.pipelines.runtime.row_packing import UniqueRow, build_packed_ddl, pack, pack_rows, unpack_rows
from kiln.pipelines.sink import transform as sink
from kiln.pipelines.sink.rows import RECEIVED_COLUMNS, ROW_TYPES, ReceivedTip
from kiln.schemas.delta.tables import TABLES, Column

PAIR = build_arrow_schema((Column("number", "bigint", ""), Column("data", "binary", "")))

# Types of Delta (PROTOCOL.md, Primitive Types) and what Arrow calls them; a timestamp is in UTC.
ARROW = {
    "string": "string",
    "binary": "binary",
    "int": "int32",
    "bigint": "int64",
    "boolean": "bool",
    "timestamp": "timestamp[us, tz=UTC]",
    "map<string,string>": "map<string, string>",
    "array<string>": "list<item: string>",
}


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_table_has_an_arrow_schema(name: str) -> None:
    schema = build_arrow_schema(TABLES[name].columns)
    assert [(field.name, str(field.type)) for field in schema] == [
        (column.name, ARROW[column.type]) for column in TABLES[name].columns
    ]


def test_ddl_names_columns_and_types_in_order() -> None:
    assert build_ddl(select_columns(TABLES["batch_tips"])) == "batch_cid string, stream string, tip string"
    assert build_ddl((Column("tips", "map<string,string>", "a comment, with commas"),)) == "tips map<string,string>"


def test_columns_by_name_come_in_the_order_named() -> None:
    found = select_columns(TABLES["batches"], "tip_count", "batch_cid")
    assert [(column.name, column.type) for column in found] == [("tip_count", "int"), ("batch_cid", "string")]
    assert select_columns(TABLES["batches"]) == TABLES["batches"].columns


@pytest.mark.parametrize("identities", [archive.IDENTITIES, sink.IDENTITY])
def test_packed_rows_are_as_spark_is_told(identities: tuple[str, ...]) -> None:
    """Names and types in one order, and no name twice."""
    item = UniqueRow("kind", (b"digest of 16 byt",) * len(identities), "3/77", (1, "a", None, b"\xff"), 1)
    (batch,) = pack_rows([item], identities, 1_700_000_000_123_456)
    types = {"string": pa.string(), "binary": pa.binary(), "timestamp": pa.timestamp("us", tz="UTC")}
    told = [pair.split(" ") for pair in build_packed_ddl(identities).split(", ")]
    assert [(field.name, field.type) for field in batch.schema] == [(name, types[kind]) for name, kind in told]
    assert len({field.name for field in batch.schema}) == len(told)
    (row,) = batch.to_pylist()
    assert row["kind"] == "kind"
    assert {row[name] for name in identities} == {b"digest of 16 byt"}
    assert row["seen_at"] == datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
    (unpacked,) = unpack_rows([batch.select(["kind", "data"])], {"kind": list[object]})
    assert unpacked.row == [1, "a", None, b"\xff"]


values = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=5) | st.text(max_size=5)


@given(st.lists(values | st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=3)))
def test_a_packed_row_comes_out_as_it_went_in_but_for_tuples(row: list[object]) -> None:
    assert msgspec.msgpack.decode(pack(tuple(row))) == [
        [list(pair) for pair in value] if isinstance(value, list) else value for value in row
    ]


ROWS = {
    "frames": FrameRow,
    "copies": CopyRow,
    "messages": MessageRow,
    "subscriptions": SubscriptionRow,
    "controls": ControlRow,
    **{kind: row for kind, row in ROW_TYPES.items() if kind in TABLES},
}


@pytest.mark.parametrize("table", sorted(ROWS))
def test_a_row_has_the_columns_of_its_table_in_their_order(table: str) -> None:
    fields = msgspec.inspect.type_info(ROWS[table])
    assert isinstance(fields, msgspec.inspect.NamedTupleType)
    assert [field.name for field in fields.fields] == [column.name for column in TABLES[table].columns]


def test_a_received_tip_has_the_columns_that_spark_is_told() -> None:
    assert list(ReceivedTip._fields) == [column.name for column in RECEIVED_COLUMNS]


def test_packed_rows_come_after_as_many_bytes_as_rows_of_a_table() -> None:
    items = (UniqueRow("kind", (b"",), f"0/{at}", (bytes(5 << 20),), 0) for at in range(5))
    assert [batch.num_rows for batch in pack_rows(items, sink.IDENTITY, 0)] == [4, 1]


def test_the_schema_of_a_table_s_file_says_what_must_be_there() -> None:
    columns = (Column("a", "string", "", nullable=False), Column("b", "string", "", nullable=True))
    assert [field.nullable for field in build_arrow_schema(columns, strict=True)] == [False, True]
    assert [field.nullable for field in build_arrow_schema(columns)] == [True, True]


@given(st.lists(st.tuples(st.none() | st.integers(-(2**63), 2**63 - 1), st.none() | st.binary(max_size=5))))
def test_rows_come_out_as_they_went_in(rows: list[tuple[int | None, bytes | None]]) -> None:
    buffer = RowBuffer(PAIR)
    for row in rows:
        buffer.add(row)
    batches = list(buffer.drain())
    assert [tuple(row.values()) for batch in batches for row in batch.to_pylist()] == rows
    assert all(batch.schema == PAIR for batch in batches)


def test_what_was_drained_does_not_come_again_and_nothing_is_no_batch() -> None:
    buffer = RowBuffer(PAIR)
    assert list(buffer.drain()) == []
    buffer.add((1, b"a"))
    assert sum(batch.num_rows for batch in buffer.drain()) == 1
    assert list(buffer.drain()) == []
    buffer.add((2, b"b"))
    assert [batch.to_pylist() for batch in buffer.drain()] == [[{"number": 2, "data": b"b"}]]


def drained(rows: int, size: int) -> list[int]:
    """Rows of each batch, drained whenever the buffer asks for it."""
    buffer, found = RowBuffer(PAIR), []
    for number in range(rows):
        if buffer.add((number, b""), size):
            found += [batch.num_rows for batch in buffer.drain()]
    return [*found, *(batch.num_rows for batch in buffer.drain())]


def test_many_rows_make_batches_of_bounded_length() -> None:
    assert drained(100_000, 0) == [5_000] * 20
    assert drained(5_001, 0) == [5_000, 1]


def test_large_rows_make_batches_of_bounded_size() -> None:
    assert drained(10, 4 << 20) == [4, 4, 2]
    assert drained(3, 64 << 20) == [1, 1, 1]


def test_bytes_are_counted_anew_after_a_drain() -> None:
    buffer = RowBuffer(PAIR)
    assert not buffer.add((1, b""), (16 << 20) - 1)
    list(buffer.drain())
    assert not buffer.add((2, b""), (16 << 20) - 1)


def test_times_are_microseconds_in_utc() -> None:
    buffer = RowBuffer(build_arrow_schema((Column("at", "timestamp", ""),)))
    buffer.add((1_700_000_000_123_456,))
    (batch,) = buffer.drain()
    assert batch.column(0).to_pylist() == [datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)]


def test_maps_lists_and_structs_are_taken() -> None:
    schema = pa.schema(
        [
            *build_arrow_schema((Column("tips", "map<string,string>", ""), Column("topics", "array<string>", ""))),
            ("row", pa.struct(list(PAIR))),
        ]
    )
    buffer = RowBuffer(schema)
    buffer.add(([("a", "b")], ["c"], {"number": 1, "data": b"d"}))
    buffer.add((None, None, None))
    buffer.add(([], [], {"number": None, "data": None}))
    (batch,) = buffer.drain()
    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        ([("a", "b")], ["c"], {"number": 1, "data": b"d"}),
        (None, None, None),
        ([], [], {"number": None, "data": None}),
    ]


def test_a_row_that_does_not_fit_the_schema_is_an_error() -> None:
    """And never columns that moved by one."""
    buffer = RowBuffer(PAIR)
    buffer.add((1, b"a", "more"))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        list(buffer.drain())
