"""Records of `kiln.history`, from which the bridge publishes the batches of a run (decision 26)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, get_args

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.schemas.kafka.records import BatchRecord, Origin, SeparatorRecord, build_batch_key, encode

RECORD_COLUMNS: Final = "key binary, value binary"
_SCHEMA: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])
_SEPARATOR_COLUMNS: Final = ("network", "origin", "separator_key", "separator_value")


def select_unpublished(batches: DataFrame, publications: DataFrame) -> DataFrame:
    """Select the run's batches of LIVE traffic that have no publication, given live `publications`.

    Live itself publishes a batch that it built and that has no receipt. Its `emitted_at` is the broker's timestamp,
    while that of any other batch equals `closed_at`.
    """
    published = publications.groupBy("batch_cid").agg(F.bool_or(F.col("error").isNull()).alias("is_published"))
    is_live = F.col("emitted_at") != F.col("closed_at")
    left = batches.where(F.col("origin") == "LIVE").join(published, "batch_cid", "left")
    return left.where(~F.coalesce("is_published", is_live)).select(batches.columns)


def build_records(batches: DataFrame) -> DataFrame:
    """Convert rows of `batches` to RECORD_COLUMNS; one task has all batches of a separator, in order."""
    columns = (
        *_SEPARATOR_COLUMNS,
        "batch_cid",
        "block",
        F.unix_micros("opened_at").alias("opened"),
        F.unix_micros("closed_at"),
    )
    by_owner = (
        batches.select(*columns).repartition(*_SEPARATOR_COLUMNS).sortWithinPartitions(*_SEPARATOR_COLUMNS, "opened")
    )
    return by_owner.mapInArrow(_build_partition, RECORD_COLUMNS)


def _build_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    out = RowBuffer(_SCHEMA)
    for batch in batches:
        for network, origin, key, value, cid, block, opened_at, closed_at in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            separator = SeparatorRecord(key, value)
            record = BatchRecord(network, _ORIGINS[origin], separator, cid, block, opened_at, closed_at)
            if out.add((build_batch_key(network, separator), encode(record)), len(block)):
                yield from out.drain()
    yield from out.drain()


_ORIGINS: Final[dict[str, Origin]] = {each: each for each in get_args(Origin)}
