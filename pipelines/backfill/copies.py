"""Decoding of a chunk's frames into `copies`, `subscriptions`, `controls` and `quarantine`, and into one row for each
good copy of a message. `messages.py` selects from these rows.

The native core decodes what it can, as in the query `archive`; Python decodes the rest, and everything if there is no
core.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kiln.pipelines.archive.core_samples import turn_off_at_difference
from kiln.pipelines.archive.record_decoder import PartFiles
from kiln.pipelines.archive.rows import (
    MessageRow,
    build_fault_records,
    build_message_row,
    decode_record,
    reject_message,
)
from kiln.pipelines.backfill.deduplication import FramePosition
from kiln.pipelines.backfill.frame_files import FrameTasks
from kiln.pipelines.backfill.merged_rows import MERGED_ROWS, MERGED_SCHEMA, MergedRow, MergedRowBuffer, StageOutput
from kiln.pipelines.backfill.terms import TimeRange
from kiln.pipelines.decode.decoder import (
    DecodeConfig,
    DecodedMessage,
    FrameDecoder,
    MessageRef,
    RejectedMessage,
    reject_failed,
)
from kiln.pipelines.decode.frame_row import FrameRow, parse_frame_row
from kiln.pipelines.decode.identities import is_lasting
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.native.core import Core, CoreRows, RecordRow, can_decode, take_records
from kiln.pipelines.native.library import TABLES_OF_CORE, find_engine
from kiln.pipelines.runtime.row_packing import pack
from kiln.pipelines.sink.rows import QuarantineRow
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.records import QuarantineRecord
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import VERDICT_NAMES, Verdict

_Batches = Iterator[pa.RecordBatch]

COPY = 5
"""Rank of a copy, after those of known messages: `data` is a packed row of `messages`."""

UPDATE, REPLAY, LASTING, SOURCE, REPEAT = 1, 2, 4, 8, 16
"""Bits of `note`. Most copies repeat a SOURCE, an equal copy that their task has decoded. The `data` of a REPEAT is the
position of its SOURCE, and its own columns _OF_COPY."""

_OF_COPY: Final = (
    *("origin", "topic_source", "verdict", "remote_peer", "observed_at"),
    *("kafka_partition", "kafka_offset", "message_index"),
)
"""Columns of `messages` in which copies of equal data and topic differ."""
_list_own: Final = attrgetter(*_OF_COPY)

_OWN_FIELDS: Final = frozenset(
    ("observed_at", "sequence", "payload", "verdicts", "kafka_partition", "kafka_offset", "kafka_timestamp")
)
"""Columns of `frames` that differ between the frames of one direction of a connection."""
_list_shared: Final = attrgetter(*(name for name in FrameRow._fields if name not in _OWN_FIELDS))
_ROWS = 5_000  # of a record batch
_SOURCE_BYTES: Final = 32 << 20
"""Approximate bytes of the messages that a task compares later copies with."""
_ROW_BYTES: Final = 1_000  # of a row without its data
_VALID = VERDICT_NAMES[Verdict.VALID]


@dataclass(frozen=True)
class RunTarget:
    """Lakes that tasks write to: `run` for rows in the range `span`, `beyond` for the rest."""

    run: Lake
    beyond: Lake
    span: TimeRange


def decode_files(spark: SparkSession, reading: FrameTasks, config: DecodeConfig, target: RunTarget) -> DataFrame:
    """Decode rows of the table `frames` into MERGED_ROWS, one for each good copy of a message.

    Each task reads its part of the files, and writes rows of `copies` and `quarantine` to files.
    """

    def rows(batches: _Batches) -> _Batches:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _decode_batches(reading.read(number), config, target)

    return spark.range(0, len(reading.tasks), 1, max(1, len(reading.tasks))).mapInArrow(rows, MERGED_ROWS)


def decode_rows(frames: DataFrame, config: DecodeConfig, target: RunTarget) -> DataFrame:
    """Decode as `decode_files` does, but rows that Spark reads."""
    times = {"observed_at", "kafka_timestamp"}
    names = [column.name for column in TABLES["frames"].columns]
    columns = [F.unix_micros(name).alias(name) if name in times else F.col(name) for name in names]
    return frames.select(*columns).mapInArrow(lambda batches: _decode_batches(batches, config, target), MERGED_ROWS)


def _decode_batches(batches: _Batches, config: DecodeConfig, target: RunTarget) -> _Batches:
    decoder = CopyDecoder(config, target)
    for batch in batches:
        yield from decoder.decode(batch)
    yield from decoder.finish()


class CopyDecoder:
    """Decoder of the rows of `frames` of one task."""

    def __init__(self, config: DecodeConfig, target: RunTarget) -> None:
        self._config, self._span = config, target.span
        self._parts, self._faults = PartFiles(target.run), TableFiles(target.run, "quarantine")
        self._out, self._decoder, self._frames = MergedRowBuffer(), FrameDecoder(config), 0
        self._core: Core | None = None
        self._sources: dict[tuple[str, str], MessageRow] = {}
        self._source_bytes = 0

    def decode(self, batch: pa.RecordBatch) -> _Batches:
        """Decode rows of `frames`, in the order of the table with times in µs. Yields MERGED_ROWS."""
        self._frames += batch.num_rows
        uses_core = can_decode(self._config, batch.num_rows)
        if uses_core and self._core is None:
            self._core = Core(self._config)
        at = batch.column("observed_at")
        inside = pc.and_(pc.greater_equal(at, self._span.low), pc.less(at, self._span.high))
        for mask, is_inside in ((inside, True), (pc.invert(inside), False)):
            records = self._build_records(batch.filter(mask), is_inside)
            core = self._core.archive(records) if uses_core and self._core is not None else ()
            yield from self._decode_records(records, core, is_inside)

    def finish(self) -> _Batches:
        """Close the files. Yields the last rows, with the result of the task."""
        files = self._parts.close() + self._faults.close()
        yield from self._out.finish(StageOutput(files, frames=self._frames))

    def _build_records(self, batch: pa.RecordBatch, is_inside: bool) -> pa.RecordBatch:
        """Build the records of `kiln.frames` for these rows. A row that makes no Frame becomes a fault."""
        heads: dict[tuple[object, ...], bytes] = {}  # the fields that frames of one connection share, serialized
        values: list[bytes | None] = []
        for row in map(FrameRow._make, zip(*(column.to_pylist() for column in batch.columns), strict=True)):
            try:
                shared = _list_shared(row)
                if shared not in heads:
                    heads[shared] = _serialize_shared(row)
                own = Frame(
                    observed_at=row.observed_at * 1000,
                    sequence=row.sequence,
                    payload=row.payload,
                    verdicts=row.verdicts,
                )
                values.append(heads[shared] + own.SerializeToString())
            except PROCESSING_ERRORS as error:  # pure: the row alone has caused this
                values.append(None)
                ref = MessageRef(row.kafka_partition, row.kafka_offset, None)
                self._add_fault(reject_failed("archive", error, ref, row.payload, row.observed_at), is_inside)
        columns = {
            "partition": batch.column("kafka_partition"),
            "offset": batch.column("kafka_offset"),
            "stamp": batch.column("observed_at"),
            "value": pa.array(values, pa.binary()),
        }
        return pa.RecordBatch.from_pydict(columns).filter(columns["value"].is_valid())

    def _add_fault(self, fault: RejectedMessage, is_inside: bool) -> None:
        if is_inside:
            for record in build_fault_records(fault):
                self._faults.add(build_quarantine_row(fault.ref, record), len(record.data))

    def _decode_records(self, records: pa.RecordBatch, core: Iterable[CoreRows], is_inside: bool) -> _Batches:
        first = 0
        for rows in core:
            if turn_off_at_difference(rows, records, self._decoder) or not find_engine().is_native:
                break
            yield from self._decode_in_python(take_records(records, rows.left), is_inside)
            if rows.tables:
                tables = dict(zip(TABLES_OF_CORE, rows.tables, strict=False))
                if is_inside:
                    self._parts.gather(tables)
                yield from self._merge_copies(tables["messages"])
            first = rows.end
        yield from self._decode_in_python(take_records(records, range(first, records.num_rows)), is_inside)

    def _decode_in_python(self, records: Iterable[RecordRow], is_inside: bool) -> _Batches:
        for record in records:
            position = record.partition, record.offset, record.stamp
            decoded = decode_record(self._decoder, *position, record.value, with_row=False)
            for item in decoded.items:
                merged = self._merge_copy(item) if isinstance(item, DecodedMessage) else item
                if isinstance(merged, RejectedMessage):
                    self._add_fault(merged, is_inside)
                else:
                    yield from self._out.add(merged)
            if is_inside:
                self._parts.add(decoded)

    def _merge_copy(self, item: DecodedMessage) -> MergedRow | RejectedMessage:
        try:
            row = build_message_row(item)
            note, data = self._pack_copy(row)
        except PROCESSING_ERRORS as error:  # pure: the message alone has caused this
            return reject_message(item, error)
        position = FramePosition(row.kafka_partition, row.kafka_offset, row.message_index or 0)
        return MergedRow(row.network, row.message_id, COPY, row.observed_at, *position, note, data)

    def _merge_copies(self, messages: pa.RecordBatch) -> _Batches:
        """Convert rows of `messages`, as the core builds them, to MERGED_ROWS."""
        at = messages.column("observed_at").cast(pa.int64())
        columns = messages.set_column(messages.schema.get_field_index("observed_at"), "observed_at", at)
        rows = map(MessageRow._make, zip(*(column.to_pylist() for column in columns.columns), strict=True))
        notes, packed = zip(*map(self._pack_copy, rows), strict=True) if messages.num_rows else ((), ())
        merged = pa.RecordBatch.from_arrays(
            [
                messages.column("network"),
                messages.column("message_id"),
                pa.repeat(pa.scalar(COPY, pa.int32()), messages.num_rows),
                at,
                messages.column("kafka_partition"),
                messages.column("kafka_offset"),
                pc.fill_null(messages.column("message_index"), 0),
                pa.array(notes, pa.int32()),
                pa.array(packed, pa.binary()),
            ],
            schema=MERGED_SCHEMA,
        )
        for start in range(0, merged.num_rows, _ROWS):
            yield merged.slice(start, _ROWS)

    def _pack_copy(self, row: MessageRow) -> tuple[int, bytes]:
        """Return the bits and the data of a copy."""
        note = UPDATE if row.type == "UPDATE" else 0
        note |= REPLAY if row.origin == "REPLAY" else 0
        note |= LASTING if row.verdict == _VALID and is_lasting(row.message_id, True) else 0
        if self._source_bytes > _SOURCE_BYTES:
            self._sources, self._source_bytes = {}, 0
        source = self._sources.setdefault((row.network, row.message_id), row)
        if source is row:
            self._source_bytes += len(row.data) + _ROW_BYTES
            return note | SOURCE, pack(row)
        if (source.data, source.topic) == (row.data, row.topic):
            position = source.kafka_partition, source.kafka_offset, source.message_index or 0
            return note | REPEAT, pack((position, _list_own(row)))
        return note, pack(row)


_MESSAGE_DECODER = msgspec.msgpack.Decoder(MessageRow)
_REPEAT_DECODER = msgspec.msgpack.Decoder(tuple[FramePosition, tuple[str | int | None, ...]])


def read_copy(copy: MergedRow, sources: Mapping[FramePosition, bytes]) -> MessageRow:
    """Read the row of a copy. `sources`: data of the copies with the bit SOURCE."""
    if not copy.note & REPEAT:
        return _MESSAGE_DECODER.decode(copy.data)
    position, own = _REPEAT_DECODER.decode(copy.data)
    columns = _MESSAGE_DECODER.decode(sources[position])._asdict() | dict(zip(_OF_COPY, own, strict=True))
    return MessageRow._make(columns.values())


def _serialize_shared(row: FrameRow) -> bytes:
    return parse_frame_row(row._replace(observed_at=0, sequence=0, payload=b"", verdicts=b"")).SerializeToString()


def build_quarantine_row(ref: MessageRef, record: QuarantineRecord) -> QuarantineRow:
    """Build the row of `quarantine` for a fault of a frame, or of a message in it."""
    return QuarantineRow(*ref, None, record.stage, record.reason, record.detail, record.data, record.observed_at)
