"""The stateful processor of the `batch` query: one partition of `kiln.updates` to batches (CIP-123; decision 1)."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

from pipelines.logic.batching import Batching, LogRecord, batch_partition
from pipelines.logic.windows import PartitionWindows

STATE = "state binary"
OUTPUT = "topic string, key binary, value binary"
"""Rows for Kafka: `topic` is a name without prefix."""


class Batcher(StatefulProcessor):
    """Keyed by Kafka partition; its state is one blob, `PartitionWindows.dump()`, read and written once each time."""

    def __init__(self, batching: Batching) -> None:
        self._batching = batching

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("windows", STATE)

    def handleInputRows(
        self,
        key: tuple[int],
        rows: Iterator[pd.DataFrame] | Iterator[Row],
        timerValues: TimerValues,
    ) -> Iterator[pd.DataFrame]:
        """Rows in: partition int, offset bigint, stamp bigint (µs), value binary. Rows out: OUTPUT."""
        frames = [frame for frame in rows if isinstance(frame, pd.DataFrame)]  # the pandas form of the operator
        kept = self._state.get() if self._state.exists() else None
        windows = PartitionWindows(self._batching.window, bytes(kept[0]) if kept else b"", self._batching.grace)
        # Order within a key is not promised.
        arrived = pd.concat(frames, ignore_index=True).sort_values("offset", kind="stable")
        records = (
            LogRecord(key[0], offset, stamp, value)
            for offset, stamp, value in zip(
                arrived["offset"].tolist(), arrived["stamp"].tolist(), arrived["value"].tolist(), strict=True
            )
        )
        outputs = list(batch_partition(windows, records, self._batching.block_limit))
        self._state.update((windows.dump(),))
        if outputs:  # pandas would give an empty column a type of its own choice
            yield pd.DataFrame(
                {
                    "topic": [output.topic for output in outputs],
                    "key": [output.key for output in outputs],
                    "value": [output.value for output in outputs],
                }
            )

    def close(self) -> None:
        """Nothing is held outside the state."""
