"""The stateful processor of the query `batch`: stretches of a partition of `kiln.updates` to batches (decision 1).

Spark asks the processor for its state in a Python process of its own when the query starts. So pandas, two seconds of
CPU, is imported where rows come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import BinaryType, StructField, StructType

from pipelines.logic.batching import Batching, Output, batch_stretches
from pipelines.logic.stretch import KeptStretch, in_order
from pipelines.logic.windows import PartitionWindows

if TYPE_CHECKING:
    import pandas as pd

OUTPUT = "topic string, key binary, value binary"
"""Rows for Kafka: `topic` is a name without prefix."""

_STATE = StructType([StructField("state", BinaryType())])
_OUTPUTS = 2_000  # rows of one frame


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
        """Rows in: STRETCHES (pipelines.spark.stretches). Rows out: OUTPUT."""
        import pandas as pd

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
    import pandas as pd

    return pd.DataFrame(
        {
            "topic": [output.topic for output in outputs],
            "key": [output.key for output in outputs],
            "value": [output.value for output in outputs],
        }
    )
