"""The Python of the query `batch`: records of `kiln.updates` to stretches, and the stretches of a partition to batches
(CIP-123; decision 1)."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import BinaryType, StructField, StructType

from pipelines.logic.batching import Batching, Output, batch_stretches
from pipelines.logic.stretch import KeptStretch, in_order, keep, read_stretch
from pipelines.logic.windows import PartitionWindows

STRETCHES = "partition int, first bigint, last bigint, stretch binary"
"""Rows between tasks. The columns after `partition` are those of a KeptStretch."""
OUTPUT = "topic string, key binary, value binary"
"""Rows for Kafka: `topic` is a name without prefix."""

_STATE = StructType([StructField("state", BinaryType())])
_STRETCHES = pa.schema(
    [("partition", pa.int32()), ("first", pa.int64()), ("last", pa.int64()), ("stretch", pa.binary())]
)
_OUTPUTS = 2_000  # rows of one frame


def stretches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`. In: partition int, offset bigint, stamp bigint (µs), value binary. Out: STRETCHES.

    A row for each partition in each Arrow batch. PySpark takes apart each row that it hands to a stateful processor, at
    5 µs a row. And each partition is read by a task of its own here, where the shuffle brings several to one task.
    """
    for batch in batches:
        partitions = batch.column("partition").unique().to_pylist()
        kept = [
            (partition, *keep(read_stretch(_records(batch, None if len(partitions) == 1 else partition))))
            for partition in partitions
        ]
        if not kept:
            continue
        arrays = [
            pa.array(column, field.type) for column, field in zip(zip(*kept, strict=True), _STRETCHES, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=_STRETCHES)


def _records(batch: pa.RecordBatch, partition: int | None) -> Iterator[tuple[int, int, bytes | None]]:
    """Offset, stamp and value of one partition's rows, or of all."""
    rows = batch if partition is None else batch.filter(pc.equal(batch.column("partition"), partition))
    columns = (rows.column(name).to_numpy(zero_copy_only=False).tolist() for name in ("offset", "stamp", "value"))
    return zip(*columns, strict=True)


class Batcher(StatefulProcessor):
    """Keyed by Kafka partition; its state is one blob, `PartitionWindows.dump()`, read and written once each time."""

    def __init__(self, batching: Batching) -> None:
        self._batching = batching

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("windows", _STATE)

    def handleInputRows(
        self,
        key: tuple[int],
        rows: Iterator[pd.DataFrame] | Iterator[Row],
        timerValues: TimerValues,
    ) -> Iterator[pd.DataFrame]:
        """Rows in: STRETCHES. Rows out: OUTPUT."""
        kept: list[KeptStretch] = []  # order within a key is not promised
        for frame in rows:
            if isinstance(frame, pd.DataFrame):  # the pandas form of the operator
                columns = (frame[name].tolist() for name in ("first", "last", "stretch"))
                kept += map(KeptStretch._make, zip(*columns, strict=True))
        state = self._state.get()
        windows = PartitionWindows(self._batching.window, bytes(state[0]) if state else b"", self._batching.grace)
        outputs: list[Output] = []
        for output in batch_stretches(windows, key[0], in_order(kept), self._batching.block_limit):
            outputs.append(output)
            if len(outputs) == _OUTPUTS:
                yield _frame(outputs)
                outputs = []
        self._state.update((windows.dump(),))
        if outputs:  # pandas would give an empty column a type of its own choice
            yield _frame(outputs)

    def close(self) -> None:
        """Nothing is held outside the state."""


def _frame(outputs: list[Output]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "topic": [output.topic for output in outputs],
            "key": [output.key for output in outputs],
            "value": [output.value for output in outputs],
        }
    )
