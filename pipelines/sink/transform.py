"""Transforms of the query `sink`: convert the records of its topics, such as `kiln.updates`, to rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.batch.log_time import LogTimes, get_log_times
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS, PROCESSING_FAILED, describe
from kiln.pipelines.delta.arrow_rows import RowBuffer, build_arrow_schema, build_ddl
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.rows import read_rows as read_stored_rows
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig, chunk_copies, filter_new_copies
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.kafka_ranges import RECORDS, ArrowTask
from kiln.pipelines.runtime.micro_batch_clock import get_batch_time, with_dedup_watermark
from kiln.pipelines.runtime.row_packing import (
    PackedRow,
    build_packed_ddl,
    pack,
    pack_rows,
    unpack,
    unpack_rows,
)
from kiln.schemas.delta.tables import TABLES, Column
from kiln.schemas.kafka.records import (
    MAX_DETAIL,
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
from kiln.schemas.times import clamp_micros
from kiln.schemas.wire.batch_block import BlockError, read_block, read_foreign_block

_Batches = Iterator[pa.RecordBatch]
_Row = tuple[object, ...]

OTHER_SEPARATOR = "other_separator"

OUTPUT_TABLES = QUERIES["sink"].tables

RECEIVED_COLUMNS = (
    Column("network", "string", "Ceramic network"),
    Column("stream", "string", "StreamID, base36"),
    Column("tip", "string", "CID of the tip"),
    Column("batch_cid", "string", "CID of the batch it is in"),
    Column("observed_at", "timestamp", "time when the block was fetched"),
    Column("separator_key", "string", "of the separator that the batch was announced under"),
    Column("separator_value", "string", "its value"),
)
"""Tips in the batches of other nodes. They are not yet rows of a table, because their separator must first be compared
with the verified one."""

IDENTITY = ("identity",)
"""Column of the digest of a row's identity."""

DECODED_DDL = build_packed_ddl(IDENTITY)
OUTPUT_DDL = "kind string, data binary"
RECEIVED_ROWS = "received"
LOG_TIME = "log_time"
SINK_OUTPUT = "sink_output"
"""Kinds of rows in addition to those of tables: received tips; a partition of `kiln.updates` and its log time;
`SinkOutput`."""

_ROW_OVERHEAD = 500  # bytes, about, of a row in addition to its record's value

_LOG_TIME, _LOG_PARTITION = (
    next(index for index, column in enumerate(TABLES["updates"].columns) if column.name == name)
    for name in ("log_time", "log_partition")
)


class SinkOutput(msgspec.Struct, frozen=True, array_like=True):
    """Result of one task: files of several tables."""

    files: list[DataFile]


def build_sink_task(lake: Lake, dedup: DedupStoreConfig) -> ArrowTask:
    """Build the task that writes the rows of the tables once each. RECORDS in; OUTPUT_DDL out: rows of no table,
    unchanged, and one `SinkOutput` per task, which names the files of the tables' rows.

    A topic has a record twice if its writer was killed and restarted.
    """

    def sink(batches: _Batches) -> _Batches:
        chunks = chunk_copies(decode_records(batches))
        new = filter_new_copies(chunks, dedup, get_batch_time(), get_task_epoch())
        return write_rows(chain.from_iterable(new), lake, get_log_times())

    return sink


def build_decode_task() -> ArrowTask:
    """Build the task that runs the first stage of `build_sink_task`. RECORDS in; DECODED_DDL out: for each row its
    table (or another kind), and a digest of its identity."""

    def decode(batches: _Batches) -> _Batches:
        return pack_rows(decode_records(batches), IDENTITY, get_batch_time())

    return decode


def deduplicate_rows(rows: DataFrame, retention: int) -> DataFrame:
    """Keep each row once. Packed rows in; kind, data out. `retention`: µs.

    As in `archive`, the watermark follows the time of the micro-batch, so that no row is ever late.
    """
    return with_dedup_watermark(rows, retention).dropDuplicatesWithinWatermark(["identity"]).select("kind", "data")


def write_tables(rows: DataFrame, lake: Lake) -> DataFrame:
    """Run the second stage of `build_sink_task`. Columns kind, data in; OUTPUT_DDL out."""

    def write(batches: _Batches) -> _Batches:
        return write_rows(unpack_rows(batches), lake, get_log_times())

    return rows.select("kind", "data").mapInArrow(write, OUTPUT_DDL)


def apply_log_time(row: Sequence[object], log_times: LogTimes) -> Sequence[object]:
    """Set `log_time` of a row of the table `updates`. A task has only the stamps of its own records, so `log_times` is
    the log time at the start of the micro-batch."""
    partition, at = row[_LOG_PARTITION], row[_LOG_TIME]
    assert isinstance(partition, int)
    assert isinstance(at, int)
    log_time = log_times.get(partition, 0)
    return row if at >= log_time else (*row[:_LOG_TIME], log_time, *row[_LOG_TIME + 1 :])


def read_received_tips(rows: DataFrame) -> DataFrame:
    """Read the received tips. Columns kind, data in; RECEIVED out."""
    schema = build_arrow_schema(RECEIVED_COLUMNS)

    def unpack_rows(batches: _Batches) -> _Batches:
        for batch in batches:
            buffer = RowBuffer(schema)
            for data in batch.column("data").to_pylist():
                buffer.add(unpack(data))
            yield from buffer.drain()

    return (
        rows.where(F.col("kind") == RECEIVED_ROWS).select("data").mapInArrow(unpack_rows, build_ddl(RECEIVED_COLUMNS))
    )


def exclude_own_batches(rows: DataFrame, publications: DataFrame) -> DataFrame:
    """Exclude the tips of batches that Kiln published itself, which peers send back. RECEIVED in and out."""
    ours = publications.where(F.col("error").isNull()).select("batch_cid").distinct()
    return rows.join(ours, "batch_cid", "left_anti").select(*(column.name for column in RECEIVED_COLUMNS))


def join_verified_separators(rows: DataFrame, streams: DataFrame) -> DataFrame:
    """Add `known`: "key/value" of the verified separator if the batch was announced under another one, else null.

    A genesis that names no separator contradicts nothing (decision 4).
    """
    known = (
        streams.where(F.col("separator_key").isNotNull())
        .select(
            "network",
            "stream",
            F.col("separator_key").alias("known_key"),
            F.col("separator_value").alias("known_value"),
        )
        .distinct()
    )
    other = (F.col("known_key") != F.col("separator_key")) | (F.col("known_value") != F.col("separator_value"))
    return rows.join(known, ["network", "stream"], "left").select(
        *(column.name for column in RECEIVED_COLUMNS),
        F.when(other, F.concat_ws("/", "known_key", "known_value")).alias("known"),
    )


def select_received_tips(rows: DataFrame) -> DataFrame:
    """Select rows of the table `tips` from what `join_verified_separators` returned."""
    return rows.where(F.col("known").isNull()).select(
        "network", "stream", "tip", F.lit("batch").alias("source"), "batch_cid", "observed_at"
    )


def quarantine_contradicted_tips(rows: DataFrame) -> DataFrame:
    """Build rows of the table `quarantine` for tips of streams that belong to another separator, from what
    `join_verified_separators` returned."""
    none = F.lit(None)
    return rows.where(F.col("known").isNotNull()).select(
        none.cast("int").alias("kafka_partition"),
        none.cast("bigint").alias("kafka_offset"),
        none.cast("int").alias("message_index"),
        F.col("batch_cid").alias("cid"),
        F.lit("receive").alias("stage"),
        F.lit(OTHER_SEPARATOR).alias("reason"),
        F.concat(
            "stream",
            F.lit(" in a batch of "),
            F.concat_ws("/", "separator_key", "separator_value"),
            F.lit("; its genesis names "),
            "known",
        ).alias("detail"),
        F.encode("tip", "UTF-8").alias("data"),
        "observed_at",
    )


def decode_records(batches: _Batches) -> Iterator[PackedRow]:
    """Decode the records of a task into rows, and log time of each partition of `kiln.updates`."""
    log_time: dict[tuple[str, int], int] = {}
    newest: dict[int, int] = {}
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in RECORDS.names)
        for topic, partition, offset, stamp, key, value in zip(*columns, strict=True):
            # Log time is the greatest stamp so far (decision 1).
            at = log_time[topic, partition] = max(stamp, log_time.get((topic, partition), 0))
            if topic == "updates":
                newest[partition] = offset
                if not key and not value:
                    continue  # a tick
            position = f"{topic}/{partition}/{offset}"
            size = len(value or b"")  # by the rows of a record, all together
            for number, (kind, identity, row) in enumerate(
                _read_record(topic, partition, offset, at, key or b"", value or b"")
            ):
                yield PackedRow(kind, (_digest(kind, *identity),), f"{position}/{number}", row, size + _ROW_OVERHEAD)
                size = 0
    for partition, offset in newest.items():
        position = f"{LOG_TIME}/{partition}/{offset}"
        yield PackedRow(
            LOG_TIME, (_digest(LOG_TIME, partition, offset),), position, (partition, log_time["updates", partition]), 0
        )


def write_rows(rows: Iterable[PackedRow], lake: Lake, log_times: LogTimes) -> _Batches:
    """Write rows of tables into files. Deduplicated rows in; OUTPUT_DDL out."""
    rejected: list[tuple[str, Sequence[object], Exception]] = []

    def open_files(table: str) -> TableFiles:
        return TableFiles(lake, table, refuse=lambda row, error: rejected.append((table, row, error)))

    files = {table: open_files(table) for table in OUTPUT_TABLES}
    out = RowBuffer(pa.schema([("kind", pa.string()), ("data", pa.binary())]))
    for kind, _, _, row, size in rows:
        if kind in files:
            files[kind].add(apply_log_time(row, log_times) if kind == "updates" else row, size)
        elif out.add((kind, pack(row)), size):
            yield from out.drain()
    closed = [file for table_files in files.values() for file in table_files.close()]
    if rejected:
        last = TableFiles(lake, "quarantine")
        for table, row, error in rejected:
            last.add(_reject_row(table, row, error))
        closed += last.close()
    out.add((SINK_OUTPUT, msgspec.msgpack.encode(SinkOutput(closed))))
    yield from out.drain()


def _reject_row(table: str, row: Sequence[object], error: Exception) -> _Row:
    """Build the row of `quarantine` for a row that its table cannot store. It has only the row's texts, because one of
    the other values is at fault."""
    columns = TABLES[table].columns
    named = {column.name: value for column, value in zip(columns, row, strict=True)}
    texts = ", ".join(f"{name} {value[:80]!r}" for name, value in named.items() if isinstance(value, str))
    detail = f"a row of {table} ({texts}): {describe(error)}"[:MAX_DETAIL]
    data = named.get("data", named.get("block"))
    at = next((value for name, value in named.items() if name.endswith("_at") and isinstance(value, int)), 0)
    content = data if isinstance(data, bytes) else b""
    return None, None, None, None, "sink", PROCESSING_FAILED, detail, content, clamp_micros(at)


def _digest(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def _read_record(
    topic: str, partition: int, offset: int, now: int, key: bytes, value: bytes
) -> list[tuple[str, _Row, _Row]]:
    """Read a record into (table, identity of the row, row). A record that cannot be read becomes a row of
    `quarantine`."""
    try:
        return list(_READERS[topic](partition, offset, now, key, value))
    except (*UNREADABLE, BlockError) as error:
        reason, detail = "record_malformed", str(error)
    except PROCESSING_ERRORS as error:  # reading is pure: the record alone has caused this
        reason, detail = PROCESSING_FAILED, describe(error)
    detail = f"record {partition}/{offset} of {topic}: {detail}"[:MAX_DETAIL]
    return [("quarantine", (detail,), (None, None, None, None, "sink", reason, detail, value, now))]


def _read_update(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    update = decode_update(value)
    separator = (update.separator.key, update.separator.value) if update.separator else (None, None)
    yield (
        "updates",
        (update.network, update.origin, update.message_id),
        (
            update.network,
            update.origin,
            update.message_id,
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


def _read_batch(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    return build_batch_rows(decode_batch(value), now)


def build_batch_rows(batch: BatchRecord, emitted_at: int) -> Iterator[tuple[str, _Row, _Row]]:
    """Build the rows of a batch and its tips: (table, identity of the row, row). `emitted_at`: µs.

    Raises:
        BlockError: Its block is malformed.
    """
    tips = read_block(batch.block)
    owner = (batch.network, batch.origin, batch.separator.key, batch.separator.value)
    yield (
        "batches",
        (*owner, batch.opened_at, batch.batch_cid),
        (
            batch.batch_cid,
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
            row = (batch.batch_cid, stream, tip)
            yield "batch_tips", row, row


def _read_publication(
    partition: int, offset: int, now: int, key: bytes, value: bytes
) -> Iterator[tuple[str, _Row, _Row]]:
    receipt = decode_publication(value)
    yield (
        "publications",
        (receipt.batch_cid, receipt.transport, receipt.topic, receipt.target, receipt.published_at),
        (
            receipt.batch_cid,
            receipt.transport,
            receipt.topic,
            receipt.target,
            receipt.peer_count,
            receipt.published_at,
            receipt.error,
        ),
    )


def _read_quarantined(
    partition: int, offset: int, now: int, key: bytes, value: bytes
) -> Iterator[tuple[str, _Row, _Row]]:
    fault = decode_quarantine(value)
    known = (*parse_quarantine_key(key), fault.stage, fault.reason, fault.detail)
    # with the bytes, because another record may be at the same offset of a topic that was created again
    yield "quarantine", (*known, _digest(fault.data)), (*known, fault.data, fault.observed_at)


def _read_stream(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    stream = decode_stream(value)
    separator = (stream.separator.key, stream.separator.value) if stream.separator else (None, None)
    known = (stream.network, stream.stream)
    yield "streams", known, (*known, *separator, stream.source)


def _read_block(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    block = decode_block(value)
    if block.block is None:
        return  # the bridge has put the reason into quarantine
    read = read_foreign_block(block.block)
    for stream, links in read.tips.items():
        for tip in links:
            known = (block.network, stream, tip)
            separator = (block.separator.key, block.separator.value)
            yield RECEIVED_ROWS, known, (*known, block.batch_cid, block.observed_at, *separator)
    for entry in read.invalid:
        detail = f"block {block.batch_cid}: {entry.why}"
        row = (None, None, None, None, "sink", "entry_malformed", detail, entry.data, block.observed_at)
        yield "quarantine", (detail,), row


_IDENTITY_COLUMNS: dict[str, tuple[str, ...]] = {
    "updates": ("network", "origin", "message_id"),
    "batches": ("network", "origin", "separator_key", "separator_value", "opened_at", "batch_cid"),
    "batch_tips": ("batch_cid", "stream", "tip"),
    "publications": ("batch_cid", "transport", "topic", "target", "published_at"),
    "streams": ("network", "stream"),
    "tips": ("network", "stream", "tip", "source"),
    "quarantine": (
        *("kafka_partition", "kafka_offset", "message_index", "cid", "stage", "reason", "detail"),
        "data",
    ),
}


def read_stored_identities(lake: Lake) -> Iterator[tuple[bytes, ...]]:
    """Read the digests by which the query recognises the records of the rows in its tables."""
    for table, names in _IDENTITY_COLUMNS.items():
        for batch in read_stored_rows(lake.open(table), list(names)) if lake.has(table) else ():
            columns = (
                column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in batch.columns
            )
            for values in zip(*(column.to_pylist() for column in columns), strict=True):
                match table:
                    case "tips" if values[-1] == "batch":
                        yield (_digest(RECEIVED_ROWS, *values[:-1]),)
                    case "quarantine":
                        yield (_digest(table, *values[:-1], _digest(values[-1])),)
                        yield (_digest(table, values[-2]),)  # as a record that the query itself cannot read
                    case _:
                        yield (_digest(table, *values),)


def read_log_times(lake: Lake) -> dict[int, int]:
    """Read the log time of each partition of `kiln.updates`, µs, as the table `updates` has it."""
    times: dict[int, int] = {}
    for batch in read_stored_rows(lake.open("updates"), ["log_partition", "log_time"]):
        stamps = batch.column("log_time").cast(pa.int64()).to_pylist()
        for partition, stamp in zip(batch.column("log_partition").to_pylist(), stamps, strict=True):
            times[partition] = max(stamp, times.get(partition, 0))
    return times


_READERS: dict[str, Callable[[int, int, int, bytes, bytes], Iterator[tuple[str, _Row, _Row]]]] = {
    "updates": _read_update,
    "batches": _read_batch,
    "publications": _read_publication,
    "quarantine": _read_quarantined,
    "streams": _read_stream,
    "blocks": _read_block,
}
