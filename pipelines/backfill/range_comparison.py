"""Comparison of a run with the live tables over the run's range, by views `live_TABLE` and `run_TABLE` of a DuckDB
connection.

DuckDB reads only Parquet files whose statistics overlap the range, and spills to a temporary folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import unquote

import duckdb
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from kiln.pipelines.backfill.run_log import RUN_TABLES, BackfillRun
from kiln.pipelines.backfill.table_extents import build_extents, get_network
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.duckdb_tables import build_files_query, register_store
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.schemas.delta.tables import TABLES

MEMORY: Final = "2GB"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_STATISTICS_ROUNDING: Final = timedelta(milliseconds=1)
"""Spark's statistics truncate times to whole ms."""


@dataclass(frozen=True)
class TableSnapshot:
    """A version of a table, and its files that may have rows of a range."""

    folder: str
    table: DeltaTable
    all_files: frozenset[str]
    """paths as in the log"""
    files: tuple[str, ...]
    """the files that may have rows of the range"""

    def paths(self, files: Iterable[str] | None = None) -> list[str]:
        """Resolve the paths of `files`; by default, of the files of the range."""
        return [f"{self.folder}/{unquote(path)}" for path in (self.files if files is None else files)]

    def select(self, files: Iterable[str] | None = None) -> str:
        """Build a query for all rows of `files`; by default, of the files of the range."""
        return build_files_query(self.table, self.paths(files))

    @property
    def rows(self) -> str:
        """Query for all rows of the table."""
        return self.select(sorted(self.all_files))


class RangeComparison:
    """A run and the live tables, with the views of their rows in the range.

    Each view has the columns of its table. The views of `batch_tips` also have `opened_at`, `separator_key` and
    `separator_value` of the tip's batch, which is in the range.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, lake: Lake, run: BackfillRun) -> None:
        register_store(connection, lake)
        self.connection = connection
        self.lake = lake
        self.run_lake = lake.locate_run(run.name)
        for side in (self.lake, self.run_lake):
            side.create(table for table in RUN_TABLES if side.has(table))  # an earlier Kiln's may lack columns
        self.extents = build_extents(run)
        self._range = _literal(run.range_from), _literal(run.range_to)
        self._bounds = datetime_of(run.range_from), datetime_of(run.range_to)
        self._network = get_network(run)

    def open(self, lake: Lake, table: str) -> TableSnapshot | None:
        """Open the newest version of a table, or return `None` if there is no table."""
        return self._read_snapshot(lake, table, lake.open(table)) if lake.has(table) else None

    def open_version(self, table: str, version: int | None) -> TableSnapshot | None:
        """Open a version of a live table, or return `None` if its log or files no longer reach back."""
        opened = self.lake.open(table)
        if version is None:
            return None
        try:
            opened.load_as_version(version)
        except DeltaError:
            return None
        snapshot = self._read_snapshot(self.lake, table, opened)
        names = {file.name for file in self.lake.folder(table).files()}
        return snapshot if names.issuperset(map(unquote, snapshot.files)) else None

    def _read_snapshot(self, lake: Lake, table: str, opened: DeltaTable) -> TableSnapshot:
        return _read_snapshot(lake.table(table), opened, self.extents[table].times, *self._bounds)

    def count(self, rows: str) -> int:
        """Count rows, given the text after FROM."""
        row = self.connection.execute(f"SELECT count(*) FROM {rows}").fetchone()
        return int(row[0]) if row else 0

    def range_condition(self, table: str) -> str:
        """Build the condition for a row of a live table to be in the range."""
        if self._network is None:
            return self._in_range(table)
        if table == "quarantine":  # it has no network, but the position of the frame
            of_network = "(kafka_partition, kafka_offset) IN (SELECT (kafka_partition, kafka_offset) FROM live_frames)"
        else:
            quoted = self._network.replace("'", "''")
            of_network = f"network = '{quoted}'"
        return f"({self._in_range(table)} AND {of_network})"

    def _in_range(self, table: str) -> str:
        extent = self.extents[table]
        low, high = self._range
        return f"({extent.event_time} >= {low} AND {extent.event_time} < {high} AND {extent.condition})"

    def create_views(self, table: str) -> None:
        """Create the views of a table. The view of a table that does not exist is empty."""
        if table == "batch_tips":
            self._create_tip_views()
            return
        if table == "quarantine" and self._network is not None:
            self.create_views("frames")
        for name, lake in (("live", self.lake), ("run", self.run_lake)):
            snapshot = self.open(lake, table)
            condition = (
                self.range_condition(table) if name == "live" or table != "quarantine" else self._in_range(table)
            )
            rows = _empty_table(self.connection, table) if snapshot is None else snapshot.select()
            self.connection.execute(f"CREATE OR REPLACE TEMP VIEW {name}_{table} AS FROM ({rows}) WHERE {condition}")

    def _create_tip_views(self) -> None:
        self.create_views("batches")
        for name, lake in (("live", self.lake), ("run", self.run_lake)):
            snapshot = self.open(lake, "batch_tips")
            rows = _empty_table(self.connection, "batch_tips") if snapshot is None else snapshot.rows
            self.connection.execute(f"""
                CREATE OR REPLACE TEMP VIEW {name}_batch_tips AS
                SELECT t.batch_cid, t.stream, t.tip, b.opened_at, b.separator_key, b.separator_value
                FROM ({rows}) AS t JOIN (
                    SELECT batch_cid, min(opened_at) AS opened_at, arg_min(separator_key, opened_at) AS separator_key,
                           arg_min(separator_value, opened_at) AS separator_value
                    FROM {name}_batches GROUP BY batch_cid) AS b USING (batch_cid)""")


@contextmanager
def open_comparison(lake: Lake, run: BackfillRun) -> Iterator[RangeComparison]:
    """Open a comparison without views.

    Raises:
        LakeError: A table cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-") as folder, duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"SET memory_limit = '{MEMORY}'")
        connection.execute("SET preserve_insertion_order = false")
        quoted = folder.replace("'", "''")
        connection.execute(f"SET temp_directory = '{quoted}'")
        try:
            yield RangeComparison(connection, lake, run)
        except duckdb.Error as error:
            reason = str(error).split("\n")[0]
            raise LakeError(
                f"the tables in {lake.path}, or those of run {run.name}, cannot be read: {reason}"
            ) from error


def _read_snapshot(
    folder: str, table: DeltaTable, times: Sequence[str], low: datetime, high: datetime
) -> TableSnapshot:
    actions = pa.table(table.get_add_actions(flatten=True))
    paths = [str(path) for path in actions["path"].to_pylist()]
    if not paths:
        return TableSnapshot(folder, table, frozenset(), ())
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    least = [_file_bounds(actions, f"min.{name}", first) for name in times]
    greatest = [_file_bounds(actions, f"max.{name}", last) for name in times]
    range_condition = [
        path
        for number, path in enumerate(paths)
        if any(values[number] < high for values in least)
        and all(values[number] >= low - _STATISTICS_ROUNDING for values in greatest)
    ]
    return TableSnapshot(folder, table, frozenset(paths), tuple(range_condition))


def _file_bounds(actions: pa.Table, column: str, unknown: datetime) -> list[datetime]:
    """Read a statistic of each file, or `unknown` for files without it."""
    if column not in actions.column_names:
        return [unknown] * actions.num_rows
    return [unknown if at is None else at for at in actions[column].to_pylist()]


def _empty_table(connection: duckdb.DuckDBPyConnection, table: str) -> str:
    connection.register(f"no_{table}", build_arrow_schema(TABLES[table].columns).empty_table())
    return f"FROM no_{table}"


def datetime_of(micros: int) -> datetime:
    """Convert µs to a datetime in UTC."""
    return _EPOCH + timedelta(microseconds=micros)


def _literal(micros: int) -> str:
    return f"TIMESTAMPTZ '{datetime_of(micros).isoformat()}'"
