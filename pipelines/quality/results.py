"""Results of data quality checks, as JSON, as rows of the table `quality_results`, and as SQL for the faulty rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from kiln.pipelines.quality.suites import SuiteCheck
from kiln.schemas.delta.tables import TABLES

SHOWN: Final = 20
"""Maximum number of faulty keys in a result."""
ANY_RANGE: Final = "--from TIME --to TIME"
"""Placeholder for the time range in the commands of a hint, if the faulty keys have no times."""
_MARGIN: Final = timedelta(minutes=1)

Key = Mapping[str, object]


@dataclass(frozen=True)
class CheckResult:
    """Result of a data quality check."""

    check: SuiteCheck
    success: bool
    observed: str
    count: int = 0
    """number of faults"""
    keys: Sequence[Key] = ()
    """keys (values by column) of the first `SHOWN` faults"""
    words: Sequence[str] = ()
    """description of each fault in `keys`"""
    pending: int = 0
    """number of new rows that are not checked yet, because rows that belong to them may still arrive"""
    span: tuple[datetime | None, datetime | None] = (None, None)
    """times of the first and the last fault, if the faults have times"""

    @property
    def hint(self) -> str:
        """The check's hint. Its commands get the time range of the faults, with a minute of margin."""
        first, last = self.span
        if first is None or last is None:
            return fill_range(self.check.hint)
        low, high = first.replace(microsecond=0) - _MARGIN, last.replace(microsecond=0) + _MARGIN
        text = f"--from {low.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ} --to {high.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        return fill_range(self.check.hint, text)

    @property
    def is_error(self) -> bool:
        """True if the check failed and its level is `error`."""
        return not self.success and self.check.level == "error"

    @property
    def sql(self) -> str:
        """SQL for `kiln sql` that selects faulty rows; empty if there are no faults."""
        return _build_sql(self.check, self.keys) if self.keys else ""

    def as_json(self) -> dict[str, object]:
        """Convert the result to JSON, as `kiln quality --json` prints it (docs/design/contracts.md, Commands)."""
        check = self.check
        return {
            "table": check.table,
            "expectation": check.expectation,
            "arguments": dict(check.arguments),
            "level": check.level,
            "success": self.success,
            "observed": self.observed,
            "count": self.count,
            "keys": [dict(key) for key in self.keys],
            "words": list(self.words),
            "not_judged": self.pending,
            "hint": self.hint,
            "owner": check.owner,
            "suite": check.location,
            "sql": self.sql,
        }


def fill_range(hint: str, text: str = ANY_RANGE) -> str:
    """Replace `{range}` in the commands of a hint by the options for a time range."""
    return hint.replace("{range}", text)


def build_rows(results: Sequence[CheckResult], run: str, at: datetime) -> list[dict[str, object]]:
    """Build the rows of the table `quality_results` for a check run."""
    return [
        {
            "run_id": run,
            "run_at": at,
            "table_name": result.check.table,
            "expectation": result.check.expectation,
            "column_name": result.check.name.removeprefix(result.check.expectation).strip("()") or None,
            "success": result.success,
            "observed_value": result.observed,
            "unexpected_count": result.count,
            "details": json.dumps(result.as_json(), ensure_ascii=False, default=str),
        }
        for result in results
    ]


def _build_sql(check: SuiteCheck, keys: Sequence[Key]) -> str:
    table = check.table
    if check.show:
        return check.show.format_map(
            {name: _format_literal(value, _find_type(name)) for name, value in keys[0].items()}
        )
    where = " OR ".join(f"({one})" for one in dict.fromkeys(_build_condition(table, key) for key in keys[:5]) if one)
    return f"SELECT * FROM {table} WHERE {where}" if where else ""


def _find_type(name: str) -> str:
    return next((column.type for table in TABLES.values() for column in table.columns if column.name == name), "string")


def _build_condition(table: str, key: Key) -> str:
    types = {column.name: column.type for column in TABLES[table].columns}
    return " AND ".join(_build_equality(name, value, types[name]) for name, value in key.items() if name in types)


def _build_equality(name: str, value: object, column_type: str) -> str:
    return f"{name} IS NULL" if value is None else f"{name} = {_format_literal(value, column_type)}"


def _format_literal(value: object, column_type: str) -> str:
    if column_type in ("int", "bigint", "boolean"):
        return str(value)
    literal = {"binary": "from_hex({})", "timestamp": "TIMESTAMPTZ {}"}.get(column_type, "{}")
    text = "'" + str(value).replace("'", "''") + "'"
    return literal.format(text)
