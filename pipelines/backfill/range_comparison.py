"""The rows of a run's range, on both sides: views `live_TABLE` and `run_TABLE` of a DuckDB connection.

DuckDB reads the Parquet files themselves, and only those whose statistics say that they may have rows of the range.
What does not fit into memory goes to a temporary folder.
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

from kiln.pipelines.backfill.account import BackfillRun
from kiln.pipelines.backfill.extents import extents, network_of
from kiln.pipelines.delta.arrow_rows import arrow_schema
from kiln.pipelines.delta.duckdb_tables import reach, select_files
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.schemas.delta.tables import TABLES

MEMORY: Final = "2GB"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CUT: Final = timedelta(milliseconds=1)
"""Spark's statistics have times in whole ms, cut off."""


@dataclass(frozen=True)
class TableSnapshot:
    """A version of a table, as far as a range is concerned."""

    folder: str
    table: DeltaTable
    all_files: frozenset[str]
    """as the log names them"""
    files: tuple[str, ...]
    """those of them that may have rows of the range"""

    def paths(self, files: Iterable[str] | None = None) -> list[str]:
        """Where these files are, or `files`."""
        return [f"{self.folder}/{unquote(path)}" for path in (self.files if files is None else files)]

    def select(self, files: Iterable[str] | None = None) -> str:
        """All rows of these files, or of `files`."""
        return select_files(self.table, self.paths(files))

    @property
    def rows(self) -> str:
        """All rows of the table, whether of the range or not."""
        return self.select(sorted(self.all_files))


class RangeComparison:
    """A run and live. `connection` has the views, each with the columns of its table; those of `batch_tips` also
    have `opened_at`, `separator_key` and `separator_value` of a batch of the range."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, lake: Lake, run: BackfillRun) -> None:
        """LakeError: a table cannot be read."""
        reach(connection, lake)
        self.connection = connection
        self.lake = lake
        self.of_run = lake.run(run.name)
        self.extents = extents(run)
        self._range = _literal(run.range_from), _literal(run.range_to)
        self._bounds = time_of(run.range_from), time_of(run.range_to)
        self._network = network_of(run)

    def open(self, lake: Lake, table: str) -> TableSnapshot | None:
        """The newest version of a table; None: it is not there. LakeError: it cannot be read."""
        return self._side(lake, table, lake.open(table)) if lake.has(table) else None

    def then(self, table: str, when: int | datetime | None) -> TableSnapshot | None:
        """A table of live as it was at a version, or at a time; None: its log, or its folder, has forgotten that."""
        opened = self.lake.open(table)
        if when is None:
            return None
        try:
            opened.load_as_version(when)
        except DeltaError:
            return None
        side = self._side(self.lake, table, opened)
        there = {found.name for found in self.lake.folder(table).files()}
        return side if there.issuperset(map(unquote, side.files)) else None

    def _side(self, lake: Lake, table: str, opened: DeltaTable) -> TableSnapshot:
        return _side(lake.table(table), opened, self.extents[table].times, *self._bounds)

    def count(self, rows: str) -> int:
        """How many rows there are: `rows` is what comes after FROM."""
        counted = self.connection.execute(f"SELECT count(*) FROM {rows}").fetchone()
        return int(counted[0]) if counted else 0

    def inside(self, table: str) -> str:
        """The condition for a row of a live table to be of the range."""
        if self._network is None:
            return self._in_range(table)
        if table == "quarantine":  # which says no network, but which frame
            ours = "(kafka_partition, kafka_offset) IN (SELECT (kafka_partition, kafka_offset) FROM live_frames)"
        else:
            quoted = self._network.replace("'", "''")
            ours = f"network = '{quoted}'"
        return f"({self._in_range(table)} AND {ours})"

    def _in_range(self, table: str) -> str:
        extent = self.extents[table]
        low, high = self._range
        return f"({extent.heard} >= {low} AND {extent.heard} < {high} AND {extent.condition})"

    def view(self, table: str) -> None:
        """Makes the views of a table; where one side does not have the table, its view has no rows."""
        if table == "batch_tips":
            self._view_tips()
            return
        if table == "quarantine" and self._network is not None:
            self.view("frames")
        for name, lake in (("live", self.lake), ("run", self.of_run)):
            side = self.open(lake, table)
            within = self.inside(table) if name == "live" or table != "quarantine" else self._in_range(table)
            rows = _nothing(self.connection, table) if side is None else side.select()
            self.connection.execute(f"CREATE OR REPLACE TEMP VIEW {name}_{table} AS FROM ({rows}) WHERE {within}")

    def _view_tips(self) -> None:
        self.view("batches")
        for name, lake in (("live", self.lake), ("run", self.of_run)):
            side = self.open(lake, "batch_tips")
            rows = _nothing(self.connection, "batch_tips") if side is None else side.rows
            self.connection.execute(f"""
                CREATE OR REPLACE TEMP VIEW {name}_batch_tips AS
                SELECT t.cid, t.stream, t.tip, b.opened_at, b.separator_key, b.separator_value
                FROM ({rows}) AS t JOIN (
                    SELECT cid, min(opened_at) AS opened_at, arg_min(separator_key, opened_at) AS separator_key,
                           arg_min(separator_value, opened_at) AS separator_value
                    FROM {name}_batches GROUP BY cid) AS b USING (cid)""")


@contextmanager
def both_sides(lake: Lake, run: BackfillRun) -> Iterator[RangeComparison]:
    """Opens a connection, without views."""
    with tempfile.TemporaryDirectory(prefix="kiln-") as folder, duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"SET memory_limit = '{MEMORY}'")
        connection.execute("SET preserve_insertion_order = false")
        quoted = folder.replace("'", "''")
        connection.execute(f"SET temp_directory = '{quoted}'")
        try:
            yield RangeComparison(connection, lake, run)
        except duckdb.Error as error:
            said = str(error).split("\n")[0]
            raise LakeError(f"the tables in {lake.path}, or those of run {run.name}, cannot be read: {said}") from error


def _side(folder: str, table: DeltaTable, times: Sequence[str], low: datetime, high: datetime) -> TableSnapshot:
    actions = pa.table(table.get_add_actions(flatten=True))
    paths = [str(path) for path in actions["path"].to_pylist()]
    if not paths:
        return TableSnapshot(folder, table, frozenset(), ())
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    least = [_stated(actions, f"min.{name}", first) for name in times]
    greatest = [_stated(actions, f"max.{name}", last) for name in times]
    inside = [
        path
        for number, path in enumerate(paths)
        if any(each[number] < high for each in least) and all(each[number] >= low - _CUT for each in greatest)
    ]
    return TableSnapshot(folder, table, frozenset(paths), tuple(inside))


def _stated(actions: pa.Table, column: str, unknown: datetime) -> list[datetime]:
    """What each file states; `unknown` where a file states nothing."""
    if column not in actions.column_names:
        return [unknown] * actions.num_rows
    return [unknown if at is None else at for at in actions[column].to_pylist()]


def _nothing(connection: duckdb.DuckDBPyConnection, table: str) -> str:
    connection.register(f"no_{table}", arrow_schema(TABLES[table].columns).empty_table())
    return f"FROM no_{table}"


def time_of(micros: int) -> datetime:
    """µs as a time in UTC."""
    return _EPOCH + timedelta(microseconds=micros)


def _literal(micros: int) -> str:
    return f"TIMESTAMPTZ '{time_of(micros).isoformat()}'"
