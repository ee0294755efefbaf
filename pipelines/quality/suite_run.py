"""Run of all suites over a lake, in which each check reads only new rows.

The state is one DuckDB file in the state folder. For each check, it holds the version of each table that was read, the
check's own tables, and faulty keys. A check reads a row once, unless rows were removed from the table: then it starts
over, so a repaired table clears its faults.

Great Expectations receives rows in chunks as pandas frames: whole rows or, if one column decides, each distinct value
once. For checks of whole tables, it receives the keys that DuckDB found.
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
from kiln.pipelines.delta.duckdb_tables import build_columns_query, quote_name, read_columns, register_store
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.quality.finders import FINDERS
from kiln.pipelines.quality.new_files import NewFiles, find_new_files
from kiln.pipelines.quality.results import SHOWN, CheckResult, Key
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.pipelines.quality.table_checks import (
    DUCKDB,
    TIMES,
    CheckContext,
    CheckInputs,
    CheckReset,
    format_timestamp,
    identity_columns,
)
from kiln.schemas.delta.tables import TABLES

if TYPE_CHECKING:
    import pandas as pd

    from kiln.pipelines.quality.expectations import ExpectationOutcome, RowValidator

CHUNK: Final = 100_000
"""rows in a chunk for Great Expectations"""

CHUNK_OF_VALUES: Final = 250_000
"""values of one column in a chunk for Great Expectations"""

_NESTED: Final = ")]"
"""Last characters of map and list types, whose values are not grouped."""
_AT: Final = "kiln_at"
_VALUE: Final = "kiln_value"

_MAX_KEYS: Final = 1_000
"""faulty keys that are stored for a check"""

_FORMAT: Final = 3
"""version of the state. State of another version is deleted, and the checks start over."""

_STATE: Final = """
CREATE TABLE IF NOT EXISTS format (version INTEGER);
CREATE TABLE IF NOT EXISTS checked (id VARCHAR, name VARCHAR, version BIGINT);
CREATE TABLE IF NOT EXISTS tally (id VARCHAR, rows BIGINT, failed BIGINT, success BOOLEAN, observed VARCHAR);
CREATE TABLE IF NOT EXISTS failed (id VARCHAR, key JSON, words VARCHAR);
"""


class QualityError(KilnError):
    """A check cannot run."""


class SuiteRun:
    """One run over the tables, each read as of the start of the run."""

    def __init__(
        self,
        lake: Lake,
        facts: CheckContext,
        validator: RowValidator,
        memory: Path | None,
        since: datetime | None = None,
    ) -> None:
        """`memory`: the state of the checks; None: the checks read all rows, and nothing is kept. `since`: results are
        of what was later, by the time of the row. LakeError: a table cannot be read."""
        self._facts = facts
        self._lake = lake
        self._validator = validator
        self._since = since
        self._tables: dict[str, DeltaTable] = {name: lake.open(name) for name in lake.tables()}
        try:
            self._db = duckdb.connect(":memory:" if memory is None else str(memory))
        except duckdb.Error as error:
            raise QualityError(
                f"{memory}: the state of the checks cannot be read: {error}. Delete the file: the next "
                "check reads all rows anew"
            ) from error
        register_store(self._db, lake)
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

    def run_checks(
        self, checks: Sequence[SuiteCheck], say: Callable[[str], None] = lambda _: None
    ) -> list[CheckResult]:
        """Run the checks whose table exists, and return their results in order.

        Raises:
            QualityError: A check cannot run.
        """
        there = [check for check in checks if check.table in self._tables]
        found: dict[str, CheckResult] = {}
        rows = sorted(
            (check for check in there if check.kind.rows), key=lambda check: (check.table, self._read_version(check))
        )
        for (table, version), group in groupby(rows, key=lambda check: (check.table, self._read_version(check))):
            say(f"{table}: rows")
            for result in self._check_rows(table, None if version < 0 else version, list(group)):
                found[result.check.id] = result
        spanning = [check for check in there if not check.kind.rows]
        for check in spanning:
            say(f"{check.table}: {check.name}")
            found[check.id] = self._check_table(check)
        told = [
            (check.id, str(key), words)
            for check in spanning
            for key, words in zip(found[check.id].keys, found[check.id].words, strict=True)
        ]
        for name, success in self._validator.found(spanning, told).items():
            found[name] = replace(found[name], success=success)
        return [found[check.id] for check in there]

    def forget_all_but(self, checks: Iterable[SuiteCheck]) -> None:
        """Delete the state of checks that no suite has any more."""
        known = {check.id for check in checks}
        for (check_id,) in self._db.execute("SELECT DISTINCT id FROM checked").fetchall():
            if check_id not in known:
                with self._transaction():
                    self._forget(check_id)

    # ---------------------------------------------------------------- rows

    def _check_rows(self, table: str, since: int | None, checks: list[SuiteCheck]) -> list[CheckResult]:
        news = find_new_files(self._lake, table, self._tables[table], since)
        with self._transaction():
            for check in checks:
                if news.must_reread:
                    self._forget(check.id)
                self._save_versions(check, [table])
            if news.files:
                self._judge_new_rows(table, checks, news)
        return [self._read_row_result(check) for check in checks]

    def _judge_new_rows(self, table: str, checks: list[SuiteCheck], news: NewFiles) -> None:
        kinds = read_columns(self._tables[table]) or {}
        time = TIMES.get(table)
        late = f" WHERE {time} >= {format_timestamp(self._since)}" if time and self._since else ""
        source = f"(FROM ({build_columns_query(kinds, news.files)}){late}) AS new"
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
            self._judge_values(cursor, source, column, some, identity_columns(table), sums)
        if of_rows:
            self._judge_rows(cursor, source, of_rows, identity_columns(table), sums)
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
        """Validate each value once, and count the result for each row that has it."""
        import pandas as pd  # not at the top, as it takes a second: a wrong suite is named before

        wrong: dict[str, list[pa.Array]] = {check.id: [] for check in checks}
        # Strings stay in Arrow's memory where Kiln's own conditions look at them: an object for each costs more.
        kept = pd.ArrowDtype if all(not check.kind.stock for check in checks) else None
        counted = cursor.sql(f"SELECT {quote_name(column)}, count(*) FROM {source} GROUP BY ALL")
        for chunk in _rechunk(counted.to_arrow_reader(CHUNK_OF_VALUES), CHUNK_OF_VALUES):
            values, counts = chunk.column(0), chunk.column(1)
            frame = chunk.select([column]).to_pandas(types_mapper=kept)
            frame[_AT] = range(len(frame))
            rows = pc.sum(counts).as_py()
            for check, seen in self._run_expectations(checks, frame, [_AT]):
                at = pa.array([one[_AT] for one in seen.keys], pa.int64())
                failed = pc.sum(counts.take(at)).as_py() or 0
                sums[check.id].count(rows, failed, not failed)
                if sum(map(len, wrong[check.id])) < _MAX_KEYS:
                    wrong[check.id] += values.take(at[:_MAX_KEYS]).chunks
        names = ", ".join(map(quote_name, key))
        for check in checks:
            if sums[check.id].failed:
                cursor.register("wrong", pa.table({_VALUE: pa.concat_arrays(wrong[check.id])}))
                rows = cursor.sql(
                    f"SELECT {names}, new.{quote_name(column)} AS {_VALUE} FROM {source} SEMI JOIN wrong "
                    f"ON wrong.{_VALUE} IS NOT DISTINCT FROM new.{quote_name(column)} LIMIT {_MAX_KEYS}"
                ).to_arrow_table()
                cursor.unregister("wrong")
                sums[check.id].add_keys(({name: row[name] for name in key}, row[_VALUE]) for row in rows.to_pylist())

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
        columns = ", ".join(map(quote_name, dict.fromkeys((*key, *named))))
        for chunk in _rechunk(cursor.sql(f"SELECT {columns} FROM {source}").to_arrow_reader(CHUNK), CHUNK):
            for check, seen in self._run_expectations(checks, chunk.to_pandas(), key):
                sums[check.id].count(seen.rows, seen.failed, seen.success, seen.observed)
                values = [*seen.values, *[""] * len(seen.keys)]
                sums[check.id].add_keys(zip(seen.keys, values, strict=False))

    def _run_expectations(
        self, checks: list[SuiteCheck], frame: pd.DataFrame, key: Sequence[str]
    ) -> Iterator[tuple[SuiteCheck, ExpectationOutcome]]:
        """Validate rows with Great Expectations, and yield the outcome of each check."""
        for check, seen in zip(checks, self._validator.rows(checks, frame, key), strict=True):
            if seen.error:
                raise QualityError(f"{check.place}: {check.name}: {seen.error}")
            yield check, seen

    def _read_row_result(self, check: SuiteCheck) -> CheckResult:
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

    # ---------------------------------------------------------------- whole tables

    def _check_table(self, check: SuiteCheck) -> CheckResult:
        find, reads = FINDERS[check.expectation]
        tables = list(reads(check))
        try:
            with self._transaction():
                return self._run_check(check, find, tables)
        except CheckReset:
            with self._transaction():
                self._forget(check.id)
                return self._run_check(check, find, tables)
        except duckdb.Error as error:
            raise QualityError(f"{check.place}: {check.name}: {error}") from error

    def _run_check(self, check: SuiteCheck, find: Callable[[CheckInputs], str], tables: list[str]) -> CheckResult:
        news = {name: self._find_new_files(check, name) for name in tables if name in self._tables}
        if any(each.must_reread for each in news.values()):
            self._forget(check.id)
            news = {name: find_new_files(self._lake, name, self._tables[name], None) for name in news}
        for name in tables:
            kinds = read_columns(self._tables[name]) if name in self._tables else _empty_columns(name)
            files = news[name].files if name in news else ()
            self._db.execute(f"CREATE OR REPLACE TEMP VIEW new_{name} AS {build_columns_query(kinds or {}, files)}")
        inputs = CheckInputs(
            self._db,
            f"m_{check.id}",
            check,
            self._facts,
            {name: each.committed for name, each in news.items() if each.committed is not None},
            {name: read_columns(table) or {} for name, table in self._tables.items()},
            self._select_all,
        )
        found = find(inputs)
        late = f" WHERE seen_at IS NULL OR seen_at >= {format_timestamp(self._since)}" if self._since else ""
        total = self._db.execute(f"SELECT count(*) FROM ({found}){late}").fetchone()
        count = total[0] if total else 0
        shown = self._db.execute(
            f"SELECT key, seen_at, words FROM ({found}){late} ORDER BY seen_at, key LIMIT {SHOWN}"
        ).fetchall()
        self._save_versions(check, tables)
        keys: list[Key] = [json.loads(key) for key, _, _ in shown]
        words = [str(each) for _, _, each in shown]
        observed = "nothing" if not count else words[0] if count == 1 else f"{count:,} keys: {words[0]}, …"
        return CheckResult(check, not count, observed, count, keys, words)

    def _select_all(self, name: str) -> str:
        if name not in self._tables:
            return build_columns_query(_empty_columns(name), ())
        files = find_new_files(self._lake, name, self._tables[name], None).files
        return build_columns_query(read_columns(self._tables[name]) or {}, files)

    def _find_new_files(self, check: SuiteCheck, name: str) -> NewFiles:
        row = self._db.execute("SELECT version FROM checked WHERE id = ? AND name = ?", [check.id, name]).fetchone()
        return find_new_files(self._lake, name, self._tables[name], row[0] if row else None)

    # ---------------------------------------------------------------- state

    def _read_version(self, check: SuiteCheck) -> int:
        row = self._db.execute(
            "SELECT version FROM checked WHERE id = ? AND name = ?", [check.id, check.table]
        ).fetchone()
        return row[0] if row else -1

    def _save_versions(self, check: SuiteCheck, tables: Iterable[str]) -> None:
        """Save the versions of the tables that the check has read."""
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
    """Totals of a check of rows over the chunks of one run."""

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

    def add_keys(self, rows: Iterable[tuple[Mapping[str, object], object]]) -> None:
        """Add faulty keys and their values, up to the greatest number that is stored."""
        for key, value in islice(rows, _MAX_KEYS - len(self.keys)):
            said = json.dumps({name: _to_json_value(each) for name, each in key.items()})
            self.keys.append((said, str(value)[:200]))

    def write(self, db: duckdb.DuckDBPyConnection, check: SuiteCheck) -> None:
        """Save the totals. An expectation with `mostly`, or on rows as a whole, covers only the newest rows."""
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


def _rechunk(batches: Iterable[pa.RecordBatch], least: int) -> Iterator[pa.Table]:
    """Combine record batches into tables of at least `least` rows: DuckDB ends a batch at each row group."""
    held, rows = list[pa.RecordBatch](), 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= least:
            yield pa.Table.from_batches(held)
            held, rows = [], 0
    if held:
        yield pa.Table.from_batches(held)


def _to_json_value(value: object) -> object:
    """Convert a pandas value for JSON: bytes to hex, times to ISO 8601."""
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    item = getattr(value, "item", None)  # of numpy
    plain = item() if callable(item) else value
    return None if plain != plain or plain is None else plain if isinstance(plain, bool | int | float) else str(plain)


def _empty_columns(table: str) -> dict[str, str]:
    """Return the columns and types of a table that does not exist."""
    return {column.name: DUCKDB[column.type] for column in TABLES[table].columns}
