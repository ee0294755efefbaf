"""Differences between a backfill run and the live tables in the run's time range: counts and examples by table.

DuckDB compares the rows by their key and a 64-bit hash of their content. It spills to disk, so no table is in Python's
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple

from kiln.pipelines.backfill.range_comparison import RangeComparison, open_comparison
from kiln.pipelines.backfill.run_log import BackfillRun
from kiln.pipelines.backfill.table_extents import TableExtent
from kiln.pipelines.delta.lake import Lake

MAX_EXAMPLES = 10
"""Maximum number of example rows per table"""

_MAX_ROWS_PER_KEY = 50
"""maximum number of rows with the same key that are read for examples"""


class DiffGroup(NamedTuple):
    """Numbers of equal and different rows of a table for one day and one separator."""

    day: date | None
    separator: str | None
    same: int
    only_live: int
    only_run: int


@dataclass(frozen=True)
class RowDifference:
    """A row that only the live table or only the run has, or two rows with equal keys and different content.

    Values have DuckDB's types.
    """

    table: str
    key: dict[str, object]
    live: dict[str, object] | None
    """compared columns of the live row, without the key; `None` if there is no live row"""
    run: dict[str, object] | None
    """compared columns of the run's row, without the key; `None` if there is no such row"""

    @property
    def columns(self) -> list[str]:
        """Columns that differ; empty if there is only one row."""
        if self.live is None or self.run is None:
            return []
        return [name for name, value in self.live.items() if value != self.run[name]]


@dataclass(frozen=True)
class TableDiff:
    """Differences between a live table and the table of a backfill run, as numbers of rows and examples.

    Two rows with equal keys and different content add 1 to each of `only_live`, `only_run` and `differ`. So the
    number of live rows is `same` + `only_live`.
    """

    table: str
    same: int = 0
    only_live: int = 0
    only_run: int = 0
    differ: int = 0
    groups: tuple[DiffGroup, ...] = ()
    examples: tuple[RowDifference, ...] = ()

    @property
    def is_equal(self) -> bool:
        """True if the live table and the run have the same rows."""
        return not self.only_live and not self.only_run


def diff_run(lake: Lake, run: BackfillRun, report: Callable[[str], None]) -> list[TableDiff]:
    """Compare a backfill run with the live tables in the run's time range.

    Args:
        report: Receives a line of text for each table.

    Raises:
        LakeError: A table cannot be read.
    """
    with open_comparison(lake, run) as comparison:
        diffs = []
        for table, extent in comparison.extents.items():
            if table == "frames" and not comparison.run_lake.has_rows(table):
                continue  # the run read the live table
            if not comparison.run_lake.has(table):
                continue  # a run of an earlier Kiln has no table that was added since
            report(f"comparing table {table}")
            diffs.append(compare_table(comparison, extent))
        return diffs


def compare_table(comparison: RangeComparison, extent: TableExtent) -> TableDiff:
    """Compare one table of a run with the live table."""
    table = extent.table
    comparison.create_views(table)
    groups = list(_count_groups(comparison, extent))
    same = sum(group.same for group in groups)
    only_live, only_run = sum(group.only_live for group in groups), sum(group.only_run for group in groups)
    if not only_live and not only_run:
        return TableDiff(table, same)
    comparison.connection.execute(f"""
        CREATE OR REPLACE TEMP TABLE unequal AS
        SELECT {_key_list(extent)}, content, event_time, greatest(live - run, 0) AS only_live,
               greatest(run - live, 0) AS only_run
        FROM ({_pair_query(extent)}) WHERE live <> run""")
    (differ,) = comparison.connection.execute(f"""
        SELECT coalesce(sum(least(live, run)), 0)::BIGINT
        FROM (SELECT sum(only_live) AS live, sum(only_run) AS run FROM unequal
              GROUP BY {_key_list(extent)})""").fetchall()
    unequal = tuple(group for group in groups if group.only_live or group.only_run)
    examples = tuple(_find_examples(comparison, extent))
    return TableDiff(table, same, only_live, only_run, differ[0], unequal, examples)


def _count_groups(comparison: RangeComparison, extent: TableExtent) -> Iterator[DiffGroup]:
    rows = comparison.connection.execute(f"""
        SELECT event_time::DATE AS day, separator, sum(least(live, run))::BIGINT, sum(greatest(live - run, 0))::BIGINT,
               sum(greatest(run - live, 0))::BIGINT
        FROM ({_pair_query(extent)}) GROUP BY day, separator ORDER BY day, separator NULLS FIRST""").fetchall()
    for row in rows:
        yield DiffGroup(*row)


def _pair_query(extent: TableExtent) -> str:
    """Build a query that counts, for each key and content, the live rows and the run's rows."""
    return f"""
        SELECT {_key_list(extent)}, content, min(event_time) AS event_time, min(separator) AS separator,
               sum(live) AS live, sum(run) AS run
        FROM (SELECT {_term_list(extent)}, 1 AS live, 0 AS run FROM live_{extent.table}
              UNION ALL SELECT {_term_list(extent)}, 0 AS live, 1 AS run FROM run_{extent.table})
        GROUP BY {_key_list(extent)}, content"""


def _term_list(extent: TableExtent) -> str:
    keys = ", ".join(f"{extent.term(name)} AS k{number}" for number, name in enumerate(extent.key))
    return (
        f"{keys}, {_digest_term(extent)} AS content, {extent.event_time} AS event_time, {extent.separator} AS separator"
    )


def _key_list(extent: TableExtent) -> str:
    return ", ".join(f"k{number}" for number in range(len(extent.key)))


def _digest_term(extent: TableExtent) -> str:
    return f"hash(row({', '.join(map(extent.term, extent.content))}))" if extent.content else "0"


def _find_examples(comparison: RangeComparison, extent: TableExtent) -> Iterator[RowDifference]:
    keys = comparison.connection.execute(
        f"SELECT {_key_list(extent)} FROM unequal GROUP BY ALL "
        f"ORDER BY min(event_time), {_key_list(extent)} LIMIT {MAX_EXAMPLES}"
    ).fetchall()
    shown = [name for name in extent.columns if name in extent.key or name in extent.content]
    terms = ", ".join(f"{extent.term(name)} AS {name}" for name in shown)
    where = " AND ".join(f"{extent.term(name)} IS NOT DISTINCT FROM ?" for name in extent.key)
    left = MAX_EXAMPLES
    for key in keys:
        rows: dict[str, list[dict[str, object]]] = {}
        for side, only in (("live", "only_live"), ("run", "only_run")):
            matches = " AND ".join(f"k{number} IS NOT DISTINCT FROM ?" for number in range(len(key)))
            # show only as many equal rows as the other side lacks
            matching = comparison.connection.execute(
                f"""SELECT {", ".join(f"r.{name}" for name in shown)}
                    FROM (SELECT {terms}, {_digest_term(extent)} AS content,
                                 row_number() OVER (PARTITION BY {_digest_term(extent)}) AS number
                          FROM {side}_{extent.table} WHERE {where}) AS r
                    JOIN (SELECT content, {only} AS many FROM unequal
                          WHERE {matches} AND {only} > 0) AS u USING (content)
                    WHERE r.number <= u.many LIMIT {_MAX_ROWS_PER_KEY}""",
                [*key, *key],
            ).fetchall()
            rows[side] = [dict(zip(shown, row, strict=True)) for row in matching]
        while left and (rows["live"] or rows["run"]):
            live, run = (rows[side].pop(0) if rows[side] else None for side in ("live", "run"))
            row = live or run or {}
            yield RowDifference(
                extent.table,
                {name: row[name] for name in extent.key},
                _content_values(live, extent),
                _content_values(run, extent),
            )
            left -= 1


def _content_values(row: dict[str, object] | None, extent: TableExtent) -> dict[str, object] | None:
    return None if row is None else {name: row[name] for name in row if name in extent.content}
