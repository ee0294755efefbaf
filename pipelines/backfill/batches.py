"""Updates of a run to rows of `batches` and `batch_tips`: the windows of each separator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple, get_args

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.backfill.chunks import TimeRange
from kiln.pipelines.backfill.grouped import TALLIES, StageOutput, tallies
from kiln.pipelines.backfill.owner_windows import LiveBatch, SeparatorWindows
from kiln.pipelines.batch.batching import BatchConfig, batch_records
from kiln.pipelines.batch.offset_range import UpdateFilter, WindowKey
from kiln.pipelines.batch.windows import ClosedWindow
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.sink.transform import batch_rows
from kiln.schemas.kafka.records import Origin
from kiln.schemas.wire.cid import cid_bytes

_Batches = Iterator[pa.RecordBatch]

_OWNER: Final = ("network", "origin", "separator_key", "separator_value")
_BATCH, _UPDATE = 0, 1
"""Ranks: a batch that live has comes before the update with which it opened."""


def log_of(updates: DataFrame, which: UpdateFilter) -> DataFrame:
    """Rows of `updates` in; what windows are made of out, in no order: those with a separator that go into batches."""
    rows = updates.where(F.col("separator_key").isNotNull())
    if which.authors is not None:
        rows = rows.where(F.col("from_peer").isin(*which.authors))
    if which.only_verified:
        rows = rows.where(F.col("separator_source") == "genesis")
    return rows.select(
        *_OWNER,
        F.unix_micros("updated_at").alias("at"),
        F.lit(_UPDATE).alias("rank"),
        F.col("log_partition").alias("partition"),
        F.col("log_offset").alias("offset"),
        F.unix_micros("observed_at").alias("heard"),
        "stream",
        "tip",
    )


def made_by_live(batches: DataFrame) -> DataFrame:
    """Live's `batches` in; rows like those of `log_of` out: opened_at in `at`, emitted_at in `offset`, closed_at in
    `heard`, the CID in `tip`."""
    return batches.select(
        *_OWNER,
        F.unix_micros("opened_at").alias("at"),
        F.lit(_BATCH).alias("rank"),
        F.lit(0).alias("partition"),
        F.unix_micros("emitted_at").alias("offset"),
        F.unix_micros("closed_at").alias("heard"),
        F.lit("").alias("stream"),
        F.col("cid").alias("tip"),
    )


def piece(rows: DataFrame, number: int, pieces: int) -> DataFrame:
    """The rows of every so manieth separator."""
    return rows if pieces == 1 else rows.where(F.pmod(F.xxhash64(*_OWNER), F.lit(pieces)) == number)


def batched(rows: DataFrame, batching: BatchConfig, span: TimeRange, lake: Lake) -> DataFrame:
    """What `log_of` and `made_by_live` gave in, TALLIES out; rows of `batches` and `batch_tips` go into files: of the
    windows that opened in `span`."""
    order: list[Column] = [F.col(name) for name in (*_OWNER, "at", "rank", "partition", "offset")]
    by_owner = rows.repartition(*order[:4]).sortWithinPartitions(*order)
    return by_owner.mapInArrow(_batched(batching, span, lake), TALLIES)


def _batched(batching: BatchConfig, span: TimeRange, lake: Lake) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        files = {name: TableFiles(lake, name) for name in ("batch_tips", "batches")}
        every = (row for batch in batches for row in zip(*(each.to_pylist() for each in batch.columns), strict=True))
        for (network, origin, key, value), of_owner in groupby(every, key=itemgetter(0, 1, 2, 3)):
            owner = WindowKey(network, _ORIGINS[origin], key, value)
            windows = SeparatorWindows(owner, batching.window, batching.grace, span.low)
            for closed in _closed(windows, of_owner):
                if closed.window.opened_at in span:
                    for record in batch_records(closed, batching.block_limit):
                        live = windows.emitted_at(record.opened_at, record.cid)
                        for table, _, row in batch_rows(record, record.closed_at if live is None else live):
                            files[table].add(row, len(record.block) if table == "batches" else 0)
                windows.forget(closed.window.opened_at)
        wrote = StageOutput([file for each in files.values() for file in each.close()])
        yield tallies(wrote)

    return rows


class _WindowRow(NamedTuple):
    """What `log_of` or `made_by_live` gave of a separator."""

    at: int
    rank: int
    partition: int
    offset: int
    heard: int
    stream: str
    tip: str


def _closed(windows: SeparatorWindows, rows: Iterator[tuple[object, ...]]) -> Iterator[ClosedWindow]:
    for row in map(_WindowRow._make, (each[len(_OWNER) :] for each in rows)):
        if row.rank == _BATCH:
            windows.batch(row.at, row.heard, LiveBatch(row.tip, row.offset))
        else:
            yield from windows.update(row.heard, row.at, row.stream, cid_bytes(row.tip))
    yield from windows.end()


_ORIGINS: Final[dict[str, Origin]] = {each: each for each in get_args(Origin)}
