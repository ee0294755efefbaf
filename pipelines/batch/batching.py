"""One partition of `kiln.updates` to records of `kiln.batches` (CIP-123; decision 1). No Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from kiln.pipelines.batch.offset_range import ALL, FAILED, OffsetRange, UpdateFilter
from kiln.pipelines.batch.windows import ClosedWindow, PartitionWindows
from kiln.pipelines.decode.processing_errors import PROCESSING_FAILED
from kiln.schemas.kafka.records import (
    BatchRecord,
    SeparatorRecord,
    batch_key,
    encode,
    quarantine_record_key,
    quarantine_records,
)
from kiln.schemas.wire.batch_block import MAX_BLOCK, write_leaves


@dataclass(frozen=True)
class BatchConfig:
    """T and G in µs, the greatest size of a block in bytes, and which updates go into batches."""

    window: int = 1_000_000
    grace: int = 0
    block_limit: int = MAX_BLOCK
    which: UpdateFilter = ALL


class BatchOutput(msgspec.Struct, frozen=True):
    topic: str
    key: bytes
    value: bytes


def batch_offset_ranges(
    windows: PartitionWindows, partition: int, stretches: Iterable[OffsetRange], limit: int
) -> Iterator[BatchOutput]:
    """Reads stretches of one partition, in the order of their offsets, into its windows; gives out the batches that
    come due.

    An update without a separator is no part of a batch; one that cannot be read goes to quarantine.
    """
    for stretch in stretches:
        for found in windows.take(stretch):
            if isinstance(found, int):
                yield from _quarantine_unreadable(partition, stretch, found)
            else:
                yield from build_outputs(found, limit)


def build_outputs(closed: ClosedWindow, limit: int) -> Iterator[BatchOutput]:
    """The records of one window as they go to Kafka."""
    for record in build_batch_records(closed, limit):
        yield BatchOutput("batches", batch_key(record.network, record.separator), encode(record))


def build_batch_records(closed: ClosedWindow, limit: int) -> Iterator[BatchRecord]:
    """The blocks of one window as records of `kiln.batches`: more than one where the limit asks for it."""
    key, window = closed
    separator = SeparatorRecord(key.separator_key, key.separator_value)
    for block in write_leaves(window.leaves, limit):
        yield BatchRecord(
            network=key.network,
            origin=key.origin,
            separator=separator,
            cid=block.cid,
            block=block.data,
            opened_at=window.opened_at,
            closed_at=window.closes_at,
        )


def _quarantine_unreadable(partition: int, stretch: OffsetRange, index: int) -> Iterator[BatchOutput]:
    offset = stretch.offsets[index]
    reason = PROCESSING_FAILED if stretch.owners[index] == FAILED else "update_malformed"
    detail = f"record {partition}/{offset} of updates: {stretch.messages[index]}"
    key = quarantine_record_key("updates", partition, offset)
    for record in quarantine_records("batch", reason, detail, stretch.leaves[index], stretch.stamps[index]):
        yield BatchOutput("quarantine", key, encode(record))
