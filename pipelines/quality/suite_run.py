"""The checks of all suites over a lake, each over what is new to the check.

The state of the checks is one DuckDB file in the state folder: of each check the version of each table up to which the
check has read, what the check must remember of rows, and the keys at fault. A check reads a row once, unless rows were
taken out of the table: then the check begins anew. So a repaired table clears what was found in it.

DuckDB reads the files. Great Expectations sees rows in chunks as pandas frames: whole rows, or, where the value of one
column decides, each distinct value of that column once. Of what spans rows Great Expectations sees what DuckDB found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.duckdb_tables import columns_of, quoted, reach, select_columns
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.quality.finders import FINDERS
from kiln.pipelines.quality.new_files import NewFiles, news_of
from kiln.pipelines.quality.results import SHOWN, CheckResult, Key
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.pipelines.quality.table_checks import DUCKDB, TIMES, CheckContext, CheckInputs, CheckReset, identity, stamp
from kiln.schemas.delta.tables import TABLES

if TYPE_CHECKING:
    import pandas as pd

    from kiln.pipelines.quality.expectations import ExpectationOutcome, RowValidator

CHUNK: Final = 100_000
"""rows that Great Expectations sees at once"""

CHUNK_OF_VALUES: Final = 250_000
"""values of one column that Great Expectations sees at once"""

_NESTED: Final = ")]"
"""What the types of maps and lists end with. Values of these types are not told apart."""
_AT: Final = "kiln_at"
_VALUE: Final = "kiln_value"

_KEPT: Final = 1_000
"""keys at fault that are kept of a check"""

_FORMAT: Final = 3
"""of the state. State of another format is forgotten: the check begins anew."""

_STATE: Final = """
CREATE TABLE IF NOT EXISTS format (version INTEGER);
CREATE TABLE IF NOT EXISTS checked (id VARCHAR, name VARCHAR, version BIGINT);
CREATE TABLE IF NOT EXISTS tally (id VARCHAR, rows BIGINT, failed BIGINT, success BOOLEAN, observed VARCHAR);
CREATE TABLE IF NOT EXISTS failed (id VARCHAR, key JSON, words VARCHAR);
"""


class QualityError(KilnError):
    """A check cannot be made; the message says which, and why."""


class SuiteRun:
    """One look at the tables. Each table is read as of the moment when the look began."""

    def __init__(
        self,
        lake: Lake,
        facts: CheckContext,
        judge: RowValidator,
        memory: Path | None,
        since: datetime | None = None,
    ) -> None:
        """`memory`: the state of the checks; None: the checks read all rows, and nothing is kept. `since`: results are
        of what was later, by the time of the row. LakeError: a table cannot be read."""
        self._facts = facts
        self._lake = lake
        self._judge = judge
        self._since = since
        self._tables: dict[str, DeltaTable] = {name: lake.open(name) for name in lake.tables()}
        try:
            self._db = duckdb.connect(":memory:" if memory is None else str(memory))
        except duckdb.Error as error:
            raise QualityError(
                f"{memory}: the state of the checks cannot be read: {error}. Delete the file: the next "
                "check reads all rows anew"
            ) from error
        reach(self._db, lake)
        self._db.execute("SET TimeZone = 'UTC'")
        self._db.execute("SET enable_progress_bar = false")
        self._forget_other_format()

    def _forget_other_format(self) -> None:
        with self._transaction():
            self._db.execute(_STATE)
            if self._db.execute("SELECT version FROM format").fetchall() == [(_FORMAT,)]:
                return
            for (name,) in self._db.execute("SELECT table_name FROM duckdb_tables() WHERE NOT temporary").fetchall():
                self._db.execute(f"DROP TABLE {name}")
            self._db.execute(_STATE)
            self._db.execute(f"INSERT INTO format VALUES ({_FORMAT})")

    def close(self) -> None:
        self._db.close()

    def results(self, checks: Sequence[SuiteCheck], say: Callable[[str], None] = lambda _: None) -> list[CheckResult]:
        """What became of the checks whose table is there, in their order. QualityError."""
        there = [check for check in checks if check.table in self._tables]
        found: dict[str, CheckResult] = {}
        rows = sorted(
            (check for check in there if check.kind.rows), key=lambda check: (check.table, self._version(check))
        )
        for (table, version), group in groupby(rows, key=lambda check: (check.table, self._version(check))):
            say(f"{table}: rows")
            for result in self._on_rows(table, None if version < 0 else version, list(group)):
                found[result.check.id] = result
        spanning = [check for check in there if not check.kind.rows]
        for check in spanning:
            say(f"{check.table}: {check.name}")
            found[check.id] = self._spanning(check)
        told = [
            (check.id, str(key), words)
            for check in spanning
            for key, words in zip(found[check.id].keys, found[check.id].words, strict=True)
        ]
        for name, success in self._judge.found(spanning, told).items():
            found[name] = replace(found[name], success=success)
        return [found[check.id] for check in there]

    def forget_all_but(self, checks: Iterable[SuiteCheck]) -> None:
        """Forgets what is remembered of checks that no suite has any more."""
        known = {check.id for check in checks}
        for (gone,) in self._db.execute("SELECT DISTINCT id FROM checked").fetchall():
            if gone not in known:
                with self._transaction():
                    self._forget(gone)

    # ---------------------------------------------------------------- rows

    def _on_rows(self, table: str, since: int | None, checks: list[SuiteCheck]) -> list[CheckResult]:
        news = news_of(self._lake, table, self._tables[table], since)
        with self._transaction():
            for check in checks:
                if news.anew:
                    self._forget(check.id)
                self._note(check, [table])
            if news.files:
                self._take_rows(table, checks, news)
        return [self._of_rows(check) for check in checks]

    def _take_rows(self, table: str, checks: list[SuiteCheck], news: NewFiles) -> None:
        kinds = columns_of(self._tables[table]) or {}
        time = TIMES.get(table)
        late = f" WHERE {time} >= {stamp(self._since)}" if time and self._since else ""
        source = f"(FROM ({select_columns(kinds, news.files)}){late}) AS new"
        of_values: dict[str, list[SuiteCheck]] = {}
        of_rows: list[SuiteCheck] = []
        for check in checks:
            column = str(check.arguments.get("column"))
            simple = check.kind.values and kinds.get(column, _NESTED)[-1] not in _NESTED
            (of_values.setdefault(column, []) if simple else of_rows).append(check)
        cursor = self._db.cursor()
        cursor.execute("SET TimeZone = 'UTC'")
        sums = {check.id: _RowTotals() for check in checks}
        for column, some in of_values.items():
            self._judge_values(cursor, source, column, some, identity(table), sums)
        if of_rows:
            self._judge_rows(cursor, source, of_rows, identity(table), sums)
        for check in checks:
            sums[check.id].write(self._db, check)

    def _judge_values(
        self,
        cursor: duckdb.DuckDBPyConnection,
        source: str,
        column: str,
        checks: list[SuiteCheck],
        key: Sequence[str],
        sums: Mapping[str, _RowTotals],
    ) -> None:
        """Great Expectations sees each value once. What it says counts for each row that has the value."""
        import pandas as pd  # not at the top, as it takes a second: a wrong suite is named before

        wrong: dict[str, list[pa.Array]] = {check.id: [] for check in checks}
        # Strings stay in Arrow's memory where Kiln's own conditions look at them: an object for each costs more.
        kept = pd.ArrowDtype if all(not check.kind.stock for check in checks) else None
        counted = cursor.sql(f"SELECT {quoted(column)}, count(*) FROM {source} GROUP BY ALL")
        for chunk in _chunks(counted.to_arrow_reader(CHUNK_OF_VALUES), CHUNK_OF_VALUES):
            values, counts = chunk.column(0), chunk.column(1)
            frame = chunk.select([column]).to_pandas(types_mapper=kept)
            frame[_AT] = range(len(frame))
            rows = pc.sum(counts).as_py()
            for check, seen in self._seen(checks, frame, [_AT]):
                at = pa.array([one[_AT] for one in seen.keys], pa.int64())
                failed = pc.sum(counts.take(at)).as_py() or 0
                sums[check.id].count(rows, failed, not failed)
                if sum(map(len, wrong[check.id])) < _KEPT:
                    wrong[check.id] += values.take(at[:_KEPT]).chunks
        names = ", ".join(map(quoted, key))
        for check in checks:
            if sums[check.id].failed:
                cursor.register("wrong", pa.table({_VALUE: pa.concat_arrays(wrong[check.id])}))
                rows = cursor.sql(
                    f"SELECT {names}, new.{quoted(column)} AS {_VALUE} FROM {source} SEMI JOIN wrong "
                    f"ON wrong.{_VALUE} IS NOT DISTINCT FROM new.{quoted(column)} LIMIT {_KEPT}"
                ).to_arrow_table()
                cursor.unregister("wrong")
                sums[check.id].tell(({name: row[name] for name in key}, row[_VALUE]) for row in rows.to_pylist())

    def _judge_rows(
        self,
        cursor: duckdb.DuckDBPyConnection,
        source: str,
        checks: list[SuiteCheck],
        key: Sequence[str],
        sums: Mapping[str, _RowTotals],
    ) -> None:
        named = [
            str(check.arguments[name])
            for check in checks
            for name in ("column", "column_A", "column_B")
            if name in check.arguments
        ]
        columns = ", ".join(map(quoted, dict.fromkeys((*key, *named))))
        for chunk in _chunks(cursor.sql(f"SELECT {columns} FROM {source}").to_arrow_reader(CHUNK), CHUNK):
            for check, seen in self._seen(checks, chunk.to_pandas(), key):
                sums[check.id].count(seen.rows, seen.failed, seen.success, seen.observed)
                values = [*seen.values, *[""] * len(seen.keys)]
                sums[check.id].tell(zip(seen.keys, values, strict=False))

    def _seen(
        self, checks: list[SuiteCheck], frame: pd.DataFrame, key: Sequence[str]
    ) -> Iterator[tuple[SuiteCheck, ExpectationOutcome]]:
        """What Great Expectations says of each check on these rows. QualityError."""
        for check, seen in zip(checks, self._judge.rows(checks, frame, key), strict=True):
            if seen.error:
                raise QualityError(f"{check.place}: {check.name}: {seen.error}")
            yield check, seen

    def _of_rows(self, check: SuiteCheck) -> CheckResult:
        told = self._db.execute("SELECT rows, failed, success, observed FROM tally WHERE id = ?", [check.id]).fetchone()
        rows, failed, success, observed = told or (0, 0, True, None)
        keys = self._db.execute("SELECT key, words FROM failed WHERE id = ? LIMIT ?", [check.id, SHOWN]).fetchall()
        words = observed if observed is not None else f"{failed:,} of {rows:,} rows"
        return CheckResult(
            check,
            success,
            words,
            failed,
            [json.loads(key) for key, _ in keys] if not success else [],
            [each for _, each in keys] if not success else [],
        )

    # ---------------------------------------------------------------- what spans rows

    def _spanning(self, check: SuiteCheck) -> CheckResult:
        find, reads = FINDERS[check.expectation]
        tables = list(reads(check))
        try:
            with self._transaction():
                return self._find(check, find, tables)
        except CheckReset:
            with self._transaction():
                self._forget(check.id)
                return self._find(check, find, tables)
        except duckdb.Error as error:
            raise QualityError(f"{check.place}: {check.name}: {error}") from error

    def _find(self, check: SuiteCheck, find: Callable[[CheckInputs], str], tables: list[str]) -> CheckResult:
        news = {name: self._news(check, name) for name in tables if name in self._tables}
        if any(each.anew for each in news.values()):
            self._forget(check.id)
            news = {name: news_of(self._lake, name, self._tables[name], None) for name in news}
        for name in tables:
            kinds = columns_of(self._tables[name]) if name in self._tables else _empty(name)
            files = news[name].files if name in news else ()
            self._db.execute(f"CREATE OR REPLACE TEMP VIEW new_{name} AS {select_columns(kinds or {}, files)}")
        look = CheckInputs(
            self._db,
            f"m_{check.id}",
            check,
            self._facts,
            {name: each.committed for name, each in news.items() if each.committed is not None},
            {name: columns_of(table) or {} for name, table in self._tables.items()},
            self._whole,
        )
        found = find(look)
        late = f" WHERE seen_at IS NULL OR seen_at >= {stamp(self._since)}" if self._since else ""
        total = self._db.execute(f"SELECT count(*) FROM ({found}){late}").fetchone()
        count = total[0] if total else 0
        shown = self._db.execute(
            f"SELECT key, seen_at, words FROM ({found}){late} ORDER BY seen_at, key LIMIT {SHOWN}"
        ).fetchall()
        self._note(check, tables)
        keys: list[Key] = [json.loads(key) for key, _, _ in shown]
        words = [str(each) for _, _, each in shown]
        observed = "nothing" if not count else words[0] if count == 1 else f"{count:,} keys: {words[0]}, …"
        return CheckResult(check, not count, observed, count, keys, words)

    def _whole(self, name: str) -> str:
        if name not in self._tables:
            return select_columns(_empty(name), ())
        files = news_of(self._lake, name, self._tables[name], None).files
        return select_columns(columns_of(self._tables[name]) or {}, files)

    def _news(self, check: SuiteCheck, name: str) -> NewFiles:
        row = self._db.execute("SELECT version FROM checked WHERE id = ? AND name = ?", [check.id, name]).fetchone()
        return news_of(self._lake, name, self._tables[name], row[0] if row else None)

    # ---------------------------------------------------------------- what is kept

    def _version(self, check: SuiteCheck) -> int:
        row = self._db.execute(
            "SELECT version FROM checked WHERE id = ? AND name = ?", [check.id, check.table]
        ).fetchone()
        return row[0] if row else -1

    def _note(self, check: SuiteCheck, tables: Iterable[str]) -> None:
        """Notes that the check has read these tables."""
        known = dict(self._db.execute("SELECT name, version FROM checked WHERE id = ?", [check.id]).fetchall())
        for name in tables:
            if name in self._tables and known.get(name) != self._tables[name].version():
                self._db.execute("DELETE FROM checked WHERE id = ? AND name = ?", [check.id, name])
                self._db.execute("INSERT INTO checked VALUES (?, ?, ?)", [check.id, name, self._tables[name].version()])

    def _forget(self, check: str) -> None:
        for table in ("checked", "tally", "failed"):
            self._db.execute(f"DELETE FROM {table} WHERE id = ?", [check])
        for (name,) in self._db.execute(
            "SELECT table_name FROM duckdb_tables() WHERE NOT temporary AND starts_with(table_name, ?)", [f"m_{check}_"]
        ).fetchall():
            self._db.execute(f"DROP TABLE {name}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
        except BaseException:  # whatever it is: raised again
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


class _RowTotals:
    """What chunks of one run say together of an expectation on rows."""

    def __init__(self) -> None:
        self.rows = self.failed = 0
        self.success = True
        self.observed: str | None = None
        self.keys: list[tuple[str, str]] = []

    def count(self, rows: int, failed: int | None, success: bool, observed: object = None) -> None:
        """`failed`: rows that do not meet the expectation; None: the expectation is on the rows as a whole."""
        self.rows += rows
        self.success = self.success and success
        if failed is None:
            self.observed = str(observed)
        else:
            self.failed += failed

    def tell(self, rows: Iterable[tuple[Mapping[str, object], object]]) -> None:
        """Keys of rows that do not meet the expectation, and their values. The first ones are kept."""
        for key, value in islice(rows, _KEPT - len(self.keys)):
            said = json.dumps({name: _plain(each) for name, each in key.items()})
            self.keys.append((said, str(value)[:200]))

    def write(self, db: duckdb.DuckDBPyConnection, check: SuiteCheck) -> None:
        """Takes the run into the tally. An expectation with `mostly`, or on rows as a whole, is of the newest rows."""
        if not self.rows:
            return
        row = db.execute("SELECT rows, failed FROM tally WHERE id = ?", [check.id]).fetchone()
        db.execute("DELETE FROM tally WHERE id = ?", [check.id])
        mostly = check.arguments.get("mostly")
        if self.observed is not None or mostly is not None:
            db.execute("DELETE FROM failed WHERE id = ?", [check.id])
            if isinstance(mostly, int | float):
                self.success = self.failed <= self.rows * (1 - mostly)
        elif row:
            self.rows, self.failed = self.rows + row[0], self.failed + row[1]
            self.success = not self.failed
        db.execute(
            "INSERT INTO tally VALUES (?, ?, ?, ?, ?)", [check.id, self.rows, self.failed, self.success, self.observed]
        )
        if self.keys:
            db.executemany("INSERT INTO failed VALUES (?, ?, ?)", [(check.id, *key) for key in self.keys])


def _chunks(batches: Iterable[pa.RecordBatch], least: int) -> Iterator[pa.Table]:
    """The rows as tables of at least so many rows, but for the last one. DuckDB ends a batch with each row group."""
    held, rows = list[pa.RecordBatch](), 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= least:
            yield pa.Table.from_batches(held)
            held, rows = [], 0
    if held:
        yield pa.Table.from_batches(held)


def _plain(value: object) -> object:
    """A value of a pandas frame as JSON has it: bytes in hex, times in ISO 8601."""
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    item = getattr(value, "item", None)  # of numpy
    plain = item() if callable(item) else value
    return None if plain != plain or plain is None else plain if isinstance(plain, bool | int | float) else str(plain)


def _empty(table: str) -> dict[str, str]:
    """Columns and types of a table that is not there."""
    return {column.name: DUCKDB[column.type] for column in TABLES[table].columns}
