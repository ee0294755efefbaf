"""DuckDB views of the rows of a backfill run and of the live tables in the run's time range, for comparing and
swapping.

DuckDB reads only the Parquet files whose statistics overlap the range, and spills to a temporary folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Final
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from kiln.pipelines.backfill.run_log import RUN_TABLES, BackfillRun
from kiln.pipelines.backfill.table_extents import build_extents, get_network
from kiln.pipelines.delta.duckdb_tables import build_files_query, quote_text, register_store
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.pipelines.delta.time_bounds import TimeBounds

MEMORY: Final = "2GB"


@dataclass(frozen=True)
class TableSnapshot:
    """A version of a table, and its data files, by their paths in the log."""

    folder: str
    table: DeltaTable
    all_files: Collection[str]
    files: Collection[str]
    """the files that may have rows in the run's time range"""

    def select(self, files: Iterable[str] | None = None) -> str:
        """Build a query for all rows of `files`; by default, of the files that may have rows in the time range."""
        paths = [f"{self.folder}/{unquote(path)}" for path in (self.files if files is None else files)]
        return build_files_query(self.table, paths)


class RangeComparison:
    """DuckDB connection with views `live_TABLE` and `run_TABLE` of the rows in a backfill run's time range.

    Each view has the columns of its table. The views of `batch_tips` also have `opened_at`, `separator_key` and
    `separator_value` of the batch that contains the tip, because the range applies to the batch.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, lake: Lake, run: BackfillRun) -> None:
        register_store(connection, lake)
        self.connection = connection
        self.lake = lake
        self.run_lake = lake.locate_run(run.name)
        lake.create(RUN_TABLES)
        self.run_lake.create(filter(self.run_lake.has, RUN_TABLES))  # tables of an earlier Kiln may lack columns
        self.extents = build_extents(run)
        self._span = run.range_from, run.range_to
        self._network = get_network(run)

    def open(self, lake: Lake, table: str) -> TableSnapshot:
        """Open the newest version of a table of the live lake or of the run's lake."""
        return self._read_snapshot(lake, table, lake.open(table))

    def open_version(self, table: str, version: int | None) -> TableSnapshot | None:
        """Open a version of a live table; `None` if its log entry or one of its data files was removed."""
        if version is None:
            return None
        opened = self.lake.open(table)
        try:
            opened.load_as_version(version)
        except DeltaError:
            return None
        snapshot = self._read_snapshot(self.lake, table, opened)
        names = {file.name for file in self.lake.folder(table).files()}
        return snapshot if names.issuperset(map(unquote, snapshot.files)) else None

    def _read_snapshot(self, lake: Lake, table: str, opened: DeltaTable) -> TableSnapshot:
        files, (low, high) = pa.table(opened.get_add_actions(flatten=True)), self._span
        times = self.extents[table].times  # the earliest of a row's times must be in the range
        before_end = reduce(pc.or_, (TimeBounds(name, high=high).select_files(files) for name in times))
        after_begin = reduce(pc.and_, (TimeBounds(name, low=low).select_files(files) for name in times))
        of_range = files.filter(pc.and_(before_end, after_begin))
        return TableSnapshot(lake.table(table), opened, set(files["path"].to_pylist()), of_range["path"].to_pylist())

    def count(self, rows: str) -> int:
        """Count rows. `rows`: the SQL text after FROM."""
        row = self.connection.execute(f"SELECT count(*) FROM {rows}").fetchone()
        return int(row[0]) if row else 0

    def range_condition(self, table: str) -> str:
        """Build the SQL condition that selects the rows of a live table that the run replaces."""
        if self._network is None:
            return self._in_range(table)
        if table == "quarantine":  # it has the position of a frame instead of a network
            of_network = "(kafka_partition, kafka_offset) IN (SELECT (kafka_partition, kafka_offset) FROM live_frames)"
        else:
            of_network = f"network = {quote_text(self._network)}"
        return f"({self._in_range(table)} AND {of_network})"

    def _in_range(self, table: str) -> str:
        extent = self.extents[table]
        low, high = (f"make_timestamptz({at})" for at in self._span)
        return f"({extent.event_time} >= {low} AND {extent.event_time} < {high} AND {extent.condition})"

    def create_views(self, table: str) -> None:
        """Create the views `live_TABLE` and `run_TABLE` of a table."""
        if table == "batch_tips":
            self.create_views("batches")
        if table == "quarantine" and self._network is not None:
            self.create_views("frames")
        for side, lake in (("live", self.lake), ("run", self.run_lake)):
            rows = self.open(lake, table).select()
            if table == "batch_tips":
                query = f"""
                SELECT t.batch_cid, t.stream, t.tip, b.opened_at, b.separator_key, b.separator_value
                FROM ({rows}) AS t JOIN (
                    SELECT batch_cid, min(opened_at) AS opened_at, arg_min(separator_key, opened_at) AS separator_key,
                           arg_min(separator_value, opened_at) AS separator_value
                    FROM {side}_batches GROUP BY batch_cid) AS b USING (batch_cid)"""
            else:
                is_run_fault = side == "run" and table == "quarantine"
                condition = self._in_range(table) if is_run_fault else self.range_condition(table)
                query = f"FROM ({rows}) WHERE {condition}"
            self.connection.execute(f"CREATE OR REPLACE TEMP VIEW {side}_{table} AS {query}")


@contextmanager
def open_comparison(lake: Lake, run: BackfillRun) -> Iterator[RangeComparison]:
    """Open a DuckDB connection for comparing a backfill run with the live tables. It has no views yet.

    Raises:
        LakeError: A table cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-") as folder, duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"SET memory_limit = '{MEMORY}'")
        connection.execute("SET preserve_insertion_order = false")
        connection.execute(f"SET temp_directory = {quote_text(folder)}")
        try:
            yield RangeComparison(connection, lake, run)
        except duckdb.Error as error:
            reason = str(error).split("\n")[0]
            raise LakeError(
                f"cannot read the tables in {lake.path}, or those of backfill run {run.name}: {reason}"
            ) from error
