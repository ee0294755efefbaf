"""A checkpoint of `batch` from before open windows were in parts goes on, and one with parts after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.offset_range import ALL
from kiln.pipelines.batch.processor import OUTPUT
from kiln.pipelines.batch.transform import OFFSET_RANGES, batch_updates, build_range_reader
from kiln.schemas.kafka.records import TICK, Coordinates, Epoch, SeparatorRecord, UpdateRecord, decode_batch, encode
from kiln.schemas.wire.batch_block import stream_key, write_leaves
from kiln.schemas.wire.cid import block_cid, cid_text
from kiln.schemas.wire.streamid import StreamID

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

RECORDS = "partition int, offset bigint, stamp bigint, value binary"
T = 1_000_000
OPEN = 600  # windows: more than the head of a state holds
STREAM = StreamID(3, block_cid(b"genesis")).text
BEFORE, NOW = block_cid(b"tip of before"), block_cid(b"tip of now")


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


def update(number: int) -> bytes:
    epoch, place = Epoch("query", 1), Coordinates(0, 0, 0)
    separator = SeparatorRecord("model", f"k{number}")
    tip = cid_text(NOW)
    return encode(
        UpdateRecord("mainnet", "LIVE", separator, "topic", STREAM, tip, None, f"m{number}", epoch, place, 1_500_000)
    )


def before_parts(records: DataFrame, state: bytes) -> DataFrame:
    """The query of before, of whose processor the state is all that matters here."""

    class Before(StatefulProcessor):  # here, so that workers need not find this file
        def init(self, handle: StatefulProcessorHandle) -> None:
            self._state = handle.getValueState("windows", "state binary")

        def handleInputRows(
            self, key: tuple[int], rows: Iterator[pd.DataFrame] | Iterator[Row], timerValues: TimerValues
        ) -> Iterator[pd.DataFrame]:
            list(rows)
            self._state.update((state,))
            yield from ()

        def close(self) -> None: ...

    read = records.select("partition", "offset", "stamp", "value").mapInArrow(build_range_reader(ALL), OFFSET_RANGES)
    return read.groupBy("partition").transformWithStateInPandas(Before(), OUTPUT, "Append", "None")


def test_a_checkpoint_from_before_there_were_parts_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "1")
    leaf = stream_key(STREAM) + BEFORE
    windows = [[["mainnet", "LIVE", "model", f"k{n}"], [T, 2 * T, None, 2 * T, [leaf]]] for n in range(OPEN)]
    state = msgspec.msgpack.encode([T, windows, None, [], []])
    found: list[tuple[str, str]] = []

    def run(old: bool = False) -> None:
        """All that is there, by a query that starts from the checkpoint."""
        records = session.readStream.schema(RECORDS).option("maxFilesPerTrigger", 1).parquet(str(folder))
        rows = before_parts(records, state) if old else batch_updates(records, BatchConfig(T), "")

        def take(rows: DataFrame, batch_id: int) -> None:
            made = [decode_batch(bytes(row.value)) for row in rows.collect()]
            found.extend((each.separator.value, each.cid) for each in made)

        writer = rows.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    put(folder, 0, T, [TICK])
    run(old=True)
    put(folder, 1, 1_500_000, [update(number) for number in range(0, OPEN, 100)])
    run()
    assert found == []
    put(folder, 1_000, 2 * T, [TICK])
    run()
    (one,), (two,) = write_leaves({leaf}), write_leaves({leaf, stream_key(STREAM) + NOW})
    assert found == [(f"k{n}", (one if n % 100 else two).cid) for n in range(OPEN)]
