"""`kiln.updates`, `.batches`, `.publications`, `.streams`, `.blocks` and `.quarantine` to rows of the tables that they
fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipelines.spark.rows import RowBuffer, arrow_schema, columns_of, ddl
from schemas.batch import BlockError, read_block
from schemas.queries import QUERIES
from schemas.records import (
    UNREADABLE,
    decode_batch,
    decode_block,
    decode_publication,
    decode_quarantine,
    decode_stream,
    decode_update,
    parse_quarantine_key,
)
from schemas.tables import TABLES, Column

_Batches = Iterator[pa.RecordBatch]
_Row = tuple[object, ...]

OTHER_SEPARATOR = "other_separator"

TOPICS = QUERIES["sink"].reads
FILLED = QUERIES["sink"].tables

RECEIVED = (
    Column("network", "string", "Ceramic network"),
    Column("stream", "string", "StreamID, base36"),
    Column("tip", "string", "CID of the tip"),
    Column("cid", "string", "CID of the batch it is in"),
    Column("observed_at", "timestamp", "when the block was had"),
    Column("separator_key", "string", "of the separator that the batch was announced under"),
    Column("separator_value", "string", "its value"),
)
"""Tips out of blocks of others' batches: no table's rows yet, as what the batch claims is to be held against what is
known."""

CLOCK = (
    Column("log_partition", "int", "partition of `kiln.updates`"),
    Column("at", "timestamp", "the greatest stamp of the partition's records in this micro-batch"),
)
"""Where the log's clock stands, as far as one micro-batch tells: ticks count, and have no row of their own."""

_SHAPES = {name: columns_of(TABLES[name]) for name in FILLED} | {"received": RECEIVED, "clock": CLOCK}
_STRUCTS = ", ".join(f"{name} struct<{ddl(columns)}>" for name, columns in _SHAPES.items())
ROWS = f"table string, identity binary, {_STRUCTS}"


def table_rows(records: DataFrame) -> DataFrame:
    """Columns topic, partition, offset, stamp, key, value in; ROWS out: for each row its table ("received", "clock":
    none), a digest of what makes it one row, and its columns in the struct of that name; other structs are null."""
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
        .select("table", *_SHAPES)
    )


def rows_of(rows: DataFrame, table: str) -> DataFrame:
    """The rows of one table, RECEIVED or CLOCK, with their columns."""
    return rows.where(F.col("table") == table).select(f"{table}.*")


def at_the_clock(updates: DataFrame, before: Mapping[int, int]) -> DataFrame:
    """Rows of the table `updates` in and out: `updated_at` is the log's clock, which stood at `before` (by partition,
    µs) when the micro-batch began. A task knows only the stamps of its own records."""
    if not before:
        return updates
    entries = [F.lit(each) for partition, micros in before.items() for each in (partition, micros)]
    stood = F.timestamp_micros(F.create_map(*entries)[F.col("log_partition")])
    return updates.withColumn("updated_at", F.greatest("updated_at", stood))


def foreign(received: DataFrame, publications: DataFrame) -> DataFrame:
    """RECEIVED in and out: without what we published ourselves, which comes back to us like anybody's."""
    ours = publications.where(F.col("error").isNull()).select("cid").distinct()
    return received.join(ours, "cid", "left_anti").select(*(column.name for column in RECEIVED))


def weighed(received: DataFrame, streams: DataFrame) -> DataFrame:
    """RECEIVED in and out, with `known`, "key/value" of the verified separator where it is another than the batch was
    announced under, else null. A genesis that names none contradicts nothing (decision 4)."""
    known = streams.where(F.col("separator_key").isNotNull()).select(
        "network",
        "stream",
        F.col("separator_key").alias("known_key"),
        F.col("separator_value").alias("known_value"),
    )
    other = (F.col("known_key") != F.col("separator_key")) | (F.col("known_value") != F.col("separator_value"))
    return received.join(known, ["network", "stream"], "left").select(
        *(column.name for column in RECEIVED),
        F.when(other, F.concat_ws("/", "known_key", "known_value")).alias("known"),
    )


def received_tips(weighed: DataFrame) -> DataFrame:
    """What `weighed` gave in; rows of the table `tips` out."""
    return weighed.where(F.col("known").isNull()).select(
        "network", "stream", "tip", F.lit("batch").alias("source"), "cid", "observed_at"
    )


def held_back(weighed: DataFrame) -> DataFrame:
    """What `weighed` gave in; rows of the table `quarantine` out: tips of streams that belong to another separator."""
    none = F.lit(None)
    return weighed.where(F.col("known").isNotNull()).select(
        none.cast("int").alias("kafka_partition"),
        none.cast("bigint").alias("kafka_offset"),
        none.cast("int").alias("message_index"),
        "cid",
        F.lit("receive").alias("stage"),
        F.lit(OTHER_SEPARATOR).alias("reason"),
        F.concat(
            "stream",
            F.lit(" in a batch of "),
            F.concat_ws("/", "separator_key", "separator_value"),
            F.lit("; its genesis says "),
            "known",
        ).alias("detail"),
        F.encode("tip", "UTF-8").alias("data"),
        "observed_at",
    )


def _rows(batches: _Batches) -> _Batches:
    structs = [pa.struct(list(arrow_schema(columns))) for columns in _SHAPES.values()]
    schema = pa.schema([("table", pa.string()), ("identity", pa.binary()), *zip(_SHAPES, structs, strict=True)])
    names = {name: [column.name for column in columns] for name, columns in _SHAPES.items()}
    places = {name: place for place, name in enumerate(_SHAPES)}
    buffer = RowBuffer(schema)
    clock: dict[tuple[str, int], int] = {}
    newest: dict[int, int] = {}
    for batch in batches:
        for topic, partition, offset, stamp, key, value in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            # The log's clock is the greatest stamp so far (decision 1).
            now = clock[topic, partition] = max(stamp, clock.get((topic, partition), 0))
            if topic == "updates":
                newest[partition] = offset
                if not key and not value:
                    continue  # a tick
            for table, identity, row in _read(topic, partition, offset, now, key or b"", value or b""):
                columns: list[object] = [None] * len(places)
                columns[places[table]] = dict(zip(names[table], row, strict=True))
                if buffer.add((table, _digest(table, *identity), *columns), len(value or b"")):
                    yield from buffer.drain()
        yield from buffer.drain()
    for partition, offset in newest.items():
        columns = [None] * len(places)
        columns[places["clock"]] = dict(zip(names["clock"], (partition, clock["updates", partition]), strict=True))
        buffer.add(("clock", _digest("clock", partition, offset), *columns))
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


def _stream(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    stream = decode_stream(value)
    separator = (stream.separator.key, stream.separator.value) if stream.separator else (None, None)
    known = (stream.network, stream.stream)
    yield "streams", known, (*known, *separator, stream.source)


def _block(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    block = decode_block(value)
    if block.block is None:
        return  # the bridge has put the reason into quarantine
    for stream, links in read_block(block.block).items():
        for tip in links:
            known = (block.network, stream, tip)
            separator = (block.separator.key, block.separator.value)
            yield "received", known, (*known, block.cid, block.observed_at, *separator)


_READERS: dict[str, Callable[[int, int, int, bytes, bytes], Iterator[tuple[str, _Row, _Row]]]] = {
    "updates": _update,
    "batches": _batch,
    "publications": _publication,
    "quarantine": _quarantined,
    "streams": _stream,
    "blocks": _block,
}
