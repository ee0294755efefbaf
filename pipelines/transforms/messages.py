"""`kiln.frames` to rows of the table `messages`, and to what goes to quarantine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipelines.logic.decode import Decoded, Decoding, Faulty, author, decode, identities, own_identity
from pipelines.spark.rows import RowBuffer, arrow_schema, columns_of, ddl
from schemas.records import QuarantineRecord, encode, quarantine_key
from schemas.tables import TABLES, Column

_Batches = Iterator[pa.RecordBatch]

MESSAGES = columns_of(TABLES["messages"])
_FAULT = (
    Column("stage", "string", "where decoding stopped; null for a good message"),
    Column("reason", "string", "reason code"),
    Column("author", "string", "peer id of a faulty message that is signed well"),
    Column("fault_key", "binary", "key of the quarantine record"),
    Column("fault_value", "binary", "value of the quarantine record"),
)
_IDENTITY = (
    Column("early", "binary", "digest by which copies are known"),
    Column("late", "binary", "the other digest"),
)
# Most bytes of a quarantine record: base64 makes four thirds of them, and a topic takes records of 8 MiB.
PART = 5 << 20
DECODED = (*MESSAGES, *_FAULT, *_IDENTITY)
_NO_FAULT = (None,) * len(_FAULT)
_NO_MESSAGE = (None,) * len(MESSAGES)


def decoded(records: DataFrame, how: Decoding) -> DataFrame:
    """Columns partition, offset, stamp, value in; DECODED out: a row for each copy of a message and for each fault."""
    source = records.select("partition", "offset", "stamp", "value")
    return source.mapInArrow(_decoded_rows(how), ddl(DECODED)).select(*(column.name for column in DECODED))


def first_copies(copies: DataFrame, remembered: str) -> DataFrame:
    """DECODED in and out: one good copy of each message, and every fault (decision 5). `remembered`: a Spark interval.

    Event time is the time of the micro-batch, so that no row is ever late. `dropDuplicatesWithinWatermark` drops late
    rows in silence, and after an outage Spark reads partitions at different speeds.
    """
    return (
        copies.withColumn("seen_at", F.current_timestamp())
        .withWatermark("seen_at", remembered)
        .dropDuplicatesWithinWatermark(["early"])
        .dropDuplicatesWithinWatermark(["late"])
        .select(*(column.name for column in DECODED))
    )


def good(rows: DataFrame) -> DataFrame:
    """DECODED in; rows of the table `messages` out."""
    return rows.where(F.col("reason").isNull()).select(*(column.name for column in MESSAGES))


def faults(rows: DataFrame) -> DataFrame:
    """DECODED in; records of `kiln.quarantine` out: key, value."""
    return rows.where(F.col("reason").isNotNull()).select(
        F.col("fault_key").alias("key"), F.col("fault_value").alias("value")
    )


def counts(rows: DataFrame) -> DataFrame:
    """DECODED in; how many there are by type, stage and reason out: type, stage, reason, rows."""
    return rows.groupBy("type", "stage", "reason").agg(F.count("*").alias("rows"))


def by_author(rows: DataFrame) -> DataFrame:
    """DECODED in; how the well-signed messages of each author decoded out: author, decoded, failed."""
    failed = F.col("reason").isNotNull()
    author = F.when(failed, F.col("author")).when(F.col("verdict") == 1, F.col("from_peer"))
    return (
        rows.select(author.alias("author"), failed.alias("failed"))
        .where(F.col("author").isNotNull() & (F.col("author") != ""))
        .groupBy("author")
        .agg(F.count_if(~F.col("failed")).alias("decoded"), F.count_if("failed").alias("failed"))
    )


def _decoded_rows(how: Decoding) -> Callable[[_Batches], _Batches]:
    def rows(batches: _Batches) -> _Batches:
        buffer = RowBuffer(arrow_schema(DECODED))
        for batch in batches:
            for partition, offset, stamp, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                for item in decode(value, partition, offset, stamp, how):
                    for row, size in fault_rows(item) if isinstance(item, Faulty) else (_message_row(item, how),):
                        if buffer.add(row, size):
                            yield from buffer.drain()
            yield from buffer.drain()

    return rows


def _message_row(item: Decoded, how: Decoding) -> tuple[tuple[object, ...], int]:
    content, envelope = item.content, item.envelope
    signer = author(item)
    early, late = identities(item, "", how.unsigned_horizon)
    row = (
        item.message,
        item.network,
        item.origin,
        item.topic,
        item.topic_source,
        content.type,
        signer,
        envelope.seqno if signer else None,
        content.stream,
        content.tip,
        content.model,
        content.sep,
        content.batch,
        content.query_id,
        list(content.tips.items()) if content.tips is not None else None,
        content.ts,
        content.ver,
        content.ipfs_ver,
        envelope.data,
        int(item.verdict),
        item.remote_peer,
        item.observed_at,
        *item.place,
        *_NO_FAULT,
        early,
        late,
    )
    return row, len(envelope.data)


def fault_rows(item: Faulty) -> Iterator[tuple[tuple[object, ...], int]]:
    """One row, or more where the bytes are too many for one record. Each row then holds a part, and says which."""
    own = own_identity(item)
    size = len(item.data)
    for start in range(0, size or 1, PART):
        part = item.data[start : start + PART]
        detail = item.detail if size <= PART else f"bytes {start} to {start + len(part)} of {size}: {item.detail}"
        record = QuarantineRecord(
            stage=item.stage, reason=item.reason, detail=detail, data=part, observed_at=item.observed_at
        )
        identity = blake2b(own + start.to_bytes(8), digest_size=16).digest() if start else own
        row = (
            *_NO_MESSAGE,
            item.stage,
            item.reason,
            item.author,
            quarantine_key(*item.place),
            encode(record),
            identity,
            identity,
        )
        yield row, len(part) * 4 // 3
