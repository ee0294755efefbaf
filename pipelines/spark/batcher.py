"""The stateful processor of the `batch` query: one partition of `kiln.updates` to batches (CIP-123; decision 1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

from pipelines.logic.windows import ClosedWindow, PartitionWindows, WindowKey
from schemas.batch import MAX_BLOCK, write_blocks
from schemas.cid import CidError, cid_bytes
from schemas.records import UNREADABLE, BatchRecord, QuarantineRecord, SeparatorRecord, batch_key, decode_update, encode
from schemas.streamid import StreamIdError, stream_text

STATE = "state binary"
OUTPUT = "topic string, key binary, value binary"
"""Rows for Kafka: `topic` is a name without prefix."""


@dataclass(frozen=True)
class Batching:
    """T in µs, and the greatest size of a block in bytes."""

    window: int = 1_000_000
    block_limit: int = MAX_BLOCK


class LogRecord(msgspec.Struct, frozen=True):
    """A record of `kiln.updates`; `stamp`: the broker's, µs. An empty value is a tick."""

    partition: int
    offset: int
    stamp: int
    value: bytes | None


class Output(msgspec.Struct, frozen=True):
    topic: str
    key: bytes
    value: bytes


def batch_partition(windows: PartitionWindows, records: Iterator[LogRecord], limit: int) -> Iterator[Output]:
    """Reads records of one partition, in offset order, into its windows; gives out the batches that come due.

    An update without a separator is no part of a batch; one that cannot be read goes to quarantine.
    """
    for record in records:
        for closed in windows.advance(record.stamp):
            yield from batch_outputs(closed, limit)
        if not record.value:
            continue
        try:
            update = decode_update(record.value)
            stream, tip = stream_text(update.stream), cid_bytes(update.tip)
        except (*UNREADABLE, StreamIdError, CidError) as error:
            yield _unreadable(record, error)
            continue
        if update.separator is None:
            continue
        key = WindowKey(update.network, update.origin, update.separator.key, update.separator.value)
        message = f"{update.network}\n{update.origin}\n{update.message}"
        if not windows.repeats(update.epoch.query, update.epoch.batch, message):
            windows.add(key, stream, tip)


def batch_outputs(closed: ClosedWindow, limit: int) -> Iterator[Output]:
    """The blocks of one window as records of `kiln.batches`: more than one where the limit asks for it."""
    key, window = closed
    separator = SeparatorRecord(key.separator_key, key.separator_value)
    for block in write_blocks(window.tips, limit):
        record = BatchRecord(
            network=key.network,
            origin=key.origin,
            separator=separator,
            cid=block.cid,
            block=block.data,
            opened_at=window.opened_at,
            closed_at=window.closes_at,
        )
        yield Output("batches", batch_key(key.network, separator), encode(record))


def _unreadable(record: LogRecord, error: Exception) -> Output:
    fault = QuarantineRecord(
        stage="batch",
        reason="update_malformed",
        detail=f"record {record.partition}/{record.offset} of updates: {error}",
        data=record.value or b"",
        observed_at=record.stamp,
    )
    return Output("quarantine", f"updates/{record.partition}/{record.offset}".encode(), encode(fault))


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
        windows = PartitionWindows(self._batching.window, bytes(kept[0]) if kept else b"")
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
