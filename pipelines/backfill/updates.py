"""Third stage of a backfill run: selects new updates among the candidates, and writes rows of `updates` and `tips`.

The candidates come from `messages.py`. A shuffle brings those of a stream together with what is known about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.archive.rows import MessageRow
from kiln.pipelines.backfill.copies import RunTarget, build_quarantine_row
from kiln.pipelines.backfill.deduplication import StreamHistory
from kiln.pipelines.backfill.merged_rows import (
    OUTPUT_RANK,
    STAGE_OUTPUTS,
    StageOutput,
    encode_outputs,
    read_groups,
    select_merged,
)
from kiln.pipelines.backfill.messages import CANDIDATE, LiveUpdate, UpdateMessage
from kiln.pipelines.decode.decoder import MessageRef
from kiln.pipelines.decode.identities import is_lasting
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.sink.rows import TipsRow, UpdatesRow
from kiln.pipelines.updates.separators import (
    SeparatedUpdate,
    SeparatorConfig,
    build_claims,
    build_false_claim,
    resolve_separator,
)
from kiln.schemas.kafka.records import SeparatorRecord
from kiln.schemas.wire.topics import Separator, parse_topic

_Batches = Iterator[pa.RecordBatch]

KNOWN_STREAM = 1
"""Rank of a row of the live table `streams`: the stream's genesis is verified. `data` is the stream's separator, or
empty if the genesis has none. A group is a stream of a network."""
RUN_UPDATE = 2
"""Rank of a row of `updates` that the run has written in an earlier chunk."""
LIVE_UPDATE = 3
"""Rank of a row of the live table `updates`."""
ANNOUNCEMENT = 4
"""Rank of an UPDATE message before the chunk, which announced a tip of the stream."""


def mark_known_streams(streams: DataFrame) -> DataFrame:
    """Convert rows of the live table `streams` for the shuffle by stream (MERGED_ROWS)."""
    return _mark_rows(streams, KNOWN_STREAM, F.lit(0), "separator_key", "separator_value")


def mark_updates(updates: DataFrame, rank: int) -> DataFrame:
    """Convert known rows of `updates` for the shuffle by stream. `rank`: RUN_UPDATE or LIVE_UPDATE."""
    event_time = F.unix_micros(F.least("observed_at", "log_time"))
    return _mark_rows(updates, rank, event_time, "origin", "tip", "separator_key", "separator_value")


def mark_announcements(messages: DataFrame, before: int) -> DataFrame:
    """Convert UPDATE messages with an author, captured before a time (µs), for the shuffle by stream (MERGED_ROWS)."""
    is_announced = (F.col("type") == "UPDATE") & F.col("from_peer").isNotNull()
    rows = messages.where(is_announced & (F.col("observed_at") < F.timestamp_micros(F.lit(before))))
    return _mark_rows(rows, ANNOUNCEMENT, F.unix_micros("observed_at"), "origin", "tip", "from_peer")


def _mark_rows(rows: DataFrame, rank: int, at: Column, *columns: str) -> DataFrame:
    """Convert rows for the shuffle by stream. `columns`: columns that go into `data`, one per line, without nulls."""
    data = F.encode(F.concat_ws("\n", *columns), "UTF-8")
    return select_merged(rows, network=F.col("network"), name=F.col("stream"), rank=F.lit(rank), at=at, data=data)


def write_updates(rows: DataFrame, separating: SeparatorConfig, signed_horizon: int, target: RunTarget) -> DataFrame:
    """Select the new updates after the shuffle by stream, and write rows of `updates`, `tips` and `quarantine` to
    files.

    An update whose genesis would have to be fetched first is omitted, as in the live tables.

    Args:
        rows: Candidates, and what is known about their streams.
        separating: How to find the separator of an update.
        signed_horizon: Time in µs during which another announcement of the same tip is a repeat.
        target: Lakes to which the tasks write.

    Returns:
        Results of the tasks of all stages (STAGE_OUTPUTS).
    """
    return rows.mapInArrow(_write_partition(separating, signed_horizon, target), STAGE_OUTPUTS)


def _write_partition(
    separating: SeparatorConfig, signed_horizon: int, target: RunTarget
) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        inside, outside = TableFiles(target.run, "updates"), TableFiles(target.beyond, "updates")
        tips, faults = TableFiles(target.run, "tips"), TableFiles(target.run, "quarantine")
        decoder = msgspec.msgpack.Decoder(UpdateMessage)
        outputs: list[StageOutput] = []
        for group in read_groups(batches):
            history = StreamHistory(signed_horizon)
            tip_times: dict[str, list[int]] = {}  # event times of the updates that put a tip into the run's `tips`
            known: dict[tuple[str, str], SeparatorRecord | None] = {}  # this stream, if its genesis is verified
            for row in group:
                if row.rank == OUTPUT_RANK:
                    outputs.append(msgspec.msgpack.decode(row.data, type=StageOutput))
                    continue
                stream = row.network, row.name
                if row.rank == KNOWN_STREAM:
                    known[stream] = SeparatorRecord(*_split_separator(row.data.decode())) if row.data else None
                    continue
                if row.rank != CANDIDATE:
                    origin, tip, *more = row.data.decode().split("\n", 2)
                    if row.rank == ANNOUNCEMENT:
                        history.add_announcement(origin, more[0], tip, row.at)
                        continue
                    separator = _split_separator(more[0]) if more else None
                    if stream in known:
                        verified = known[stream]
                        separator = Separator(verified.key, verified.value) if verified else None
                    history.add_update(origin, separator, tip, row.at)
                    if row.rank == RUN_UPDATE:
                        tip_times.setdefault(tip, []).append(row.at)
                    continue
                message = decoder.decode(row.data)
                copy = message.row
                topic = parse_topic(copy.topic)
                claims = build_claims(None if topic is None else topic.separator, copy.model)
                result = resolve_separator(claims, stream, known, separating)
                if result.source is None and separating.fetch and message.live is None:
                    continue
                separator = result.separator
                if result.contradicted is not None and separator is not None and message.reports_faults:
                    fault = build_false_claim(result.contradicted, separator, copy.data, copy.observed_at)
                    ref = MessageRef(copy.kafka_partition, copy.kafka_offset, copy.message_index)
                    faults.add(build_quarantine_row(ref, fault))
                tip, stamp, is_live = copy.tip or "", message.stamp, message.live is not None
                author = copy.from_peer if message.is_first and is_lasting(copy.message_id, True) else None
                if not history.offer(row.at, copy.origin, separator, tip, author, is_live=is_live):
                    continue
                (inside if row.at in target.span else outside).add(_build_row(copy, result, stamp))
                times = tip_times.setdefault(tip, [])
                if stamp.observed_at in target.span and not any(abs(row.at - at) < signed_horizon for at in times):
                    times.append(row.at)
                    tips.add(TipsRow(*stream, tip, "update", None, stamp.observed_at))
        yield encode_outputs(*outputs, StageOutput(inside.close() + tips.close() + faults.close(), outside.close()))

    return rows


def _split_separator(text: str) -> Separator:
    return Separator(*text.rsplit("\n", 1))  # a key may have line breaks, a value has none


def _build_row(copy: MessageRow, result: SeparatedUpdate, stamp: LiveUpdate) -> UpdatesRow:
    key, value = result.separator or (None, None)
    return UpdatesRow(
        network=copy.network,
        origin=copy.origin,
        message_id=copy.message_id,
        from_peer=copy.from_peer,
        separator_key=key,
        separator_value=value,
        separator_source=result.source,
        stream=copy.stream or "",
        tip=copy.tip or "",
        observed_at=stamp.observed_at,
        log_time=stamp.log_time,
        log_partition=stamp.log_partition,
        log_offset=stamp.log_offset,
    )
