"""Candidates to rows of `updates` and `tips`: assigns verified separators, and selects the updates that are new."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.backfill.deduplication import NOWHERE, UpdateCandidate, select_new_updates
from kiln.pipelines.backfill.merged_rows import (
    MERGED_ROWS,
    STAGE_OUTPUTS,
    MergedRow,
    MergedRowBuffer,
    StageOutput,
    encode_outputs,
    read_groups,
)
from kiln.pipelines.backfill.messages import CANDIDATE, LiveUpdate, RunTarget, UpdateMessage, decode_candidate
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.updates.transform import (
    KnownSeparators,
    SeparatorConfig,
    build_claims,
    build_false_claim,
    resolve_separator,
)
from kiln.schemas.kafka.records import Origin, QuarantineRecord, SeparatorRecord, SeparatorSource
from kiln.schemas.wire.topics import parse_topic

_Batches = Iterator[pa.RecordBatch]

RUN_UPDATE = 1
"""Rank of an update that the run has from an earlier chunk. A group is the stream and the tip of a network."""
LIVE_UPDATE = 2
"""Rank of an update that live has."""
CANDIDATE_UPDATE = 3
"""Rank of an update that may be new."""

KNOWN_STREAMS = "network string, stream string, known boolean, separator_key string, separator_value string"


class _SeparatedUpdate(msgspec.Struct, frozen=True, array_like=True):
    """An update with its separator. Times are µs."""

    network: str
    origin: Origin
    message_id: str
    author: str | None
    separator: tuple[str, str] | None
    source: SeparatorSource | None
    stream: str
    tip: str
    stamp: LiveUpdate
    """times and log position of the row; those of live if live has the update"""
    is_live: bool
    position: tuple[int, int, int]
    fault: QuarantineRecord | None

    @property
    def claim(self) -> bytes:
        return "\n".join((self.origin, *(self.separator or ()))).encode()

    @property
    def row(self) -> tuple[object, ...]:
        """Row of the table `updates`."""
        stamp = self.stamp
        return (
            self.network,
            self.origin,
            self.message_id,
            self.author,
            *(self.separator or (None, None)),
            self.source,
            self.stream,
            self.tip,
            stamp.observed_at,
            stamp.log_time,
            stamp.log_partition,
            stamp.log_offset,
        )


def select_known_streams(streams: DataFrame) -> DataFrame:
    """Convert rows of the table `streams` to KNOWN_STREAMS."""
    return streams.select("network", "stream", F.lit(True).alias("known"), "separator_key", "separator_value")


def assign_separators(candidates: DataFrame, known: DataFrame, separating: SeparatorConfig) -> DataFrame:
    """Assign separators to CANDIDATES by KNOWN_STREAMS, and return MERGED_ROWS grouped by stream and tip.

    An update that waits for its genesis is left out, as in live.
    """
    rows = candidates.where(F.col("kind") == CANDIDATE).join(known, ["network", "stream"], "left")
    return rows.select("data", "known", "separator_key", "separator_value").mapInArrow(
        _assign_partition(separating), MERGED_ROWS
    )


def mark_run_updates(updates: DataFrame) -> DataFrame:
    """Convert the run's `updates` to MERGED_ROWS."""
    return updates.select(*_mark_columns(RUN_UPDATE, F.col("separator_key"), F.col("separator_value")))


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
    return rows.select(*_mark_columns(LIVE_UPDATE, key, value))


def write_updates(rows: DataFrame, signed_horizon: int, target: RunTarget) -> DataFrame:
    """Write rows of `updates`, `tips` and `quarantine` to files from grouped MERGED_ROWS, and return STAGE_OUTPUTS."""
    return rows.mapInArrow(_write_partition(signed_horizon, target), STAGE_OUTPUTS)


def _mark_columns(rank: int, key: Column, value: Column) -> list[Column]:
    return [
        F.col("network"),
        F.concat_ws("\n", "stream", "tip").alias("name"),
        F.lit(rank).alias("rank"),
        F.unix_micros(F.least("observed_at", "log_time")).alias("at"),
        F.lit(0).alias("partition"),
        F.lit(0).cast("bigint").alias("offset"),
        F.lit(0).alias("position"),
        F.lit(0).alias("note"),
        F.encode(F.concat_ws("\n", F.col("origin"), key, value), "UTF-8").alias("data"),
    ]


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
                    stamp = update.stamp
                    yield from out.add(
                        MergedRow(
                            update.network,
                            f"{update.stream}\n{update.tip}",
                            CANDIDATE_UPDATE,
                            min(stamp.observed_at, stamp.log_time),
                            stamp.log_partition,
                            stamp.log_offset,
                            data=msgspec.msgpack.encode(update),
                        )
                    )
        yield from out.drain()

    return rows


def _assign_separator(
    candidate: UpdateMessage, known: KnownSeparators, separating: SeparatorConfig
) -> _SeparatedUpdate | None:
    topic, observed_at = parse_topic(candidate.topic), candidate.observed_at
    claims = build_claims(None if topic is None else topic.separator, candidate.model)
    result = resolve_separator(claims, (candidate.network, candidate.stream), known, separating)
    if result.source is None and separating.fetch and candidate.live is None:
        return None
    fault = None
    if result.contradicted is not None and result.separator is not None and candidate.reports_faults:
        fault = build_false_claim(result.contradicted, result.separator, candidate.data, observed_at)
    return _SeparatedUpdate(
        network=candidate.network,
        origin=candidate.origin,
        message_id=candidate.message_id,
        author=candidate.author,
        separator=None if result.separator is None else (result.separator.key, result.separator.value),
        source=result.source,
        stream=candidate.stream,
        tip=candidate.tip,
        stamp=candidate.live or LiveUpdate(observed_at, observed_at, NOWHERE, observed_at),
        is_live=candidate.live is not None,
        position=(candidate.position.partition, candidate.position.offset, candidate.position.position or 0),
        fault=fault,
    )


def _write_partition(signed_horizon: int, target: RunTarget) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        inside, outside = TableFiles(target.run, "updates"), TableFiles(target.beyond, "updates")
        tips, faults = TableFiles(target.run, "tips"), TableFiles(target.run, "quarantine")
        for group in read_groups(batches):
            known: list[tuple[int, Hashable]] = []
            tip_times: list[int] = []  # event times of the updates that put the tip into the run's table `tips`
            announced: list[tuple[UpdateCandidate, _SeparatedUpdate]] = []
            for row in group:
                if row.rank == CANDIDATE_UPDATE:
                    update = _decode_update(row.data)
                    announced.append((UpdateCandidate(row.at, update.claim, update.is_live), update))
                    if update.fault is not None:
                        fault = update.fault
                        row_end = (fault.stage, fault.reason, fault.detail, fault.data, fault.observed_at)
                        faults.add((*update.position, None, *row_end))
                else:
                    known.append((row.at, row.data))
                    if row.rank == RUN_UPDATE:
                        tip_times.append(row.at)
            for update in select_new_updates(known, announced, signed_horizon):
                stamp = update.stamp
                event_time = min(stamp.observed_at, stamp.log_time)
                (inside if event_time in target.span else outside).add(update.row)
                if stamp.observed_at in target.span and not any(
                    abs(event_time - at) < signed_horizon for at in tip_times
                ):
                    tip_times.append(event_time)
                    tips.add((update.network, update.stream, update.tip, "update", None, stamp.observed_at))
        yield encode_outputs(StageOutput(inside.close() + tips.close() + faults.close(), outside.close()))

    return rows


_UPDATE_DECODER = msgspec.msgpack.Decoder(_SeparatedUpdate)


def _decode_update(data: bytes) -> _SeparatedUpdate:
    # what a function that Spark sends to tasks names itself must be picklable, and a decoder is not
    return _UPDATE_DECODER.decode(data)
