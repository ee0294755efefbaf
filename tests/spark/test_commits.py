"""`Commits` of either back-end hold one contract, on a real Spark (decisions 7 and 18): once for each write, against
two drivers, and read alike by deltalake, DuckDB and Spark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import overload

import pyarrow as pa
import pyarrow.compute  # pa.compute
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from kiln.deploy.query.ask import query_lake
from kiln.pipelines.backfill.swap import FileSwap, SwapMarker
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.commits import Commits, SecondWriterError, WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.delta_spark import DeltaSparkCommits
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake, LakeError, SchemaChangedError, list_stats_columns
from kiln.pipelines.delta.tables import read_table, write_files
from kiln.schemas.delta.tables import TABLES

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

TABLE = "tips"
COLUMNS = [column.name for column in TABLES[TABLE].columns]
WRITERS = ("delta-rs", "delta-spark")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    lake.create([TABLE])
    return lake


Opened = Callable[[Lake], Commits]
"""Commits as a driver has them that has just started."""


def opened(name: str, spark: SparkSession) -> Opened:
    return DeltaRsCommits if name == "delta-rs" else lambda lake: DeltaSparkCommits(lake, spark)


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest, spark: SparkSession) -> Opened:
    return opened(request.param, spark)


@pytest.fixture
def other(writer: Opened, spark: SparkSession) -> Opened:
    """The back-end that `writer` is not."""
    return opened("delta-spark" if writer is DeltaRsCommits else "delta-rs", spark)


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


class Meanwhile(Sequence[DataFile]):
    """Files on their way into a commit. When the commit looks at them, it has asked the log already; something happens
    then, once."""

    def __init__(self, files: Sequence[DataFile], happens: Callable[[], object]) -> None:
        self._files = files
        self._happens = [happens]

    @overload
    def __getitem__(self, index: int) -> DataFile: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DataFile]: ...
    def __getitem__(self, index: int | slice) -> DataFile | Sequence[DataFile]:
        return self._files[index]

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[DataFile]:
        while self._happens:
            self._happens.pop()()
        return iter(self._files)


# ---------------------------------------------------------------- once


def test_a_write_that_is_repeated_changes_nothing_and_says_so(lake: Lake, writer: Opened) -> None:
    commits, first, second = writer(lake), WriteId("query", 0), WriteId("query", 1)
    assert commits.commit(TABLE, files(lake, "a", "b"), first)
    version = lake.open(TABLE).version()
    for each in (commits, writer(lake)):  # this driver, and the one after a crash
        assert not each.commit(TABLE, files(lake, "a", "b"), first)
    assert (held(lake), lake.open(TABLE).version()) == (["a", "b"], version)
    assert commits.commit(TABLE, files(lake, "c"), second)
    assert not commits.commit(TABLE, files(lake, "c"), first)
    assert held(lake) == ["a", "b", "c"]
    assert commits.commit(TABLE, files(lake, "d"), WriteId("query", 7))  # micro-batches without rows in between
    assert held(lake) == ["a", "b", "c", "d"]


def test_another_query_and_another_write_are_others(lake: Lake, writer: Opened) -> None:
    commits = writer(lake)
    for number, write in enumerate((WriteId("one", 5), WriteId("two", 5), WriteId("one", 5, "more"))):
        assert commits.commit(TABLE, files(lake, f"{number}"), write)
    assert held(lake) == ["0", "1", "2"]


def test_an_append_goes_through_when_a_swap_takes_files_meanwhile(
    lake: Lake, writer: Opened, other: Opened, spark: SparkSession
) -> None:
    """Between the append's look at the log and its commit. Spark then reads what DuckDB reads."""
    commits = writer(lake)
    assert commits.commit(TABLE, files(lake, "a"), WriteId("query", 0))

    def take() -> None:
        read = lake.open(TABLE)
        gone = [str(path) for path in read.get_add_actions()["path"].to_pylist()]
        FileSwap(lake).commit(TABLE, read, gone, files(lake, "new"), SwapMarker("run", TABLE, 1))

    assert commits.commit(TABLE, Meanwhile(files(lake, "b"), take), WriteId("query", 1))
    assert commits.commit(TABLE, files(lake, "c"), WriteId("query", 2))
    assert not other(lake).commit(TABLE, files(lake, "twice"), WriteId("query", 2))
    assert FileSwap(lake).has_step(TABLE, SwapMarker("run", TABLE, 1))
    assert held(lake) == ["b", "c", "new"]
    assert sorted(row.stream for row in read_table(spark, lake, TABLE).collect()) == ["b", "c", "new"]
    assert set(query_lake(lake, f"SELECT stream FROM {TABLE}").rows()) == {("b",), ("c",), ("new",)}


def test_either_goes_on_where_the_other_stopped(lake: Lake, writer: Opened, other: Opened) -> None:
    for number in range(4):
        writes, asks = (writer, other) if number % 2 else (other, writer)
        assert writes(lake).commit(TABLE, files(lake, f"{number}"), WriteId("query", number))
        assert not asks(lake).commit(TABLE, files(lake, "twice"), WriteId("query", number))
    assert held(lake) == ["0", "1", "2", "3"]


def test_spark_s_own_writer_knows_what_was_appended(spark: SparkSession, lake: Lake, writer: Opened) -> None:
    """The commits are those of the options txnAppId and txnVersion, and of Kiln 0.1."""
    write = WriteId("query", 3)
    writer(lake).commit(TABLE, files(lake, "a"), write)
    again = read_table(spark, lake, TABLE).write.format("delta").mode("append")
    again.option("txnAppId", write.app_id(TABLE)).option("txnVersion", "3").save(lake.table(TABLE))
    assert held(lake) == ["a"]
    again.option("txnAppId", write.app_id(TABLE)).option("txnVersion", "4").save(lake.table(TABLE))
    assert held(lake) == ["a", "a"]
    assert not writer(lake).commit(TABLE, files(lake, "b"), WriteId("query", 4))
    assert held(lake) == ["a", "a"]


def test_history_says_what_was_done(lake: Lake, writer: Opened) -> None:
    writer(lake).commit(TABLE, files(lake, "a"), WriteId("query", 0))
    history = lake.open(TABLE).history(1)[0]
    assert (history["operation"], history["operationParameters"]["mode"]) == ("WRITE", "Append")


def test_checkpoints_of_the_log_keep_what_was_committed(lake: Lake, writer: Opened, other: Opened) -> None:
    """The commits before the checkpoint are taken away, as a log clean-up would do."""
    lake.open(TABLE).alter.set_table_properties({"delta.checkpointInterval": "5"})
    commits = writer(lake)
    for number in range(7):
        assert commits.commit(TABLE, files(lake, f"{number:02}"), WriteId("query" if number else "older", number))
    log = Path(lake.table(TABLE)) / "_delta_log"
    (checkpoint,) = log.glob("*.checkpoint*.parquet")
    newest = int(checkpoint.name.split(".")[0])
    assert newest in (4, 5)
    for number in range(newest):
        (log / f"{number:020}.json").unlink()
    for reopened in (writer(lake), other(lake)):
        assert not reopened.commit(TABLE, files(lake, "twice"), WriteId("older", 0))
        assert not reopened.commit(TABLE, files(lake, "twice"), WriteId("query", 2))
        assert not reopened.commit(TABLE, files(lake, "twice"), WriteId("query", 6))
    assert held(lake) == [f"{number:02}" for number in range(7)]


# ---------------------------------------------------------------- two drivers

WORDS = (
    r"^cannot commit to table tips: another driver runs the query query and has just written to it.*Stop one of the two"
)


@pytest.mark.parametrize("batch", [4, 5, 6])
def test_of_two_drivers_the_second_fails_in_words(lake: Lake, writer: Opened, batch: int) -> None:
    """The first one commits while the second one is about to, and the rows are there once."""
    first, second = writer(lake), writer(lake)
    for driver, number in ((first, 1), (second, 2)):
        assert driver.commit(TABLE, files(lake, "before"), WriteId(f"driver {number}", 0))

    def commit_first() -> None:
        assert first.commit(TABLE, files(lake, "a"), WriteId("query", 5))

    with pytest.raises(SecondWriterError, match=WORDS):
        second.commit(TABLE, Meanwhile(files(lake, "a"), commit_first), WriteId("query", batch))
    assert held(lake) == ["a", "before", "before"]
    assert not second.commit(TABLE, files(lake, "a"), WriteId("query", 5)), "started again, it sees the other's commit"
    assert held(lake) == ["a", "before", "before"]


def test_a_driver_that_has_followed_the_log_is_told_of_another_since(lake: Lake) -> None:
    """delta-rs reads a table's log once. What another driver has committed since is not taken for a repeat."""
    first, second = DeltaRsCommits(lake), DeltaRsCommits(lake)
    assert first.commit(TABLE, files(lake, "a"), WriteId("query", 0))
    assert second.commit(TABLE, files(lake, "b"), WriteId("query", 1))
    for batch in (1, 2):
        with pytest.raises(SecondWriterError, match=WORDS):
            first.commit(TABLE, files(lake, "b"), WriteId("query", batch))
        first = DeltaRsCommits(lake)
        first._tables[TABLE] = DeltaTable(lake.table(TABLE), version=1)
    assert held(lake) == ["a", "b"]


def test_each_back_end_is_told_of_the_other(lake: Lake, writer: Opened, other: Opened) -> None:
    def commit_other() -> None:
        assert other(lake).commit(TABLE, files(lake, "a"), WriteId("query", 0))

    with pytest.raises(SecondWriterError, match=WORDS):
        writer(lake).commit(TABLE, Meanwhile(files(lake, "a"), commit_other), WriteId("query", 0))
    assert held(lake) == ["a"]


def test_commits_of_others_in_between_do_no_harm(lake: Lake, writer: Opened, other: Opened) -> None:
    """Of another query, of another write of the same, and of a person."""
    mine = writer(lake)
    for number, apart in enumerate((WriteId("other", 0), WriteId("query", 0, "received"), WriteId("third", 9))):

        def commit_apart(apart: WriteId = apart, number: int = number) -> None:
            assert (writer, other)[number % 2](lake).commit(TABLE, files(lake, f"apart {number}"), apart)

        assert mine.commit(TABLE, Meanwhile(files(lake, f"mine {number}"), commit_apart), WriteId("query", number))
    assert held(lake) == [f"{whose} {number}" for whose in ("apart", "mine") for number in range(3)]


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match=rf"cannot read table {TABLE} in"):
        DeltaRsCommits(Lake(str(tmp_path))).commit(TABLE, [], WriteId("query", 0))


def test_a_column_that_another_writer_has_renamed_stops_the_commit(
    spark: SparkSession, lake: Lake, writer: Opened
) -> None:
    assert writer(lake).commit(TABLE, files(lake, "a"), WriteId("query", 0))
    table = f"delta.`{lake.table(TABLE)}`"
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    spark.sql(f"ALTER TABLE {table} RENAME COLUMN tip TO tip_cid")
    with pytest.raises(
        SchemaChangedError, match="the column tip is missing, and Kiln does not know the column tip_cid"
    ):
        writer(lake).commit(TABLE, files(lake, "b"), WriteId("query", 1))


# ---------------------------------------------------------------- read by anybody

DAY = 86_400_000_000
ROWS = [
    [row(f"s{n}", network=f"n{n % 3}", batch_cid=None if n % 2 else "c", at=n * DAY + 123_456) for n in range(5)],
    [row("lang" * 500, network="größer", at=-DAY - 1), row("\U0001f600", network="\uffff", batch_cid="", at=-1)],
    [row("", network="", at=-62_135_596_800_000_000), row("x", at=253_402_300_799_999_999)],
]


def full(lake: Lake, commits: Commits) -> Lake:
    for number, rows in enumerate(ROWS):
        assert commits.commit(TABLE, [file_of(lake, *rows)], WriteId("query", number))
    return lake


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


def test_the_same_files_make_the_same_table_for_every_reader(spark: SparkSession, tmp_path: Path) -> None:
    everything = sorted((each for part in ROWS for each in part), key=repr)
    made = {}
    for name in WRITERS:
        lake = made[name] = Lake(str(tmp_path / name))
        lake.create([TABLE])
        full(lake, opened(name, spark)(lake))
    tables = [lake.open(TABLE) for lake in made.values()]
    assert tables[0].schema() == tables[1].schema()
    assert tables[0].protocol() == tables[1].protocol()
    assert tables[0].metadata().configuration == tables[1].metadata().configuration
    for where, rows in FOUND.items():
        for lake in made.values():
            found = [by_deltalake(lake, where), by_duckdb(lake, where), by_spark(spark, lake, where)]
            assert [len(each) for each in found] == [rows] * 3, where
            assert found[0] == found[1] == found[2], where
    assert by_deltalake(lake, "TRUE") == everything
    assert read_table(spark, made["delta-rs"], TABLE).schema == read_table(spark, made["delta-spark"], TABLE).schema


def test_the_statistics_in_the_log_hold_for_every_row(lake: Lake, writer: Opened) -> None:
    full(lake, writer(lake))
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
def test_a_filter_lets_readers_skip_files(spark: SparkSession, lake: Lake, writer: Opened, where: str) -> None:
    """A reader that opened one of the files that are gone would fail. (DuckDB opens each, and skips within.)"""
    rows = [row(f"s{n}", network=f"n{n}", at=n * DAY + 123_456) for n in range(4)]
    made = [file_of(lake, each) for each in rows]
    assert writer(lake).commit(TABLE, made, WriteId("query", 0))
    expected = by_deltalake(lake, where)
    assert len(expected) == 1
    for file, each in zip(made, rows, strict=True):
        if each not in expected:
            (Path(lake.table(TABLE)) / file.name).unlink()
    assert by_deltalake(lake, where) == by_spark(spark, lake, where) == expected
    with pytest.raises(FileNotFoundError):
        by_deltalake(lake, "TRUE")


def test_rows_that_spark_computes_are_in_files_that_a_commit_adds(
    spark: SparkSession, lake: Lake, writer: Opened
) -> None:
    everything = [each for part in ROWS for each in part]
    columns = zip(zip(*everything, strict=True), build_arrow_schema(TABLES[TABLE].columns), strict=True)
    arrays = [pa.array(values, field.type) for values, field in columns]
    pq.write_table(pa.Table.from_arrays(arrays, names=COLUMNS), Path(lake.path) / "rows.parquet")
    rows = spark.read.parquet(str(Path(lake.path) / "rows.parquet")).repartition(3)
    made = write_files(rows.select(*reversed(COLUMNS)), lake, TABLE)
    assert sum(file.rows for file in made) == len(everything)
    assert by_deltalake(lake, "TRUE") == []
    assert writer(lake).commit(TABLE, made, WriteId("query", 0))
    assert by_deltalake(lake, "TRUE") == by_spark(spark, lake, "TRUE") == sorted(everything, key=repr)
    assert write_files(rows.where("network = 'nobody'"), lake, TABLE) == []
