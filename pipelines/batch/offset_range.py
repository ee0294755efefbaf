"""Ranges of records of one partition of `kiln.updates`, decoded into the fields that windows need (decision 1). No
Spark.

Records can be decoded by many tasks at once, because decoding needs no order and no state. The windows then take the
ranges in the order of their offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS, describe
from kiln.schemas.kafka.epoch_guard import compute_message_digest
from kiln.schemas.kafka.records import (
    MAX_DETAIL,
    UNREADABLE,
    Origin,
    UpdateRecord,
    decode_update,
)
from kiln.schemas.wire.batch_block import encode_stream_key
from kiln.schemas.wire.cid import CidError, cid_bytes
from kiln.schemas.wire.streamid import StreamIdError, stream_text

if TYPE_CHECKING:
    import pyarrow as pa

NO_UPDATE: Final = -1
"""In `UpdateRange.owner_indexes`: a tick, or an update that goes into no batch. Such a record only advances log
time."""
FAULT: Final = -2
"""In `UpdateRange.owner_indexes`: a record that is no valid update."""
FAILED: Final = -3
"""In `UpdateRange.owner_indexes`: a record at which Kiln's own decoding failed."""


class WindowKey(NamedTuple):
    """Key of a window. Updates with another network, origin or separator go into other windows."""

    network: str
    origin: Origin
    separator_key: str
    separator_value: str


class UpdateFilter(NamedTuple):
    """Selection of the updates that go into batches. Like a tick, any other update only advances log time."""

    authors: frozenset[str] | None = None
    """peer ids of the authors whose updates are batched; None for all authors"""
    only_verified: bool = False
    """true to batch only updates whose separator the genesis of their stream has confirmed"""

    def accepts(self, update: UpdateRecord) -> bool:
        return (self.authors is None or update.from_ in self.authors) and (
            not self.only_verified or update.separator_source == "genesis"
        )


ALL: Final = UpdateFilter()


class WriterEpoch(NamedTuple):
    """Writer of an update, and the epoch in which it wrote the update (`kiln.schemas.kafka.records.Epoch`)."""

    writer: str
    number: int


class UpdateRange(msgspec.Struct, array_like=True, gc=False):
    """Decoded records of one partition, by column, in the order of their offsets."""

    offsets: list[int]
    stamps: list[int]
    """broker timestamps, µs"""
    owners: list[WindowKey]
    epochs: list[WriterEpoch]
    owner_indexes: list[int]
    """index of the window's key in `owners`, or NO_UPDATE, FAULT or FAILED"""
    epoch_indexes: list[int]
    """index of the writer and its epoch in `epochs`"""
    leaves: list[bytes]
    """the stream and its tip (see `write_leaves`); for a record that cannot be decoded, its bytes"""
    observed_at: list[int]
    """capture times, µs"""
    messages: list[bytes]
    """digest of the message (`compute_message_digest`); for a record that cannot be decoded, the error in UTF-8"""

    def describe(self, index: int) -> tuple[object, ...]:
        """Return the decoded values of a record, to compare them with those of the native core."""
        owner = self.owner_indexes[index]
        if owner == NO_UPDATE:
            return (owner,)
        rest = self.leaves[index], self.observed_at[index], self.messages[index]
        if owner < 0:
            return owner, *rest
        return self.owners[owner], self.epochs[self.epoch_indexes[index]], *rest


class PackedOffsetRange(NamedTuple):
    """A range that is passed between tasks: the first and the last offset, and an `UpdateRange` as msgpack."""

    first: int
    last: int
    data: bytes


def read_offset_range(batch: pa.RecordBatch, update_filter: UpdateFilter) -> UpdateRange:
    """Decode records of one partition, in any order, from the columns offset, stamp and value.

    The native core decodes most records in the same way (native/src/batch.rs).
    """
    numbers = batch.column("offset").to_numpy()
    if (numbers[1:] < numbers[:-1]).any():
        batch = batch.sort_by("offset")
    columns = (batch.column(name).to_numpy(zero_copy_only=False) for name in ("offset", "stamp", "value"))
    offsets, stamps, values = (column.tolist() for column in columns)
    accepts_all = update_filter == ALL
    owners: dict[WindowKey, int] = {}
    epochs: dict[WriterEpoch, int] = {}
    records = UpdateRange(offsets, stamps, [], [], [], [], [], [], [])
    for value in values:
        owner, epoch, leaf, observed_at, message = NO_UPDATE, NO_UPDATE, b"", 0, b""
        if value:
            try:
                update = decode_update(value)
                stream_tip = encode_stream_key(stream_text(update.stream)) + cid_bytes(update.tip)
                separator = update.separator
                if separator is not None and (accepts_all or update_filter.accepts(update)):
                    leaf, observed_at, network, origin = stream_tip, update.observed_at, update.network, update.origin
                    owner = owners.setdefault(WindowKey(network, origin, separator.key, separator.value), len(owners))
                    epoch = epochs.setdefault(WriterEpoch(update.epoch.query, update.epoch.batch), len(epochs))
                    message = compute_message_digest(f"{network}\n{origin}\n{update.message_id}")
            except (*UNREADABLE, StreamIdError, CidError) as error:
                owner, leaf, message = FAULT, value, str(error)[:MAX_DETAIL].encode()
            except PROCESSING_ERRORS as error:  # reading is pure: the record alone has caused this
                owner, leaf, message = FAILED, value, describe(error).encode()
        records.owner_indexes.append(owner)
        records.epoch_indexes.append(epoch)
        records.leaves.append(leaf)
        records.observed_at.append(observed_at)
        records.messages.append(message)
    records.owners, records.epochs = list(owners), list(epochs)
    return records


def merge_offset_ranges(packed: Iterable[PackedOffsetRange]) -> Iterator[UpdateRange]:
    """Unpack ranges of one partition, and yield them in the order of their offsets. Ranges that overlap are merged into
    one."""
    groups: list[list[PackedOffsetRange]] = []
    end = -1
    for row in sorted(packed, key=itemgetter(0)):
        if groups and row.first <= end:
            groups[-1].append(row)
        else:
            groups.append([row])
        end = max(end, row.last)
    for group in groups:
        ranges = [_DECODER.decode(row.data) for row in group]
        yield ranges[0] if len(ranges) == 1 else _merge(ranges)


def _merge(ranges: list[UpdateRange]) -> UpdateRange:
    """Merge ranges that overlap. The lists `owners` and `epochs` of the result may have equal values."""
    owners: list[WindowKey] = []
    epochs: list[WriterEpoch] = []
    records: list[tuple[int, int, int, int, bytes, int, bytes]] = []
    for part in ranges:
        records += zip(
            part.offsets,
            part.stamps,
            [index + len(owners) if index >= 0 else index for index in part.owner_indexes],
            [index + len(epochs) for index in part.epoch_indexes],
            part.leaves,
            part.observed_at,
            part.messages,
            strict=True,
        )
        owners += part.owners
        epochs += part.epochs
    records.sort(key=itemgetter(0))
    offsets, stamps, owner_indexes, epoch_indexes, *rest = map(list, zip(*records, strict=True))
    return UpdateRange(offsets, stamps, owners, epochs, owner_indexes, epoch_indexes, *rest)


_DECODER: Final = msgspec.msgpack.Decoder(UpdateRange)
