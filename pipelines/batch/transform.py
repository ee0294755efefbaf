"""Tasks of the query `batch`: from records of `kiln.updates` to CIP-123 batches for `kiln.batches`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from kiln.pipelines.batch.batching import BatchConfig
from kiln.pipelines.batch.offset_range import (
    NO_UPDATE,
    UpdateFilter,
    UpdateRange,
    WindowKey,
    WriterEpoch,
    read_offset_range,
)
from kiln.pipelines.batch.processor import OUTPUT, BatchProcessor
from kiln.pipelines.native.core import Core, CoreRows, is_worth_it
from kiln.pipelines.native.library import find_engine, turn_off
from kiln.pipelines.runtime.kafka_ranges import ArrowTask

_Value = TypeVar("_Value")

OFFSET_RANGES = "partition int, first bigint, last bigint, data binary"
"""Columns of the rows between the tasks: a Kafka partition, and the fields of a `PackedOffsetRange`."""

_OFFSET_RANGES_SCHEMA = pa.schema(
    [("partition", pa.int32()), ("first", pa.int64()), ("last", pa.int64()), ("data", pa.binary())]
)


def batch_ranges(ranges: DataFrame, batching: BatchConfig, prefix: str) -> DataFrame:
    """Build the batches of ranges of updates. The result has the columns topic, key and value: batches and
    quarantine records for Kafka."""
    return ranges.groupBy("partition").transformWithStateInPandas(
        BatchProcessor(batching, prefix), outputStructType=OUTPUT, outputMode="Append", timeMode="None"
    )


def build_range_task(update_filter: UpdateFilter) -> ArrowTask:
    """Build the task that decodes records of `kiln.updates` into rows with the columns OFFSET_RANGES.

    A row holds many updates, because PySpark takes 5 µs to unpack each row for a stateful processor.
    """

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        core: Core | None = None
        for batch in batches:
            if core is None and is_worth_it(batch.num_rows):
                core = Core()
            partitions = batch.column("partition").unique().to_pylist()
            rows = []
            for partition in partitions:
                records = batch
                if len(partitions) > 1:
                    records = batch.filter(pc.equal(batch.column("partition"), partition))
                rows += [
                    (partition, decoded.offsets[0], decoded.offsets[-1], msgspec.msgpack.encode(decoded))
                    for decoded in _decode(core, records, update_filter)
                ]
            if not rows:
                continue
            fields = zip(zip(*rows, strict=True), _OFFSET_RANGES_SCHEMA, strict=True)
            arrays = [pa.array(column, field.type) for column, field in fields]
            yield pa.RecordBatch.from_arrays(arrays, schema=_OFFSET_RANGES_SCHEMA)

    return read


def _decode(core: Core | None, batch: pa.RecordBatch, update_filter: UpdateFilter) -> Iterator[UpdateRange]:
    """Decode records of one partition into ranges. If the native core leaves some records to Python, the range of
    these records lies within a range of the core."""
    first = 0
    for rows in core.batch(batch) if core is not None and find_engine().is_native else ():
        decoded = _build_range(rows, batch, update_filter) if rows.tables else None
        if decoded is not None and _has_difference(decoded, rows, batch, update_filter):
            break
        if decoded is not None and decoded.offsets:
            yield decoded
        if rows.left:
            yield read_offset_range(batch.take(pa.array(rows.left, pa.int32())), update_filter)
        first = rows.end
    if first < batch.num_rows:
        yield read_offset_range(batch.slice(first), update_filter)


def _build_range(rows: CoreRows, batch: pa.RecordBatch, update_filter: UpdateFilter) -> UpdateRange:
    """Build the range of the records that the native core decoded in one call."""
    records, owners, epochs = rows.tables
    taken = batch.select(["offset", "stamp"])
    taken = taken.slice(rows.first, rows.end - rows.first) if not rows.left else taken.take(records.column("row"))
    indexes = records.column("owner")
    if update_filter.authors is not None:
        is_accepted = pc.is_in(records.column("author"), pa.array(update_filter.authors, pa.string()))
        indexes = pc.if_else(is_accepted, indexes, NO_UPDATE)
    if update_filter.only_verified:
        indexes = pc.if_else(records.column("is_verified"), indexes, NO_UPDATE)
    return UpdateRange(
        offsets=_list_values(taken.column("offset")),
        stamps=_list_values(taken.column("stamp")),
        owners=list(map(WindowKey._make, zip(*map(_list_values, owners.columns), strict=True))),
        epochs=list(map(WriterEpoch._make, zip(*map(_list_values, epochs.columns), strict=True))),
        owner_indexes=_list_values(indexes),
        epoch_indexes=_list_values(records.column("epoch")),
        leaves=_list_values(records.column("leaf")),
        observed_at=_list_values(records.column("observed_at")),
        messages=_list_values(records.column("message")),
    )


def _has_difference(decoded: UpdateRange, rows: CoreRows, batch: pa.RecordBatch, update_filter: UpdateFilter) -> bool:
    """Compare the samples of a call of the native core with what Python decodes. At a difference, turn the core off."""
    if not rows.samples:
        return False
    samples = batch.take(pa.array(rows.samples, pa.int32()))
    expected = read_offset_range(samples, update_filter)
    places = dict(zip(decoded.offsets, range(len(decoded.offsets)), strict=True))
    for index, offset in enumerate(expected.offsets):
        if decoded.describe(places[offset]) != expected.describe(index):
            reason = "the native core and Python decoded a record of kiln.updates differently"
            turn_off(reason, batch.column("partition")[0].as_py(), offset)
            return True
    return False


def _list_values(column: pa.Array) -> list[_Value]:
    values: list[_Value] = column.to_numpy(zero_copy_only=False).tolist()
    return values
