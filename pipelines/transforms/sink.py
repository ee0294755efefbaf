"""`kiln.updates`, `.batches`, `.publications` and `.quarantine` to rows of the tables filled from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipelines.rows import RowBuffer, arrow_schema, columns_of, ddl
from schemas.batch import BlockError, read_block
from schemas.records import (
    UNREADABLE,
    decode_batch,
    decode_publication,
    decode_quarantine,
    decode_update,
    parse_quarantine_key,
)
from schemas.tables import TABLES

_Batches = Iterator[pa.RecordBatch]
_Row = tuple[object, ...]

TOPICS = ("updates", "batches", "publications", "quarantine")
FILLED = ("updates", "tips", "batches", "batch_tips", "publications", "quarantine")
"""The tables that this query writes."""

_STRUCTS = ", ".join(f"{name} struct<{ddl(columns_of(TABLES[name]))}>" for name in FILLED)
ROWS = f"table string, identity binary, {_STRUCTS}"


def table_rows(records: DataFrame) -> DataFrame:
    """Columns topic, partition, offset, stamp, key, value in; ROWS out: for each row its table, a digest of what makes
    it one row, and its columns in the struct of that table's name, the other structs being null."""
    source = records.select("topic", "partition", "offset", "stamp", "key", "value")
    return source.mapInArrow(_rows, ROWS)


def once_each(rows: DataFrame, remembered: str) -> DataFrame:
    """ROWS in and out, each row once: a topic holds a record twice when its writer was killed and began again.

    As in `messages`, event time is the micro-batch's, so that no row is ever late. `remembered`: a Spark interval.
    """
    return (
        rows.withColumn("seen_at", F.current_timestamp())
        .withWatermark("seen_at", remembered)
        .dropDuplicatesWithinWatermark(["identity"])
        .select("table", *FILLED)
    )


def rows_of(rows: DataFrame, table: str) -> DataFrame:
    """The rows of one table, with its columns."""
    return rows.where(F.col("table") == table).select(f"{table}.*")


def _rows(batches: _Batches) -> _Batches:
    structs = [pa.struct(list(arrow_schema(columns_of(TABLES[name])))) for name in FILLED]
    schema = pa.schema([("table", pa.string()), ("identity", pa.binary()), *zip(FILLED, structs, strict=True)])
    names = {name: [column.name for column in TABLES[name].columns] for name in FILLED}
    buffer = RowBuffer(schema)
    clock: dict[tuple[str, int], int] = {}
    for batch in batches:
        for topic, partition, offset, stamp, key, value in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            # The log's clock is the greatest stamp so far (DESIGN, decision 1).
            now = clock[topic, partition] = max(stamp, clock.get((topic, partition), 0))
            if not value:
                continue  # a tick
            for table, identity, row in _read(topic, partition, offset, now, key or b"", value):
                columns: list[object] = [None] * len(FILLED)
                columns[FILLED.index(table)] = dict(zip(names[table], row, strict=True))
                if buffer.add((table, _digest(table, *identity), *columns), len(value)):
                    yield from buffer.drain()
        yield from buffer.drain()


def _digest(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def _read(
    topic: str, partition: int, offset: int, now: int, key: bytes, value: bytes
) -> Iterator[tuple[str, _Row, _Row]]:
    """(table, what makes the row one, row) for all that a record says; what cannot be read is quarantined itself."""
    try:
        yield from _READERS[topic](partition, offset, now, key, value)
    except (*UNREADABLE, BlockError) as error:
        detail = f"record {partition}/{offset} of {topic}: {error}"
        row = (None, None, None, None, "sink", "record_malformed", detail, value, now)
        yield "quarantine", (detail,), row


def _update(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    update = decode_update(value)
    separator = (update.separator.key, update.separator.value) if update.separator else (None, None)
    yield (
        "updates",
        (update.network, update.origin, update.message),
        (
            update.network,
            update.origin,
            update.message,
            update.from_,
            *separator,
            update.separator_source,
            update.stream,
            update.tip,
            update.observed_at,
            now,
            partition,
            offset,
        ),
    )
    known = (update.network, update.stream, update.tip, "update")
    yield "tips", known, (*known, None, update.observed_at)


def _batch(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    batch = decode_batch(value)
    tips = read_block(batch.block)
    owner = (batch.network, batch.origin, batch.separator.key, batch.separator.value)
    yield (
        "batches",
        (*owner, batch.opened_at, batch.cid),
        (
            batch.cid,
            *owner,
            batch.opened_at,
            batch.closed_at,
            now,
            len(tips),
            sum(map(len, tips.values())),
            len(batch.block),
            batch.block,
        ),
    )
    for stream, links in tips.items():
        for tip in links:
            row = (batch.cid, stream, tip)
            yield "batch_tips", row, row


def _publication(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    receipt = decode_publication(value)
    yield (
        "publications",
        (receipt.cid, receipt.transport, receipt.topic, receipt.target, receipt.published_at),
        (
            receipt.cid,
            receipt.transport,
            receipt.topic,
            receipt.target,
            receipt.peers,
            receipt.published_at,
            receipt.error,
        ),
    )


def _quarantined(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    fault = decode_quarantine(value)
    row = (*parse_quarantine_key(key), fault.stage, fault.reason, fault.detail, fault.data, fault.observed_at)
    yield "quarantine", (key, fault.stage, fault.reason, fault.detail), row


_READERS: dict[str, Callable[[int, int, int, bytes, bytes], Iterator[tuple[str, _Row, _Row]]]] = {
    "updates": _update,
    "batches": _batch,
    "publications": _publication,
    "quarantine": _quarantined,
}
