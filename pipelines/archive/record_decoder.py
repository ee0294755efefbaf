"""First stage of the query `archive`: decode the records of `kiln.frames`, with the native core or in Python.

This stage writes the rows of all tables but `messages` into files, and yields the copies of messages for deduplication.
Python decodes the records that the core leaves to it. The order of the rows is the same as without the core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from kiln.pipelines.archive.core_samples import list_positions, turn_off_at_difference
from kiln.pipelines.archive.rows import (
    ENTRY_ROW_BYTES,
    ROW_BYTES,
    DecodedRecord,
    FaultRow,
    build_fault_rows,
    decode_record,
    estimate_size,
    reject_row,
)
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, FrameDecoder, RejectedMessage
from kiln.pipelines.decode.identities import compute_identities
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.frame_ranges import FrameRanges, build_range_key, insert
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.native.core import Core, CoreRows, RecordRow, can_decode, take_records
from kiln.pipelines.native.library import TABLES_OF_CORE, find_engine
from kiln.pipelines.runtime.dedup_store import CHUNK_BYTES, CHUNK_ROWS
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.row_packing import UniqueRow

_Batches = Iterator[pa.RecordBatch]
_Faults = list[RejectedMessage]

PARTS: Final = ("copies", "subscriptions", "controls")
"""Tables with the parts of a frame. Their rows have the Kafka position of the frame."""

MESSAGE: Final = "messages"
FAULT: Final = "fault"
DECODE_RESULT: Final = "decode_result"
"""Kinds of rows between the stages: a message (`DecodedMessage` or `MessageRow`), a `FaultRow`, and a
`DecodeResult`."""

_NO_ROWS: Final = pa.RecordBatch.from_arrays([], names=[])


class DecodeResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of one task of the first stage."""

    spans: dict[int, tuple[int, int]]
    """first and last Kafka offset that the task read, by partition"""
    frame_ranges: dict[bytes, list[tuple[int, int]]]
    """sequence numbers of the frames in the files, as `FrameRanges`"""
    frames: list[DataFile]
    parts: list[DataFile]
    """files of the tables in PARTS"""
    valid_copies: int = 0
    """number of copies of valid messages"""
    entries: dict[str, int] = {}
    """number of subscriptions and control entries, by kind"""
    core_differences: int = 0
    """number of records that the native core and Python decoded differently"""


@dataclass(frozen=True)
class CopyChunk:
    """Rows that are deduplicated in one transaction: messages, quarantine records, and the result of the task."""

    messages: pa.RecordBatch
    """rows of the table `messages` from the native core"""
    items: list[UniqueRow[object]]
    """rows from Python, in which a message is a `DecodedMessage`"""
    identities: list[tuple[bytes, ...]]
    """digests of the rows in `messages`, then of those in `items`"""
    positions: list[str]
    """Kafka positions of the same rows"""
    order: Sequence[int]
    """indexes of the same rows, in the order of their Kafka records"""


def decode_records(
    batches: _Batches, config: DecodeConfig, lake: Lake, task: bytes, *, native_core: bool = True
) -> Iterator[CopyChunk]:
    """Decode the records of a task, and write the rows of `frames` and of the tables in PARTS into files.

    Args:
        batches: Kafka records, of which the columns partition, offset, stamp and value are read.
        task: Digest that only the attempts of this task share.
        native_core: True to use the native core if there is one.

    Yields:
        All copies of messages, the quarantine records, and at the end the task's `DecodeResult`. Repeated copies are
        included, because the deduplication file may have accepted a later copy when this task ran before.
    """
    decoder: _RecordDecoder | None = None
    for batch in batches:
        if decoder is None:
            core = Core(config) if native_core and can_decode(config, batch.num_rows) else None
            decoder = _RecordDecoder(config, lake, core)
        yield from decoder.decode(batch)
    if decoder is not None:
        yield from decoder.finish(task)


class _RecordDecoder:
    def __init__(self, config: DecodeConfig, lake: Lake, core: Core | None) -> None:
        self._core = core
        self._decoder = FrameDecoder(config)
        self._rejected: _Faults = []
        self._frames = _open_files(lake, "frames", self._rejected)
        self._parts = PartFiles(lake, self._rejected)
        self._frame_ranges: FrameRanges = {}
        self._spans: dict[int, tuple[int, int]] = {}
        self._valid_copies = self._differences = 0
        self._items: list[UniqueRow[object]] = []  # from Python, for the next chunk
        self._bytes = 0

    def decode(self, batch: pa.RecordBatch) -> Iterator[CopyChunk]:
        partitions, offsets = batch.column("partition"), batch.column("offset")
        for partition in pc.unique(partitions).to_pylist():
            own = offsets.filter(pc.equal(partitions, partition))
            start, _ = self._spans.get(partition, (own[0].as_py(), 0))
            self._spans[partition] = start, own[-1].as_py()
        first = 0
        for rows in self._core.archive(batch) if self._core is not None else ():
            if rows.samples and turn_off_at_difference(rows, batch, self._decoder):
                self._differences += 1
            if not find_engine().is_native:  # this task, or another one of the worker, has found a difference
                self._core = None
                break
            yield from self._merge(rows, batch) if rows.tables else self._decode_in_python(batch, rows.first, rows.end)
            first = rows.end
        if first < batch.num_rows:
            yield from self._decode_in_python(batch, first, batch.num_rows)

    def finish(self, task: bytes) -> Iterator[CopyChunk]:
        frames, parts = self._frames.close(), self._parts.close()
        for fault in self._rejected:
            self._items += pack_faults(fault)
        if self._spans:
            result = DecodeResult(
                spans=self._spans,
                frame_ranges=self._frame_ranges,
                frames=frames,
                parts=parts,
                valid_copies=self._valid_copies,
                entries=self._parts.entries,
                core_differences=self._differences,
            )
            self._items.append(UniqueRow(DECODE_RESULT, (task,), task.hex(), result, 0))
        yield from self._take_chunk()

    def _decode_in_python(self, batch: pa.RecordBatch, first: int, end: int) -> Iterator[CopyChunk]:
        """Decode the records at the indexes from `first` to before `end`."""
        records = batch.slice(first, end - first)
        columns = (records.column(name).to_pylist() for name in ("partition", "offset", "stamp", "value"))
        for partition, offset, stamp, value in zip(*columns, strict=True):
            decoded = decode_record(self._decoder, partition, offset, stamp, value)
            row, is_new = decoded.row, False
            if row is not None:
                ranges = self._frame_ranges.setdefault(build_range_key(row.connection, row.direction), [])
                is_new = insert(ranges, row.sequence, row.sequence)
            self._items += self._write(decoded, len(value or b""), is_new=is_new)
            if decoded.items:
                self._bytes += len(value or b"") + ROW_BYTES * len(decoded.items)
                if len(self._items) >= CHUNK_ROWS or self._bytes >= CHUNK_BYTES:
                    yield from self._take_chunk()

    def _take_chunk(self) -> Iterator[CopyChunk]:
        if self._items:
            identities, positions = [item.identities for item in self._items], [item.position for item in self._items]
            yield CopyChunk(_NO_ROWS, self._items, identities, positions, range(len(self._items)))
            self._items, self._bytes = [], 0

    def _merge(self, rows: CoreRows, batch: pa.RecordBatch) -> Iterator[CopyChunk]:
        """Decode in Python the records that the core left, and write the rows that Python and the core built. A frame
        that is a repeat is left out with its parts."""
        yield from self._take_chunk()
        tables: dict[str, pa.RecordBatch] = dict(zip(TABLES_OF_CORE, rows.tables, strict=False))
        frame_keys, copies = rows.tables[len(TABLES_OF_CORE) :]
        keys: list[tuple[int, bytes, int]]
        keys = list(zip(*(frame_keys.column(name).to_pylist() for name in ("row", "key", "sequence")), strict=True))
        core_rows = [row for row, _, _ in keys]
        left: list[tuple[RecordRow, DecodedRecord]] = []
        if rows.left:
            for record in take_records(batch, rows.left):
                decoded = decode_record(self._decoder, record.partition, record.offset, record.stamp, record.value)
                left.append((record, decoded))
                if (row := decoded.row) is not None:
                    keys.append((record.row, build_range_key(row.connection, row.direction), row.sequence))
            keys.sort()  # each frame is accepted once, in the order of the records
        ranges = self._frame_ranges
        accepted = {row for row, key, sequence in keys if insert(ranges.setdefault(key, []), sequence, sequence)}
        if not accepted.issuperset(core_rows):
            is_new = pa.array([row in accepted for row in core_rows], pa.bool_())
            repeated = set(list_positions(tables["frames"].filter(pc.invert(is_new))))
            tables["frames"] = tables["frames"].filter(is_new)
            for name in PARTS:
                keep = [position not in repeated for position in list_positions(tables[name])]
                tables[name] = tables[name].filter(pa.array(keep, pa.bool_()))
        self._frames.gather(tables["frames"])
        self._parts.gather(tables)
        self._valid_copies += tables["messages"].num_rows
        early, late, positions, records = (
            copies.column(name).to_pylist() for name in ("early", "late", "position", "row")
        )
        identities: list[tuple[bytes, ...]]
        identities = [(one,) if other is None else (one, other) for one, other in zip(early, late, strict=True)]
        items: list[UniqueRow[object]] = []
        for record, decoded in left:
            from_record = self._write(decoded, len(record.value or b""), is_new=record.row in accepted)
            items += from_record
            records += [record.row] * len(from_record)
        identities += [item.identities for item in items]
        positions += [item.position for item in items]
        order = sorted(range(len(records)), key=records.__getitem__) if items else range(len(records))  # a stable sort
        yield CopyChunk(tables["messages"], items, identities, positions, order)

    def _write(self, decoded: DecodedRecord, size: int, *, is_new: bool) -> list[UniqueRow[object]]:
        """Return the valid and rejected messages of a record that Python decoded. If its frame is no repeat, also write
        the rows of the frame and its parts."""
        if is_new and decoded.row is not None:
            self._frames.add(decoded.row, size)
            self._parts.add(decoded)
        items: list[UniqueRow[object]] = []
        horizon = self._decoder.config.unsigned_horizon
        for item in decoded.items:
            if isinstance(item, DecodedMessage):
                self._valid_copies += item.copy is not None or not item.own  # our publications are no copies
                items.append(UniqueRow(MESSAGE, compute_identities(item, "", horizon), item.ref.text, item, 0))
            else:
                items += pack_faults(item)
        return items


class PartFiles:
    """Writer of the files of `copies`, `subscriptions` and `controls`."""

    def __init__(self, lake: Lake, rejected: _Faults | None = None) -> None:
        """Prepare the files. A row that a table cannot store is rejected, and added to `rejected`; without `rejected`,
        `add` or `close` raises the error."""
        self._copies, self._subscriptions, self._controls = (_open_files(lake, table, rejected) for table in PARTS)
        self.entries = Counter[str]()
        """number of subscriptions and control entries, by kind"""

    def add(self, record: DecodedRecord) -> None:
        """Add the rows of a record that Python decoded."""
        for copy in record.copies:
            self._copies.add(copy, ROW_BYTES)
        for subscription in record.control.subscriptions:
            self._subscriptions.add(subscription, ENTRY_ROW_BYTES)
            self.entries[_name_subscription(subscription.subscribe)] += 1
        for control in record.control.controls:
            self._controls.add(control, estimate_size(control))
            self.entries[control.kind] += 1

    def gather(self, parts: Mapping[str, pa.RecordBatch]) -> None:
        """Add the rows that the native core built. `parts`: record batches by table."""
        self._copies.gather(parts["copies"])
        self._subscriptions.gather(parts["subscriptions"])
        self._controls.gather(parts["controls"])
        for subscribe, count in count_values(parts["subscriptions"].column("subscribe")):
            self.entries[_name_subscription(bool(subscribe))] += count
        for kind, count in count_values(parts["controls"].column("kind")):
            self.entries[str(kind)] += count

    def close(self) -> list[DataFile]:
        """Close all files, and return them."""
        return [file for table in (self._copies, self._subscriptions, self._controls) for file in table.close()]


def _open_files(lake: Lake, table: str, rejected: _Faults | None) -> TableFiles:
    if rejected is None:
        return TableFiles(lake, table)
    return TableFiles(lake, table, refuse=lambda row, error: rejected.append(reject_row(table, row, error)))


def _name_subscription(subscribe: bool) -> str:
    return "SUBSCRIBE" if subscribe else "UNSUBSCRIBE"


def count_values(column: pa.Array) -> Iterator[tuple[object, int]]:
    """Yield each value of a column, with the number of its rows."""
    for counted in pc.value_counts(column).to_pylist():
        yield counted["values"], counted["counts"]


def pack_faults(item: RejectedMessage) -> Iterator[UniqueRow[FaultRow]]:
    """Build the rows of a rejected message for `kiln.quarantine`."""
    for identity, row in build_fault_rows(item):
        yield UniqueRow(FAULT, (identity,), item.ref.text, row, len(row.value))


def compute_task_digest() -> bytes:
    """Compute the digest that identifies the result of this task in deduplication. It is the same in each attempt of
    the task, so that the result of a repeated task counts once."""
    epoch, context = get_task_epoch(), TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    return blake2b(f"{epoch.query}/{epoch.batch}/{partition}".encode(), digest_size=16).digest()
