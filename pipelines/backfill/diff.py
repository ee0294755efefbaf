"""How a run differs from live over the run's range: counts by table, day and separator, and the first differences.

DuckDB counts equal rows on both sides, so that what a table holds never is in Python, and what does not fit into memory
is on disk. Rows are compared by a digest of 64 bits of their content, beside their whole key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple

from kiln.pipelines.backfill.account import BackfillRun
from kiln.pipelines.backfill.extents import TableExtent
from kiln.pipelines.backfill.range_comparison import RangeComparison, both_sides
from kiln.pipelines.delta.lake import Lake

FIRST = 10
"""How many differences of a table are shown."""

_AT_MOST = 50
"""rows of one key that are looked at for the first differences"""


class DiffGroup(NamedTuple):
    """A day and a separator of a table where something differs."""

    day: date | None
    separator: str | None
    same: int
    only_live: int
    only_run: int


@dataclass(frozen=True)
class RowDifference:
    """A row that one side has, or two of one key. Values as DuckDB has them."""

    table: str
    key: dict[str, object]
    live: dict[str, object] | None
    """the columns of live's row that count, beside the key; None: live has no such row"""
    run: dict[str, object] | None

    @property
    def columns(self) -> list[str]:
        """The columns that differ; none where one side has no row."""
        if self.live is None or self.run is None:
            return []
        return [name for name, value in self.live.items() if value != self.run[name]]


@dataclass(frozen=True)
class TableDiff:
    """One table. A row that is another on the two sides counts once as `only_live`, once as `only_run`, and once as
    `differ`: so `same` and `only_live` together are live's rows."""

    table: str
    same: int = 0
    only_live: int = 0
    only_run: int = 0
    differ: int = 0
    places: tuple[DiffGroup, ...] = ()
    first: tuple[RowDifference, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both sides have the same rows."""
        return not self.only_live and not self.only_run


def diff(lake: Lake, run: BackfillRun, say: Callable[[str], None]) -> list[TableDiff]:
    """Compares table by table. `say` hears which one. LakeError: a table cannot be read."""
    with both_sides(lake, run) as sides:
        found = []
        for table, extent in sides.extents.items():
            if table == "frames" and not sides.of_run.has_rows(table):
                continue  # the run read live's own
            say(f"{table}: comparing")
            found.append(compare(sides, extent))
        return found


def compare(sides: RangeComparison, extent: TableExtent) -> TableDiff:
    """Compares one table."""
    table = extent.table
    sides.view(table)
    counted = list(_counted(sides, extent))
    same = sum(each.same for each in counted)
    only_live, only_run = sum(each.only_live for each in counted), sum(each.only_run for each in counted)
    if not only_live and not only_run:
        return TableDiff(table, same)
    sides.connection.execute(f"""
        CREATE OR REPLACE TEMP TABLE unequal AS
        SELECT {_keys(extent)}, content, heard, greatest(live - run, 0) AS only_live,
               greatest(run - live, 0) AS only_run
        FROM ({_paired(extent)}) WHERE live <> run""")
    (differ,) = sides.connection.execute(f"""
        SELECT coalesce(sum(least(live, run)), 0)::BIGINT
        FROM (SELECT sum(only_live) AS live, sum(only_run) AS run FROM unequal GROUP BY {_keys(extent)})""").fetchall()
    places = tuple(each for each in counted if each.only_live or each.only_run)
    return TableDiff(table, same, only_live, only_run, differ[0], places, tuple(_first(sides, extent)))


def _counted(sides: RangeComparison, extent: TableExtent) -> Iterator[DiffGroup]:
    rows = sides.connection.execute(f"""
        SELECT heard::DATE AS day, separator, sum(least(live, run))::BIGINT, sum(greatest(live - run, 0))::BIGINT,
               sum(greatest(run - live, 0))::BIGINT
        FROM ({_paired(extent)}) GROUP BY day, separator ORDER BY day, separator NULLS FIRST""").fetchall()
    for row in rows:
        yield DiffGroup(*row)


def _paired(extent: TableExtent) -> str:
    """For each key and content how often each side has it."""
    return f"""
        SELECT {_keys(extent)}, content, min(heard) AS heard, min(separator) AS separator,
               sum(live) AS live, sum(run) AS run
        FROM (SELECT {_terms(extent)}, 1 AS live, 0 AS run FROM live_{extent.table}
              UNION ALL SELECT {_terms(extent)}, 0 AS live, 1 AS run FROM run_{extent.table})
        GROUP BY {_keys(extent)}, content"""


def _terms(extent: TableExtent) -> str:
    keys = ", ".join(f"{extent.term(name)} AS k{number}" for number, name in enumerate(extent.key))
    return f"{keys}, {_digest(extent)} AS content, {extent.heard} AS heard, {extent.separator} AS separator"


def _keys(extent: TableExtent) -> str:
    return ", ".join(f"k{number}" for number in range(len(extent.key)))


def _digest(extent: TableExtent) -> str:
    return f"hash(row({', '.join(map(extent.term, extent.content))}))" if extent.content else "0"


def _first(sides: RangeComparison, extent: TableExtent) -> Iterator[RowDifference]:
    keys = sides.connection.execute(
        f"SELECT {_keys(extent)} FROM unequal GROUP BY ALL ORDER BY min(heard), {_keys(extent)} LIMIT {FIRST}"
    ).fetchall()
    shown = [name for name in extent.columns if name in extent.key or name in extent.content]
    terms = ", ".join(f"{extent.term(name)} AS {name}" for name in shown)
    where = " AND ".join(f"{extent.term(name)} IS NOT DISTINCT FROM ?" for name in extent.key)
    left = FIRST
    for key in keys:
        rows: dict[str, list[dict[str, object]]] = {}
        for side, only in (("live", "only_live"), ("run", "only_run")):
            matches = " AND ".join(f"k{number} IS NOT DISTINCT FROM ?" for number in range(len(key)))
            # of rows that are alike, as many as the other side has not
            found = sides.connection.execute(
                f"""SELECT {", ".join(f"r.{name}" for name in shown)}
                    FROM (SELECT {terms}, {_digest(extent)} AS content,
                                 row_number() OVER (PARTITION BY {_digest(extent)}) AS number
                          FROM {side}_{extent.table} WHERE {where}) AS r
                    JOIN (SELECT content, {only} AS many FROM unequal
                          WHERE {matches} AND {only} > 0) AS u USING (content)
                    WHERE r.number <= u.many LIMIT {_AT_MOST}""",
                [*key, *key],
            ).fetchall()
            rows[side] = [dict(zip(shown, row, strict=True)) for row in found]
        while left and (rows["live"] or rows["run"]):
            live, run = (rows[side].pop(0) if rows[side] else None for side in ("live", "run"))
            told = live or run or {}
            yield RowDifference(
                extent.table, {name: told[name] for name in extent.key}, _content(live, extent), _content(run, extent)
            )
            left -= 1


def _content(row: dict[str, object] | None, extent: TableExtent) -> dict[str, object] | None:
    return None if row is None else {name: row[name] for name in row if name in extent.content}
