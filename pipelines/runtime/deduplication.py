"""Deduplication of a query: by an SQLite file in the checkpoint's folder, or by Spark's state store (decision 10).

A query has two stages: decoding before deduplication, and writing after it. Each class here assigns these stages to the
tasks of Spark's source, and to the function of foreachBatch. Both classes accept the same rows.

    FileDeduplication    source: decode, look up in the file, write        foreachBatch: nothing
    StateDeduplication   source: decode, pack    Spark: deduplicate        foreachBatch: unpack, write

The query `updates` differs (`kiln.pipelines.updates.transform`). An update is new or a repeat depending on the order of
announcements, so one task in foreachBatch looks up all digests in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import Location
from kiln.pipelines.runtime.clocks import get_batch_time, with_dedup_watermark
from kiln.pipelines.runtime.dedup_store import FILE_NAME, DedupStoreConfig
from kiln.pipelines.runtime.kafka_ranges import ArrowTask
from kiln.pipelines.runtime.row_packing import UniqueRow, build_packed_ddl, pack_rows

_Batches = Iterator[pa.RecordBatch]
_Row = TypeVar("_Row")

_SMALL: Final = 20_000
"""number of records below which one task writes a micro-batch: each task has a startup cost, and files of its own"""


@dataclass(frozen=True)
class DedupSteps:
    """Deduplication in a query: its steps in the tasks of the source, in Spark's operators, and in foreachBatch."""

    source_task: ArrowTask
    """converts Kafka records (`kafka_ranges.RECORDS`) to rows of `source_schema`"""
    source_schema: str
    deduplicate: Callable[[DataFrame], DataFrame]
    """applies Spark's operators to the rows of the source"""
    run_in_micro_batch: Callable[[DataFrame, int | None], DataFrame]
    """in foreachBatch, converts deduplicated rows to the query's output. The second argument is the number of records
    in the micro-batch, or `None` if it is not known; few records are processed in one task"""


@dataclass(frozen=True)
class UniqueStages:
    """Stages of a query that accepts each row once, by digests of the row."""

    decode: Callable[[_Batches], Iterator[UniqueRow[object]]]
    """decodes Kafka records (`kafka_ranges.RECORDS`) into rows"""
    identities: tuple[str, ...]
    """names of the digests of a row; if one of them was seen before, the row is a duplicate"""
    write: ArrowTask
    """converts the columns kind and data of accepted rows to rows of `output_schema`"""
    output_schema: str
    in_one_task: Callable[[DedupStoreConfig], ArrowTask]
    """builds a task that decodes, looks up digests in the deduplication file, and writes"""


@dataclass(frozen=True)
class FileDeduplication:
    """Deduplication by an SQLite file, which all tasks of one machine share."""

    store: DedupStoreConfig

    def accept_once(self, stages: UniqueStages) -> DedupSteps:
        """Build the steps of a query that accepts each row once."""
        return DedupSteps(
            stages.in_one_task(self.store), stages.output_schema, lambda rows: rows, lambda rows, records: rows
        )


@dataclass(frozen=True)
class StateDeduplication:
    """Deduplication by Spark's state store, which every machine of a cluster can load.

    `dropDuplicatesWithinWatermark` silently drops rows that are older than the watermark. To lose no row, the watermark
    follows the time of the micro-batch (`MicroBatchClock`) instead of the records' timestamps: after an outage, Spark
    reads some partitions ahead of others.
    """

    retention: int
    """retention of a digest, µs"""

    def accept_once(self, stages: UniqueStages) -> DedupSteps:
        """Build the steps of a query that accepts each row once."""
        identities = stages.identities

        def pack(rows: Iterator[UniqueRow[object]], seen_at: int) -> _Batches:
            return pack_rows(rows, identities, seen_at)

        def deduplicate(rows: DataFrame) -> DataFrame:
            rows = with_dedup_watermark(rows, self.retention)
            for identity in identities:
                rows = rows.dropDuplicatesWithinWatermark([identity])
            return rows.select("kind", "data")

        def run_in_micro_batch(rows: DataFrame, records: int | None) -> DataFrame:
            few = rows.coalesce(1) if is_small(records, _SMALL) else rows
            return few.mapInArrow(stages.write, stages.output_schema)

        decode = build_decode_task(stages.decode, pack)
        return DedupSteps(decode, build_packed_ddl(identities), deduplicate, run_in_micro_batch)


Deduplication: TypeAlias = FileDeduplication | StateDeduplication


def build_decode_task(
    decode: Callable[[_Batches], Iterator[_Row]], pack: Callable[[Iterator[_Row], int], _Batches]
) -> ArrowTask:
    """Build the task of the source that decodes Kafka records, and packs the rows for Spark's operators."""

    def run(batches: _Batches) -> _Batches:
        return pack(decode(batches), get_batch_time())

    return run


def is_small(records: int | None, small: int) -> bool:
    """Return true if a micro-batch has fewer than `small` records. `records`: `None` if the number is not known."""
    return records is not None and records < small


def find_deduplication(checkpoint: Location, master: str, retention: int, *, durable: bool) -> Deduplication:
    """Choose the deduplication of a query.

    It is an SQLite file in the checkpoint's folder if Spark runs in local mode and the checkpoint is on a disk.
    Otherwise it is Spark's state store, because executors on other machines cannot open the file.

    Args:
        checkpoint: Folder of the query's checkpoint.
        master: URL of Spark's master.
        retention: Retention of a digest, µs. The file keeps a digest twice as long, as Spark's operators do: after a
            downtime, records may be read that much later.
        durable: True if the file must survive a power cut.

    Raises:
        KilnError: The checkpoint has deduplication state of the other kind.
    """
    if checkpoint.folder is None:
        return StateDeduplication(retention)
    path, state = checkpoint.folder / FILE_NAME, checkpoint.folder / "state"
    if master.startswith("local"):
        if state.exists():
            raise KilnError(
                f"cannot run this query with spark.master {master}: its deduplication state is in Spark's state store "
                f"({state}), which only a query on a cluster uses. Run the query on the cluster, or restart it from "
                "scratch (docs/RUNBOOK.md, State)"
            )
        return FileDeduplication(DedupStoreConfig(str(path), 2 * retention, durable))
    if path.exists():
        raise KilnError(
            f"cannot run this query with spark.master {master}: its deduplication state is in the file {path}, which "
            "executors on other machines cannot open. Run the query with spark.master = local[*], or restart it from "
            "scratch (docs/RUNBOOK.md, State)"
        )
    return StateDeduplication(retention)
