"""Run of all suites over a lake, in which each check reads only new rows.

The state is one DuckDB file in the state folder. For each check, it holds the version of each table that was read, the
check's own tables, and faulty keys. A check reads a row once, unless rows were removed from the table: then it starts
over, so a repaired table clears its faults.

Great Expectations receives rows in chunks as pandas frames: whole rows or, if one column decides, each distinct value
once. For checks of whole tables, it receives the keys that DuckDB found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.duckdb_tables import build_columns_query, quote_name, register_store, require_columns
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.pipelines.quality.finders import FINDERS
from kiln.pipelines.quality.new_files import NewFiles, find_new_files
from kiln.pipelines.quality.results import SHOWN, CheckResult, FaultyKey, Key
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
_INDEX: Final = "kiln_index"
_VALUE: Final = "kiln_value"

_MAX_KEYS: Final = 1_000
"""faulty keys that are stored for a check"""

_FORMAT: Final = 5
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
        context: CheckContext,
        validator: RowValidator,
        state_file: Path | None,
        since: datetime | None = None,
    ) -> None:
        """Open the tables and the state.

        Args:
            lake: The lake to check.
            context: Settings and time of the checks.
            validator: Great Expectations.
            state_file: State of the checks. Without it, the checks read all rows and store no state.
            since: Report only rows from this time on, by the table's time column.

        Raises:
            QualityError: The state cannot be read.
        """
        self._context = context
        self._lake = lake
        self._validator = validator
        self._since = since
        self._tables: dict[str, DeltaTable] = {}
        self._columns: dict[str, dict[str, str]] = {}
        self._unreadable: dict[str, str] = {}
        """why a table cannot be read, by name"""
        for name in TABLES.keys() & set(lake.tables()):
            try:
                opened = lake.open(name)
                self._columns[name] = require_columns(lake, name, opened)
                self._tables[name] = opened
            except LakeError as error:
                self._unreadable[name] = str(error)
        try:
            self._db = duckdb.connect(":memory:" if state_file is None else str(state_file))
        except duckdb.Error as error:
            raise QualityError(
                f"cannot read the state of the checks {state_file} ({error}). Delete the file: the next check reads "
                "all rows again"
            ) from error
        register_store(self._db, lake)
        self._db.execute("SET TimeZone = 'UTC'")
        self._db.execute("SET enable_progress_bar = false")
        self._delete_other_format()

    def _delete_other_format(self) -> None:
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

    def run_checks(self, checks: Sequence[SuiteCheck]) -> list[CheckResult]:
        """Run the checks whose table exists, and return their results in order.

        For a table that cannot be read, one result fails, and the other checks of the table have none.

        Raises:
            QualityError: A check cannot run.
        """
        runnable = [check for check in checks if check.table in self._tables or check.table in self._unreadable]
        results: dict[str, CheckResult] = {}
        row_checks: dict[tuple[str, int | None], list[SuiteCheck]] = {}
        for check in runnable:
            if check.kind.rows and check.table in self._tables:
                version = self._read_versions(check).get(check.table)
                row_checks.setdefault((check.table, version), []).append(check)
        for (table, version), group in row_checks.items():
            try:
                for result in self._check_rows(table, version, group):
                    results[result.check.id] = result
            except (duckdb.Error, OSError) as error:
                reason = str(error).split("\n")[0]
                self._unreadable[table] = f"cannot read table {table} in {self._lake.path}: {reason}"
        table_checks = [check for check in runnable if not check.kind.rows and not self._describe_obstacle(check)]
        for check in table_checks:
            results[check.id] = self._check_table(check)
        faults = [
            FaultyKey(check.id, str(key), words)
            for check in table_checks
            for key, words in zip(results[check.id].keys, results[check.id].words, strict=True)
        ]
        for check_id, success in self._validator.validate_tables(table_checks, faults).items():
            results[check_id] = replace(results[check_id], success=success)
        for check in self._select_unjudged(runnable, results):
            results[check.id] = CheckResult(check, False, self._describe_obstacle(check))
        return [results[check.id] for check in runnable if check.id in results]

    def _describe_obstacle(self, check: SuiteCheck) -> str:
        """Describe why the first of the check's tables that cannot be read cannot be; empty if all can."""
        others = () if check.kind.rows else FINDERS[check.expectation].reads(check)
        return next((self._unreadable[name] for name in (check.table, *others) if name in self._unreadable), "")

    def _select_unjudged(self, checks: Iterable[SuiteCheck], judged: Collection[str]) -> Iterator[SuiteCheck]:
        """Select the checks that report the tables that cannot be read: for each such table its first check of level
        error, and the checks of other tables that refer to it."""
        reported: set[str] = set()
        for check in sorted(checks, key=lambda each: each.level != "error"):
            if check.id not in judged and check.table not in reported:
                yield check
                if check.table in self._unreadable:
                    reported.add(check.table)

    def delete_unknown_checks(self, checks: Iterable[SuiteCheck]) -> None:
        """Delete the state of all checks but these."""
        known = {check.id for check in checks}
        for (check_id,) in self._db.execute("SELECT DISTINCT id FROM checked").fetchall():
            if check_id not in known:
                with self._transaction():
                    self._delete_check(check_id)

    # ---------------------------------------------------------------- rows

    def _check_rows(self, table: str, since: int | None, checks: list[SuiteCheck]) -> list[CheckResult]:
        new_files = find_new_files(self._lake, table, self._tables[table], since)
        with self._transaction():
            for check in checks:
                if new_files.must_reread:
                    self._delete_check(check.id)
                self._save_versions(check, [table])
            if new_files.files:
                self._validate_new_rows(table, checks, new_files)
        return [self._read_row_result(check) for check in checks]

    def _validate_new_rows(self, table: str, checks: list[SuiteCheck], new_files: NewFiles) -> None:
        types = self._columns[table]
        time = TIMES.get(table)
        since = f" WHERE {time} >= {format_timestamp(self._since)}" if time and self._since else ""
        source = f"(FROM ({build_columns_query(types, new_files.files)}){since}) AS new"
        value_checks: dict[str, list[SuiteCheck]] = {}
        row_checks: list[SuiteCheck] = []
        for check in checks:
            column = str(check.arguments.get("column"))
            by_value = check.kind.by_value and types.get(column, _NESTED)[-1] not in _NESTED
            (value_checks.setdefault(column, []) if by_value else row_checks).append(check)
        cursor = self._db.cursor()
        cursor.execute("SET TimeZone = 'UTC'")
        totals = {check.id: _RowTotals() for check in checks}
        for column, of_column in value_checks.items():
            self._validate_values(cursor, source, column, of_column, identity_columns(table), totals)
        if row_checks:
            self._validate_rows(cursor, source, row_checks, identity_columns(table), totals)
        for check in checks:
            totals[check.id].write(self._db, check)

    def _validate_values(
        self,
        cursor: duckdb.DuckDBPyConnection,
        source: str,
        column: str,
        checks: list[SuiteCheck],
        key: Sequence[str],
        totals: Mapping[str, _RowTotals],
    ) -> None:
        """Validate each value once, and count the result for each row that has it."""
        import pandas as pd  # slow to import: faults of a suite are reported before it

        faulty_values: dict[str, list[pa.Array]] = {check.id: [] for check in checks}
        # Kiln's own conditions read Arrow strings, which is faster than a Python object for each string.
        types_mapper = pd.ArrowDtype if all(not check.kind.is_stock for check in checks) else None
        counted = cursor.sql(f"SELECT {quote_name(column)}, count(*) FROM {source} GROUP BY ALL")
        for chunk in _rechunk(counted.to_arrow_reader(CHUNK_OF_VALUES), CHUNK_OF_VALUES):
            values, counts = chunk.column(0), chunk.column(1)
            frame = chunk.select([column]).to_pandas(types_mapper=types_mapper)
            frame[_INDEX] = range(len(frame))
            rows = pc.sum(counts).as_py()
            for check, outcome in self._run_expectations(checks, frame, [_INDEX]):
                indexes = pa.array([key[_INDEX] for key in outcome.keys], pa.int64())
                failed = pc.sum(counts.take(indexes)).as_py() or 0
                totals[check.id].count(rows, failed, not failed)
                if sum(map(len, faulty_values[check.id])) < _MAX_KEYS:
                    faulty_values[check.id] += values.take(indexes[:_MAX_KEYS]).chunks
        names = ", ".join(map(quote_name, key))
        for check in checks:
            if totals[check.id].failed:
                cursor.register("faulty", pa.table({_VALUE: pa.concat_arrays(faulty_values[check.id])}))
                rows = cursor.sql(
                    f"SELECT {names}, new.{quote_name(column)} AS {_VALUE} FROM {source} SEMI JOIN faulty "
                    f"ON faulty.{_VALUE} IS NOT DISTINCT FROM new.{quote_name(column)} LIMIT {_MAX_KEYS}"
                ).to_arrow_table()
                cursor.unregister("faulty")
                totals[check.id].add_keys(({name: row[name] for name in key}, row[_VALUE]) for row in rows.to_pylist())

    def _validate_rows(
        self,
        cursor: duckdb.DuckDBPyConnection,
        source: str,
        checks: list[SuiteCheck],
        key: Sequence[str],
        totals: Mapping[str, _RowTotals],
    ) -> None:
        argument_columns = [
            str(check.arguments[name])
            for check in checks
            for name in ("column", "column_A", "column_B")
            if name in check.arguments
        ]
        columns = ", ".join(map(quote_name, dict.fromkeys((*key, *argument_columns))))
        for chunk in _rechunk(cursor.sql(f"SELECT {columns} FROM {source}").to_arrow_reader(CHUNK), CHUNK):
            for check, outcome in self._run_expectations(checks, chunk.to_pandas(), key):
                totals[check.id].count(outcome.rows, outcome.failed, outcome.success, outcome.observed)
                values = [*outcome.values, *[""] * len(outcome.keys)]
                totals[check.id].add_keys(zip(outcome.keys, values, strict=False))

    def _run_expectations(
        self, checks: list[SuiteCheck], frame: pd.DataFrame, key: Sequence[str]
    ) -> Iterator[tuple[SuiteCheck, ExpectationOutcome]]:
        """Validate rows with Great Expectations, and yield the outcome of each check."""
        for check, outcome in zip(checks, self._validator.validate_rows(checks, frame, key), strict=True):
            if outcome.error:
                raise QualityError(f"{check.location}: {check.name}: {outcome.error}")
            yield check, outcome

    def _read_row_result(self, check: SuiteCheck) -> CheckResult:
        tally = self._db.execute(
            "SELECT rows, failed, success, observed FROM tally WHERE id = ?", [check.id]
        ).fetchone()
        rows, failed, success, observed = tally or (0, 0, True, None)
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
                self._delete_check(check.id)
                return self._run_check(check, find, tables)
        except duckdb.Error as error:
            raise QualityError(f"{check.location}: {check.name}: {error}") from error

    def _run_check(self, check: SuiteCheck, find: Callable[[CheckInputs], str], tables: list[str]) -> CheckResult:
        new_files = self._find_new_files(tables, self._read_versions(check))
        if any(each.must_reread for each in new_files.values()):
            self._delete_check(check.id)
            new_files = self._find_new_files(tables, {})
        for name in tables:
            types = self._columns[name] if name in self._tables else _empty_columns(name)
            files = new_files[name].files if name in new_files else ()
            self._db.execute(f"CREATE OR REPLACE TEMP VIEW new_{name} AS {build_columns_query(types, files)}")
        inputs = CheckInputs(
            self._db,
            f"m_{check.id}",
            check,
            self._context,
            {name: each.committed for name, each in new_files.items() if each.committed is not None},
            self._columns,
            self._select_all,
        )
        faults_query = find(inputs)
        since = f" WHERE seen_at IS NULL OR seen_at >= {format_timestamp(self._since)}" if self._since else ""
        ((count, first, last),) = self._db.execute(
            f"SELECT count(*), min(seen_at), max(seen_at) FROM ({faults_query}){since}"
        ).fetchall()
        shown: list[tuple[str, str]] = []
        if count:
            query = f"SELECT key, words FROM ({faults_query}){since} ORDER BY seen_at, key LIMIT {SHOWN}"
            shown = self._db.execute(query).fetchall()
        self._save_versions(check, tables)
        keys: list[Key] = [json.loads(key) for key, _ in shown]
        words = [str(each) for _, each in shown]
        observed = "nothing" if not count else words[0] if count == 1 else f"{count:,} keys: {words[0]}, …"
        return CheckResult(check, not count, observed, count, keys, words, inputs.pending["rows"], (first, last))

    def _find_new_files(self, tables: Iterable[str], versions: Mapping[str, int]) -> dict[str, NewFiles]:
        """Find the files that each of the tables that exist has received since its version in `versions`."""
        return {
            name: find_new_files(self._lake, name, self._tables[name], versions.get(name))
            for name in tables
            if name in self._tables
        }

    def _select_all(self, name: str) -> str:
        if name in self._unreadable:
            raise QualityError(self._unreadable[name])
        if name not in self._tables:
            return build_columns_query(_empty_columns(name), ())
        files = find_new_files(self._lake, name, self._tables[name], None).files
        return build_columns_query(self._columns[name], files)

    # ---------------------------------------------------------------- state

    def _read_versions(self, check: SuiteCheck) -> dict[str, int]:
        """Read the versions of the tables that the check has read."""
        return dict(self._db.execute("SELECT name, version FROM checked WHERE id = ?", [check.id]).fetchall())

    def _save_versions(self, check: SuiteCheck, tables: Iterable[str]) -> None:
        """Save the versions of the tables that the check has read."""
        known = self._read_versions(check)
        versions = {name: self._tables[name].version() for name in tables if name in self._tables}
        if changed := dict(versions.items() - known.items()):
            names = list(changed)
            self._db.execute("DELETE FROM checked WHERE id = ? AND list_contains(?, name)", [check.id, names])
            self._db.execute(
                "INSERT INTO checked SELECT ?, unnest(?), unnest(?)", [check.id, names, list(changed.values())]
            )

    def _delete_check(self, check_id: str) -> None:
        for table in ("checked", "tally", "failed"):
            self._db.execute(f"DELETE FROM {table} WHERE id = ?", [check_id])
        for (name,) in self._db.execute(
            "SELECT table_name FROM duckdb_tables() WHERE NOT temporary AND starts_with(table_name, ?)",
            [f"m_{check_id}_"],
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
        """Add a chunk's outcome.

        Args:
            rows: Rows of the chunk.
            failed: Rows that fail; `None` if the expectation is on the rows as a whole.
            success: True if the chunk meets the expectation.
            observed: Observed value of an expectation on the rows as a whole.
        """
        self.rows += rows
        self.success = self.success and success
        if failed is None:
            self.observed = str(observed)
        else:
            self.failed += failed

    def add_keys(self, rows: Iterable[tuple[Mapping[str, object], object]]) -> None:
        """Add faulty keys and their values, up to `_MAX_KEYS`."""
        for key, value in islice(rows, _MAX_KEYS - len(self.keys)):
            key_json = json.dumps({name: _to_json_value(each) for name, each in key.items()})
            self.keys.append((key_json, str(value)[:200]))

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
    chunk, rows = list[pa.RecordBatch](), 0
    for batch in batches:
        chunk.append(batch)
        rows += batch.num_rows
        if rows >= least:
            yield pa.Table.from_batches(chunk)
            chunk, rows = [], 0
    if chunk:
        yield pa.Table.from_batches(chunk)


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
