"""Summary of a run: the rows that it added to the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from kiln.deploy.ops.status import read_lake_status
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.lake import Lake


@dataclass(frozen=True)
class TableTotal:
    """Number of rows of a table, and of those added since the start of the run; `None` if not known."""

    name: str
    rows: int | None
    added: int | None


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run for the screen."""

    lake: Lake
    elapsed: timedelta
    first_batch: timedelta | None
    """from the start of the command to the first batch; `None` if there was none"""
    tables: Sequence[TableTotal]
    batches: int
    """of this run"""
    late_p50: float | None
    """delay of live batches, s (`snapshot.BatchLine.late`); `None` if there were none"""
    late_p99: float | None
    quarantine: Sequence[tuple[str, str, int]]
    """stage, reason and number of rows, of the whole table"""
    errors: Sequence[str] = ()
    is_ceramic: bool = True
    """false on a network that has no batches"""
    unread: Mapping[str, int | None] = field(default_factory=dict)
    """records that the queries have not read, by query; `None` for an unknown number"""
    warnings: Sequence[str] = ()


def read_row_counts(lake: Lake) -> dict[str, int]:
    """Read the number of rows of each table from its log, at the start of a run."""
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
    unread: Mapping[str, int | None] | None = None,
    warnings: Sequence[str] = (),
    is_ceramic: bool = True,
) -> RunSummary:
    """Read the lake, and build the summary.

    Args:
        lake: The lake.
        elapsed: Duration of the run.
        first_batch: See `RunSummary`.
        batches: Number of batches of the run.
        late_p50: See `RunSummary`.
        late_p99: See `RunSummary`.
        before: `read_row_counts` at the start of the run.
        errors: Errors of the run.
        unread: See `RunSummary`.
        warnings: Problems that did not end the run.
        is_ceramic: See `RunSummary`.

    Raises:
        SqlError: A query fails.
        LakeError: A table cannot be read.
    """
    tables = [
        TableTotal(table.name, table.rows, None if table.rows is None else table.rows - before.get(table.name, 0))
        for table in read_lake_status(lake)
    ]
    quarantine = _read_quarantine(lake) if "quarantine" in lake.tables() else []
    return RunSummary(
        lake,
        elapsed,
        first_batch,
        tables,
        batches,
        late_p50,
        late_p99,
        quarantine,
        errors,
        is_ceramic,
        unread or {},
        warnings,
    )


def _read_quarantine(lake: Lake) -> list[tuple[str, str, int]]:
    sql = "SELECT stage, reason, count(*) AS rows FROM quarantine GROUP BY ALL ORDER BY rows DESC, stage, reason"
    return [
        (str(stage), str(reason), rows) for stage, reason, rows in query_lake(lake, sql).rows() if isinstance(rows, int)
    ]
