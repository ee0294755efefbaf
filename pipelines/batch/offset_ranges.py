"""Records of `kiln.updates` to stretches of the log, in Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from kiln.pipelines.batch.offset_range import UpdateFilter, pack_offset_range, read_offset_range

STRETCHES = "partition int, first bigint, last bigint, stretch binary"
"""Rows between tasks. The columns after `partition` are those of a KeptStretch."""

_STRETCHES = pa.schema(
    [("partition", pa.int32()), ("first", pa.int64()), ("last", pa.int64()), ("stretch", pa.binary())]
)


def stretches(which: UpdateFilter) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow`. In: partition int, offset bigint, stamp bigint (µs), value binary. Out: STRETCHES.

    A row for each partition in each Arrow batch. PySpark takes apart each row that it hands to a stateful processor, at
    5 µs a row. And each partition is read by a task of its own here, where the shuffle brings several to one task.
    """

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            partitions = batch.column("partition").unique().to_pylist()
            kept = [
                (
                    partition,
                    *pack_offset_range(
                        read_offset_range(_records(batch, None if len(partitions) == 1 else partition), which)
                    ),
                )
                for partition in partitions
            ]
            if not kept:
                continue
            arrays = [
                pa.array(column, field.type) for column, field in zip(zip(*kept, strict=True), _STRETCHES, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=_STRETCHES)

    return read


def _records(batch: pa.RecordBatch, partition: int | None) -> Iterator[tuple[int, int, bytes | None]]:
    """Offset, stamp and value of one partition's rows, or of all."""
    rows = batch if partition is None else batch.filter(pc.equal(batch.column("partition"), partition))
    columns = (rows.column(name).to_numpy(zero_copy_only=False).tolist() for name in ("offset", "stamp", "value"))
    return zip(*columns, strict=True)
