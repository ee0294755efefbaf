"""`kiln.frames` to records of `kiln.updates`: the first good copy of each UPDATE, with its separator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipelines.decode import Decoded, Decoding, Faulty, author, decode, identities
from pipelines.rows import RowBuffer
from schemas.records import Coordinates, Epoch, SeparatorRecord, UpdateRecord, encode, update_key
from schemas.topics import Separator

_Batches = Iterator[pa.RecordBatch]

_SCHEMA = pa.schema([("identity", pa.binary()), ("key", pa.binary()), ("value", pa.binary())])


def updates(records: DataFrame, how: Decoding) -> DataFrame:
    """Columns partition, offset, stamp, value in; identity, key, value out: a row for each good copy of an UPDATE."""
    source = records.select("partition", "offset", "stamp", "value")
    return source.mapInArrow(_update_rows(how), "identity binary, key binary, value binary").select(
        "identity", "key", "value"
    )


def first_copies(copies: DataFrame, remembered: str) -> DataFrame:
    """identity, key, value in; key, value of one copy each out. As in `messages`, no row is ever late.

    One digest is enough here: an unsigned update whose copies straddle two spans is announced twice, which a window
    counts once and the table `updates` holds once; a second operator would make every batch later.
    """
    return (
        copies.withColumn("seen_at", F.current_timestamp())
        .withWatermark("seen_at", remembered)
        .dropDuplicatesWithinWatermark(["identity"])
        .select("key", "value")
    )


def separate(topic: Separator | None, model: str | None) -> tuple[Separator | None, str | None]:
    """The separator of an update, and where it is known from: "topic" or "model" (DESIGN, decision 4).

    What a verified genesis says comes before both; it is not known here yet.
    """
    if topic is not None:
        return topic, "topic"
    if model is not None:
        return Separator("model", model), "model"
    return None, None


def _update_rows(how: Decoding) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        epoch = _epoch()
        buffer = RowBuffer(_SCHEMA)
        for batch in batches:
            for partition, offset, stamp, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                for item in decode(value, partition, offset, stamp, how):
                    if isinstance(item, Faulty) or item.content.type != "UPDATE":
                        continue
                    if buffer.add(_update_row(item, epoch, how)):
                        yield from buffer.drain()
            yield from buffer.drain()

    return rows


def _epoch() -> Epoch:
    """The micro-batch that this task is of; the same again when a crash makes it run again (DESIGN, decision 7)."""
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("updates are made in a task of a streaming query, and this is none")
    query, batch = context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty("streaming.sql.batchId")
    return Epoch(query=query or "batch", batch=int(batch or 0))


def _update_row(item: Decoded, epoch: Epoch, how: Decoding) -> tuple[object, ...]:
    content = item.content
    separator, source = separate(item.separator, content.model)
    named = SeparatorRecord(*separator) if separator else None
    stream, tip = content.stream or "", content.tip or ""
    record = UpdateRecord(
        network=item.network,
        origin=item.origin,
        separator=named,
        separator_source=source,
        stream=stream,
        tip=tip,
        from_=author(item),
        message=item.message,
        epoch=epoch,
        frame=Coordinates(item.place.partition, item.place.offset, item.place.position or 0),
        observed_at=item.observed_at,
    )
    identity, _ = identities(item, item.origin, how.unsigned_horizon)
    return identity, update_key(item.network, named, stream), encode(record)
