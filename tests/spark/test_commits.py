"""Tables that delta-rs commits, on a real Spark (decisions 7 and 18): Spark reads them as deltalake and DuckDB do, and
its own writer knows what was committed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute  # pa.compute
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake, SchemaChangedError, list_stats_columns
from kiln.pipelines.delta.tables import read_table, write_files
from kiln.schemas.delta.tables import TABLES

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

TABLE = "tips"
COLUMNS = [column.name for column in TABLES[TABLE].columns]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    lake.create([TABLE])
    return lake


def row(stream: str, *, network: str = "n", batch_cid: str | None = None, at: int = 0) -> tuple[object, ...]:
    named: dict[str, object] = {
        "network": network,
        "stream": stream,
        "tip": "t",
        "source": "update",
        "batch_cid": batch_cid,
    }
    named["observed_at"] = at
    return tuple(named[name] for name in COLUMNS)


def file_of(lake: Lake, *rows: tuple[object, ...]) -> DataFile:
    out = TableFiles(lake, TABLE)
    for each in rows:
        out.add(each)
    (file,) = out.close()
    return file


def files(lake: Lake, *streams: str) -> list[DataFile]:
    """A file for each stream."""
    return [file_of(lake, row(stream)) for stream in streams]


def held(lake: Lake) -> list[str]:
    return sorted(lake.open(TABLE).to_pyarrow_table()["stream"].to_pylist())


def test_spark_s_own_writer_knows_what_was_appended(spark: SparkSession, lake: Lake) -> None:
    """The commits are those of the options txnAppId and txnVersion, and of Kiln 0.1."""
    write = WriteId("query", 3)
    DeltaRsCommits(lake).commit(TABLE, files(lake, "a"), write)
    again = read_table(spark, lake, TABLE).write.format("delta").mode("append")
    again.option("txnAppId", write.app_id(TABLE)).option("txnVersion", "3").save(lake.table(TABLE))
    assert held(lake) == ["a"]
    again.option("txnAppId", write.app_id(TABLE)).option("txnVersion", "4").save(lake.table(TABLE))
    assert held(lake) == ["a", "a"]
    assert not DeltaRsCommits(lake).commit(TABLE, files(lake, "b"), WriteId("query", 4))
    assert held(lake) == ["a", "a"]


def test_a_column_that_another_writer_has_renamed_stops_the_commit(spark: SparkSession, lake: Lake) -> None:
    assert DeltaRsCommits(lake).commit(TABLE, files(lake, "a"), WriteId("query", 0))
    table = f"delta.`{lake.table(TABLE)}`"
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE {table} RENAME COLUMN tip TO tip_cid")
    with pytest.raises(
        SchemaChangedError, match="the column tip is missing, and Kiln does not know the column tip_cid"
    ):
        DeltaRsCommits(lake).commit(TABLE, files(lake, "b"), WriteId("query", 1))


# ---------------------------------------------------------------- read by anybody

DAY = 86_400_000_000
ROWS = [
    [row(f"s{n}", network=f"n{n % 3}", batch_cid=None if n % 2 else "c", at=n * DAY + 123_456) for n in range(5)],
    [row("lang" * 500, network="größer", at=-DAY - 1), row("\U0001f600", network="\uffff", batch_cid="", at=-1)],
    [row("", network="", at=-62_135_596_800_000_000), row("x", at=253_402_300_799_999_999)],
]


def fill(lake: Lake) -> None:
    for number, rows in enumerate(ROWS):
        assert DeltaRsCommits(lake).commit(TABLE, [file_of(lake, *rows)], WriteId("query", number))


WHERE: dict[str, pa.compute.Expression | None] = {
    "TRUE": None,
    "network = 'n1'": pa.compute.field("network") == "n1",
    "network > 'n'": pa.compute.field("network") > "n",
    "network = ''": pa.compute.field("network") == "",
    "network = '\uffff'": pa.compute.field("network") == "\uffff",
    "batch_cid IS NULL": pa.compute.field("batch_cid").is_null(),
    "batch_cid = 'c'": pa.compute.field("batch_cid") == "c",
    "observed_at = TIMESTAMP '1970-01-03 00:00:00.123456'": pa.compute.field("observed_at")
    == pa.scalar(2 * DAY + 123_456, pa.timestamp("us", "UTC")),
    "observed_at < TIMESTAMP '1970-01-01 00:00:00'": pa.compute.field("observed_at")
    < pa.scalar(0, pa.timestamp("us", "UTC")),
    "observed_at >= TIMESTAMP '9999-12-31 23:59:59.999999'": pa.compute.field("observed_at")
    >= pa.scalar(253_402_300_799_999_999, pa.timestamp("us", "UTC")),
}
"""Filters as SQL, and as deltalake's reader takes them."""
FOUND = {
    "TRUE": 9,
    "network = 'n1'": 2,
    "network > 'n'": 6,
    "network = ''": 1,
    "network = '\uffff'": 1,
    "batch_cid IS NULL": 5,
    "batch_cid = 'c'": 3,
    "observed_at = TIMESTAMP '1970-01-03 00:00:00.123456'": 1,
    "observed_at < TIMESTAMP '1970-01-01 00:00:00'": 3,
    "observed_at >= TIMESTAMP '9999-12-31 23:59:59.999999'": 1,
}
Rows = list[tuple[object, ...]]


def in_micros(table: pa.Table) -> Rows:
    place = COLUMNS.index("observed_at")
    table = table.select(COLUMNS)
    table = table.set_column(place, "observed_at", table["observed_at"].cast(pa.int64()))
    return sorted((tuple(each.values()) for each in table.to_pylist()), key=repr)


def by_deltalake(lake: Lake, where: str) -> Rows:
    return in_micros(lake.open(TABLE).to_pyarrow_dataset().to_table(filter=WHERE[where]))


def by_duckdb(lake: Lake, where: str) -> Rows:
    columns = ", ".join("epoch_us(observed_at)" if name == "observed_at" else name for name in COLUMNS)
    return sorted(query_lake(lake, f"SELECT {columns} FROM {TABLE} WHERE {where}").rows(), key=repr)


def by_spark(spark: SparkSession, lake: Lake, where: str) -> Rows:
    columns = [F.unix_micros(name) if name == "observed_at" else F.col(name) for name in COLUMNS]
    found = read_table(spark, lake, TABLE).where(where).select(*columns).collect()
    return sorted(map(tuple, found), key=repr)


def test_every_reader_finds_the_same_rows(spark: SparkSession, lake: Lake) -> None:
    fill(lake)
    for where, rows in FOUND.items():
        found = [by_deltalake(lake, where), by_duckdb(lake, where), by_spark(spark, lake, where)]
        assert [len(each) for each in found] == [rows] * 3, where
        assert found[0] == found[1] == found[2], where
    assert by_deltalake(lake, "TRUE") == sorted((each for part in ROWS for each in part), key=repr)


def test_the_statistics_in_the_log_hold_for_every_row(lake: Lake) -> None:
    fill(lake)
    added = lake.open(TABLE).get_add_actions(flatten=True)
    log = Path(lake.table(TABLE)) / "_delta_log"
    actions = [json.loads(line) for path in sorted(log.glob("*.json")) for line in path.read_text().splitlines()]
    adds = {action["add"]["path"]: action["add"] for action in actions if "add" in action}
    assert len(adds) == added.num_rows == len(ROWS)
    for name, add in adds.items():
        path = Path(lake.table(TABLE)) / name
        rows, stats = in_micros(pq.read_table(path)), json.loads(add["stats"])
        assert (add["size"], stats["numRecords"]) == (path.stat().st_size, len(rows))
        for column in list_stats_columns(TABLES[TABLE]):
            values = [each[COLUMNS.index(column)] for each in rows]
            there = [value for value in values if value is not None]
            assert stats["nullCount"][column] == len(values) - len(there)
            low, high = (stats[key].get(column) for key in ("minValues", "maxValues"))
            if column == "observed_at":
                low, high = ((datetime.fromisoformat(at) - EPOCH) // timedelta(microseconds=1) for at in (low, high))
            in_order = sorted(
                there, key=lambda value: (str(value).encode(), 0) if isinstance(value, str) else (b"", value)
            )
            assert (low, high) == ((in_order[0], in_order[-1]) if there else (None, None))


@pytest.mark.parametrize("where", ["network = 'n1'", "observed_at = TIMESTAMP '1970-01-03 00:00:00.123456'"])
def test_a_filter_lets_readers_skip_files(spark: SparkSession, lake: Lake, where: str) -> None:
    """A reader that opened one of the files that are gone would fail. (DuckDB opens each, and skips within.)"""
    rows = [row(f"s{n}", network=f"n{n}", at=n * DAY + 123_456) for n in range(4)]
    made = [file_of(lake, each) for each in rows]
    assert DeltaRsCommits(lake).commit(TABLE, made, WriteId("query", 0))
    expected = by_deltalake(lake, where)
    assert len(expected) == 1
    for file, each in zip(made, rows, strict=True):
        if each not in expected:
            (Path(lake.table(TABLE)) / file.name).unlink()
    assert by_deltalake(lake, where) == by_spark(spark, lake, where) == expected
    with pytest.raises(FileNotFoundError):
        by_deltalake(lake, "TRUE")


def test_rows_that_spark_computes_are_in_files_that_a_commit_adds(spark: SparkSession, lake: Lake) -> None:
    everything = [each for part in ROWS for each in part]
    columns = zip(zip(*everything, strict=True), build_arrow_schema(TABLES[TABLE].columns), strict=True)
    arrays = [pa.array(values, field.type) for values, field in columns]
    pq.write_table(pa.Table.from_arrays(arrays, names=COLUMNS), Path(lake.path) / "rows.parquet")
    rows = spark.read.parquet(str(Path(lake.path) / "rows.parquet")).repartition(3)
    made = write_files(rows.select(*reversed(COLUMNS)), lake, TABLE)
    assert sum(file.rows for file in made) == len(everything)
    assert by_deltalake(lake, "TRUE") == []
    assert DeltaRsCommits(lake).commit(TABLE, made, WriteId("query", 0))
    assert by_deltalake(lake, "TRUE") == by_spark(spark, lake, "TRUE") == sorted(everything, key=repr)
    assert write_files(rows.where("network = 'nobody'"), lake, TABLE) == []
