"""Deduplication of a query: by a file on one machine, or by Spark's state on a cluster (decision 10).

A query describes two stages, one before and one after deduplication. The implementation returns the steps of the
query in which these stages run. Both implementations accept the same rows.

    FileDeduplication    source: decode, look up in the file, write                   micro-batch: no step
    StateDeduplication   source: decode and pack ─ Spark's deduplicating operators ─  micro-batch: unpack, write

The steps of `updates` are different (`kiln.pipelines.updates.transform`): whether an update is new depends on the order
of announcements, so a single task of the micro-batch looks up the digests in the file.
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
    """The steps of a query around its deduplication."""

    source_task: ArrowTask
    """RECORDS in, rows of `source_schema` out"""
    source_schema: str
    deduplicate: Callable[[DataFrame], DataFrame]
    """from rows of the source to rows of a micro-batch"""
    run_in_micro_batch: Callable[[DataFrame, int | None], DataFrame]
    """from rows of a micro-batch to the query's output, by the steps that are left to foreachBatch. A micro-batch with
    few records has one task; the number of records is `None` if unknown"""


@dataclass(frozen=True)
class UniqueStages:
    """Stages of a query that accepts each row once, by its digests."""

    decode: Callable[[_Batches], Iterator[UniqueRow[object]]]
    """RECORDS in"""
    identities: tuple[str, ...]
    """names of the digests of a row, which are checked in turn"""
    write: ArrowTask
    """columns kind and data of accepted rows in, rows of `output_schema` out"""
    output_schema: str
    in_one_task: Callable[[DedupStoreConfig], ArrowTask]
    """builds the task that runs both stages, with the deduplication file between them"""


@dataclass(frozen=True)
class FileDeduplication:
    """Deduplication by a file, which all tasks of one machine have open."""

    store: DedupStoreConfig

    def accept_once(self, stages: UniqueStages) -> DedupSteps:
        """Build the steps of a query that accepts each row once."""
        return DedupSteps(
            stages.in_one_task(self.store), stages.output_schema, lambda rows: rows, lambda rows, records: rows
        )


@dataclass(frozen=True)
class StateDeduplication:
    """Deduplication by Spark's state, which any machine can load. `retention`: retention of a digest, µs.

    The watermark follows the time of the micro-batch (`MicroBatchClock`), so that no row is ever late:
    `dropDuplicatesWithinWatermark` drops late rows silently, and after an outage Spark reads partitions at different
    speeds.
    """

    retention: int

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
    """Build the task that decodes records, and packs the rows for the next stage. RECORDS in."""

    def run(batches: _Batches) -> _Batches:
        return pack(decode(batches), get_batch_time())

    return run


def is_small(records: int | None, small: int) -> bool:
    """Return true if a micro-batch is known to read fewer than `small` records."""
    return records is not None and records < small


def find_deduplication(checkpoint: Location, master: str, retention: int, *, durable: bool) -> Deduplication:
    """Return the deduplication of a query with this checkpoint. On one machine it uses a file next to the checkpoint;
    where tasks may run on machines without that file, it uses Spark's state.

    Args:
        checkpoint: Folder of the query's checkpoint.
        master: URL of Spark's master.
        retention: Retention of a digest, µs. The file keeps it twice as long, as Spark's operators do: after a
            downtime, records may be read that much later.
        durable: True if the file must survive a power cut.

    Raises:
        KilnError: The query's deduplication state is in a file, but this master uses Spark's state, or the reverse.
    """
    if checkpoint.folder is None:
        return StateDeduplication(retention)
    path, state = checkpoint.folder / FILE_NAME, checkpoint.folder / "state"
    if master.startswith("local"):
        if state.exists():
            raise KilnError(
                f"the deduplication state of the query is in Spark's state ({state}), which a query with spark.master "
                f"{master} does not use. Run the query on the cluster, or restart it from scratch (RUNBOOK, State)"
            )
        return FileDeduplication(DedupStoreConfig(str(path), 2 * retention, durable))
    if path.exists():
        raise KilnError(
            f"the deduplication state of the query is in the file {path}, which executors of {master} do not have. Run "
            "the query with spark.master = local[*], or restart it from scratch (RUNBOOK, State)"
        )
    return StateDeduplication(retention)
