"""Last stage of a backfill run: builds rows of `batches` and `batch_tips` from its updates, by separator and window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple, get_args

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.backfill.merged_rows import STAGE_OUTPUTS, StageOutput, encode_outputs
from kiln.pipelines.backfill.separator_windows import SeparatorWindows
from kiln.pipelines.backfill.terms import TimeRange
from kiln.pipelines.batch.batching import BatchConfig, build_batch_records
from kiln.pipelines.batch.offset_range import UpdateFilter, WindowKey
from kiln.pipelines.batch.windows import Window
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.sink.rows import build_batch_rows
from kiln.schemas.kafka.records import Origin
from kiln.schemas.wire.cid import cid_bytes

_Batches = Iterator[pa.RecordBatch]

_SEPARATOR_COLUMNS: Final = ("network", "origin", "separator_key", "separator_value")
_BATCH, _UPDATE = 0, 1
"""Ranks: a batch of the live table comes before the update that opened its window."""


def select_batchable(updates: DataFrame, update_filter: UpdateFilter) -> DataFrame:
    """Select the updates that go into batches, with the columns of a separator and of `_WindowRow`, unsorted."""
    rows = updates.where(F.col("separator_key").isNotNull())
    if update_filter.authors is not None:
        rows = rows.where(F.col("from_peer").isin(*update_filter.authors))
    if update_filter.only_verified:
        rows = rows.where(F.col("separator_source") == "genesis")
    return rows.select(
        *_SEPARATOR_COLUMNS,
        F.unix_micros("log_time").alias("at"),
        F.lit(_UPDATE).alias("rank"),
        F.col("log_partition").alias("partition"),
        F.col("log_offset").alias("offset"),
        F.unix_micros("observed_at").alias("observed_at"),
        "stream",
        "tip",
    )


def mark_live_batches(batches: DataFrame) -> DataFrame:
    """Convert rows of the live table `batches` to the columns of `select_batchable`.

    `opened_at` is renamed to `at`, `emitted_at` to `offset`, `closed_at` to `observed_at`, and `batch_cid` to `tip`.
    """
    return batches.select(
        *_SEPARATOR_COLUMNS,
        F.unix_micros("opened_at").alias("at"),
        F.lit(_BATCH).alias("rank"),
        F.lit(0).alias("partition"),
        F.unix_micros("emitted_at").alias("offset"),
        F.unix_micros("closed_at").alias("observed_at"),
        F.lit("").alias("stream"),
        F.col("batch_cid").alias("tip"),
    )


def select_piece(rows: DataFrame, number: int, pieces: int) -> DataFrame:
    """Select the rows of piece `number`, if the separators are divided into `pieces` pieces."""
    return rows if pieces == 1 else rows.where(F.pmod(F.xxhash64(*_SEPARATOR_COLUMNS), F.lit(pieces)) == number)


def build_batches(rows: DataFrame, batching: BatchConfig, span: TimeRange, lake: Lake) -> DataFrame:
    """Build the batches of the windows that open in a time range. Tasks write `batches` and `batch_tips` to files.

    Args:
        rows: Rows of `select_batchable` and `mark_live_batches`.

    Returns:
        Results of the tasks (STAGE_OUTPUTS).
    """
    order: list[Column] = [F.col(name) for name in (*_SEPARATOR_COLUMNS, "at", "rank", "partition", "offset")]
    by_owner = rows.repartition(*order[:4]).sortWithinPartitions(*order)
    return by_owner.mapInArrow(_build_partition(batching, span, lake), STAGE_OUTPUTS)


def _build_partition(batching: BatchConfig, span: TimeRange, lake: Lake) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        files = {name: TableFiles(lake, name) for name in ("batch_tips", "batches")}
        merged = (
            row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        )
        for (network, origin, key, value), group in groupby(merged, key=itemgetter(0, 1, 2, 3)):
            owner = WindowKey(network, _ORIGINS[origin], key, value)
            windows = SeparatorWindows(owner, batching.window, batching.grace, span.low)
            for closed in _close_windows(windows, group):
                if closed.opened_at in span:
                    for record in build_batch_records(closed, batching.block_limit):
                        emitted_at = windows.take_emitted_at(record.opened_at, record.batch_cid)
                        for table, _, row in build_batch_rows(
                            record, record.closed_at if emitted_at is None else emitted_at
                        ):
                            files[table].add(row, len(record.block) if table == "batches" else 0)
        yield encode_outputs(StageOutput([file for table_files in files.values() for file in table_files.close()]))

    return rows


class _WindowRow(NamedTuple):
    """Row of `select_batchable` or `mark_live_batches`, without the columns of the separator. Times are µs."""

    at: int
    rank: int
    partition: int
    offset: int
    observed_at: int
    stream: str
    tip: str


def _close_windows(windows: SeparatorWindows, rows: Iterator[tuple[object, ...]]) -> Iterator[Window]:
    for row in map(_WindowRow._make, (cells[len(_SEPARATOR_COLUMNS) :] for cells in rows)):
        if row.rank == _BATCH:
            windows.add_live_batch(row.at, row.observed_at, row.tip, row.offset)
        else:
            yield from windows.add_update(row.observed_at, row.at, row.stream, cid_bytes(row.tip))
    yield from windows.close()


_ORIGINS: Final[dict[str, Origin]] = {origin: origin for origin in get_args(Origin)}
