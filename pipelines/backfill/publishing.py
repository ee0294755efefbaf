"""Batches of a run to records of `kiln.history`, from which the bridge publishes (decision 26)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, get_args

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.delta.arrow_rows import RowBuffer
from kiln.schemas.kafka.records import BatchRecord, Origin, SeparatorRecord, batch_key, encode

RECORDS: Final = "key binary, value binary"
_SCHEMA: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])
_OWNER: Final = ("network", "origin", "separator_key", "separator_value")


def to_publish(batches: DataFrame, publications: DataFrame) -> DataFrame:
    """Rows of `batches` of a run in, and of live's `publications`; out those of LIVE traffic that nobody publishes.

    A batch that live made and that has no receipt is live's own to publish: `emitted_at` is then the broker's stamp,
    and of all other batches it is `closed_at`.
    """
    ends = publications.groupBy("cid").agg(F.bool_or(F.col("error").isNull()).alias("out"))
    of_live = F.col("emitted_at") != F.col("closed_at")
    left = batches.where(F.col("origin") == "LIVE").join(ends, "cid", "left")
    return left.where(~F.coalesce("out", of_live)).select(batches.columns)


def records(batches: DataFrame) -> DataFrame:
    """Rows of `batches` in, RECORDS out: the batches of a separator in one task, in their order."""
    columns = (*_OWNER, "cid", "block", F.unix_micros("opened_at").alias("opened"), F.unix_micros("closed_at"))
    by_owner = batches.select(*columns).repartition(*_OWNER).sortWithinPartitions(*_OWNER, "opened")
    return by_owner.mapInArrow(_records, RECORDS)


def _records(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    out = RowBuffer(_SCHEMA)
    for batch in batches:
        for network, origin, key, value, cid, block, opened_at, closed_at in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            separator = SeparatorRecord(key, value)
            record = BatchRecord(network, _ORIGINS[origin], separator, cid, block, opened_at, closed_at)
            if out.add((batch_key(network, separator), encode(record)), len(block)):
                yield from out.drain()
    yield from out.drain()


_ORIGINS: Final[dict[str, Origin]] = {each: each for each in get_args(Origin)}
