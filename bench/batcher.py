"""Speed of the query `batch` that catches up with a long topic of updates, with few and with many separators."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from functools import lru_cache

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from bench.catch_up import catch_up
from bench.ground import Ends, Ground
from bench.report import Finding, Note, Ratio
from bench.runs import BenchError, Extent, Side, in_turn
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.pipelines.batch.ticker import Ticker
from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.runtime.kafka import write_topic
from kiln.schemas.kafka.records import Coordinates, Epoch, SeparatorRecord, UpdateRecord, build_update_key, encode
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.streamid import MODEL, MODEL_INSTANCE, StreamID

UPDATES = 1_000_000
SEPARATORS = (200, 20_000)

_STREAMS = 100_000
_TASKS = 2
_EPOCH = 20_000  # updates in a micro-batch of `updates`
_DAG_CBOR = b"\x01\x71\x12\x20"
_PATIENCE = 120.0  # s


def measure(ground: Ground, extent: Extent) -> Finding:
    """Measure the query `batch`, in each run from a new checkpoint. Only the time of its micro-batches counts."""
    count = extent.of(UPDATES)
    notes: dict[str, Note] = {"updates": count}
    sides: dict[str, Side] = {}
    for separators in (extent.of(number, least=2) for number in SEPARATORS):
        settings = ground.plot(f"batcher-{separators}")
        ground.say(f"writing {count:,} updates over {separators:,} separators")
        ends, span = write_log(ground, settings, count, separators)
        sides[f"{separators:,} separators"] = _catching_up(ground, settings, ends, count, notes, f"{separators:,}")
        notes[f"s of log, {separators:,}"] = round(span, 1)
    ground.say("warming up")
    next(iter(sides.values()))(0)
    few, many = in_turn(sides, extent.runs, "updates/s", ground.say)
    return Finding(
        "batcher",
        "the query batch, catching up with a topic of updates",
        (few, many),
        (Ratio("many over few", many, few),),
        notes,
    )


def _catching_up(
    ground: Ground, settings: Settings, ends: Ends, count: int, notes: dict[str, Note], label: str
) -> Side:
    def side(run: int) -> float:
        before = sum(ground.ends(settings, "batches").values())
        with ground.fresh(settings, "batches") as fresh:
            took = sum(micro_batch.seconds for micro_batch in catch_up(ground.spark, fresh, "batch", {"updates": ends}))
            notes[f"batches, {label}"] = sum(ground.ends(settings, "batches").values()) - before
        return count / took

    return side


def write_log(ground: Ground, settings: Settings, count: int, separators: int) -> tuple[Ends, float]:
    """Write updates to `kiln.updates`, and the ticks that end their windows.

    Returns:
        The end offsets of the topic, and the time between its first and last update by the broker's timestamps, s.

    Raises:
        BenchError: The ticks did not end all windows.
    """
    write_topic(updates(ground.spark, _log(count, separators), range(count)), ground.broker(settings), "updates")
    updated = ground.ends(settings, "updates")
    kafka, batch = settings.broker, settings.batch
    ticker = Ticker(
        kafka.client_options(),
        kafka.topic("updates"),
        interval=batch.tick.total_seconds(),
        window=micros(batch.window),
    )
    ticker.start()
    try:
        until = time.monotonic() + _PATIENCE
        while ticker.quiet_ends is None:
            if time.monotonic() > until:
                raise BenchError(ticker.error or f"the ticks did not end all windows within {_PATIENCE:g} s")
            time.sleep(0.1)
    finally:
        ticker.stop()
    stamps = [
        record.stamp
        for partition, end in updated.items()
        for at in (0, end - 1)
        for record in ground.read(settings, "updates", {partition: at}, {partition: at + 1})
    ]
    return ground.ends(settings, "updates"), (max(stamps) - min(stamps)) / 1000


Make = Callable[[int], tuple[bytes, bytes]]
"""Function from the number of an update to the key and value of its record."""


def updates(spark: SparkSession, make: Make, numbers: range) -> DataFrame:
    """Build a DataFrame with the key and the value of a record of `kiln.updates` for each number."""
    rows = spark.range(numbers.start, numbers.stop, numPartitions=_TASKS)
    return rows.mapInArrow(_update_rows(make), "key binary, value binary")


def _update_rows(make: Make) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary())])

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        buffer = RowBuffer(schema)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                if buffer.add(make(number)):
                    yield from buffer.drain()
        yield from buffer.drain()

    return rows


def _log(count: int, separators: int) -> Make:
    of_task = -(-count // _TASKS)

    def make(number: int) -> tuple[bytes, bytes]:
        # tasks write at the same time, so the epoch depends on the position within a task
        return update(number, number % of_task * _TASKS // _EPOCH, separators)

    return make


def update(number: int, epoch: int, separators: int) -> tuple[bytes, bytes]:
    """Build the key and value of an update with a new tip. The stream has one of `separators` separators."""
    stream = int.from_bytes(_digest("update", number)[:8]) % _STREAMS
    return update_of(number, epoch, stream, stream % separators)


def update_of(number: int, epoch: int, stream: int, separator: int) -> tuple[bytes, bytes]:
    """Build the key and value of an update with a new tip of the given stream, which has the given separator."""
    named = SeparatorRecord("model", _stream(MODEL, separator))
    record = UpdateRecord(
        network="local-bench",
        origin="LIVE",
        separator=named,
        separator_source="topic",
        stream=_stream(MODEL_INSTANCE, stream),
        tip=cid_text(_DAG_CBOR + _digest("update", number)),
        from_="12D3KooWBench",
        message_id=f"12D3KooWBench/{number:016x}",
        epoch=Epoch("bench", epoch),
        frame=Coordinates(0, number, 0),
        observed_at=1_735_689_600_000_000 + number,
    )
    return build_update_key(record.network, named, record.stream), encode(record)


def _digest(kind: str, number: int) -> bytes:
    return hashlib.sha256(f"{kind} {number}".encode()).digest()


@lru_cache(maxsize=2 * _STREAMS)
def _stream(kind: int, number: int) -> str:
    return StreamID(kind, _DAG_CBOR + _digest(f"stream {kind}", number)).text
