"""A checkpoint of `batch` with open windows goes on after a restart."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.offset_range import ALL
from kiln.pipelines.batch.transform import OFFSET_RANGES, batch_ranges, build_range_task
from kiln.schemas.kafka.records import TICK, Coordinates, Epoch, SeparatorRecord, UpdateRecord, decode_batch, encode
from kiln.schemas.wire.batch_block import encode_stream_key, write_leaves
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.streamid import StreamID

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

RECORDS = "partition int, offset bigint, stamp bigint, value binary"
T = 1_000_000
START = 1_700_000_000_000_000  # µs
OPEN = 600  # windows
STREAM = StreamID(3, compute_cid(b"genesis")).text
FIRST, SECOND = compute_cid(b"first tip"), compute_cid(b"second tip")


def put(folder: Path, first: int, stamp: int, values: list[bytes]) -> None:
    """A micro-batch: records of partition 0."""
    count = len(values)
    columns = {
        "partition": pa.array([0] * count, pa.int32()),
        "offset": pa.array(range(first, first + count), pa.int64()),
        "stamp": pa.array([stamp] * count, pa.int64()),
        "value": pa.array(values, pa.binary()),
    }
    pq.write_table(pa.table(columns), folder / f".{first}")
    (folder / f".{first}").rename(folder / f"{first}.parquet")


def update(number: int, tip: bytes) -> bytes:
    epoch, position, text, at = Epoch("query", 1), Coordinates(0, 0, 0), cid_text(tip), START + T // 2
    separator, message = SeparatorRecord("model", f"k{number}"), f"{number} {text}"
    return encode(UpdateRecord("mainnet", "LIVE", separator, "topic", STREAM, text, None, message, epoch, position, at))


def test_open_windows_go_on_after_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "1")
    found: list[tuple[str, str]] = []

    def take(rows: DataFrame, batch_id: int) -> None:
        made = [decode_batch(bytes(row.value)) for row in rows.collect()]
        found.extend((each.separator.value, each.batch_cid) for each in made)

    def run() -> None:
        """Read all that is there, by a query that starts from the checkpoint."""
        records = session.readStream.schema(RECORDS).option("maxFilesPerTrigger", 1).parquet(str(folder))
        ranges = records.mapInArrow(build_range_task(ALL), OFFSET_RANGES)
        writer = batch_ranges(ranges, BatchConfig(T), "").writeStream.foreachBatch(take)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    put(folder, 0, START, [update(number, FIRST) for number in range(OPEN)])
    run()
    put(folder, OPEN, START + T // 2, [update(number, SECOND) for number in range(0, OPEN, 100)])
    run()
    assert found == []
    put(folder, 2 * OPEN, START + T, [TICK])
    run()
    leaves = [encode_stream_key(STREAM) + tip for tip in (FIRST, SECOND)]
    (one,), (two,) = write_leaves(set(leaves[:1])), write_leaves(set(leaves))
    assert found == [(f"k{n}", (one if n % 100 else two).cid) for n in range(OPEN)]
