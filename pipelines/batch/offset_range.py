"""Stretches of one partition of `kiln.updates`, read: what the windows need of each record (decision 1). No Spark.

Reading needs no order and no state, so many tasks can do it at once; the windows then take stretch by stretch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec

from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS, describe
from kiln.schemas.kafka.records import MAX_DETAIL, UNREADABLE, Origin, UpdateRecord, decode_update
from kiln.schemas.wire.batch_block import stream_key
from kiln.schemas.wire.cid import CidError, cid_bytes
from kiln.schemas.wire.streamid import StreamIdError, stream_text

NO_UPDATE: Final = -1
"""In `Stretch.owners`: a tick, or an update that goes into no batch. The record only moves the log's clock."""
FAULT: Final = -2
"""In `Stretch.owners`: a record that cannot be read. `leaves` has its bytes, and `messages` says why."""
FAILED: Final = -3
"""In `Stretch.owners`: as FAULT, of a record at which Kiln itself failed."""


class WindowKey(NamedTuple):
    """What owns a window: two networks, origins or separators never share one."""

    network: str
    origin: Origin
    separator_key: str
    separator_value: str


class UpdateFilter(NamedTuple):
    """Which updates of the log go into batches. The others only move the log's clock, as ticks do."""

    authors: frozenset[str] | None = None
    """peer ids of those whose updates do; None: everybody's"""
    only_verified: bool = False
    """whether the separator must be the one that the genesis names"""

    def takes(self, update: UpdateRecord) -> bool:
        return (self.authors is None or update.from_ in self.authors) and (
            not self.only_verified or update.separator_source == "genesis"
        )


ALL: Final = UpdateFilter()


class WindowOwner(NamedTuple):
    """What owns the window of an update, and which epoch of which writer the update is of."""

    key: WindowKey
    query: str
    batch: int


class OffsetRange(msgspec.Struct, array_like=True, gc=False):
    """Records of one partition in the order of their offsets: an item in each list for each record."""

    offsets: list[int]
    stamps: list[int]
    """of the broker, µs"""
    table: list[WindowOwner]
    """each owner once"""
    owners: list[int]
    """index in `table`, or NO_UPDATE, FAULT or FAILED"""
    leaves: list[bytes]
    """the tip of the stream (kiln.schemas.wire.batch_block)"""
    heard: list[int]
    """`observed_at`, µs"""
    messages: list[str]
    """what the message is known by: network, origin and message id"""


class PackedOffsetRange(NamedTuple):
    """A stretch on its way: the offsets of its first and last record, and the stretch as msgpack."""

    first: int
    last: int
    data: bytes


def read_offset_range(records: Iterable[tuple[int, int, bytes | None]], which: UpdateFilter = ALL) -> OffsetRange:
    """Reads (offset, stamp, value) of one partition, in any order."""
    everything = which == ALL
    ordered = list(records)
    if any(one[0] > next_[0] for one, next_ in pairwise(ordered)):
        ordered.sort(key=lambda record: record[0])
    found: dict[tuple[str, Origin, str, str, str, int], int] = {}
    owners: list[int] = []
    leaves: list[bytes] = []
    heard: list[int] = []
    messages: list[str] = []
    for _, _, value in ordered:
        owner, leaf, observed_at, message = NO_UPDATE, b"", 0, ""
        if value:
            try:
                update = decode_update(value)
                tip_of_stream = _read_stream_key(update.stream) + cid_bytes(update.tip)
                separator = update.separator
                if separator is not None and (everything or which.takes(update)):
                    leaf = tip_of_stream
                    network, origin, epoch = update.network, update.origin, update.epoch
                    key = network, origin, separator.key, separator.value, epoch.query, epoch.batch
                    owner = found.setdefault(key, len(found))
                    observed_at = update.observed_at
                    message = f"{network}\n{origin}\n{update.message}"
            except (*UNREADABLE, StreamIdError, CidError) as error:
                owner, leaf, message = FAULT, value, str(error)[:MAX_DETAIL]
            except PROCESSING_ERRORS as error:  # reading is pure: the record alone has caused this
                owner, leaf, message = FAILED, value, describe(error)
        owners.append(owner)
        leaves.append(leaf)
        heard.append(observed_at)
        messages.append(message)
    return OffsetRange(
        [offset for offset, _, _ in ordered],
        [stamp for _, stamp, _ in ordered],
        [WindowOwner(WindowKey(*key[:4]), *key[4:]) for key in found],
        owners,
        leaves,
        heard,
        messages,
    )


def pack_offset_range(stretch: OffsetRange) -> PackedOffsetRange:
    """The stretch, which has a record at least, as it passes between tasks."""
    return PackedOffsetRange(stretch.offsets[0], stretch.offsets[-1], _ENCODER.encode(stretch))


def merge_offset_ranges(kept: Iterable[PackedOffsetRange]) -> Iterator[OffsetRange]:
    """The stretches of one partition, such that offsets only go up. Those that overlap become one."""
    runs: list[list[PackedOffsetRange]] = []
    end = -1
    for each in sorted(kept, key=itemgetter(0)):
        if runs and each.first <= end:
            runs[-1].append(each)
        else:
            runs.append([each])
        end = max(end, each.last)
    for run in runs:
        stretches = [_DECODER.decode(each.data) for each in run]
        yield stretches[0] if len(stretches) == 1 else _merge(stretches)


def _merge(stretches: list[OffsetRange]) -> OffsetRange:
    table: dict[WindowOwner, int] = {}
    records: list[tuple[int, int, int, bytes, int, str]] = []
    for each in stretches:
        numbers = [table.setdefault(owner, len(table)) for owner in each.table]
        owners = [numbers[owner] if owner >= 0 else owner for owner in each.owners]
        records += zip(each.offsets, each.stamps, owners, each.leaves, each.heard, each.messages, strict=True)
    records.sort(key=itemgetter(0))
    offsets, stamps, owners_, leaves, heard, messages = map(list, zip(*records, strict=True))
    return OffsetRange(offsets, stamps, list(table), owners_, leaves, heard, messages)


@lru_cache(maxsize=65536)
def _read_stream_key(stream: str) -> bytes:
    """The key of a stream in a block, from any spelling. StreamIdError: it is none."""
    return stream_key(stream_text(stream))


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(OffsetRange)
