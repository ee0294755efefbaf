"""Results of expectations: as JSON, as rows of the table `quality_results`, and as SQL that shows the faulty keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from kiln.pipelines.quality.suites import SuiteCheck
from kiln.pipelines.quality.table_checks import TIMES
from kiln.schemas.delta.tables import TABLES

SHOWN: Final = 20
"""maximum number of keys in a result"""
ANY_RANGE: Final = "--from TIME --to TIME"
"""Range of a command in a hint, if no key has a time."""
_MARGIN: Final = timedelta(minutes=1)

Key = Mapping[str, object]


class FaultyKey(NamedTuple):
    """A key that the finder of a table check reports."""

    id: str
    """id of the check"""
    key: str
    words: str


@dataclass(frozen=True)
class CheckResult:
    """Result of one check."""

    check: SuiteCheck
    success: bool
    observed: str
    count: int = 0
    """number of faulty keys"""
    keys: Sequence[Key] = ()
    """up to `SHOWN` faulty keys"""
    words: Sequence[str] = ()
    """description of each key's fault"""
    pending: int = 0
    """number of rows that are not judged yet, because the rows that they refer to may still arrive"""
    span: tuple[datetime | None, datetime | None] = (None, None)
    """times of the first and the last faulty key, if keys have times"""

    @property
    def hint(self) -> str:
        """Advice, with the range of the faulty keys in its commands."""
        first, last = self.span
        if first is None or last is None:
            return fill_range(self.check.hint)
        low, high = first.replace(microsecond=0) - _MARGIN, last.replace(microsecond=0) + _MARGIN
        text = f"--from {low.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ} --to {high.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        return fill_range(self.check.hint, text)

    @property
    def is_error(self) -> bool:
        """True if an expectation of level error has failed."""
        return not self.success and self.check.level == "error"

    @property
    def sql(self) -> str:
        """Query for `kiln sql` that shows the faulty rows; empty if there are none."""
        return _build_sql(self.check, self.keys) if self.keys else ""

    def as_json(self) -> dict[str, object]:
        """Convert to an object as `kiln quality --json` prints it (docs/design/contracts.md, Commands)."""
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
    """Fill the range into the commands of a hint."""
    return hint.replace("{range}", text)


def build_rows(results: Sequence[CheckResult], run: str, at: datetime) -> list[dict[str, object]]:
    """Build rows of the table `quality_results`."""
    return [
        {
            "run_id": run,
            "run_at": at,
            "table_name": each.check.table,
            "expectation": each.check.expectation,
            "column_name": each.check.name.removeprefix(each.check.expectation).strip("()") or None,
            "success": each.success,
            "observed_value": each.observed,
            "unexpected_count": each.count,
            "details": json.dumps(each.as_json(), ensure_ascii=False, default=str),
        }
        for each in results
    ]


def _build_sql(check: SuiteCheck, keys: Sequence[Key]) -> str:
    table, first = check.table, keys[0]
    match check.expectation:
        case "expect_sequences_without_gaps":
            near = f"sequence BETWEEN {first['sequence']} - 2 AND {first['sequence']} + 2"
            where = _build_condition("frames", {name: first[name] for name in ("connection", "direction")})
            return f"SELECT sequence, observed_at, remote_peer FROM frames WHERE {where} AND {near} ORDER BY sequence"
        case "expect_offsets_without_holes":
            near = f"kafka_offset BETWEEN {first['kafka_offset']} - 2 AND {first['kafka_offset']} + 2"
            return f"SELECT * FROM frames WHERE kafka_partition = {first['kafka_partition']} AND {near}"
        case "expect_old_messages_not_to_flood":
            return (
                "SELECT remote_peer, count(*), min(observed_at), max(observed_at) FROM copies "
                f"WHERE {_build_condition('copies', first)} GROUP BY 1 ORDER BY 2 DESC"
            )
        case "expect_batches_to_follow_from_updates":
            where = _build_condition(
                "updates", {name: first[name] for name in first if name not in ("opened_at", "batch_cid")}
            )
            opened = f"TIMESTAMPTZ '{first['opened_at']}'"
            return (
                f"SELECT * FROM updates WHERE {where} AND least(observed_at, log_time) BETWEEN {opened} - "
                f"INTERVAL 5 SECONDS AND {opened} + INTERVAL 5 SECONDS ORDER BY log_partition, log_offset"
            )
        case "expect_table_to_keep_up" | "expect_table_to_be_fresh":
            return f"SELECT max({TIMES.get(table, 'NULL')}) FROM {table}"
    where = " OR ".join(f"({one})" for one in dict.fromkeys(_build_condition(table, key) for key in keys[:5]) if one)
    return f"SELECT * FROM {table} WHERE {where}" if where else ""


def _build_condition(table: str, key: Key) -> str:
    types = {column.name: column.type for column in TABLES[table].columns}
    return " AND ".join(_build_equality(name, value, types[name]) for name, value in key.items() if name in types)


def _build_equality(name: str, value: object, column_type: str) -> str:
    if value is None:
        return f"{name} IS NULL"
    if column_type in ("int", "bigint", "boolean"):
        return f"{name} = {value}"
    literal = {"binary": "from_hex({})", "timestamp": "TIMESTAMPTZ {}"}.get(column_type, "{}")
    text = "'" + str(value).replace("'", "''") + "'"
    return f"{name} = {literal.format(text)}"
