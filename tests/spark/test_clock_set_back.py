"""A streaming query on a real Spark whose clock goes back by days: no row is dropped as late, and none comes twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from kiln.conf.process.location import parse_location
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.clocks import MicroBatchClock
from kiln.pipelines.runtime.deduplication import StateDeduplication
from kiln.pipelines.runtime.query_context import write_in_order
from kiln.pipelines.sink.rows import StreamsRow
from kiln.pipelines.sink.transform import build_stages
from kiln.schemas.kafka.records import SeparatorRecord, StreamRecord, encode

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

HOUR, DAY = 3_600_000_000, 86_400_000_000
START = 1_800_000_000_000_000
REMEMBERED = HOUR
RECORDS = "topic string, partition int, offset bigint, stamp bigint, key binary, value binary"


def put(folder: Path, number: int) -> None:
    """Two records: of a stream of this number, and of a stream that every file has."""
    separator = SeparatorRecord("model", "k")
    values = [encode(StreamRecord("mainnet", name, separator, START)) for name in (f"s{number}", "all")]
    columns = {
        "topic": pa.array(["streams", "streams"]),
        "partition": pa.array([0, 0], pa.int32()),
        "offset": pa.array([2 * number, 2 * number + 1], pa.int64()),
        "stamp": pa.array([0, 0], pa.int64()),
        "key": pa.array([b"", b""], pa.binary()),
        "value": pa.array(values, pa.binary()),
    }
    path = folder / f"{number:03}.parquet"
    pq.write_table(pa.table(columns), path)
    os.utime(path, (1_700_000_000 + number,) * 2)  # Spark takes files in the order of their times


def run(spark: SparkSession, folder: Path, times: Sequence[int], uptimes: Sequence[int] = ()) -> list[list[str]]:
    """The streams of each micro-batch. `times`: what the clock says in each, µs; `uptimes`: how long the machine runs
    (as long as the clock says)."""
    source, checkpoint = folder / "records", Checkpoint(parse_location(folder / "checkpoint"))
    clock = MicroBatchClock(iter(times).__next__, iter(uptimes or times).__next__, checkpoint.watermark + REMEMBERED)
    found: list[list[str]] = []

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        clock.set_time(rows.sparkSession.sparkContext)
        taken = [bytes(row.data) for row in rows.collect() if row.kind == "streams"]
        found.append(sorted(msgspec.msgpack.decode(data, type=StreamsRow).stream for data in taken))

    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "1")
    records = session.readStream.schema(RECORDS).option("maxFilesPerTrigger", 1).parquet(str(source))
    steps = StateDeduplication(REMEMBERED).accept_once(build_stages(Lake(str(folder / "lake"))))
    rows = steps.deduplicate(records.mapInArrow(steps.source_task, steps.source_schema))
    query = (
        rows.writeStream.foreachBatch(write_in_order(write))
        .option("checkpointLocation", str(checkpoint.path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return found


def test_no_row_is_dropped_when_the_clock_is_put_back(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    for number in range(4):
        put(tmp_path / "records", number)
    times = [START, START + HOUR // 2, START + HOUR // 2 - 2 * DAY, START + HOUR // 2 - 2 * DAY + 1]
    assert run(spark, tmp_path, times) == [["all", "s0"], ["s1"], ["s2"], ["s3"]]
    for number in range(4, 6):  # started again, with the clock still behind
        put(tmp_path / "records", number)
    assert Checkpoint(parse_location(tmp_path / "checkpoint")).watermark > START - 2 * HOUR
    assert run(spark, tmp_path, [START - 2 * DAY, START - 2 * DAY]) == [["s4"], ["s5"]]


def test_what_was_remembered_is_forgotten_in_time(spark: SparkSession, tmp_path: Path) -> None:
    """An operator that forgets nothing would pass the test above."""
    (tmp_path / "records").mkdir()
    for number in range(5):
        put(tmp_path / "records", number)
    times = [START, START + HOUR // 2, START + 4 * HOUR, START + 8 * HOUR, START + 8 * HOUR]
    found = run(spark, tmp_path, times)
    assert [each[-1] for each in found] == ["s0", "s1", "s2", "s3", "s4"]
    assert "all" in found[0]
    assert "all" not in found[1]
    assert "all" in found[4]


def test_nothing_is_forgotten_when_the_clock_is_set_ahead(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    for number in range(4):
        put(tmp_path / "records", number)
    times = [START, START + 2 * DAY, START + 2 * DAY + 1, START + 3]
    assert run(spark, tmp_path, times, range(4)) == [["all", "s0"], ["s1"], ["s2"], ["s3"]]
