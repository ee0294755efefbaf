"""The task of the query `archive` with the native core. Records that the core leaves are decoded in Python, and their
rows take the places that they have without the core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kiln.pipelines.archive.transform import (
    DECODE_RESULT,
    FRAMES,
    DecodedRecord,
    DecodeResult,
    OutputWriter,
    PartFiles,
    build_message_row,
    build_python_task,
    compute_task_digest,
    decode_record,
    pack_faults,
    pack_message,
    record_rejection,
)
from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, FrameDecoder, RejectedMessage
from kiln.pipelines.delta.arrow_rows import build_arrow_schema, select_columns
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.frame_ranges import FrameRangeFilter, build_range_key
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.native.core import Core, CoreRows, RecordRow, can_decode, leave_all, take_records
from kiln.pipelines.native.library import TABLES_OF_CORE, find_engine, turn_off
from kiln.pipelines.runtime.dedup_store import CHUNK_ROWS, CopyColumns, DedupStoreConfig, open_dedup_store
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.kafka_ranges import ArrowTask
from kiln.pipelines.runtime.micro_batch_clock import get_batch_time
from kiln.pipelines.runtime.row_packing import PackedRow
from kiln.schemas.delta.tables import TABLES

_Batches = Iterator[pa.RecordBatch]
_NO_ROWS: Final = pa.RecordBatch.from_arrays([], names=[])


def build_archive_task(config: DecodeConfig, lake: Lake, dedup: DedupStoreConfig) -> ArrowTask:
    """Build the task of the query: `build_python_task`, with the native core if there is one. RECORDS in; OUTPUT_DDL
    out."""
    in_python = build_python_task(config, lake, dedup)

    def archive(batches: _Batches) -> _Batches:
        first = next(batches, None)
        if first is None or not can_decode(config, first.num_rows):
            yield from in_python(batches if first is None else chain((first,), batches))
            return
        decoder, output = RecordDecoder(config, lake), OutputWriter(config, lake)
        store, now = open_dedup_store(dedup), get_batch_time()
        for batch in chain((first,), batches):
            for chunk in decoder.decode(batch):
                passed = chunk.restore_order(store.select_new(chunk.columns, now))
                output.write_batch(chunk.messages.filter(pa.array(passed[: chunk.messages.num_rows], pa.bool_())))
                yield from output.write(compress(chunk.items, passed[chunk.messages.num_rows :]))
        last = decoder.finish(compute_task_digest())
        for start in range(0, len(last), CHUNK_ROWS):
            yield from output.write(store.filter_new(last[start : start + CHUNK_ROWS], now))
        store.mark(get_task_epoch(), now)
        yield from output.finish()

    return archive


class CopyChunk:
    """Copies of messages and faults for the deduplication file: those of the core, then those of Python.

    Attributes:
        messages: Rows of `messages` of the core.
        items: Rows from Python.
        columns: All of them in the order of their records.
    """

    def __init__(
        self, messages: pa.RecordBatch, identities: pa.RecordBatch, items: list[tuple[int, PackedRow]]
    ) -> None:
        self.messages = messages
        self.items = [item for _, item in items]
        first, second, positions = [], [], []
        if messages.num_rows:
            first, second, positions = (identities.column(name).to_pylist() for name in ("early", "late", "position"))
        for item in self.items:
            early, *late = item.identities
            first.append(early)
            second.append(late[0] if late else None)
            positions.append(item.position)
        self.columns = CopyColumns(first, second, positions)
        self._order: list[int] | None = None
        if items and messages.num_rows:
            rows = [*identities.column("row").to_pylist(), *(row for row, _ in items)]
            self._order = order = sorted(range(len(rows)), key=rows.__getitem__)  # stable
            self.columns = CopyColumns(
                [first[at] for at in order], [second[at] for at in order], [positions[at] for at in order]
            )

    def restore_order(self, passed: list[bool]) -> list[bool]:
        """Return what `select_new` returned for `columns`, in the order of `messages` and `items`."""
        if self._order is None:
            return passed
        restored = [False] * len(passed)
        for at, is_passed in zip(self._order, passed, strict=True):
            restored[at] = is_passed
        return restored


class RecordDecoder:
    """First stage of the task: `decode_records`, with the native core."""

    def __init__(self, config: DecodeConfig, lake: Lake) -> None:
        self._config = config
        self._core: Core | None = Core(config)
        self._decoder = FrameDecoder(config)
        self._rejected: list[RejectedMessage] = []
        self._frames = TableFiles(lake, "frames", refuse=partial(record_rejection, self._rejected, FRAMES))
        self._parts = PartFiles(lake, partial(record_rejection, self._rejected))
        self._filter = FrameRangeFilter({})
        self._spans: dict[int, tuple[int, int]] = {}
        self._valid_copies = self._differences = 0

    def decode(self, batch: pa.RecordBatch) -> Iterator[CopyChunk]:
        """Decode a batch of RECORDS, and write all rows but those of `messages`."""
        self._extend_spans(batch)
        for rows in leave_all(batch) if self._core is None else self._core.archive(batch):
            if self._core is not None and self._find_difference(rows, batch):
                self._core = None
            if self._core is None:
                for remaining in leave_all(batch, rows.first):
                    yield self._merge(remaining, batch)
                return
            yield self._merge(rows, batch)

    def finish(self, task: bytes) -> list[PackedRow]:
        """Close the files. Returns the faults of rows that no table could store, and the `DecodeResult`."""
        files = self._frames.close(), self._parts.close()
        last = [row for fault in self._rejected for row in pack_faults(fault)]
        if self._spans:
            result = DecodeResult(
                self._spans, self._filter.accepted, *files, self._valid_copies, self._parts.entries, self._differences
            )
            data = msgspec.msgpack.encode(result)
            last.append(PackedRow(DECODE_RESULT, (task,), task.hex(), (data,), len(data)))
        return last

    def _extend_spans(self, batch: pa.RecordBatch) -> None:
        partitions, offsets = batch.column("partition"), batch.column("offset")
        for partition in pc.unique(partitions).to_pylist():
            own = offsets.filter(pc.equal(partitions, partition))
            first, _ = self._spans.get(partition, (own[0].as_py(), 0))
            self._spans[partition] = first, own[-1].as_py()

    def _find_difference(self, rows: CoreRows, batch: pa.RecordBatch) -> bool:
        """Compare the samples with Python's rows. At a difference, the core is turned off."""
        for record, ours, theirs in compare_samples(rows, batch, self._decoder, self._config):
            if ours != theirs:
                self._differences += 1
                turn_off("the native core and Python decoded a record into other rows", record.partition, record.offset)
                return True
        return not find_engine().is_native  # another task of this worker has found one

    def _merge(self, rows: CoreRows, batch: pa.RecordBatch) -> CopyChunk:
        """Decode in Python what the core left, and write the rows of both."""
        left = [
            (record, decode_record(self._decoder, record.partition, record.offset, record.stamp, record.value))
            for record in take_records(batch, rows.left)
        ]
        tables: Mapping[str, pa.RecordBatch] = dict(zip(TABLES_OF_CORE, rows.tables, strict=False))
        messages = identities = _NO_ROWS
        is_accepted: list[bool] = []
        accepted: set[int] = set()
        if tables:
            frame_keys, identities = rows.tables[len(TABLES_OF_CORE) :]
            messages = tables["messages"]
            self._valid_copies += messages.num_rows
            is_accepted = self._accept_frames(frame_keys, left, accepted)
            self._write_tables(tables, is_accepted)
        else:
            self._accept_frames(None, left, accepted)
        items: list[tuple[int, PackedRow]] = []
        for record, decoded in left:
            if record.row in accepted:
                self._frames.add(decoded.row, len(record.value or b""))
                self._parts.add(decoded)
            for item in decoded.items:
                if isinstance(item, RejectedMessage):
                    items += ((record.row, fault) for fault in pack_faults(item))
                else:
                    self._valid_copies += item.copy is not None or not item.own
                    items.append((record.row, pack_message(item, self._config)))
        return CopyChunk(messages, identities, items)

    def _accept_frames(
        self, frame_keys: pa.RecordBatch | None, left: Sequence[tuple[RecordRow, DecodedRecord]], accepted: set[int]
    ) -> list[bool]:
        """Accept each frame once, in the order of the records. Returns which frames of the core are accepted, and adds
        the records from Python that are to `accepted`."""
        is_accepted: list[bool] = []
        remaining = iter([(record.row, decoded.frame) for record, decoded in left if decoded.frame is not None])
        next_row, frame = next(remaining, (None, None))

        def accept_left() -> None:
            nonlocal next_row, frame
            assert frame is not None
            assert next_row is not None
            key = build_range_key(frame.connection, frame.direction)
            if self._filter.accept_key(key, frame.sequence):
                accepted.add(next_row)
            next_row, frame = next(remaining, (None, None))

        accept = self._filter.accept_key
        if frame_keys is not None:
            columns = (frame_keys.column(name).to_pylist() for name in ("row", "key", "sequence"))
            for row, key, sequence in zip(*columns, strict=True):
                while next_row is not None and next_row < row:
                    accept_left()
                is_accepted.append(accept(key, sequence))
        while next_row is not None:
            accept_left()
        return is_accepted

    def _write_tables(self, tables: Mapping[str, pa.RecordBatch], is_accepted: list[bool]) -> None:
        """Write the rows of `frames` and its parts, without those of frames that came twice."""
        frames = tables["frames"]
        parts = {name: tables[name] for name in ("copies", "subscriptions", "controls")}
        if not all(is_accepted):
            mask = pa.array(is_accepted, pa.bool_())
            repeated = set(_list_positions(frames.filter(pc.invert(mask))))
            frames = frames.filter(mask)
            for name, part in parts.items():
                keep = [position not in repeated for position in _list_positions(part)]
                parts[name] = part.filter(pa.array(keep, pa.bool_()))
        self._frames.gather(frames)
        self._parts.gather(parts)


def _list_positions(rows: pa.RecordBatch) -> list[tuple[int, int]]:
    columns = (rows.column(name).to_pylist() for name in ("kafka_partition", "kafka_offset"))
    return list(zip(*columns, strict=True))


_ArchiveRows = dict[str, list[tuple[object, ...]]]
"""Rows of one record by table, and `identities`"""


def compare_samples(
    rows: CoreRows, batch: pa.RecordBatch, decoder: FrameDecoder, config: DecodeConfig
) -> Iterator[tuple[RecordRow, _ArchiveRows, _ArchiveRows]]:
    """Yield the samples of a call with their rows from the core and from Python."""
    samples = list(take_records(batch, rows.samples))
    if not samples:
        return
    from_core: dict[tuple[int, int], _ArchiveRows] = {
        (sample.partition, sample.offset): {name: [] for name in (*TABLES_OF_CORE, "identities")} for sample in samples
    }
    offsets = pa.array([record.offset for record in samples], pa.int64())
    for name, table in zip(TABLES_OF_CORE, rows.tables, strict=False):
        some = table.filter(pc.is_in(table.column("kafka_offset"), offsets))
        for position, values in zip(_list_positions(some), _list_rows(some), strict=True):
            if position in from_core:
                from_core[position][name].append(values)
    by_row = {record.row: (record.partition, record.offset) for record in samples}
    identities = rows.tables[-1]
    some = identities.filter(pc.is_in(identities.column("row"), pa.array(list(by_row), pa.int32())))
    for row, digests in zip(some.column("row").to_pylist(), _list_rows(some), strict=True):
        from_core[by_row[row]]["identities"].append(digests[1:])
    for record in samples:
        yield record, from_core[record.partition, record.offset], _build_python_rows(record, decoder, config)


def _build_python_rows(record: RecordRow, decoder: FrameDecoder, config: DecodeConfig) -> _ArchiveRows:
    decoded = decode_record(decoder, record.partition, record.offset, record.stamp, record.value)
    packed = [pack_message(item, config) for item in decoded.items if isinstance(item, DecodedMessage)]
    identities: list[tuple[object, ...]] = [
        (row.identities[0], (*row.identities, None)[1], row.position) for row in packed
    ]
    identities += [
        (item.stage, item.reason, item.ref.text) for item in decoded.items if isinstance(item, RejectedMessage)
    ]
    made: dict[str, Sequence[Sequence[object]]] = {
        "frames": [decoded.row] if decoded.frame is not None else [],
        "copies": decoded.copies,
        "messages": [build_message_row(item) for item in decoded.items if isinstance(item, DecodedMessage)],
        "subscriptions": decoded.control.subscriptions,
        "controls": decoded.control.controls,
    }
    rows: _ArchiveRows = {name: _convert_rows(name, made[name]) for name in TABLES_OF_CORE}
    rows["identities"] = identities
    return rows


def _convert_rows(table: str, rows: Sequence[Sequence[object]]) -> list[tuple[object, ...]]:
    """Convert rows as a file of the table does."""
    if not rows:
        return []
    schema = build_arrow_schema(select_columns(TABLES[table]))
    arrays = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return _list_rows(pa.RecordBatch.from_arrays(arrays, schema=schema))


def _list_rows(batch: pa.RecordBatch) -> list[tuple[object, ...]]:
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
