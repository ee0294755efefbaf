"""The batcher without Spark: Kiln's code for whole ranges of records, and decision 1 implemented record by record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from kiln.pipelines.batch.batching import BatchOutput, batch_offset_ranges, build_batch_records
from kiln.pipelines.batch.offset_range import ALL, UpdateFilter, UpdateRange, WindowKey, read_offset_range
from kiln.pipelines.batch.windows import PartitionWindows, Window
from kiln.schemas.kafka.records import (
    UNREADABLE,
    QuarantineRecord,
    build_batch_key,
    build_quarantine_record_key,
    decode_update,
    encode,
)
from kiln.schemas.wire.cid import CidError, cid_bytes
from kiln.schemas.wire.streamid import StreamIdError, stream_text


class LogRecord(NamedTuple):
    """A record of `kiln.updates`. `stamp` is the broker's timestamp in µs. An empty value is a tick."""

    partition: int
    offset: int
    stamp: int
    value: bytes | None


def list_window_tips(window: Window) -> dict[str, set[bytes]]:
    """CID bytes of the tips in a window, by StreamID."""
    tips: dict[str, set[bytes]] = {}
    for leaf in window.leaves:
        stream, _, tip = leaf.partition(b"\n")
        tips.setdefault(stream.decode(), set()).add(tip)
    return tips


def read_range(
    offsets: Sequence[int], stamps: Sequence[int], values: Sequence[bytes | None], update_filter: UpdateFilter = ALL
) -> UpdateRange:
    """Read records of one partition as a task does."""
    columns = {"offset": pa.array(offsets), "stamp": pa.array(stamps), "value": pa.array(values, pa.binary())}
    return read_offset_range(pa.RecordBatch.from_pydict(columns), update_filter)


def batch_partition(windows: PartitionWindows, records: Iterable[LogRecord], limit: int) -> Iterator[BatchOutput]:
    """Batch records of one partition, all in one offset range, with the code of the query `batch`."""
    log = list(records)
    if log:
        offsets, stamps, values = zip(*((each.offset, each.stamp, each.value) for each in log), strict=True)
        stretch = read_range(offsets, stamps, values)
        yield from batch_offset_ranges(windows, log[0].partition, [stretch], limit)


def plainly(windows: PartitionWindows, records: Iterable[LogRecord], limit: int) -> Iterator[BatchOutput]:
    """Batch records in the order of offsets, one by one, to compare the output with that of `batch_partition`."""
    for record in records:
        for closed in windows.advance(record.stamp):
            yield from build_outputs(closed, limit)
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
        message = f"{update.network}\n{update.origin}\n{update.message_id}"
        if not windows.guard.is_duplicate(update.epoch.query, update.epoch.batch, message):
            for closed in windows.add(key, stream, tip, min(update.observed_at, windows.log_time)):
                yield from build_outputs(closed, limit)


def build_outputs(closed: Window, limit: int) -> Iterator[BatchOutput]:
    """Build the Kafka records of a window that has ended."""
    for record in build_batch_records(closed, limit):
        yield BatchOutput("batches", build_batch_key(record.network, record.separator), encode(record))


def _unreadable(record: LogRecord, error: Exception) -> BatchOutput:
    fault = QuarantineRecord(
        stage="batch",
        reason="update_malformed",
        detail=f"record {record.partition}/{record.offset} of updates: {error}",
        data=record.value or b"",
        observed_at=record.stamp,
    )
    return BatchOutput(
        "quarantine", build_quarantine_record_key("updates", record.partition, record.offset), encode(fault)
    )
