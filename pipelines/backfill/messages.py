"""Frames of a chunk to rows of `copies`, `messages` and `quarantine`, and to what may be an update: one decode for all.

As in the query `archive`, a first stage decodes and writes `copies` and faults where it stands, and a second stage,
after the shuffle that brings the copies of a message together, writes `messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.archive.transform import (
    FRAMES,
    MESSAGES,
    FrameRow,
    copy_row,
    fault_records,
    frame_of,
    message_row,
    with_pairs,
)
from kiln.pipelines.backfill.chunks import TimeRange
from kiln.pipelines.backfill.first import FirstCopySelector, FramePosition, same_signed, same_unsigned
from kiln.pipelines.backfill.grouped import MIXED, TALLY, MergedRow, MergedRowBuffer, StageOutput, read_groups
from kiln.pipelines.decode.decoder import (
    DecodeConfig,
    DecodedMessage,
    FrameDecoder,
    RejectedMessage,
    failed,
    unreadable,
)
from kiln.pipelines.decode.decoder import MessageRef as FramePlace
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS
from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.row_packing import pack, unpack
from kiln.schemas.kafka.frames import frame_fault
from kiln.schemas.kafka.records import Origin, QuarantineRecord
from kiln.schemas.wire.identity import Verdict

_Batches = Iterator[pa.RecordBatch]
_Row = tuple[object, ...]

KEPT, KEPT_BY_LIVE, UPDATE_KEPT, STAMP, COPY = 1, 2, 3, 4, 5
"""Ranks: what is known of a message comes before its copies.

KEPT: a message that the run has of an earlier chunk, at `at`. KEPT_BY_LIVE: the copy that live keeps. UPDATE_KEPT: an
update that the run has. STAMP: an update of live; partition and offset are those of the log, `data` is its `updated_at`
as text. COPY: `data` is a row of `messages`, packed.
"""

_UPDATE, _REPLAY, _SIGNED = 1, 2, 4
"""Bits of `note`, as far as a row says so."""

CANDIDATES = "kind string, network string, stream string, data binary"
CANDIDATE, TOLD = "candidate", "told"
"""Kinds: a `UpdateMessage`; a `StageOutput`."""

_OBSERVED_AT = next(place for place, column in enumerate(MESSAGES) if column.name == "observed_at")


class LiveUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What live wrote of an update. Times are µs."""

    observed_at: int
    updated_at: int
    log_partition: int
    log_offset: int


class UpdateMessage(msgspec.Struct, frozen=True, array_like=True):
    """An UPDATE that may be a new update: its first copy in the chunk, and live's stamp. Times are µs."""

    network: str
    origin: Origin
    message: str
    author: str | None
    topic: str
    model: str | None
    stream: str
    tip: str
    observed_at: int
    place: FramePlace
    data: bytes
    counts: bool
    """whether the run has the message, and has it of this chunk, so that what is wrong with it is told here"""
    stamp: LiveUpdate | None


def read_candidate(data: bytes) -> UpdateMessage:
    """A `UpdateMessage` out of CANDIDATES."""
    return _READ_CANDIDATE.decode(data)


_READ_CANDIDATE = msgspec.msgpack.Decoder(UpdateMessage)


@dataclass(frozen=True)
class RunTarget:
    """Where tasks write: the lake of a run, and, what lies beyond the range `span`, the lake `beyond`."""

    run: Lake
    beyond: Lake
    span: TimeRange


def copies(frames: DataFrame, how: DecodeConfig, where: RunTarget) -> DataFrame:
    """Rows of the table `frames` in, MIXED out: each good copy of a message. Rows of `copies` and `quarantine` go into
    files."""
    times = {"observed_at", "kafka_timestamp"}
    columns = [F.unix_micros(each.name) if each.name in times else F.col(each.name) for each in FRAMES]
    return frames.select(*columns).mapInArrow(_copies(how, where), MIXED)


def settled(rows: DataFrame, chunk: TimeRange, how: DecodeConfig, remembered: int, where: RunTarget) -> DataFrame:
    """MIXED in groups in, CANDIDATES out; rows of `messages` go into files."""
    return rows.mapInArrow(_settled(chunk, how.unsigned_horizon, remembered, where), CANDIDATES)


# ---------------------------------------------------------------- what is known


def kept(messages: DataFrame) -> DataFrame:
    """The run's `messages` in, MIXED out."""
    return messages.select(*_mark(KEPT, F.unix_micros("observed_at")))


def kept_by_live(messages: DataFrame) -> DataFrame:
    """Live's `messages` in, MIXED out."""
    place = ("kafka_partition", "kafka_offset", "message_index")
    return messages.select(*_mark(KEPT_BY_LIVE, F.unix_micros("observed_at"), *place))


def updates_kept(updates: DataFrame) -> DataFrame:
    """The run's `updates` in, MIXED out."""
    return updates.select(*_mark(UPDATE_KEPT, F.unix_micros("observed_at"), note=_origin()))


def stamps(updates: DataFrame) -> DataFrame:
    """Live's `updates` in, MIXED out."""
    log = ("log_partition", "log_offset")
    clock = F.encode(F.unix_micros("updated_at").cast("string"), "UTF-8")
    return updates.select(*_mark(STAMP, F.unix_micros("observed_at"), *log, note=_origin(), data=clock))


# ---------------------------------------------------------------- the first stage


def _copies(how: DecodeConfig, where: RunTarget) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        table, faults = TableFiles(where.run, "copies"), TableFiles(where.run, "quarantine")
        out, decoder, frames = MergedRowBuffer(), FrameDecoder(how), 0
        for batch in batches:
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                inside = row[6] in where.span
                frames += 1
                for item, copy in _read_frame(decoder, row):
                    if isinstance(item, RejectedMessage):
                        if inside:
                            for record in fault_records(item):
                                faults.add(quarantine_row(item, record), len(record.data))
                    else:
                        yield from out.add(item)
                    if inside and copy is not None:
                        table.add(copy, _BESIDE)
        yield from out.tell(StageOutput(table.close() + faults.close(), frames=frames))

    return rows


def _read_frame(decoder: FrameDecoder, row: FrameRow) -> list[tuple[MergedRow | RejectedMessage, _Row | None]]:
    """The good messages and the faults of a frame, each with its row of `copies`. Where this fails, the frame is a
    fault."""
    place = FramePlace(row[15], row[16], None)
    try:
        frame = frame_of(row)
        fault = frame_fault(frame)
        if fault is not None:  # an earlier Kiln has written the row
            return [(unreadable(fault, frame.SerializeToString(), *place[:2], row[6]), None)]
        return [
            (
                _copy(item) if isinstance(item, DecodedMessage) else item,
                None if item.copy is None else copy_row(item, frame),
            )
            for item in decoder.decode_frame(frame, *place[:2])
        ]
    except PROCESSING_ERRORS as error:  # pure: the frame alone has caused this
        return [(failed("archive", error, place, row[8], row[6]), None)]


_BESIDE = 500  # bytes of a row of `copies`, about


def _copy(item: DecodedMessage) -> MergedRow:
    note = _UPDATE if item.content.type == "UPDATE" else 0
    note |= _REPLAY if item.origin == "REPLAY" else 0
    note |= _SIGNED if item.verdict is Verdict.GOOD else 0
    place = item.place.partition, item.place.offset, item.place.position or 0
    return MergedRow(item.network, item.message, COPY, item.observed_at, *place, note, pack(message_row(item)))


def quarantine_row(item: RejectedMessage, record: QuarantineRecord) -> _Row:
    """The row of a fault of a frame, or of a message in a frame."""
    return (*item.place, None, record.stage, record.reason, record.detail, record.data, record.observed_at)


# ---------------------------------------------------------------- the second stage


def _settled(chunk: TimeRange, horizon: int, remembered: int, where: RunTarget) -> Callable[[_Batches], _Batches]:
    signed, unsigned = same_signed(remembered), same_unsigned(horizon)

    def rows(batches: _Batches) -> _Batches:
        inside, outside = TableFiles(where.run, "messages"), TableFiles(where.beyond, "messages")
        out = RowBuffer(_CANDIDATES)
        for group in read_groups(batches):
            message = _MessageRows(chunk, signed, unsigned)
            for row in group:
                if row.rank == TALLY:
                    out.add((TOLD, None, None, row.data))
                    continue
                message.take(row)
            for kept in message.kept():
                made = with_pairs(unpack(kept))
                (inside if made[_OBSERVED_AT] in where.span else outside).add(made, len(kept))
            for candidate in message.candidates(where.span):
                data = msgspec.msgpack.encode(candidate)
                if out.add((CANDIDATE, candidate.network, candidate.stream, data), len(data)):
                    yield from out.drain()
        out.add((TOLD, None, None, msgspec.msgpack.encode(StageOutput(inside.close(), outside.close()))))
        yield from out.drain()

    return rows


_CANDIDATES = pa.schema(
    [("kind", pa.string()), ("network", pa.string()), ("stream", pa.string()), ("data", pa.binary())]
)
_Same = Callable[[int, int], bool]


class _MessageRows:
    """One message, as its rows come."""

    def __init__(self, chunk: TimeRange, signed: _Same, unsigned: _Same) -> None:
        self._chunk = chunk
        self._same = {True: signed, False: unsigned}
        self._known: list[MergedRow] = []
        self._choice: FirstCopySelector[bytes] | None = None
        self._written: set[int] = set()
        self._stamps: dict[int, MergedRow] = {}
        self._first: dict[int, MergedRow] = {}
        """by origin, the first copy of an UPDATE"""
        self._kept: list[bytes] = []

    def take(self, row: MergedRow) -> None:
        """The next row: what is known comes before the copies."""
        if row.rank in (KEPT, KEPT_BY_LIVE):
            self._known.append(row)
        elif row.rank == UPDATE_KEPT:
            self._written.add(row.note)
        elif row.rank == STAMP:
            self._stamps[row.note] = row
        else:
            if self._choice is None:
                self._choice = self._choosing(bool(row.note & _SIGNED))
            if self._choice.keep(row.at, FramePosition(row.partition, row.offset, row.position), row.data):
                self._kept.append(row.data)
            if row.note & _UPDATE:
                self._first.setdefault(row.note & _REPLAY, row)

    def _choosing(self, signed: bool) -> FirstCopySelector[bytes]:
        choice = FirstCopySelector[bytes](self._same[signed])
        for each in self._known:
            if each.rank == KEPT_BY_LIVE and each.at in self._chunk:
                choice.chosen_by_live(each.at, FramePosition(each.partition, each.offset, each.position))
            else:
                choice.known_elsewhere(each.at)
        return choice

    def kept(self) -> list[bytes]:
        """Rows of `messages`, packed."""
        if self._choice is not None:
            self._kept += self._choice.rest()
        return self._kept

    def candidates(self, span: TimeRange) -> Iterator[UpdateMessage]:
        """For each origin, the UPDATE, unless the run has the update already."""
        for origin, copy in self._first.items():
            if origin in self._written:
                continue
            stamp = self._stamps.get(origin)
            told = None if stamp is None else LiveUpdate(stamp.at, int(stamp.data), stamp.partition, stamp.offset)
            row = _UPDATES.decode(copy.data)
            yield UpdateMessage(
                network=copy.network,
                origin=row.origin,
                message=copy.name,
                author=row.from_peer,
                topic=row.topic,
                model=row.model,
                stream=row.stream,
                tip=row.tip,
                observed_at=copy.at,
                place=FramePlace(copy.partition, copy.offset, copy.position),
                data=row.data,
                counts=bool(self._kept) and copy.at in span,
                stamp=told,
            )


class _UpdateMessageRow(msgspec.Struct, array_like=True):
    """The row of an UPDATE in `messages`, as far as it is needed here, packed."""

    message: str
    network: str
    origin: Origin
    topic: str
    topic_source: str
    type: str
    from_peer: str | None
    seqno: bytes | None
    stream: str
    tip: str
    model: str | None
    sep: None
    batch: None
    query_id: None
    tips: None
    ts: None
    ver: None
    ipfs_ver: None
    data: bytes


_UPDATES = msgspec.msgpack.Decoder(_UpdateMessageRow)


def _mark(rank: int, at: Column, *place: str, note: Column | None = None, data: Column | None = None) -> list[Column]:
    """The columns of MIXED for a row of a table that has `network` and `message`."""
    columns = [F.col(name) for name in place]
    columns += [F.lit(0)] * (3 - len(columns))
    partition, offset, position = columns
    return [
        F.col("network"),
        F.col("message").alias("name"),
        F.lit(rank).alias("rank"),
        at.alias("at"),
        partition.cast("int").alias("partition"),
        offset.cast("bigint").alias("offset"),
        position.cast("int").alias("position"),
        (F.lit(0) if note is None else note).alias("note"),
        (F.lit(b"") if data is None else data).alias("data"),
    ]


def _origin() -> Column:
    return F.when(F.col("origin") == "REPLAY", F.lit(_REPLAY)).otherwise(F.lit(0))
