"""What a query lets through is the same whether a file remembers it or Spark's operators do (decision 10)."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from kiln.conf.process.location import parse_location
from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.pipelines.archive import transform as archiving
from kiln.pipelines.archive.record_decoder import DECODE_RESULT, FAULT, DecodeResult
from kiln.pipelines.archive.transform import ARCHIVE_OUTPUT, ArchiveOutput
from kiln.pipelines.batch.log_time import set_log_times
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.clocks import MicroBatchClock
from kiln.pipelines.runtime.dedup_store import FILE_NAME, DedupStoreConfig
from kiln.pipelines.runtime.deduplication import Deduplication, DedupSteps, FileDeduplication, StateDeduplication
from kiln.pipelines.runtime.query_context import write_in_order
from kiln.pipelines.sink import transform as sinking
from kiln.pipelines.sink.transform import OUTPUT_TABLES, SINK_FILES
from kiln.pipelines.updates import transform as selecting
from kiln.pipelines.updates.separators import SeparatorConfig
from kiln.schemas.kafka.records import QuarantineRecord, decode_quarantine, decode_update
from kiln.schemas.queries import QUERIES
from kit.decoder_package import install_decoders

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

NOW, SPAN = 1_800_000_000_000_000, 86_400_000_000
FRAMES = {"partition": pa.int32(), "offset": pa.int64(), "stamp": pa.int64(), "value": pa.binary()}
HOW, SEPARATING = DecodeConfig("either"), SeparatorConfig()


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of `kiln.frames` in two files, in two partitions: copies of a message are in both."""
    folder = tmp_path_factory.mktemp("frames")
    options = TrafficOptions(seed=5, network="local-both", copies=4, garbage=0.05, forged=0.05)
    records = Traffic(options, NOW * 1000, 500, keep_ledger=False).frames()
    rows = [
        {"partition": at % 2, "offset": at // 2, "stamp": NOW + at, "value": frame.value}
        for at, frame in zip(range(1_000), records, strict=False)
    ]
    for number in range(2):
        part = rows[number * 500 : number * 500 + 500]
        pq.write_table(pa.Table.from_pylist(part, pa.schema(FRAMES)), folder / f"{number}.parquet", row_group_size=100)
    return folder


def micro_batches(
    spark: SparkSession, source: Path, checkpoint: Path, steps: DedupSteps, take: Callable[[DataFrame], None]
) -> None:
    """Runs a query over the files, each a micro-batch. `take` is given what the micro-batch made."""
    clock = MicroBatchClock(lambda: NOW, lambda: 0, Checkpoint(parse_location(checkpoint)).watermark + SPAN)

    def write(rows: DataFrame, batch_id: int, query_id: str) -> None:
        clock.set_time(rows.sparkSession.sparkContext)
        set_log_times(rows.sparkSession.sparkContext, {})
        take(steps.run_in_micro_batch(rows, None))

    schema = spark.read.parquet(str(source)).schema
    records = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(source))
    query = (
        steps.deduplicate(records.mapInArrow(steps.source_task, steps.source_schema))
        .writeStream.foreachBatch(write_in_order(write))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    query.start().awaitTermination()


def rows_of(lake: Lake, files: list[DataFile], *columns: str) -> Counter[tuple[object, ...]]:
    found: Counter[tuple[object, ...]] = Counter()
    for file in files:
        rows = pq.read_table(Path(lake.table(file.table)) / file.name, columns=list(columns)).to_pylist()
        found.update((file.table, *row.values()) for row in rows)
    return found


def remembered(folder: Path) -> DedupStoreConfig:
    folder.mkdir()
    return DedupStoreConfig(str(folder / FILE_NAME), 2 * SPAN)


def deduplication(by: str, memory: DedupStoreConfig) -> Deduplication:
    return FileDeduplication(memory) if by == "file" else StateDeduplication(SPAN)


class Archived(NamedTuple):
    lake: Lake
    files: dict[str, list[DataFile]]
    faults: Counter[bytes]
    """by key"""
    quarantined: list[QuarantineRecord]


def archive(by: str, spark: SparkSession, frames: Path, folder: Path, how: DecodeConfig = HOW) -> Archived:
    lake = Lake(str(folder / "lake"))
    lake.create(QUERIES["archive"].tables)
    memory = remembered(folder / "checkpoint")
    files: list[DataFile] = []
    faults: Counter[bytes] = Counter()
    quarantined: list[QuarantineRecord] = []

    def take(made: DataFrame) -> None:
        for row in made.collect():
            if row.kind == ARCHIVE_OUTPUT:
                files.extend(msgspec.msgpack.decode(bytes(row.value), type=ArchiveOutput).messages)
            elif row.kind == DECODE_RESULT:
                passed = msgspec.msgpack.decode(bytes(row.value), type=DecodeResult)
                files.extend([*passed.frames, *passed.parts])
            else:
                assert row.kind == FAULT
                faults[bytes(row.key)] += 1
                quarantined.append(decode_quarantine(bytes(row.value)))

    steps = deduplication(by, memory).accept_once(archiving.build_stages(how, lake))
    checkpoint = folder / "checkpoint"
    micro_batches(spark, frames, checkpoint, steps, take)
    assert (checkpoint / "state").exists() == (by == "Spark")
    named = {name: [file for file in files if file.table == name] for name in ("frames", "copies", "messages")}
    return Archived(lake, named, faults, quarantined)


@pytest.mark.parametrize("by", ["file", "Spark"])
def test_archive(by: str, spark: SparkSession, frames: Path, tmp_path: Path, seen: dict[str, object]) -> None:
    lake, named, faults, _ = archive(by, spark, frames, tmp_path)
    messages = rows_of(lake, named["messages"], "network", "message_id")
    copies = rows_of(lake, named["copies"], "kafka_partition", "kafka_offset", "message_index")
    assert set(messages.values()) == set(copies.values()) == {1}
    assert 50 < len(messages) < len(copies) / 2
    assert faults
    assert set(faults.values()) == {1}
    assert sum(file.rows for file in named["frames"]) == 1_000
    same(seen, "archive", (messages, copies, faults))


@pytest.mark.parametrize("by", ["file", "Spark"])
def test_a_decoder_of_the_users_own_works_in_sparks_workers(
    by: str, spark: SparkSession, frames: Path, tmp_path: Path, decoders: str, seen: dict[str, object]
) -> None:
    """It is called once for each message, after deduplication, and reads JSON. The traffic has garbage too."""
    how = DecodeConfig("either", ceramic=False, decoder=f"{decoders}.parse")
    lake, named, _, quarantined = archive(by, spark, frames, tmp_path, how)
    paths = [Path(lake.table("messages")) / file.name for file in named["messages"]]
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    assert {row["type"] for row in rows} == {"DATA"}
    read = {row["data"]: row["decoded"] for row in rows}
    good = {data: json.loads(decoded) for data, decoded in read.items() if decoded is not None}
    assert len(good) > 50
    assert good == {data: json.loads(data, parse_constant=lambda _: None) for data in good}
    failed = Counter(each.data for each in quarantined if each.stage == "decoder")
    assert failed == Counter(row["data"] for row in rows if row["decoded"] is None)
    assert failed
    same(seen, "decoded", (read, failed))


@pytest.fixture(scope="module")
def decoders(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A package of decoders that Spark's workers have, as its module."""
    folder = tmp_path_factory.mktemp("decoders")
    install_decoders(folder / "site", "worker_decoders")
    spark.sparkContext.addPyFile(shutil.make_archive(str(folder / "worker_decoders"), "zip", folder / "site"))
    return "worker_decoders"


@pytest.mark.parametrize("by", ["file", "Spark"])
def test_updates(by: str, spark: SparkSession, frames: Path, tmp_path: Path, seen: dict[str, object]) -> None:
    memory = remembered(tmp_path / "checkpoint")
    found: Counter[tuple[object, ...]] = Counter()

    def take(made: DataFrame) -> None:
        assert made.columns == ["topic", "key", "value", "observed_at"]
        for row in made.collect():
            update = decode_update(bytes(row.value))
            found[row.topic, bytes(row.key), update.separator, update.stream, update.tip] += 1

    steps = selecting.build_steps(deduplication(by, memory), HOW, SEPARATING)
    micro_batches(spark, frames, tmp_path / "checkpoint", steps, take)
    assert len(found) > 50
    assert set(found.values()) == {1}
    same(seen, "updates", found)


@pytest.fixture(scope="module")
def twice(spark: SparkSession, frames: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each record of `kiln.updates` twice, as its writer was killed and began again; two files."""
    folder, source = tmp_path_factory.mktemp("updates"), tmp_path_factory.mktemp("twice")
    memory = DedupStoreConfig(str(folder / FILE_NAME), 2 * SPAN)
    made: list[tuple[bytes, bytes]] = []

    def take(rows: DataFrame) -> None:
        made.extend((bytes(row.key), bytes(row.value)) for row in rows.collect())

    steps = selecting.build_steps(FileDeduplication(memory), HOW, SEPARATING)
    micro_batches(spark, frames, folder, steps, take)
    types = {"topic": pa.string(), **FRAMES, "key": pa.binary()}
    for number in range(2):
        rows = [
            {"topic": "updates", "partition": 0, "offset": at, "stamp": at, "key": key, "value": value}
            for at, (key, value) in enumerate(made, number * len(made))
        ]
        pq.write_table(pa.Table.from_pylist(rows, pa.schema(types)), source / f"{number}.parquet")
    return source


@pytest.mark.parametrize("by", ["file", "Spark"])
def test_sink(by: str, spark: SparkSession, twice: Path, tmp_path: Path, seen: dict[str, object]) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.create(OUTPUT_TABLES)
    memory = remembered(tmp_path / "checkpoint")
    files: list[DataFile] = []

    def take(made: DataFrame) -> None:
        for row in made.collect():
            if row.kind == SINK_FILES:
                files.extend(msgspec.msgpack.decode(bytes(row.data), type=list[DataFile]))

    steps = deduplication(by, memory).accept_once(sinking.build_stages(lake))
    micro_batches(spark, twice, tmp_path / "checkpoint", steps, take)
    found = rows_of(lake, [file for file in files if file.table == "updates"], "network", "origin", "message_id")
    found += rows_of(lake, [file for file in files if file.table == "tips"], "network", "stream", "tip")
    assert set(found.values()) == {1}
    assert sum(file.rows for file in files) == len(found) > 100
    same(seen, "sink", found)


@pytest.fixture(scope="module")
def seen() -> dict[str, object]:
    """What the first of the two ways let through, by query."""
    return {}


def same(seen: dict[str, object], query: str, found: object) -> None:
    assert seen.setdefault(query, found) == found
