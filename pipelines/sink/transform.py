"""Tasks of the query `sink`: from the records of its Kafka topics to rows of tables, in files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kiln.pipelines.batch.log_time import LogTimes, get_log_times
from kiln.pipelines.decode.processing_errors import PROCESSING_FAILED, describe
from kiln.pipelines.delta.arrow_rows import RowBuffer, build_arrow_schema, build_ddl
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.lake import read_rows as read_stored_rows
from kiln.pipelines.runtime.clocks import get_batch_time
from kiln.pipelines.runtime.dedup_store import DedupStoreConfig, chunk_copies, filter_new_copies
from kiln.pipelines.runtime.deduplication import UniqueStages
from kiln.pipelines.runtime.epoch import get_task_epoch
from kiln.pipelines.runtime.kafka_ranges import RECORDS, ArrowTask
from kiln.pipelines.runtime.row_packing import UniqueRow, pack, unpack_rows
from kiln.pipelines.sink.rows import (
    LOG_TIME,
    RECEIVED_COLUMNS,
    RECEIVED_ROWS,
    ROW_TYPES,
    LogTimeRow,
    QuarantineRow,
    ReceivedTip,
    UpdatesRow,
    compute_digest,
    read_record,
)
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.records import MAX_DETAIL
from kiln.schemas.queries import QUERIES
from kiln.schemas.times import clamp_micros

_Batches = Iterator[pa.RecordBatch]

OTHER_SEPARATOR: Final = "other_separator"

OUTPUT_TABLES: Final = QUERIES["sink"].tables

IDENTITY: Final = ("identity",)
"""Column of the digest that identifies a row"""

OUTPUT_DDL: Final = "kind string, data binary"
"""Columns of the rows that the tasks return to the driver: a packed `ReceivedTip` or `LogTimeRow`, or the files of a
task"""
SINK_FILES: Final = "sink_files"
"""Value of the column `kind` in the row with the `DataFile`s of a task, which belong to several tables"""

_ROW_BYTES: Final = 500  # approximate bytes of a row, in addition to the record's value


def build_stages(lake: Lake) -> UniqueStages:
    """Build the two stages: from Kafka records to rows with the columns OUTPUT_DDL. Between the stages, deduplication
    drops records that a writer sent twice, as after a crash.

    The output has the rows that belong to no table. For each task it has a row with the files of the other rows.
    """

    def write(batches: _Batches) -> _Batches:
        return write_rows(unpack_rows(batches, ROW_TYPES), lake, get_log_times())

    def in_one_task(dedup: DedupStoreConfig) -> ArrowTask:
        def sink(batches: _Batches) -> _Batches:
            chunks = chunk_copies(read_records(batches))
            new = filter_new_copies(chunks, dedup, get_batch_time(), get_task_epoch())
            return write_rows(chain.from_iterable(new), lake, get_log_times())

        return sink

    return UniqueStages(read_records, IDENTITY, write, OUTPUT_DDL, in_one_task)


def read_records(batches: _Batches) -> Iterator[UniqueRow[object]]:
    """Build the rows of the Kafka records of a task. At the end, also yield the log time of each partition of
    `kiln.updates`."""
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
            size = len(value or b"")  # counted once for all rows of the record
            for number, (kind, identity, row) in enumerate(
                read_record(topic, partition, offset, at, key or b"", value or b"")
            ):
                position = f"{topic}/{partition}/{offset}/{number}"
                yield UniqueRow(kind, (compute_digest(kind, *identity),), position, row, size + _ROW_BYTES)
                size = 0
    for partition, offset in newest.items():
        position, digest = f"{LOG_TIME}/{partition}/{offset}", compute_digest(LOG_TIME, partition, offset)
        yield UniqueRow(LOG_TIME, (digest,), position, LogTimeRow(partition, log_time["updates", partition]), 0)


def write_rows(rows: Iterable[UniqueRow[object]], lake: Lake, log_times: LogTimes) -> _Batches:
    """Write deduplicated rows into the files of their tables, and yield rows with the columns OUTPUT_DDL."""
    rejected: list[QuarantineRow] = []

    def open_files(table: str) -> TableFiles:
        return TableFiles(lake, table, refuse=lambda row, error: rejected.append(_reject_row(table, row, error)))

    files = {table: open_files(table) for table in OUTPUT_TABLES}
    out = RowBuffer(pa.schema([("kind", pa.string()), ("data", pa.binary())]))
    for kind, _, _, row, size in rows:
        if isinstance(row, UpdatesRow):
            row = apply_log_time(row, log_times)
        if kind in files and isinstance(row, tuple):
            files[kind].add(row, size)
        elif out.add((kind, pack(row)), size):
            yield from out.drain()
    closed = [file for table_files in files.values() for file in table_files.close()]
    if rejected:
        last = TableFiles(lake, "quarantine")
        for fault in rejected:
            last.add(fault)
        closed += last.close()
    out.add((SINK_FILES, msgspec.msgpack.encode(closed)))
    yield from out.drain()


def apply_log_time(row: UpdatesRow, log_times: LogTimes) -> UpdatesRow:
    """Set the column `log_time` of an update. A task sees only its own records, so the time is raised to the
    log time at the start of the micro-batch (`log_times`) if that is later."""
    return row._replace(log_time=max(row.log_time, log_times.get(row.log_partition, 0)))


def _reject_row(table: str, row: Sequence[object], error: Exception) -> QuarantineRow:
    """Build the row of `quarantine` for a row that its table cannot store. `detail` has only the texts of the row,
    because one of its other values cannot be stored."""
    values = {column.name: value for column, value in zip(TABLES[table].columns, row, strict=True)}
    texts = ", ".join(f"{name} {value[:80]!r}" for name, value in values.items() if isinstance(value, str))
    detail = f"a row of {table} ({texts}): {describe(error)}"[:MAX_DETAIL]
    data = values.get("data", values.get("block"))
    at = next((value for name, value in values.items() if name.endswith("_at") and isinstance(value, int)), 0)
    content = data if isinstance(data, bytes) else b""
    return QuarantineRow(None, None, None, None, "sink", PROCESSING_FAILED, detail, content, clamp_micros(at))


def read_received_tips(rows: DataFrame) -> DataFrame:
    """Read the received tips from the rows that the tasks returned. The result has the columns RECEIVED_COLUMNS."""
    schema = build_arrow_schema(RECEIVED_COLUMNS)

    def unpack(batches: _Batches) -> _Batches:
        for batch in batches:
            buffer = RowBuffer(schema)
            for item in unpack_rows([batch], {RECEIVED_ROWS: ReceivedTip}):
                assert isinstance(item.row, ReceivedTip)
                buffer.add(item.row)
            yield from buffer.drain()

    received = rows.where(F.col("kind") == RECEIVED_ROWS).select("kind", "data")
    return received.mapInArrow(unpack, build_ddl(RECEIVED_COLUMNS))


def exclude_own_batches(rows: DataFrame, publications: DataFrame) -> DataFrame:
    """Drop the tips of Kiln's own batches, which peers sent back. The result has the columns
    RECEIVED_COLUMNS."""
    ours = publications.where(F.col("error").isNull()).select("batch_cid").distinct()
    return rows.join(ours, "batch_cid", "left_anti").select(*(column.name for column in RECEIVED_COLUMNS))


def join_verified_separators(rows: DataFrame, streams: DataFrame) -> DataFrame:
    """Add the column `known`: "key/value" of the verified separator of the stream if the batch was announced under
    another one, else null.

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
    """Select the rows of the table `tips` from the result of `join_verified_separators`."""
    return rows.where(F.col("known").isNull()).select(
        "network", "stream", "tip", F.lit("batch").alias("source"), "batch_cid", "observed_at"
    )


def quarantine_contradicted_tips(rows: DataFrame) -> DataFrame:
    """Build the rows of `quarantine` from the result of `join_verified_separators`: the tips of streams whose
    separator is not that of the batch."""
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


def read_log_times(lake: Lake) -> dict[int, int]:
    """Read log time from the table `updates`, by partition of `kiln.updates`, µs."""
    times: dict[int, int] = {}
    for batch in read_stored_rows(lake.open("updates"), ["log_partition", "log_time"]):
        stamps = batch.column("log_time").cast(pa.int64()).to_pylist()
        for partition, stamp in zip(batch.column("log_partition").to_pylist(), stamps, strict=True):
            times[partition] = max(stamp, times.get(partition, 0))
    return times
