"""First stage of a backfill run: decodes the frames of a chunk.

Tasks write rows of `copies`, `subscriptions`, `controls` and `quarantine` to files. They return the valid copies of
messages, from which `messages.py` selects. As in the query `archive`, the native core decodes what it can, and Python
the rest; without a native core, Python decodes everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

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
from kiln.pipelines.backfill.frame_files import FrameTasks
from kiln.pipelines.backfill.merged_rows import MERGED_ROWS, MergedRow, MergedRowBuffer, StageOutput
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
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.native.core import Core, CoreRows, RecordRow, can_decode, take_records
from kiln.pipelines.native.library import TABLES_OF_CORE, find_engine
from kiln.pipelines.runtime.row_packing import pack
from kiln.pipelines.sink.rows import QuarantineRow
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.records import Origin, QuarantineRecord
from kiln.schemas.proto.kiln.frame_pb2 import Frame

_Batches = Iterator[pa.RecordBatch]

COPIES = 5
"""Rank of copies of a message, which come after the known rows of the message. `data` is a packed `EqualCopies`, and
`note` is UPDATE or 0. Time and position are those of the first copy."""

UPDATE, REPLAY = 1, 2
"""Values of `note`: UPDATE for copies of an UPDATE message; REPLAY for a known update with the origin REPLAY."""


class CopyColumns(NamedTuple):
    """The columns of `messages` in which copies of equal content differ. Times are µs."""

    origin: Origin
    topic_source: str
    verdict: str
    remote_peer: str
    observed_at: int
    kafka_partition: int
    kafka_offset: int
    message_index: int | None


class EqualCopies(msgspec.Struct, frozen=True, array_like=True):
    """Copies of a message that one task decoded and that have equal content, which Spark shuffles only once."""

    row: msgspec.Raw
    """packed row of `messages` of one of the copies"""
    copies: list[CopyColumns]


_OWN_FIELDS: Final = frozenset(
    ("observed_at", "sequence", "payload", "verdicts", "kafka_partition", "kafka_offset", "kafka_timestamp")
)
"""Columns of `frames` that differ between the frames that one peer sends on a connection"""
_list_shared: Final = attrgetter(*(name for name in FrameRow._fields if name not in _OWN_FIELDS))
_HELD_BYTES: Final = 32 << 20
"""Approximate bytes of copies that a task collects before it returns them"""
_ROW_BYTES: Final = 1_000  # of a row without its data
_COPY_BYTES: Final = 300
_CONTENT: Final = ("network", "message_id", "from_peer", "seqno", "topic", "data")
"""Columns of `messages` that identify equal content. The other columns follow from these and CopyColumns."""


@dataclass(frozen=True)
class RunTarget:
    """Lakes to which a backfill run writes: `run` for rows in its time range `span`, `beyond` for the others."""

    run: Lake
    beyond: Lake
    span: TimeRange


def decode_files(spark: SparkSession, reading: FrameTasks, config: DecodeConfig, target: RunTarget) -> DataFrame:
    """Decode files of the table `frames` into copies of messages, for the shuffle by message (MERGED_ROWS).

    Each task reads its own slices of the files. It writes the rows of other tables, such as `copies`, to files.
    """

    def rows(batches: _Batches) -> _Batches:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _decode_batches(reading.read(number), config, target)

    return spark.range(0, len(reading.tasks), 1, max(1, len(reading.tasks))).mapInArrow(rows, MERGED_ROWS)


def decode_rows(frames: DataFrame, config: DecodeConfig, target: RunTarget) -> DataFrame:
    """Decode rows of the table `frames` that Spark has read. The result has the form of `decode_files`."""
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
    """Decoder of the rows of `frames` in one task."""

    def __init__(self, config: DecodeConfig, target: RunTarget) -> None:
        self._config, self._span = config, target.span
        self._parts, self._faults = PartFiles(target.run), TableFiles(target.run, "quarantine")
        self._out, self._decoder, self._frames = MergedRowBuffer(), FrameDecoder(config), 0
        self._core: Core | None = None
        self._held: dict[tuple[object, ...], _HeldCopies] = {}  # by _CONTENT
        self._held_bytes = 0

    def decode(self, batch: pa.RecordBatch) -> _Batches:
        """Decode rows of `frames`, whose columns are in the table's order, with times in µs.

        Yields:
            Copies for the shuffle (MERGED_ROWS).
        """
        self._frames += batch.num_rows
        uses_core = can_decode(self._config, batch.num_rows)
        if uses_core and self._core is None:
            self._core = Core(self._config)
        at = batch.column("observed_at")
        inside = pc.and_(pc.greater_equal(at, self._span.low), pc.less(at, self._span.high))
        for mask, is_inside in ((inside, True), (pc.invert(inside), False)):
            records = self._build_records(batch.filter(mask), is_inside)
            core = self._core.archive(records) if uses_core and self._core is not None else ()
            self._decode_records(records, core, is_inside)
        if self._held_bytes > _HELD_BYTES:
            yield from self._emit_held()

    def finish(self) -> _Batches:
        """Close the files, and yield the copies that are left and the result of the task (MERGED_ROWS)."""
        yield from self._emit_held()
        files = self._parts.close() + self._faults.close()
        yield from self._out.finish(StageOutput(files, frames=self._frames))

    def _build_records(self, batch: pa.RecordBatch, is_inside: bool) -> pa.RecordBatch:
        """Build Kafka records of `kiln.frames` from rows of `frames`. A row that is no valid Frame is quarantined."""
        heads: dict[tuple[object, ...], bytes] = {}  # the fields that frames of one connection share, serialized
        values: list[bytes | None] = []
        for row in map(FrameRow._make, zip(*(column.to_pylist() for column in batch.columns), strict=True)):
            try:
                shared = _list_shared(row)
                if shared not in heads:
                    head = row._replace(observed_at=0, sequence=0, payload=b"", verdicts=b"")
                    heads[shared] = parse_frame_row(head).SerializeToString()
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

    def _decode_records(self, records: pa.RecordBatch, core: Iterable[CoreRows], is_inside: bool) -> None:
        first = 0
        for rows in core:
            if rows.samples and turn_off_at_difference(rows, records, self._decoder):
                break
            if not find_engine().is_native:
                break
            self._decode_in_python(take_records(records, rows.left), is_inside)
            if rows.tables:
                tables = dict(zip(TABLES_OF_CORE, rows.tables, strict=False))
                if is_inside:
                    self._parts.gather(tables)
                self._hold_rows(tables["messages"])
            first = rows.end
        self._decode_in_python(take_records(records, range(first, records.num_rows)), is_inside)

    def _decode_in_python(self, records: Iterable[RecordRow], is_inside: bool) -> None:
        for record in records:
            position = record.partition, record.offset, record.stamp
            decoded = decode_record(self._decoder, *position, record.value, with_row=False)
            for item in decoded.items:
                fault = self._hold(item) if isinstance(item, DecodedMessage) else item
                if fault is not None:
                    self._add_fault(fault, is_inside)
            if is_inside:
                self._parts.add(decoded)

    def _hold(self, item: DecodedMessage) -> RejectedMessage | None:
        """Store a copy for the output of the task, or reject a copy that cannot become a row."""
        try:
            row = build_message_row(item)
            held = _HeldCopies(row)
        except PROCESSING_ERRORS as error:  # pure: the message alone has caused this
            return reject_message(item, error)
        self._held.setdefault(_list_content(row), held).copies.append(CopyColumns(*_list_own(row)))
        self._held_bytes += len(row.data) + _ROW_BYTES
        return None

    def _hold_rows(self, messages: pa.RecordBatch) -> None:
        """Store the copies that the native core has decoded, as rows of `messages`, for the output of the task."""
        at = messages.column("observed_at").cast(pa.int64())
        messages = messages.set_column(messages.schema.get_field_index("observed_at"), "observed_at", at)
        contents = list(_list_rows(messages, _CONTENT))
        new: dict[tuple[object, ...], int] = {}  # number of the first row, by content
        for number, content in enumerate(contents):
            if content not in self._held:
                new.setdefault(content, number)
        rows = messages.take(pa.array(new.values(), pa.int32()))
        for content, row in zip(new, map(MessageRow._make, _list_rows(rows, rows.schema.names)), strict=True):
            self._held[content] = _HeldCopies(row)
        for content, copy in zip(contents, _list_rows(messages, CopyColumns._fields), strict=True):
            self._held[content].copies.append(CopyColumns._make(copy))
        self._held_bytes += rows.nbytes + _ROW_BYTES * len(new) + _COPY_BYTES * len(contents)

    def _emit_held(self) -> _Batches:
        for held in self._held.values():
            first = held.copies[0]
            place = first.observed_at, first.kafka_partition, first.kafka_offset, first.message_index or 0
            data = pack(EqualCopies(held.row, held.copies))
            yield from self._out.add(MergedRow(held.network, held.message_id, COPIES, *place, held.note, data))
        self._held, self._held_bytes = {}, 0


class _HeldCopies:
    """Copies with equal content that a task has decoded and will return as `EqualCopies`."""

    __slots__ = ("copies", "message_id", "network", "note", "row")

    def __init__(self, row: MessageRow) -> None:
        self.network, self.message_id = row.network, row.message_id
        self.note = UPDATE if row.type == "UPDATE" else 0
        self.row = msgspec.Raw(pack(row))
        self.copies: list[CopyColumns] = []


def _list_rows(batch: pa.RecordBatch, names: Iterable[str]) -> Iterator[tuple[object, ...]]:
    return zip(*(batch.column(name).to_pylist() for name in names), strict=True)


_list_content: Final = attrgetter(*_CONTENT)
_list_own: Final = attrgetter(*CopyColumns._fields)
_COPIES_DECODER: Final = msgspec.msgpack.Decoder(EqualCopies)
_MESSAGE_DECODER: Final = msgspec.msgpack.Decoder(MessageRow)


def decode_copies(data: bytes) -> EqualCopies:
    """Unpack the column `data` of a row with rank COPIES."""
    return _COPIES_DECODER.decode(data)


def read_copy(row: msgspec.Raw, copy: CopyColumns) -> MessageRow:
    """Build the row of `messages` for a copy. `row`: packed row of a copy with equal content."""
    equal = _MESSAGE_DECODER.decode(row)
    return equal if _list_own(equal) == copy else equal._replace(**copy._asdict())


def build_quarantine_row(ref: MessageRef, record: QuarantineRecord) -> QuarantineRow:
    """Build the row of `quarantine` for a frame, or a message in it, that cannot be used."""
    return QuarantineRow(*ref, None, record.stage, record.reason, record.detail, record.data, record.observed_at)
