"""What a run added to the tables, read at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from kiln.deploy.ops.status import read_lake_status
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.lake import Lake


@dataclass(frozen=True)
class TableTotal:
    """Rows of a table, and how many of them were not there when the run began. None: not known."""

    name: str
    rows: int | None
    added: int | None


@dataclass(frozen=True)
class RunSummary:
    """What is told at the end of a run."""

    lake: Lake
    elapsed: timedelta
    first_batch: timedelta | None
    """from the start of the command to the first batch; None: there was none"""
    tables: Sequence[TableTotal]
    batches: int
    """of this run"""
    late_p50: float | None
    """seconds later than T after the first update was heard, until the broker had the batch; None: no live batches"""
    late_p99: float | None
    quarantine: Sequence[tuple[str, str, int]]
    """stage, reason, rows; of all that is in the table"""
    errors: Sequence[str] = ()


def read_row_counts(lake: Lake) -> dict[str, int]:
    """Rows of each table, from the tables' logs: to be taken when a run begins."""
    return {table.name: table.rows for table in read_lake_status(lake) if table.rows is not None}


def read_summary(
    lake: Lake,
    *,
    elapsed: timedelta,
    first_batch: timedelta | None,
    batches: int,
    late_p50: float | None,
    late_p99: float | None,
    before: Mapping[str, int],
    errors: Sequence[str] = (),
) -> RunSummary:
    """Read the lake for the summary; `before`: `read_row_counts` as the run began. SqlError, LakeError: it cannot."""
    tables = [
        TableTotal(table.name, table.rows, None if table.rows is None else table.rows - before.get(table.name, 0))
        for table in read_lake_status(lake)
    ]
    quarantine = _read_quarantine(lake) if "quarantine" in lake.tables() else []
    return RunSummary(lake, elapsed, first_batch, tables, batches, late_p50, late_p99, quarantine, errors)


def _read_quarantine(lake: Lake) -> list[tuple[str, str, int]]:
    sql = "SELECT stage, reason, count(*) AS rows FROM quarantine GROUP BY ALL ORDER BY rows DESC, stage, reason"
    return [
        (str(stage), str(reason), rows) for stage, reason, rows in query_lake(lake, sql).rows() if isinstance(rows, int)
    ]
