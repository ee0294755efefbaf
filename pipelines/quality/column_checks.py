"""Checks of the columns and of single rows of a table.

Great Expectations gets the new rows in chunks, as pandas frames. Checks of single values of a column get each distinct
value once. DuckDB evaluates conditions that are written in SQL.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.duckdb_tables import quote_name
from kiln.pipelines.quality.results import SHOWN, CheckResult
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.schemas.delta.tables import DUCKDB_TYPES, TABLES

if TYPE_CHECKING:
    import pandas as pd

    from kiln.pipelines.quality.expectations import ExpectationOutcome, RowValidator

CHUNK: Final = 100_000
"""Number of rows in a chunk for Great Expectations."""

CHUNK_OF_VALUES: Final = 250_000
"""Number of distinct values of a column in a chunk for Great Expectations."""

_NESTED: Final = ")]"
"""Last characters of the names of map and list types in DuckDB. Distinct values of such columns are not computed."""
_INDEX: Final = "kiln_index"
_VALUE: Final = "kiln_value"

_MAX_KEYS: Final = 1_000


class QualityError(KilnError):
    """A data quality check cannot run, or its progress cannot be read."""


def identity_columns(table: str) -> tuple[str, ...]:
    """Return the columns by which a result names a faulty row: the table's key, or substitutes if it has none."""
    return TABLES[table].key or ("kafka_partition", "kafka_offset", "message_index", "cid", "stage", "reason")


def check_table_columns(check: SuiteCheck, actual: Mapping[str, str]) -> CheckResult:
    """Check that a table has the columns and types of docs/TABLES.md.

    Args:
        actual: DuckDB types of the table's columns, by name.
    """
    expected = {column.name: DUCKDB_TYPES[column.type] for column in TABLES[check.table].columns}
    wrong = {
        name: f"the column is {actual.get(name, 'missing')}, but should be {column_type}"
        for name, column_type in expected.items()
        if actual.get(name) != column_type
    }
    observed = "; ".join(f"{name}: {words}" for name, words in wrong.items()) or "nothing"
    return CheckResult(
        check, not wrong, observed, len(wrong), [{"column": name} for name in wrong], list(wrong.values())
    )


class ColumnChecks:
    """Runs the checks of a table's new rows, which are in the view `new_TABLE`."""

    def __init__(
        self, db: duckdb.DuckDBPyConnection, validator: RowValidator, table: str, types: Mapping[str, str]
    ) -> None:
        self._db, self._validator = db, validator
        self._key, self._types, self._source = identity_columns(table), types, f"new_{table} AS new"

    def run(self, checks: Sequence[SuiteCheck]) -> list[CheckResult]:
        """Run checks on the new rows. Return their results in the order of the checks."""
        value_checks: dict[str, list[SuiteCheck]] = {}
        row_checks: list[SuiteCheck] = []
        totals = {check.id: _RowTotals() for check in checks}
        for check in checks:
            column = str(check.arguments.get("column"))
            by_value = check.kind.by_value and self._types.get(column, _NESTED)[-1] not in _NESTED
            if not check.kind.rows:
                self._test_rule(check, totals[check.id])
            else:
                (value_checks.setdefault(column, []) if by_value else row_checks).append(check)
        for column, of_column in value_checks.items():
            self._validate_values(column, of_column, totals)
        if row_checks:
            self._validate_rows(row_checks, totals)
        return [totals[check.id].build_result(check) for check in checks]

    def _test_rule(self, check: SuiteCheck, totals: _RowTotals) -> None:
        rule = f"NOT ({check.arguments['rule']})"
        try:
            counts = self._db.execute(f"SELECT count(*), count(*) FILTER ({rule}) FROM {self._source}").fetchall()
        except duckdb.Error as error:
            raise QualityError(f"{check.location}: cannot run {check.name}: {error}") from error
        ((rows, failed),) = counts
        totals.count(rows, failed, not failed)
        if failed:
            names = ", ".join(map(quote_name, self._key))
            found = self._db.execute(f"SELECT {names} FROM {self._source} WHERE {rule} LIMIT {SHOWN}").fetchall()
            totals.add_keys((dict(zip(self._key, row, strict=True)), "the rule is false") for row in found)

    def _validate_values(self, column: str, checks: list[SuiteCheck], totals: Mapping[str, _RowTotals]) -> None:
        """Validate each distinct value of a column once, and count its result for all rows with the value."""
        import pandas as pd  # slow to import, so suites are validated first

        faulty_values: dict[str, list[pa.Array]] = {check.id: [] for check in checks}
        # Arrow strings are faster than a Python object for each string, but only Kiln's own expectations read them.
        types_mapper = pd.ArrowDtype if all(not check.kind.is_stock for check in checks) else None
        counted = self._db.sql(f"SELECT {quote_name(column)}, count(*) FROM {self._source} GROUP BY ALL")
        for chunk in _rechunk(counted.to_arrow_reader(CHUNK_OF_VALUES), CHUNK_OF_VALUES):
            values, counts = chunk.column(0), chunk.column(1)
            frame = chunk.select([column]).to_pandas(types_mapper=types_mapper)
            frame[_INDEX] = range(len(frame))
            rows = pc.sum(counts).as_py()
            for check, outcome in self._run_expectations(checks, frame, [_INDEX]):
                indexes = pa.array([failed_key[_INDEX] for failed_key in outcome.keys], pa.int64())
                failed = pc.sum(counts.take(indexes)).as_py() or 0
                totals[check.id].count(rows, failed, not failed)
                if sum(map(len, faulty_values[check.id])) < _MAX_KEYS:
                    faulty_values[check.id] += values.take(indexes[:_MAX_KEYS]).chunks
        names = ", ".join(map(quote_name, self._key))
        for check in checks:
            if totals[check.id].failed:
                self._db.register("faulty", pa.table({_VALUE: pa.concat_arrays(faulty_values[check.id])}))
                rows = self._db.sql(
                    f"SELECT {names}, new.{quote_name(column)} AS {_VALUE} FROM {self._source} SEMI JOIN faulty "
                    f"ON faulty.{_VALUE} IS NOT DISTINCT FROM new.{quote_name(column)} LIMIT {_MAX_KEYS}"
                ).to_arrow_table()
                self._db.unregister("faulty")
                totals[check.id].add_keys(
                    ({name: row[name] for name in self._key}, row[_VALUE]) for row in rows.to_pylist()
                )

    def _validate_rows(self, checks: list[SuiteCheck], totals: Mapping[str, _RowTotals]) -> None:
        argument_columns = [
            str(check.arguments[name])
            for check in checks
            for name in ("column", "column_A", "column_B")
            if name in check.arguments
        ]
        columns = ", ".join(map(quote_name, dict.fromkeys((*self._key, *argument_columns))))
        rows = self._db.sql(f"SELECT {columns} FROM {self._source}")
        for chunk in _rechunk(rows.to_arrow_reader(CHUNK), CHUNK):
            for check, outcome in self._run_expectations(checks, chunk.to_pandas(), self._key):
                totals[check.id].count(outcome.rows, outcome.failed, outcome.success, outcome.observed)
                values = [*outcome.values, *[""] * len(outcome.keys)]
                totals[check.id].add_keys(zip(outcome.keys, values, strict=False))

    def _run_expectations(
        self, checks: list[SuiteCheck], frame: pd.DataFrame, key: Sequence[str]
    ) -> Iterator[tuple[SuiteCheck, ExpectationOutcome]]:
        for check, outcome in zip(checks, self._validator.validate_rows(checks, frame, key), strict=True):
            if outcome.error:
                raise QualityError(f"{check.location}: cannot run {check.name}: {outcome.error}")
            yield check, outcome


class _RowTotals:
    """Totals of a check over all chunks of the new rows."""

    def __init__(self) -> None:
        self.rows = self.failed = 0
        self.success = True
        self.observed: str | None = None
        self.keys: list[tuple[str, str]] = []

    def count(self, rows: int, failed: int | None, success: bool, observed: object = None) -> None:
        """Add the outcome of a chunk.

        Args:
            rows: Number of rows in the chunk.
            failed: Number of rows that fail; `None` if the expectation is about the chunk as a whole, such as a mean.
            success: True if the chunk meets the expectation.
            observed: Observed value, if the expectation is about the chunk as a whole.
        """
        self.rows += rows
        self.success = self.success and success
        if failed is None:
            self.observed = str(observed)
        else:
            self.failed += failed

    def add_keys(self, rows: Iterable[tuple[Mapping[str, object], object]]) -> None:
        """Add keys of faulty rows and their faulty values, up to `_MAX_KEYS` in total."""
        for key, value in islice(rows, _MAX_KEYS - len(self.keys)):
            key_json = json.dumps({name: to_json_value(cell) for name, cell in key.items()})
            self.keys.append((key_json, str(value)[:200]))

    def build_result(self, check: SuiteCheck) -> CheckResult:
        """Build the result of the check. Its argument `mostly` is the minimum share of rows that pass."""
        mostly = check.arguments.get("mostly")
        if isinstance(mostly, int | float):
            self.success = self.failed <= self.rows * (1 - mostly)
        words = self.observed if self.observed is not None else f"{self.failed:,} of {self.rows:,} rows"
        keys = [] if self.success else self.keys[:SHOWN]
        return CheckResult(
            check, self.success, words, self.failed, [json.loads(key) for key, _ in keys], [text for _, text in keys]
        )


def _rechunk(batches: Iterable[pa.RecordBatch], least: int) -> Iterator[pa.Table]:
    """Combine record batches into tables of at least `least` rows, because DuckDB's batches end at each row group."""
    chunk, rows = list[pa.RecordBatch](), 0
    for batch in batches:
        chunk.append(batch)
        rows += batch.num_rows
        if rows >= least:
            yield pa.Table.from_batches(chunk)
            chunk, rows = [], 0
    if chunk:
        yield pa.Table.from_batches(chunk)


def to_json_value(value: object) -> object:
    """Convert a value of a row to a JSON value: bytes to hex, times to ISO 8601, NaN to `None`."""
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    item = getattr(value, "item", None)  # a numpy scalar
    plain = item() if callable(item) else value
    return None if plain != plain or plain is None else plain if isinstance(plain, bool | int | float) else str(plain)
