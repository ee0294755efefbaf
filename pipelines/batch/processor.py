"""Stateful processor of the query `batch`: batches of one partition of `kiln.updates` (decision 1).

pandas is imported only where rows are processed. Its import takes two seconds of CPU, and at the start of the query
Spark runs this module in one more Python process, only to read the processor's state schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import BinaryType, StructField, StructType

from kiln.pipelines.batch.batching import BatchConfig, BatchOutput, batch_offset_ranges
from kiln.pipelines.batch.offset_range import PackedOffsetRange, merge_offset_ranges
from kiln.pipelines.batch.windows import PartitionWindows

if TYPE_CHECKING:
    import pandas as pd

OUTPUT = "topic string, key binary, value binary"
"""Columns of the records for Kafka"""

_STATE = StructType([StructField("state", BinaryType())])
_OUTPUT_SIZE = 1 << 20
"""Bytes of records in one DataFrame of the output. The limit bounds memory, and lets Spark send the first records while
the next are built."""


class BatchProcessor(StatefulProcessor):
    """Stateful processor with the Kafka partition as key. Its state holds the open windows, and is read and written
    once per micro-batch."""

    def __init__(self, batching: BatchConfig, prefix: str = "") -> None:
        """Create the processor. `prefix`: prefix of the names of Kafka topics."""
        self._batching = batching
        self._prefix = prefix

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("windows", _STATE)

    def handleInputRows(
        self,
        key: tuple[int],
        rows: Iterator[pd.DataFrame] | Iterator[Row],
        timerValues: TimerValues,
    ) -> Iterator[pd.DataFrame]:
        """Build the batches of one partition. The input has the columns OFFSET_RANGES, the output the columns
        OUTPUT."""
        import pandas as pd

        packed: list[PackedOffsetRange] = []  # order within a key is not guaranteed
        for frame in rows:
            if isinstance(frame, pd.DataFrame):  # the pandas form of the operator
                columns = (frame[name].tolist() for name in PackedOffsetRange._fields)
                packed += map(PackedOffsetRange._make, zip(*columns, strict=True))
        state = self._state.get()
        windows = PartitionWindows(self._batching.window, bytes(state[0]) if state else b"", self._batching.grace)
        outputs: list[BatchOutput] = []
        size = 0
        for output in batch_offset_ranges(windows, key[0], merge_offset_ranges(packed), self._batching.block_limit):
            outputs.append(output)
            size += len(output.value)
            if size >= _OUTPUT_SIZE:
                yield self._build_data_frame(outputs)
                outputs, size = [], 0
        self._state.update((windows.dump(),))
        if outputs:  # pandas would give an empty column a type of its own choice
            yield self._build_data_frame(outputs)

    def close(self) -> None:
        """Do nothing, because all state is Spark's."""

    def _build_data_frame(self, outputs: list[BatchOutput]) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(
            {
                "topic": [self._prefix + output.topic for output in outputs],
                "key": [output.key for output in outputs],
                "value": [output.value for output in outputs],
            }
        )
