"""Offset ranges of one partition of `kiln.updates`, decoded into the fields of each record that the windows need
(decision 1). No Spark.

Decoding needs no order and no state, so many tasks can do it at once; the windows then take range by range.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec

from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS, describe
from kiln.schemas.kafka.records import (
    MAX_DETAIL,
    UNREADABLE,
    Epoch,
    Origin,
    SeparatorRecord,
    UpdateRecord,
    decode_update,
)
from kiln.schemas.wire.batch_block import encode_stream_key
from kiln.schemas.wire.cid import CidError, cid_bytes
from kiln.schemas.wire.streamid import StreamIdError, stream_text

NO_UPDATE: Final = -1
"""In `UpdateRange.owner_indexes`: a tick, or an update that goes into no batch. The record only moves log time."""
FAULT: Final = -2
"""In `UpdateRange.owner_indexes`: an unreadable record. `leaves` contains its bytes, and `message_keys` contains the
error."""
FAILED: Final = -3
"""In `UpdateRange.owner_indexes`: as FAULT, for a record at which Kiln itself failed."""


class WindowKey(NamedTuple):
    """Owner of a window: two networks, origins or separators never share one."""

    network: str
    origin: Origin
    separator_key: str
    separator_value: str


class UpdateFilter(NamedTuple):
    """Selection of the updates that go into batches. The others only move log time, as ticks do."""

    authors: frozenset[str] | None = None
    """peer ids whose updates are batched; None for all"""
    only_verified: bool = False
    """batch only updates whose separator is confirmed by the stream's genesis"""

    def accepts(self, update: UpdateRecord) -> bool:
        return (self.authors is None or update.from_ in self.authors) and (
            not self.only_verified or update.separator_source == "genesis"
        )


ALL: Final = UpdateFilter()


class WindowOwner(NamedTuple):
    """Owner of the window of an update, and the writer's epoch in which it was written."""

    key: WindowKey
    query: str
    batch: int


class UpdateRange(msgspec.Struct, array_like=True, gc=False):
    """Records of one partition in the order of their offsets: an item in each list for each record."""

    offsets: list[int]
    stamps: list[int]
    """broker stamps, µs"""
    owners: list[WindowOwner]
    """each owner once"""
    owner_indexes: list[int]
    """index in `owners`, or NO_UPDATE, FAULT or FAILED"""
    leaves: list[bytes]
    """the tip of the stream (kiln.schemas.wire.batch_block)"""
    observed_at: list[int]
    """capture time, µs"""
    message_keys: list[str]
    """network, origin and message id"""


class PackedOffsetRange(NamedTuple):
    """An offset range between tasks: the offsets of its first and last record, and msgpack of an `UpdateRange`."""

    first: int
    last: int
    data: bytes


def read_offset_range(
    offsets: Sequence[int],
    stamps: Sequence[int],
    values: Sequence[bytes | None],
    update_filter: UpdateFilter = ALL,
) -> UpdateRange:
    """Decode records of one partition, in any order, given as columns. `stamps`: the broker's, µs."""
    if any(one > following for one, following in pairwise(offsets)):
        order = sorted(range(len(offsets)), key=offsets.__getitem__)
        offsets, stamps = [offsets[index] for index in order], [stamps[index] for index in order]
        values = [values[index] for index in order]
    accepts_all = update_filter == ALL
    indexes: dict[tuple[str, Origin, SeparatorRecord, Epoch], int] = {}
    owner_indexes: list[int] = []
    leaves: list[bytes] = []
    observed: list[int] = []
    message_keys: list[str] = []
    for value in values:
        owner, leaf, observed_at, message = NO_UPDATE, b"", 0, ""
        if value:
            try:
                update = decode_update(value)
                stream_tip = _read_stream_key(update.stream) + cid_bytes(update.tip)
                separator = update.separator
                if separator is not None and (accepts_all or update_filter.accepts(update)):
                    leaf = stream_tip
                    network, origin = update.network, update.origin
                    owner = indexes.setdefault((network, origin, separator, update.epoch), len(indexes))
                    observed_at = update.observed_at
                    message = f"{network}\n{origin}\n{update.message_id}"
            except (*UNREADABLE, StreamIdError, CidError) as error:
                owner, leaf, message = FAULT, value, str(error)[:MAX_DETAIL]
            except PROCESSING_ERRORS as error:  # reading is pure: the record alone has caused this
                owner, leaf, message = FAILED, value, describe(error)
        owner_indexes.append(owner)
        leaves.append(leaf)
        observed.append(observed_at)
        message_keys.append(message)
    owners = [
        WindowOwner(WindowKey(network, origin, separator.key, separator.value), epoch.query, epoch.batch)
        for network, origin, separator, epoch in indexes
    ]
    return UpdateRange(list(offsets), list(stamps), owners, owner_indexes, leaves, observed, message_keys)


def pack_offset_range(records: UpdateRange) -> PackedOffsetRange:
    """Pack a range of at least one record, to pass it between tasks."""
    return PackedOffsetRange(records.offsets[0], records.offsets[-1], _ENCODER.encode(records))


def merge_offset_ranges(packed: Iterable[PackedOffsetRange]) -> Iterator[UpdateRange]:
    """Unpack the ranges of one partition in ascending offset order. Ranges that overlap become one."""
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
    owners: dict[WindowOwner, int] = {}
    records: list[tuple[int, int, int, bytes, int, str]] = []
    for part in ranges:
        numbers = [owners.setdefault(owner, len(owners)) for owner in part.owners]
        indexes = [numbers[index] if index >= 0 else index for index in part.owner_indexes]
        records += zip(
            part.offsets,
            part.stamps,
            indexes,
            part.leaves,
            part.observed_at,
            part.message_keys,
            strict=True,
        )
    records.sort(key=itemgetter(0))
    offsets, stamps, merged, leaves, observed_at, message_keys = map(list, zip(*records, strict=True))
    return UpdateRange(offsets, stamps, list(owners), merged, leaves, observed_at, message_keys)


@lru_cache(maxsize=65536)
def _read_stream_key(stream: str) -> bytes:
    """Return the key of a stream in a block.

    Args:
        stream: The StreamID in any spelling.

    Raises:
        StreamIdError: The text is no StreamID.
    """
    return encode_stream_key(stream_text(stream))


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(UpdateRange)
