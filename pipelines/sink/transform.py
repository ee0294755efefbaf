"""`kiln.updates`, `.batches`, `.publications`, `.streams`, `.blocks` and `.quarantine` to rows of the tables that they
fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.batch.log_time import LogTimes
from kiln.pipelines.decode.processing_errors import PROCESSING_ERRORS, PROCESSING_FAILED, describe
from kiln.pipelines.delta.arrow_rows import RowBuffer, build_arrow_schema, build_ddl
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig, filter_new_copies
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.micro_batch_clock import get_batch_time, with_dedup_watermark
from kiln.pipelines.runtime.row_packing import (
    PackedRow,
    UniqueRow,
    build_packed_ddl,
    pack,
    pack_rows,
    unpack,
    unpack_rows,
    unwrap_rows,
)
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
OUTPUT_TABLES = QUERIES["sink"].tables

RECEIVED_COLUMNS = (
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

OUTPUT_DDL = "kind string, data binary"
RECEIVED_ROWS = "received"
LOG_TIME = "clock"
SINK_OUTPUT = "sink_output"
"""Kinds of rows beside those of tables: RECEIVED; a partition of `kiln.updates` and where its clock stands;
`SinkOutput`."""

_TASKS = 2
_ROW_OVERHEAD = 500  # bytes of a row, about, beside its record's value

_UPDATED_AT, _LOG_PARTITION = (
    next(place for place, column in enumerate(TABLES["updates"].columns) if column.name == name)
    for name in ("updated_at", "log_partition")
)


class SinkOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a task made of its rows: files of several tables."""

    files: list[DataFile]


def sink_records(records: DataFrame, lake: Lake, stood: LogTimes, remembered: DedupStoreConfig) -> DataFrame:
    """Columns topic, partition, offset, stamp, key, value in; WRITTEN out: what is of no table, as it came, and one
    `SinkOutput` a task, which names the files of the tables' rows. Each row passes once: a topic holds a record twice
    when its writer was killed and began again. `stood`: the log's clock when the micro-batch began."""

    def rows(batches: _Batches) -> _Batches:
        new = filter_new_copies(decode_records(batches), remembered, get_batch_time(), get_task_epoch())
        return write_rows(unwrap_rows(new), lake, stood)

    return _select_columns(records).mapInArrow(rows, OUTPUT_DDL)


def decode_table_rows(records: DataFrame) -> DataFrame:
    """The first stage of `sink_records`. Columns topic, partition, offset, stamp, key, value in; packed rows out: for
    each row its table (or another kind), and a digest of what makes it one row."""

    def rows(batches: _Batches) -> _Batches:
        return pack_rows(decode_records(batches), IDENTITY, get_batch_time())

    return _select_columns(records).mapInArrow(rows, build_packed_ddl(IDENTITY))


def deduplicate_rows(rows: DataFrame, remembered: int) -> DataFrame:
    """Packed rows in; kind, data out, each row once.

    As in `archive`, event time is the micro-batch's, so that no row is ever late. `remembered`: µs.
    """
    return with_dedup_watermark(rows, remembered).dropDuplicatesWithinWatermark(["identity"]).select("kind", "data")


def write_tables(rows: DataFrame, lake: Lake, stood: LogTimes) -> DataFrame:
    """The second stage of `sink_records`: kind, data in; WRITTEN out."""

    def made(batches: _Batches) -> _Batches:
        return write_rows(unpack_rows(batches), lake, stood)

    return rows.select("kind", "data").mapInArrow(made, OUTPUT_DDL)


def _select_columns(records: DataFrame) -> DataFrame:
    # A task for each partition of six topics would cost more than what there is to do.
    return records.select("topic", "partition", "offset", "stamp", "key", "value").coalesce(_TASKS)


def apply_log_time(row: Sequence[object], stood: LogTimes) -> Sequence[object]:
    """A row of the table `updates` in and out: `updated_at` is the log's clock, which stood at `stood` when the
    micro-batch began. A task knows only the stamps of its own records."""
    partition, at = row[_LOG_PARTITION], row[_UPDATED_AT]
    assert isinstance(partition, int)
    assert isinstance(at, int)
    stands = stood.get(partition, 0)
    return row if at >= stands else (*row[:_UPDATED_AT], stands, *row[_UPDATED_AT + 1 :])


def read_received_tips(rows: DataFrame) -> DataFrame:
    """kind, data in; RECEIVED out: the rows of that kind."""
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
    """RECEIVED in and out: without what we published ourselves, which comes back to us like anybody's."""
    ours = publications.where(F.col("error").isNull()).select("cid").distinct()
    return rows.join(ours, "cid", "left_anti").select(*(column.name for column in RECEIVED_COLUMNS))


def join_verified_separators(rows: DataFrame, streams: DataFrame) -> DataFrame:
    """RECEIVED in and out, with `known`, "key/value" of the verified separator where it is another than the batch was
    announced under, else null. A genesis that names none contradicts nothing (decision 4)."""
    known = streams.where(F.col("separator_key").isNotNull()).select(
        "network",
        "stream",
        F.col("separator_key").alias("known_key"),
        F.col("separator_value").alias("known_value"),
    )
    other = (F.col("known_key") != F.col("separator_key")) | (F.col("known_value") != F.col("separator_value"))
    return rows.join(known, ["network", "stream"], "left").select(
        *(column.name for column in RECEIVED_COLUMNS),
        F.when(other, F.concat_ws("/", "known_key", "known_value")).alias("known"),
    )


def select_received_tips(rows: DataFrame) -> DataFrame:
    """What `join_verified_separators` gave in; rows of the table `tips` out."""
    return rows.where(F.col("known").isNull()).select(
        "network", "stream", "tip", F.lit("batch").alias("source"), "cid", "observed_at"
    )


def quarantine_contradicted_tips(rows: DataFrame) -> DataFrame:
    """What `join_verified_separators` gave in; rows of the table `quarantine` out: tips of streams that belong to another separator."""
    none = F.lit(None)
    return rows.where(F.col("known").isNotNull()).select(
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


def decode_records(batches: _Batches) -> Iterator[PackedRow]:
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
                _read_record(topic, partition, offset, at, key or b"", value or b"")
            ):
                yield PackedRow(kind, (_digest(kind, *identity),), f"{place}/{number}", row, held + _ROW_OVERHEAD)
                held = 0
    for partition, offset in newest.items():
        place = f"{LOG_TIME}/{partition}/{offset}"
        yield PackedRow(
            LOG_TIME, (_digest(LOG_TIME, partition, offset),), place, (partition, clock["updates", partition]), 0
        )


def write_rows(rows: Iterable[UniqueRow], lake: Lake, stood: LogTimes) -> _Batches:
    """What has passed in; WRITTEN out. Rows of tables go into files."""
    refused: list[tuple[str, Sequence[object], Exception]] = []

    def files_of(table: str) -> TableFiles:
        return TableFiles(lake, table, refuse=lambda row, error: refused.append((table, row, error)))

    files = {table: files_of(table) for table in OUTPUT_TABLES}
    out = RowBuffer(pa.schema([("kind", pa.string()), ("data", pa.binary())]))
    for kind, row, size in rows:
        if kind in files:
            files[kind].add(apply_log_time(row, stood) if kind == "updates" else row, size)
        elif out.add((kind, pack(row)), size):
            yield from out.drain()
    closed = [file for each in files.values() for file in each.close()]
    if refused:
        last = TableFiles(lake, "quarantine")
        for table, row, error in refused:
            last.add(_reject_row(table, row, error))
        closed += last.close()
    out.add((SINK_OUTPUT, pack(SinkOutput(closed))))
    yield from out.drain()


def _reject_row(table: str, row: Sequence[object], error: Exception) -> _Row:
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


def _read_record(
    topic: str, partition: int, offset: int, now: int, key: bytes, value: bytes
) -> list[tuple[str, _Row, _Row]]:
    """(table, what makes the row one, row) for all that a record says; what cannot be read is quarantined itself."""
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


def _read_batch(partition: int, offset: int, now: int, key: bytes, value: bytes) -> Iterator[tuple[str, _Row, _Row]]:
    return build_batch_rows(decode_batch(value), now)


def build_batch_rows(batch: BatchRecord, emitted_at: int) -> Iterator[tuple[str, _Row, _Row]]:
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


def _read_publication(
    partition: int, offset: int, now: int, key: bytes, value: bytes
) -> Iterator[tuple[str, _Row, _Row]]:
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


def _read_quarantined(
    partition: int, offset: int, now: int, key: bytes, value: bytes
) -> Iterator[tuple[str, _Row, _Row]]:
    fault = decode_quarantine(value)
    row = (*parse_quarantine_key(key), fault.stage, fault.reason, fault.detail, fault.data, fault.observed_at)
    # with the bytes: another record may be at the same offset of a topic that was created again
    yield "quarantine", (key, fault.stage, fault.reason, fault.detail, _digest(fault.data)), row


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
            yield RECEIVED_ROWS, known, (*known, block.cid, block.observed_at, *separator)
    for entry in read.bad:
        detail = f"block {block.cid}: {entry.why}"
        row = (None, None, None, None, "sink", "entry_malformed", detail, entry.data, block.observed_at)
        yield "quarantine", (detail,), row


_READERS: dict[str, Callable[[int, int, int, bytes, bytes], Iterator[tuple[str, _Row, _Row]]]] = {
    "updates": _read_update,
    "batches": _read_batch,
    "publications": _read_publication,
    "quarantine": _read_quarantined,
    "streams": _read_stream,
    "blocks": _read_block,
}
