"""Stateful processor of the query `batch`: from offset ranges of a partition of `kiln.updates` to batches (decision 1).

When the query starts, Spark requests the processor's state schema in a separate Python process. So pandas, whose import
takes two seconds of CPU, is imported only where rows are processed.
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
"""Rows for Kafka"""

_STATE = StructType([StructField("state", BinaryType())])
_OUTPUT_SIZE = 1 << 20
"""Bytes of values after which a DataFrame ends: it bounds memory, and Spark sends its rows while the next are built."""


class BatchProcessor(StatefulProcessor):
    """Batcher keyed by Kafka partition. Its state is the state of the windows, read and written once per
    micro-batch."""

    def __init__(self, batching: BatchConfig, prefix: str = "") -> None:
        """`prefix`: prefix of the topic names."""
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
        """Batch the rows of one partition. Rows in: OFFSET_RANGES (kiln.pipelines.batch.transform). Rows out:
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
        """Do nothing: there is no state outside Spark's."""

    def _build_data_frame(self, outputs: list[BatchOutput]) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(
            {
                "topic": [self._prefix + output.topic for output in outputs],
                "key": [output.key for output in outputs],
                "value": [output.value for output in outputs],
            }
        )
