"""What may be an update to rows of `updates` and `tips`: the separator by what is verified, and new once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.backfill.first import NOWHERE, UpdateCandidate, new_updates
from kiln.pipelines.backfill.grouped import (
    MIXED,
    TALLIES,
    MergedRow,
    MergedRowBuffer,
    StageOutput,
    read_groups,
    tallies,
)
from kiln.pipelines.backfill.messages import CANDIDATE, LiveUpdate, RunTarget, UpdateMessage, read_candidate
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.updates.transform import KnownSeparators, SeparatorConfig, claims_of, false_claim, separate
from kiln.schemas.kafka.records import Origin, QuarantineRecord, SeparatorRecord, SeparatorSource
from kiln.schemas.wire.topics import parse_topic

_Batches = Iterator[pa.RecordBatch]

TAKEN_BY_RUN, TAKEN, NEW = 1, 2, 3
"""Ranks in a group, which is the stream and the tip of a network: an update that the run has of an earlier chunk; an
update that live has; one that may be new."""

KNOWN = "network string, stream string, known boolean, separator_key string, separator_value string"


class _SeparatedUpdate(msgspec.Struct, frozen=True, array_like=True):
    """An update under its separator. Times are µs."""

    network: str
    origin: Origin
    message: str
    author: str | None
    separator: tuple[str, str] | None
    source: SeparatorSource | None
    stream: str
    tip: str
    stamp: LiveUpdate
    stamped: bool
    place: tuple[int, int, int]
    fault: QuarantineRecord | None

    @property
    def claim(self) -> bytes:
        return "\n".join((self.origin, *(self.separator or ()))).encode()

    @property
    def row(self) -> tuple[object, ...]:
        """The row of `updates`."""
        stamp = self.stamp
        return (
            self.network,
            self.origin,
            self.message,
            self.author,
            *(self.separator or (None, None)),
            self.source,
            self.stream,
            self.tip,
            stamp.observed_at,
            stamp.updated_at,
            stamp.log_partition,
            stamp.log_offset,
        )


def known_streams(streams: DataFrame) -> DataFrame:
    """Rows of the table `streams` in, KNOWN out."""
    return streams.select("network", "stream", F.lit(True).alias("known"), "separator_key", "separator_value")


def separated(candidates: DataFrame, known: DataFrame, separating: SeparatorConfig) -> DataFrame:
    """CANDIDATES and KNOWN in, MIXED out: what may be a new update, in the group of its stream and tip. An update that
    waits for its genesis is left out, as live leaves it out."""
    rows = candidates.where(F.col("kind") == CANDIDATE).join(known, ["network", "stream"], "left")
    return rows.select("data", "known", "separator_key", "separator_value").mapInArrow(_separated(separating), MIXED)


def taken_by_run(updates: DataFrame) -> DataFrame:
    """The run's `updates` in, MIXED out."""
    return updates.select(*_taken(TAKEN_BY_RUN, F.col("separator_key"), F.col("separator_value")))


def taken(updates: DataFrame, known: DataFrame) -> DataFrame:
    """Live's `updates` and KNOWN in, MIXED out, under the separators of today."""
    verified = known.select(
        "network", "stream", "known", F.col("separator_key").alias("key"), F.col("separator_value").alias("value")
    )
    rows = updates.join(verified, ["network", "stream"], "left")
    key, value = (
        F.when(F.col("known"), F.col(then)).otherwise(F.col(now))
        for then, now in (("key", "separator_key"), ("value", "separator_value"))
    )
    return rows.select(*_taken(TAKEN, key, value))


def written(rows: DataFrame, remembered: int, where: RunTarget) -> DataFrame:
    """MIXED in groups in, TALLIES out; rows of `updates`, `tips` and `quarantine` go into files."""
    return rows.mapInArrow(_written(remembered, where), TALLIES)


def _taken(rank: int, key: Column, value: Column) -> list[Column]:
    return [
        F.col("network"),
        F.concat_ws("\n", "stream", "tip").alias("name"),
        F.lit(rank).alias("rank"),
        F.unix_micros(F.least("observed_at", "updated_at")).alias("at"),
        F.lit(0).alias("partition"),
        F.lit(0).cast("bigint").alias("offset"),
        F.lit(0).alias("position"),
        F.lit(0).alias("note"),
        F.encode(F.concat_ws("\n", F.col("origin"), key, value), "UTF-8").alias("data"),
    ]


def _separated(separating: SeparatorConfig) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        out = MergedRowBuffer()
        for batch in batches:
            for data, known, key, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                candidate = read_candidate(data)
                verified: KnownSeparators = {}
                if known:
                    named = None if key is None else SeparatorRecord(key, value)
                    verified = {(candidate.network, candidate.stream): named}
                update = _under_separator(candidate, verified, separating)
                if update is not None:
                    stamp = update.stamp
                    yield from out.add(
                        MergedRow(
                            update.network,
                            f"{update.stream}\n{update.tip}",
                            NEW,
                            min(stamp.observed_at, stamp.updated_at),
                            stamp.log_partition,
                            stamp.log_offset,
                            data=msgspec.msgpack.encode(update),
                        )
                    )
        yield from out.rest()

    return rows


def _under_separator(
    candidate: UpdateMessage, known: KnownSeparators, separating: SeparatorConfig
) -> _SeparatedUpdate | None:
    topic = parse_topic(candidate.topic)
    claims = claims_of(None if topic is None else topic.separator, candidate.model)
    found = separate(claims, (candidate.network, candidate.stream), known, separating)
    if found.source is None and separating.fetch and candidate.stamp is None:
        return None
    fault = None
    if found.contradicted is not None and found.separator is not None and candidate.counts:
        fault = false_claim(found.contradicted, found.separator, candidate.data, candidate.observed_at)
    heard = candidate.observed_at
    return _SeparatedUpdate(
        network=candidate.network,
        origin=candidate.origin,
        message=candidate.message,
        author=candidate.author,
        separator=None if found.separator is None else (found.separator.key, found.separator.value),
        source=found.source,
        stream=candidate.stream,
        tip=candidate.tip,
        stamp=candidate.stamp or LiveUpdate(heard, heard, NOWHERE, heard),
        stamped=candidate.stamp is not None,
        place=(candidate.place.partition, candidate.place.offset, candidate.place.position or 0),
        fault=fault,
    )


def _written(remembered: int, where: RunTarget) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        inside, outside = TableFiles(where.run, "updates"), TableFiles(where.beyond, "updates")
        tips, faults = TableFiles(where.run, "tips"), TableFiles(where.run, "quarantine")
        for group in read_groups(batches):
            known: list[tuple[int, Hashable]] = []
            told: list[int] = []
            announced: list[tuple[UpdateCandidate, _SeparatedUpdate]] = []
            for row in group:
                if row.rank == NEW:
                    update = _read_update(row.data)
                    announced.append((UpdateCandidate(row.at, update.claim, update.stamped), update))
                    if update.fault is not None:
                        fault = update.fault
                        what = (fault.stage, fault.reason, fault.detail, fault.data, fault.observed_at)
                        faults.add((*update.place, None, *what))
                else:
                    known.append((row.at, row.data))
                    if row.rank == TAKEN_BY_RUN:
                        told.append(row.at)
            for update in new_updates(known, announced, remembered):
                stamp = update.stamp
                heard = min(stamp.observed_at, stamp.updated_at)
                (inside if heard in where.span else outside).add(update.row)
                if stamp.observed_at in where.span and not any(abs(heard - at) < remembered for at in told):
                    told.append(heard)
                    tips.add((update.network, update.stream, update.tip, "update", None, stamp.observed_at))
        wrote = StageOutput(inside.close() + tips.close() + faults.close(), outside.close())
        yield tallies(wrote)

    return rows


_UPDATES = msgspec.msgpack.Decoder(_SeparatedUpdate)


def _read_update(data: bytes) -> _SeparatedUpdate:
    # what a function that Spark sends to tasks names itself must be picklable, and a decoder is not
    return _UPDATES.decode(data)
