"""The stateful processor of the query `batch`: stretches of a partition of `kiln.updates` to batches (decision 1).

Spark asks the processor for its state in a Python process of its own when the query starts. So pandas, two seconds of
CPU, is imported where rows come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from kiln.pipelines.batch.batching import BatchConfig, BatchOutput, batch_offset_ranges
from kiln.pipelines.batch.offset_range import PackedOffsetRange, merge_offset_ranges
from kiln.pipelines.batch.windows import PartitionWindows

if TYPE_CHECKING:
    import pandas as pd

OUTPUT = "topic string, key binary, value binary"
"""Rows for Kafka: `topic` is a name without prefix."""

_STATE = StructType([StructField("state", BinaryType())])
_PART = StructType([StructField("part", IntegerType())])
_OUTPUTS = 2_000  # rows of one frame


class _StateShards:
    """The parts of the state of the partition that Spark hands over just now
    (`kiln.pipelines.batch.windows.StateShards`)."""

    def __init__(self, state: MapState) -> None:
        self._state = state

    def __getitem__(self, part: int) -> bytes:
        kept = self._state.getValue((part,))
        if kept is None:
            raise RuntimeError(f"part {part} of the open windows is not in the checkpoint of the query batch")
        return bytes(kept[0])

    def __setitem__(self, part: int, data: bytes) -> None:
        self._state.updateValue((part,), (data,))

    def __delitem__(self, part: int) -> None:
        self._state.removeKey((part,))


class BatchProcessor(StatefulProcessor):
    """Keyed by Kafka partition. Its state is the head of the windows, read and written once each time, and their parts
    (`PartitionWindows`). A state from before there were parts is a head."""

    def __init__(self, batching: BatchConfig) -> None:
        self._batching = batching

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("windows", _STATE)
        self._parts = _StateShards(handle.getMapState("parts", _PART, _STATE))

    def handleInputRows(
        self,
        key: tuple[int],
        rows: Iterator[pd.DataFrame] | Iterator[Row],
        timerValues: TimerValues,
    ) -> Iterator[pd.DataFrame]:
        """Rows in: STRETCHES (kiln.pipelines.batch.offset_ranges). Rows out: OUTPUT."""
        import pandas as pd

        kept: list[PackedOffsetRange] = []  # order within a key is not promised
        for frame in rows:
            if isinstance(frame, pd.DataFrame):  # the pandas form of the operator
                columns = (frame[name].tolist() for name in ("first", "last", "stretch"))
                kept += map(PackedOffsetRange._make, zip(*columns, strict=True))
        state = self._state.get()
        head = bytes(state[0]) if state else b""
        windows = PartitionWindows(self._batching.window, head, self._batching.grace, self._parts)
        outputs: list[BatchOutput] = []
        for output in batch_offset_ranges(windows, key[0], merge_offset_ranges(kept), self._batching.block_limit):
            outputs.append(output)
            if len(outputs) == _OUTPUTS:
                yield _frame(outputs)
                outputs = []
        self._state.update((windows.dump(),))
        if outputs:  # pandas would give an empty column a type of its own choice
            yield _frame(outputs)

    def close(self) -> None:
        """Nothing is held outside the state."""


def _frame(outputs: list[BatchOutput]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        {
            "topic": [output.topic for output in outputs],
            "key": [output.key for output in outputs],
            "value": [output.value for output in outputs],
        }
    )
