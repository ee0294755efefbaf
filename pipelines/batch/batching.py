"""Records of `kiln.batches` from one partition of `kiln.updates`, built without Spark (CIP-123; decision 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from kiln.pipelines.batch.offset_range import ALL, FAILED, UpdateFilter, UpdateRange
from kiln.pipelines.batch.windows import PartitionWindows, Window
from kiln.pipelines.decode.processing_errors import PROCESSING_FAILED
from kiln.schemas.kafka.records import (
    BatchRecord,
    SeparatorRecord,
    build_batch_key,
    build_quarantine_record_key,
    build_quarantine_records,
    encode,
)
from kiln.schemas.wire.batch_block import MAX_BLOCK, write_leaves


@dataclass(frozen=True)
class BatchConfig:
    """Options of the batches: T (`window`) and G (`grace`) in µs, the maximum size of a block in bytes, and the updates
    that go into batches."""

    window: int = 1_000_000
    grace: int = 0
    block_limit: int = MAX_BLOCK
    update_filter: UpdateFilter = ALL


class BatchOutput(msgspec.Struct, frozen=True):
    topic: str
    key: bytes
    value: bytes


def batch_offset_ranges(
    windows: PartitionWindows, partition: int, ranges: Iterable[UpdateRange], limit: int
) -> Iterator[BatchOutput]:
    """Add decoded records of one partition, in the order of their offsets, to its windows. Yield the Kafka records of
    the windows that end.

    An update without a separator goes into no batch. A record that cannot be decoded goes to quarantine. `limit`:
    maximum size of a block, bytes.
    """
    for records in ranges:
        for result in windows.add_range(records):
            if isinstance(result, int):
                yield from _quarantine_unreadable(partition, records, result)
            else:
                for record in build_batch_records(result, limit):
                    yield BatchOutput("batches", build_batch_key(record.network, record.separator), encode(record))


def build_batch_records(window: Window, limit: int) -> Iterator[BatchRecord]:
    """Build the records of `kiln.batches` for a window. There are several if one block would exceed `limit` bytes."""
    key = window.key
    separator = SeparatorRecord(key.separator_key, key.separator_value)
    for block in write_leaves(window.leaves, limit):
        yield BatchRecord(
            network=key.network,
            origin=key.origin,
            separator=separator,
            batch_cid=block.cid,
            block=block.data,
            opened_at=window.opened_at,
            closed_at=window.closes_at,
        )


def _quarantine_unreadable(partition: int, records: UpdateRange, index: int) -> Iterator[BatchOutput]:
    offset = records.offsets[index]
    reason = PROCESSING_FAILED if records.owner_indexes[index] == FAILED else "update_malformed"
    detail = f"record {partition}/{offset} of updates: {records.messages[index].decode()}"
    key = build_quarantine_record_key("updates", partition, offset)
    for record in build_quarantine_records("batch", reason, detail, records.leaves[index], records.stamps[index]):
        yield BatchOutput("quarantine", key, encode(record))
