"""`kiln.updates`, `.batches`, `.publications`, `.streams`, `.blocks` and `.quarantine` to rows of the tables that they
fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.batch.log_time import Clock
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS, PROCESSING_FAILED, describe
from kiln.pipelines.delta.arrow_rows import RowBuffer, arrow_schema, ddl
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig, new_copies
from kiln.pipelines.runtime.epoch import epoch_of_task
from kiln.pipelines.runtime.micro_batch_clock import remembering, seen_at
from kiln.pipelines.runtime.row_packing import PackedRow, UniqueRow, loose, pack, packed, packed_ddl, unpack, unpacked
from kiln.schemas.delta.tables import TABLES, Column
from kiln.schemas.kafka.records import (
    MAX_DETAIL,
    MAX_MICROS,
    UNREADABLE,
    BatchRecord,
    decode_batch,
    decode_block,
    decode_publication,
    decode_quarantine,
    decode_stream,
    decode_update,
    parse_quarantine_key,
)
from kiln.schemas.queries import QUERIES
from kiln.schemas.wire.batch_block import BlockError, read_block, read_foreign_block

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

IDENTITY = ("identity",)
"""The digest of what makes a row one row."""

WRITTEN = "kind string, data binary"
RECEIVED_ROWS, CLOCK, WROTE = "received", "clock", "wrote"
"""Kinds of rows beside those of tables: RECEIVED; a partition of `kiln.updates` and where its clock stands;
`SinkOutput`."""

_TASKS = 2
_BESIDE = 500  # bytes of a row, about, beside its record's value

_UPDATED_AT, _LOG_PARTITION = (
    next(place for place, column in enumerate(TABLES["updates"].columns) if column.name == name)
    for name in ("updated_at", "log_partition")
)


class SinkOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a task made of its rows: files of several tables."""

    files: list[DataFile]


def written_once(records: DataFrame, lake: Lake, stood: Clock, remembered: DedupStoreConfig) -> DataFrame:
    """Columns topic, partition, offset, stamp, key, value in; WRITTEN out: what is of no table, as it came, and one
    `SinkOutput` a task, which names the files of the tables' rows. Each row passes once: a topic holds a record twice
    when its writer was killed and began again. `stood`: the log's clock when the micro-batch began."""

    def rows(batches: _Batches) -> _Batches:
        new = new_copies(items_of(batches), remembered, seen_at(), epoch_of_task())
        return written_rows(loose(new), lake, stood)

    return _source(records).mapInArrow(rows, WRITTEN)


def table_rows(records: DataFrame) -> DataFrame:
    """The first stage of `written_once`. Columns topic, partition, offset, stamp, key, value in; packed rows out: for
    each row its table (or another kind), and a digest of what makes it one row."""

    def rows(batches: _Batches) -> _Batches:
        return packed(items_of(batches), IDENTITY, seen_at())

    return _source(records).mapInArrow(rows, packed_ddl(IDENTITY))


def once_each(rows: DataFrame, remembered: int) -> DataFrame:
    """Packed rows in; kind, data out, each row once.

    As in `archive`, event time is the micro-batch's, so that no row is ever late. `remembered`: µs.
    """
    return remembering(rows, remembered).dropDuplicatesWithinWatermark(["identity"]).select("kind", "data")


def written(rows: DataFrame, lake: Lake, stood: Clock) -> DataFrame:
    """The second stage of `written_once`: kind, data in; WRITTEN out."""

    def made(batches: _Batches) -> _Batches:
        return written_rows(unpacked(batches), lake, stood)

    return rows.select("kind", "data").mapInArrow(made, WRITTEN)


def _source(records: DataFrame) -> DataFrame:
    # A task for each partition of six topics would cost more than what there is to do.
    return records.select("topic", "partition", "offset", "stamp", "key", "value").coalesce(_TASKS)


def at_the_clock(row: Sequence[object], stood: Clock) -> Sequence[object]:
    """A row of the table `updates` in and out: `updated_at` is the log's clock, which stood at `stood` when the
    micro-batch began. A task knows only the stamps of its own records."""
    partition, at = row[_LOG_PARTITION], row[_UPDATED_AT]
    assert isinstance(partition, int)
    assert isinstance(at, int)
    stands = stood.get(partition, 0)
    return row if at >= stands else (*row[:_UPDATED_AT], stands, *row[_UPDATED_AT + 1 :])


def received(rows: DataFrame) -> DataFrame:
    """kind, data in; RECEIVED out: the rows of that kind."""
    schema = arrow_schema(RECEIVED)

    def unpacked(batches: _Batches) -> _Batches:
        for batch in batches:
            buffer = RowBuffer(schema)
            for data in batch.column("data").to_pylist():
                buffer.add(unpack(data))
            yield from buffer.drain()

    return rows.where(F.col("kind") == RECEIVED_ROWS).select("data").mapInArrow(unpacked, ddl(RECEIVED))


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


def items_of(batches: _Batches) -> Iterator[PackedRow]:
    """Records of a task in; all that they say out, and where the clock of each partition of `kiln.updates` stands."""
    clock: dict[tuple[str, int], int] = {}
    newest: dict[int, int] = {}
    for batch in batches:
        for topic, partition, offset, stamp, key, value in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            # The log's clock is the greatest stamp so far (decision 1).
            at = clock[topic, partition] = max(stamp, clock.get((topic, partition), 0))
            if topic == "updates":
                newest[partition] = offset
                if not key and not value:
                    continue  # a tick
            place = f"{topic}/{partition}/{offset}"
            held = len(value or b"")  # by the rows of a record, all together
            for number, (kind, identity, row) in enumerate(
                _read(topic, partition, offset, at, key or b"", value or b"")
            ):
                yield PackedRow(kind, (_digest(kind, *identity),), f"{place}/{number}", row, held + _BESIDE)
                held = 0
    for partition, offset in newest.items():
        place = f"{CLOCK}/{partition}/{offset}"
        yield PackedRow(CLOCK, (_digest(CLOCK, partition, offset),), place, (partition, clock["updates", partition]), 0)


def written_rows(rows: Iterable[UniqueRow], lake: Lake, stood: Clock) -> _Batches:
    """What has passed in; WRITTEN out. Rows of tables go into files."""
    refused: list[tuple[str, Sequence[object], Exception]] = []

    def files_of(table: str) -> TableFiles:
        return TableFiles(lake, table, refuse=lambda row, error: refused.append((table, row, error)))

    files = {table: files_of(table) for table in FILLED}
    out = RowBuffer(pa.schema([("kind", pa.string()), ("data", pa.binary())]))
    for kind, row, size in rows:
        if kind in files:
            files[kind].add(at_the_clock(row, stood) if kind == "updates" else row, size)
        elif out.add((kind, pack(row)), size):
            yield from out.drain()
    closed = [file for each in files.values() for file in each.close()]
    if refused:
        last = TableFiles(lake, "quarantine")
        for table, row, error in refused:
            last.add(_refused(table, row, error))
        closed += last.close()
    out.add((WROTE, pack(SinkOutput(closed))))
    yield from out.drain()


def _refused(table: str, row: Sequence[object], error: Exception) -> _Row:
    """The row of `quarantine` of a row that its table cannot hold. Not the values themselves: one of them is why."""
    columns = TABLES[table].columns
    named = {column.name: value for column, value in zip(columns, row, strict=True)}
    texts = ", ".join(f"{name} {value[:80]!r}" for name, value in named.items() if isinstance(value, str))
    detail = f"a row of {table} ({texts}): {describe(error)}"[:MAX_DETAIL]
    data = named.get("data", named.get("block"))
    at = next((value for name, value in named.items() if name.endswith("_at") and isinstance(value, int)), 0)
    is_time = 0 <= at <= MAX_MICROS
    kept = data if isinstance(data, bytes) else b""
    return None, None, None, None, "sink", PROCESSING_FAILED, detail, kept, at if is_time else 0


def _digest(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def _read(topic: str, partition: int, offset: int, now: int, key: bytes, value: bytes) -> list[tuple[str, _Row, _Row]]:
    """(table, what makes the row one, row) for all that a record says; what cannot be read is quarantined itself."""
    try:
        return list(_READERS[topic](partition, offset, now, key, value))
    except (*UNREADABLE, BlockError) as error:
        reason, detail = "record_malformed", str(error)
    except PROCESSING_ERRORS as error:  # reading is pure: the record alone has caused this
        reason, detail = PROCESSING_FAILED, describe(error)
    detail = f"record {partition}/{offset} of {topic}: {detail}"[:MAX_DETAIL]
    return [("quarantine", (detail,), (None, None, None, None, "sink", reason, detail, value, now))]


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
    return batch_rows(decode_batch(value), now)


def batch_rows(batch: BatchRecord, emitted_at: int) -> Iterator[tuple[str, _Row, _Row]]:
    """A batch and its tips: (table, what makes the row one, row). BlockError: its block is none. µs."""
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
            emitted_at,
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
    # with the bytes: another record may be at the same offset of a topic that was created again
    yield "quarantine", (key, fault.stage, fault.reason, fault.detail, _digest(fault.data)), row


def _stream(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    stream = decode_stream(value)
    separator = (stream.separator.key, stream.separator.value) if stream.separator else (None, None)
    known = (stream.network, stream.stream)
    yield "streams", known, (*known, *separator, stream.source)


def _block(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    block = decode_block(value)
    if block.block is None:
        return  # the bridge has put the reason into quarantine
    read = read_foreign_block(block.block)
    for stream, links in read.tips.items():
        for tip in links:
            known = (block.network, stream, tip)
            separator = (block.separator.key, block.separator.value)
            yield RECEIVED_ROWS, known, (*known, block.cid, block.observed_at, *separator)
    for entry in read.bad:
        detail = f"block {block.cid}: {entry.why}"
        row = (None, None, None, None, "sink", "entry_malformed", detail, entry.data, block.observed_at)
        yield "quarantine", (detail,), row


_READERS: dict[str, Callable[[int, int, int, bytes, bytes], Iterator[tuple[str, _Row, _Row]]]] = {
    "updates": _update,
    "batches": _batch,
    "publications": _publication,
    "quarantine": _quarantined,
    "streams": _stream,
    "blocks": _block,
}
