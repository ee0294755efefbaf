"""Second stage of a backfill run: selects the copies that become rows of `messages`, and candidates for updates.

`copies.py` decodes the frames of a chunk into copies of messages. A shuffle then brings the copies of a message
together with what is known about it. This stage processes one message after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.archive.rows import (
    MessageRow,
    build_fault_records,
    decode_data,
)
from kiln.pipelines.backfill.copies import (
    REPLAY,
    UPDATE,
    CopyColumns,
    RunTarget,
    build_quarantine_row,
    decode_copies,
    read_copy,
)
from kiln.pipelines.backfill.deduplication import (
    NOWHERE,
    FirstCopySelector,
    FramePosition,
    match_signed,
    match_unsigned,
)
from kiln.pipelines.backfill.merged_rows import (
    MERGED_ROWS,
    OUTPUT_RANK,
    MergedRow,
    MergedRowBuffer,
    StageOutput,
    read_groups,
    select_merged,
)
from kiln.pipelines.backfill.terms import TimeRange
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.decode.identities import is_lasting
from kiln.pipelines.decode.user_decoder import MessageDecoder
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.runtime.row_packing import pack
from kiln.schemas.wire.identity import VERDICT_NAMES, Verdict

_Batches = Iterator[pa.RecordBatch]

RUN_MESSAGE = 1
"""Rank of a row of `messages` that the run has written in an earlier chunk. Rows of this and the next ranks come before
the copies of the message."""
LIVE_MESSAGE = 2
"""Rank of a row of the live table `messages`."""
RUN_UPDATE = 3
"""Rank of a row of `updates` that the run has written in an earlier chunk. `partition` and `offset` are those of the
topic `kiln.updates`, and `data` is the log time as text."""
LIVE_UPDATE = 4
"""Rank of a row of the live table `updates`. The columns are those of RUN_UPDATE."""
CANDIDATE = 5
"""Rank of an UPDATE message that may become a row of `updates`: `at` is the event time, `data` a packed
`UpdateMessage`. It comes after the known updates of its stream."""


class LiveUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Times and Kafka position of a row of `updates`. Times are µs."""

    observed_at: int
    log_time: int
    log_partition: int
    log_offset: int


class UpdateMessage(msgspec.Struct, frozen=True, array_like=True):
    """An UPDATE message that may become a row of `updates`."""

    row: MessageRow
    """its first copy in the chunk"""
    reports_faults: bool
    """true if this chunk writes the message to `messages`, and so writes its rows of `quarantine`"""
    is_first: bool
    """true if this chunk keeps a copy of the message: then no earlier copy counts as its announcement"""
    live: LiveUpdate | None
    """its row in the live table `updates`, if any"""

    @property
    def stamp(self) -> LiveUpdate:
        """Times and Kafka position for the row of `updates`: of the live row, or else derived from the capture time."""
        at = self.row.observed_at
        return self.live or LiveUpdate(at, at, NOWHERE, at)

    @property
    def event_time(self) -> int:
        return min(self.stamp.observed_at, self.stamp.log_time)


def select_messages(
    rows: DataFrame, chunk: TimeRange, config: DecodeConfig, signed_horizon: int, target: RunTarget
) -> DataFrame:
    """Select the copies that become rows of `messages`, after the shuffle by message.

    The tasks write these rows to files. They return the candidates for updates, for the shuffle by stream
    (MERGED_ROWS).
    """
    return rows.mapInArrow(_select_partition(chunk, config, signed_horizon, target), MERGED_ROWS)


# ---------------------------------------------------------------- known messages and updates


def mark_messages(messages: DataFrame, rank: int) -> DataFrame:
    """Convert known rows of `messages` for the shuffle by message. `rank`: RUN_MESSAGE or LIVE_MESSAGE."""
    position = F.coalesce(F.col("message_index"), F.lit(0))
    return _mark_rows(
        messages, rank, partition=F.col("kafka_partition"), offset=F.col("kafka_offset"), position=position
    )


def mark_updates(updates: DataFrame, rank: int) -> DataFrame:
    """Convert known rows of `updates` for the shuffle by message. `rank`: RUN_UPDATE or LIVE_UPDATE."""
    note = F.when(F.col("origin") == "REPLAY", F.lit(REPLAY)).otherwise(F.lit(0))
    log_time = F.encode(F.unix_micros("log_time").cast("string"), "UTF-8")
    return _mark_rows(
        updates, rank, partition=F.col("log_partition"), offset=F.col("log_offset"), note=note, data=log_time
    )


def _mark_rows(rows: DataFrame, rank: int, **columns: Column) -> DataFrame:
    at = F.unix_micros("observed_at")
    return select_merged(rows, network=F.col("network"), name=F.col("message_id"), rank=F.lit(rank), at=at, **columns)


# ---------------------------------------------------------------- the second stage


def _select_partition(
    chunk: TimeRange, config: DecodeConfig, signed_horizon: int, target: RunTarget
) -> Callable[[_Batches], _Batches]:
    signed, unsigned = match_signed(signed_horizon), match_unsigned(config.unsigned_horizon)

    def rows(batches: _Batches) -> _Batches:
        inside, outside = TableFiles(target.run, "messages"), TableFiles(target.beyond, "messages")
        faults = TableFiles(target.run, "quarantine")
        decoder = MessageDecoder(config.decoder) if config.decoder else None
        out = MergedRowBuffer()
        for group in read_groups(batches):
            message = _MessageGroup(chunk, signed, unsigned)
            for merged in group:
                if merged.rank == OUTPUT_RANK:
                    yield from out.add(merged)
                else:
                    message.add(merged)
            for message_row in message.select_rows():
                is_inside = message_row.observed_at in target.span
                if decoder is not None:
                    decoded = decode_data(message_row, decoder)
                    if isinstance(decoded, MessageRow):
                        message_row = decoded
                    elif is_inside:
                        for record in build_fault_records(decoded):
                            faults.add(build_quarantine_row(decoded.ref, record), len(record.data))
                (inside if is_inside else outside).add(message_row, len(message_row.data))
            for candidate in message.list_candidates(target.span):
                first = candidate.row
                head = first.network, first.stream or "", CANDIDATE, candidate.event_time
                position = first.kafka_partition, first.kafka_offset, first.message_index or 0
                yield from out.add(MergedRow(*head, *position, data=pack(candidate)))
        yield from out.finish(StageOutput([*inside.close(), *faults.close()], outside.close()))

    return rows


_CopyMatcher = Callable[[int, int], bool]


class _Copy(NamedTuple):
    at: int
    position: FramePosition
    columns: CopyColumns
    equal_row: msgspec.Raw

    @property
    def origin(self) -> int:
        return REPLAY if self.columns.origin == "REPLAY" else 0


_VALID: Final = VERDICT_NAMES[Verdict.VALID]
_get_order: Final = itemgetter(0, 1)
"""key by which copies are sorted: capture time, then Kafka position"""


class _MessageGroup:
    """The rows of one message, which are added in order of rank: known rows first, then copies."""

    def __init__(self, chunk: TimeRange, signed: _CopyMatcher, unsigned: _CopyMatcher) -> None:
        self._chunk = chunk
        self._matchers = {True: signed, False: unsigned}
        self._known: list[MergedRow] = []
        self._run_origins: set[int] = set()
        self._live_updates: dict[int, MergedRow] = {}
        self._copies: list[_Copy] = []
        self._updates: list[_Copy] = []
        """copies whose content is an UPDATE message"""
        self._kept: list[_Copy] = []
        self._rows: dict[FramePosition, MessageRow] = {}

    def add(self, row: MergedRow) -> None:
        if row.rank in (RUN_MESSAGE, LIVE_MESSAGE):
            self._known.append(row)
        elif row.rank == RUN_UPDATE:
            self._run_origins.add(row.note)
        elif row.rank == LIVE_UPDATE:
            self._live_updates[row.note] = row
        else:
            equal = decode_copies(row.data)
            for columns in equal.copies:
                position = FramePosition(columns.kafka_partition, columns.kafka_offset, columns.message_index or 0)
                self._copies.append(_Copy(columns.observed_at, position, columns, equal.row))
            if row.note & UPDATE:
                self._updates += self._copies[-len(equal.copies) :]

    def select_rows(self) -> Iterator[MessageRow]:
        """Select the copies to keep, and yield their rows of `messages`."""
        if self._copies:
            self._copies.sort(key=_get_order)
            selector = self._build_selector(self._copies[0])
            self._kept = [copy for copy in self._copies if selector.offer(copy.at, copy.position, copy)]
            self._kept += selector.list_fallbacks()
        for copy in self._kept:
            yield self._read(copy)

    def _read(self, copy: _Copy) -> MessageRow:
        row = self._rows.get(copy.position)
        if row is None:
            self._rows[copy.position] = row = read_copy(copy.equal_row, copy.columns)
        return row

    def _build_selector(self, first: _Copy) -> FirstCopySelector[_Copy]:
        signed = first.columns.verdict == _VALID and is_lasting(self._read(first).message_id, True)
        selector = FirstCopySelector[_Copy](self._matchers[signed])
        for known in self._known:
            if known.rank == LIVE_MESSAGE and known.at in self._chunk:
                selector.add_live_choice(known.at, FramePosition(known.partition, known.offset, known.position))
            else:
                selector.add_known(known.at)
        return selector

    def list_candidates(self, span: TimeRange) -> Iterator[UpdateMessage]:
        """Yield a candidate for each origin (LIVE, REPLAY) of which the run has no update. Call `select_rows` first."""
        first_copies: dict[int, _Copy] = {}
        for copy in sorted(self._updates, key=_get_order):
            first_copies.setdefault(copy.origin, copy)
        is_first = bool(self._kept)
        for origin, copy in first_copies.items():
            if origin in self._run_origins:
                continue
            row = self._live_updates.get(origin)
            live = None if row is None else LiveUpdate(row.at, int(row.data), row.partition, row.offset)
            yield UpdateMessage(self._read(copy), is_first and copy.at in span, is_first, live)
