"""One partition of `kiln.updates` to records of `kiln.batches` (CIP-123; decision 1). No Spark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from pipelines.logic.windows import ClosedWindow, PartitionWindows, WindowKey
from schemas.batch import MAX_BLOCK, write_blocks
from schemas.cid import CidError, cid_bytes
from schemas.records import (
    UNREADABLE,
    BatchRecord,
    QuarantineRecord,
    SeparatorRecord,
    batch_key,
    decode_update,
    encode,
    quarantine_record_key,
)
from schemas.streamid import StreamIdError, stream_text


@dataclass(frozen=True)
class Batching:
    """T and G in µs, and the greatest size of a block in bytes."""

    window: int = 1_000_000
    grace: int = 0
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
            for closed in windows.add(key, stream, tip, min(update.observed_at, windows.clock)):
                yield from batch_outputs(closed, limit)


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
    return Output("quarantine", quarantine_record_key("updates", record.partition, record.offset), encode(fault))
