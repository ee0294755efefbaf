"""Candidates to rows of `updates` and `tips`: assigns verified separators, and selects the updates that are new."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.backfill.copies import RunTarget, build_quarantine_row
from kiln.pipelines.backfill.deduplication import NOWHERE, StreamHistory, UpdateCandidate
from kiln.pipelines.backfill.merged_rows import (
    MERGED_ROWS,
    STAGE_OUTPUTS,
    MergedRow,
    MergedRowBuffer,
    StageOutput,
    encode_outputs,
    read_groups,
    select_merged,
)
from kiln.pipelines.backfill.messages import CANDIDATE, LiveUpdate, UpdateMessage, decode_candidate
from kiln.pipelines.decode.decoder import MessageRef
from kiln.pipelines.decode.identities import is_lasting
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.sink.rows import TipsRow, UpdatesRow
from kiln.pipelines.updates.separators import (
    KnownSeparators,
    SeparatorConfig,
    build_claims,
    build_false_claim,
    resolve_separator,
)
from kiln.schemas.kafka.records import QuarantineRecord, SeparatorRecord, SeparatorSource
from kiln.schemas.wire.topics import parse_topic

_Batches = Iterator[pa.RecordBatch]

RUN_UPDATE = 1
"""Rank of an update that the run has from an earlier chunk. A group is a stream of a network."""
LIVE_UPDATE = 2
"""Rank of an update in the live tables."""
ANNOUNCEMENT = 3
"""Rank of an announcement before the chunk."""
CANDIDATE_UPDATE = 4
"""Rank of an update that may be new."""

KNOWN_STREAMS = "network string, stream string, known boolean, separator_key string, separator_value string"


class _RunUpdate(msgspec.Struct, frozen=True, array_like=True):
    """An update with its separator."""

    message: UpdateMessage
    """without its data"""
    separator: tuple[str, str] | None
    source: SeparatorSource | None
    fault: QuarantineRecord | None

    @property
    def stamp(self) -> LiveUpdate:
        """Times and log position of the row: those of the live row if there is one."""
        at = self.message.observed_at
        return self.message.live or LiveUpdate(at, at, NOWHERE, at)

    @property
    def event_time(self) -> int:
        return min(self.stamp.observed_at, self.stamp.log_time)

    @property
    def candidate(self) -> UpdateCandidate:
        message = self.message
        author = message.author if message.is_first and is_lasting(message.message_id, True) else None
        is_live = message.live is not None
        return UpdateCandidate(self.event_time, message.origin, self.separator, message.tip, author, is_live)

    @property
    def row(self) -> UpdatesRow:
        """Row of the table `updates`."""
        key, value = self.separator or (None, None)
        message, stamp = self.message, self.stamp
        return UpdatesRow(
            network=message.network,
            origin=message.origin,
            message_id=message.message_id,
            from_peer=message.author,
            separator_key=key,
            separator_value=value,
            separator_source=self.source,
            stream=message.stream,
            tip=message.tip,
            observed_at=stamp.observed_at,
            log_time=stamp.log_time,
            log_partition=stamp.log_partition,
            log_offset=stamp.log_offset,
        )


def select_known_streams(streams: DataFrame) -> DataFrame:
    """Convert rows of the table `streams` to KNOWN_STREAMS."""
    return streams.select("network", "stream", F.lit(True).alias("known"), "separator_key", "separator_value")


def assign_separators(candidates: DataFrame, known: DataFrame, separating: SeparatorConfig) -> DataFrame:
    """Assign separators to CANDIDATES by KNOWN_STREAMS, and return MERGED_ROWS grouped by stream.

    An update that waits for its genesis is left out, as in the live tables.
    """
    rows = candidates.where(F.col("kind") == CANDIDATE).join(known, ["network", "stream"], "left")
    return rows.select("data", "known", "separator_key", "separator_value").mapInArrow(
        _assign_partition(separating), MERGED_ROWS
    )


def mark_run_updates(updates: DataFrame) -> DataFrame:
    """Convert the run's `updates` to MERGED_ROWS."""
    return _mark_rows(updates, RUN_UPDATE, _get_event_time(), F.col("separator_key"), F.col("separator_value"))


def mark_live_updates(updates: DataFrame, known: DataFrame) -> DataFrame:
    """Convert live `updates` to MERGED_ROWS, with the separators that KNOWN_STREAMS has now."""
    verified = known.select(
        "network", "stream", "known", F.col("separator_key").alias("key"), F.col("separator_value").alias("value")
    )
    rows = updates.join(verified, ["network", "stream"], "left")
    key, value = (
        F.when(F.col("known"), F.col(verified_column)).otherwise(F.col(column))
        for verified_column, column in (("key", "separator_key"), ("value", "separator_value"))
    )
    return _mark_rows(rows, LIVE_UPDATE, _get_event_time(), key, value)


def mark_announcements(messages: DataFrame, before: int) -> DataFrame:
    """Convert rows of `messages` to MERGED_ROWS: UPDATEs with an author, up to before a time, µs."""
    is_announced = (F.col("type") == "UPDATE") & F.col("from_peer").isNotNull()
    rows = messages.where(is_announced & (F.col("observed_at") < F.timestamp_micros(F.lit(before))))
    return _mark_rows(rows, ANNOUNCEMENT, F.col("observed_at"), F.col("from_peer"))


def _get_event_time() -> Column:
    return F.least("observed_at", "log_time")


def _mark_rows(rows: DataFrame, rank: int, at: Column, *more: Column) -> DataFrame:
    """Select MERGED_ROWS. `data`: origin, tip, and `more` as far as it is not null."""
    data = F.encode(F.concat_ws("\n", F.col("origin"), F.col("tip"), *more), "UTF-8")
    return select_merged(
        rows, network=F.col("network"), name=F.col("stream"), rank=F.lit(rank), at=F.unix_micros(at), data=data
    )


def write_updates(rows: DataFrame, signed_horizon: int, target: RunTarget) -> DataFrame:
    """Write rows of `updates`, `tips` and `quarantine` to files from grouped MERGED_ROWS, and return STAGE_OUTPUTS."""
    return rows.mapInArrow(_write_partition(signed_horizon, target), STAGE_OUTPUTS)


def _assign_partition(separating: SeparatorConfig) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        out = MergedRowBuffer()
        for batch in batches:
            for data, known, key, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                candidate = decode_candidate(data)
                verified: KnownSeparators = {}
                if known:
                    separator = None if key is None else SeparatorRecord(key, value)
                    verified = {(candidate.network, candidate.stream): separator}
                update = _assign_separator(candidate, verified, separating)
                if update is not None:
                    head = (candidate.network, candidate.stream, CANDIDATE_UPDATE, update.event_time)
                    yield from out.add(MergedRow(*head, *candidate.position, data=msgspec.msgpack.encode(update)))
        yield from out.drain()

    return rows


def _assign_separator(
    candidate: UpdateMessage, known: KnownSeparators, separating: SeparatorConfig
) -> _RunUpdate | None:
    topic, observed_at = parse_topic(candidate.topic), candidate.observed_at
    claims = build_claims(None if topic is None else topic.separator, candidate.model)
    result = resolve_separator(claims, (candidate.network, candidate.stream), known, separating)
    if result.source is None and separating.fetch and candidate.live is None:
        return None
    fault = None
    if result.contradicted is not None and result.separator is not None and candidate.reports_faults:
        fault = build_false_claim(result.contradicted, result.separator, candidate.data, observed_at)
    separator = None if result.separator is None else (result.separator.key, result.separator.value)
    return _RunUpdate(msgspec.structs.replace(candidate, data=b""), separator, result.source, fault)


def _write_partition(signed_horizon: int, target: RunTarget) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        inside, outside = TableFiles(target.run, "updates"), TableFiles(target.beyond, "updates")
        tips, faults = TableFiles(target.run, "tips"), TableFiles(target.run, "quarantine")
        for group in read_groups(batches):
            history = StreamHistory(signed_horizon)
            tip_times: dict[str, list[int]] = {}  # event times of the updates that put a tip into the run's `tips`
            for row in group:
                if row.rank != CANDIDATE_UPDATE:
                    origin, tip, *more = row.data.decode().split("\n")
                    if row.rank == ANNOUNCEMENT:
                        history.add_announcement(origin, more[0], tip, row.at)
                    else:
                        history.add_update(origin, tuple(more) or None, tip, row.at)
                    if row.rank == RUN_UPDATE:
                        tip_times.setdefault(tip, []).append(row.at)
                    continue
                update = _decode_update(row.data)
                message, event_time = update.message, update.event_time
                if update.fault is not None:
                    faults.add(build_quarantine_row(MessageRef(*message.position), update.fault))
                if not history.offer(update.candidate):
                    continue
                (inside if event_time in target.span else outside).add(update.row)
                observed_at, times = update.stamp.observed_at, tip_times.setdefault(message.tip, [])
                if observed_at in target.span and not any(abs(event_time - at) < signed_horizon for at in times):
                    times.append(event_time)
                    tips.add(TipsRow(message.network, message.stream, message.tip, "update", None, observed_at))
        yield encode_outputs(StageOutput(inside.close() + tips.close() + faults.close(), outside.close()))

    return rows


_UPDATE_DECODER = msgspec.msgpack.Decoder(_RunUpdate)


def _decode_update(data: bytes) -> _RunUpdate:
    # what a function that Spark sends to tasks names itself must be picklable, and a decoder is not
    return _UPDATE_DECODER.decode(data)
