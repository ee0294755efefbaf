"""Checks of whole tables in DuckDB: each finder adds the new rows of its tables to its state, and reports faulty keys.

The state of a check is the tables whose names begin with `CheckInputs.state_prefix`. So a finder reads each row of the
lake once. A finder returns a query of three columns: `key` (a JSON object), `seen_at` (when the key was on the
wire, or null) and `words` (a description).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import duckdb

from kiln.conf.settings.durations import micros, parse_duration
from kiln.pipelines.delta.duckdb_tables import quote_name
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.frames import HISTORY

FROM_KAFKA: Final = "kafka_partition >= 0"
"""Condition of rows that came through Kafka. Rows from files have a negative partition (docs/design, decision 21).
Their numbers are those of lines, which have gaps and begin anywhere."""

TIMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("frames", "copies", "subscriptions", "controls", "messages"), "observed_at"),
    **dict.fromkeys(("updates", "tips", "quarantine"), "observed_at"),
    "batches": "emitted_at",
    "publications": "published_at",
    "bundles": "first_seen",
    "quarantine_dropped": "dropped_at",
}
"""Time column of each table that has one."""

DUCKDB: Final[Mapping[str, str]] = {
    "string": "VARCHAR",
    "binary": "BLOB",
    "int": "INTEGER",
    "bigint": "BIGINT",
    "boolean": "BOOLEAN",
    "timestamp": "TIMESTAMPTZ",
    "map<string,string>": "MAP(VARCHAR, VARCHAR)",
    "array<string>": "VARCHAR[]",
}
"""DuckDB types by type of `kiln.schemas.delta.tables`."""

KEY_RETENTION: Final = timedelta(days=7)
"""retention of a key in the state, whose size thus depends on the rows of a week, not on the tables"""

_SETTLE: Final = timedelta(minutes=10)
_ANNOUNCED: Final = timedelta(hours=2)
"""retention of the ids of copies: a peer announces a message only within seconds after it received it"""
_REPEATS: Final = timedelta(days=2)
"""maximum age of an update or a message to which a row still refers: more than `dedupe.signed_ttl`"""


@dataclass(frozen=True)
class CheckContext:
    """Context of the checks, next to the tables."""

    now: datetime
    running: bool = False
    """true if the status of the bridge is recent"""
    window: int = 1_000_000
    grace: int = 0
    block_limit: int = 1_000_000
    authors: frozenset[str] | None = None
    only_verified: bool = False
    retention: Mapping[str, timedelta] = field(default_factory=dict)
    """age from which maintenance removes rows, by table"""

    def find_expiry(self, tables: Sequence[str]) -> datetime | None:
        """Find the time of the newest rows whose counterpart in one of the tables may have expired."""
        ages = [self.retention[table] for table in tables if table in self.retention]
        return self.now - min(ages) + _REPEATS if ages else None


class SwappedRange(NamedTuple):
    """A range of time that a backfill run replaced, µs."""

    low: int
    high: int


@dataclass(frozen=True)
class CheckInputs:
    """Inputs of a finder. In `db`, the view `new_TABLE` holds the new rows of each table that the finder names."""

    db: duckdb.DuckDBPyConnection
    state_prefix: str
    check: SuiteCheck
    context: CheckContext
    committed: Mapping[str, datetime]
    """commit time of the newest new row, by table; a table without new rows is absent"""
    schemas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """DuckDB columns and types, by table"""
    select_all: Callable[[str], str] = lambda table: f"FROM new_{table}"
    """builds a query for all rows of a table, new or not; only for faults that a check is about to report"""
    pending: Counter[str] = field(default_factory=Counter)
    """receives under `rows` the number of rows that a finder does not judge yet"""

    def create_state(self, name: str, columns: str) -> str:
        """Create a table of the state if it is missing, and return its name."""
        table = f"{self.state_prefix}_{name}"
        self.db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        return table

    def delete_old(self, table: str, age: timedelta = KEY_RETENTION) -> None:
        """Delete the rows of a state table whose `read_at` is longer ago than `age`."""
        self.db.execute(f"DELETE FROM {table} WHERE read_at < {self.now} - {format_interval(age)}")

    def read_swaps(self) -> list[SwappedRange]:
        """Read the ranges that backfill runs replaced."""
        rows = self.db.execute(
            "SELECT DISTINCT epoch_us(range_from), epoch_us(range_to) FROM "
            f"({self.select_all('backfill_runs')}) WHERE event = 'swapped' AND range_from IS NOT NULL"
        ).fetchall()
        return [SwappedRange._make(row) for row in rows]

    def duration(self, name: str, otherwise: timedelta = _SETTLE) -> timedelta:
        return parse_duration(self.check.arguments.get(name, otherwise))

    def number(self, name: str, otherwise: float) -> float:
        value = self.check.arguments.get(name, otherwise)
        return value if isinstance(value, int | float) else otherwise

    def texts(self, name: str) -> list[str]:
        value = self.check.arguments.get(name, [])
        return [str(each) for each in value] if isinstance(value, list) else [str(value)]

    @property
    def now(self) -> str:
        return format_timestamp(self.context.now)


class CheckReset(Exception):  # noqa: N818 - no error: rows were added where the state has a gap
    """Signals that the check must delete its state and read its tables from the beginning."""


Finder = Callable[[CheckInputs], str]


class TableCheck(NamedTuple):
    find: Finder
    reads: Callable[[SuiteCheck], Sequence[str]]
    """returns the tables that the finder reads"""


def format_timestamp(at: datetime) -> str:
    """Format a time as an SQL literal."""
    return f"TIMESTAMPTZ '{at.isoformat()}'"


def format_interval(length: timedelta) -> str:
    """Format a duration as an SQL expression."""
    return f"to_microseconds({micros(length)})"


def build_key_expression(table: str, columns: Sequence[str]) -> str:
    """Build the SQL expression of a key as a JSON object, with bytes in hex and times in ISO 8601."""
    types = {column.name: column.type for column in TABLES[table].columns}
    formats = {
        "binary": "lower(hex({0}))",
        "timestamp": "strftime({0} AT TIME ZONE 'UTC', '%Y-%m-%dT%H:%M:%S.%fZ')",
    }
    pairs = (f"'{name}', {formats.get(types[name], '{0}').format(quote_name(name))}" for name in columns)
    return f"json_object({', '.join(pairs)})"


def identity_columns(table: str) -> tuple[str, ...]:
    """Return the columns that identify a row: the key of the table, or of `quarantine`."""
    return TABLES[table].key or ("kafka_partition", "kafka_offset", "message_index", "cid", "stage", "reason")


def _time_column(table: str) -> str:
    return TIMES.get(table, "NULL::TIMESTAMPTZ")


# ---------------------------------------------------------------- rows and keys


def check_rule(inputs: CheckInputs) -> str:
    table, broken = inputs.check.table, inputs.create_state("broken", "key JSON, seen_at TIMESTAMPTZ")
    inputs.db.execute(
        f"INSERT INTO {broken} SELECT {build_key_expression(table, identity_columns(table))}, {_time_column(table)} "
        f"FROM new_{table} "
        f"WHERE NOT ({inputs.check.arguments['rule']})"
    )
    return f"SELECT key, seen_at, 'the rule is false' AS words FROM {broken}"


def check_columns(inputs: CheckInputs) -> str:
    expected = {column.name: DUCKDB[column.type] for column in TABLES[inputs.check.table].columns}
    actual = inputs.schemas[inputs.check.table]
    faults = inputs.create_state("wrong", "key JSON, seen_at TIMESTAMPTZ, words VARCHAR")
    inputs.db.execute(f"DELETE FROM {faults}")
    for name, column_type in expected.items():
        if actual.get(name) != column_type:
            words = f"the type is {actual.get(name, 'none: the column is missing')}, and should be {column_type}"
            inputs.db.execute(f"INSERT INTO {faults} VALUES (json_object('column', ?), NULL, ?)", [name, words])
    return f"SELECT key, seen_at, words FROM {faults}"


def check_unique_keys(inputs: CheckInputs) -> str:
    table = inputs.check.table
    columns = inputs.texts("columns") or list(identity_columns(table))
    names = ", ".join(map(quote_name, columns))
    keys = inputs.create_state("keys", "h UBIGINT, seen_at TIMESTAMPTZ, read_at TIMESTAMPTZ")
    twice = inputs.create_state("twice", "key JSON, seen_at TIMESTAMPTZ")
    where = inputs.check.arguments.get("where")
    source = f"(FROM new_{table} WHERE {where})" if where else f"new_{table}"
    within = inputs.check.arguments.get("within")
    near = f"AND old.seen_at > rows.seen_at - {format_interval(parse_duration(within))}" if within else ""
    close = f"AND max(seen_at) - min(seen_at) < {format_interval(parse_duration(within))}" if within else ""
    inputs.db.execute(
        f"CREATE OR REPLACE TEMP TABLE hashes AS SELECT hash({names}) AS h, max({_time_column(table)}) AS seen_at, "
        f"count(*) AS n FROM {source} GROUP BY h"
    )
    # Nearly all hashes occur once. The keys themselves are read only for the others.
    inputs.db.execute(
        "CREATE OR REPLACE TEMP TABLE again AS SELECT h FROM hashes WHERE n > 1 UNION "
        f"SELECT h FROM hashes SEMI JOIN {keys} USING (h)"
    )
    if inputs.db.execute("SELECT 1 FROM again LIMIT 1").fetchone():
        inputs.db.execute(
            f"CREATE OR REPLACE TEMP TABLE rows AS "
            f"SELECT hash({names}) AS h, {names}, {_time_column(table)} AS seen_at "
            f"FROM {source} WHERE hash({names}) IN (SELECT h FROM again)"
        )
        key = build_key_expression(table, columns)
        inputs.db.execute(
            f"INSERT INTO {twice} SELECT {key}, seen_at FROM rows WHERE EXISTS "
            f"(SELECT 1 FROM {keys} old WHERE old.h = rows.h {near})"
        )
        inputs.db.execute(
            f"INSERT INTO {twice} SELECT {key}, seen_at FROM (SELECT {names}, max(seen_at) AS seen_at FROM rows "
            f"GROUP BY ALL HAVING count(*) > 1 {close})"
        )
    inputs.db.execute(f"INSERT INTO {keys} SELECT h, seen_at, {inputs.now} FROM hashes")
    inputs.delete_old(keys)
    for other in inputs.texts("parts_of"):
        if inputs.db.execute(f"SELECT 1 FROM {twice} LIMIT 1").fetchone():
            by = inputs.texts("named_by")
            ours, theirs = ", ".join(f"key->>'{name}'" for name in by), ", ".join(map(quote_name, by))
            inputs.db.execute(
                f"DELETE FROM {twice} WHERE ({ours}) IN (SELECT ({theirs}) FROM ({inputs.select_all(other)}) "
                "GROUP BY ALL HAVING count(*) > 1)"
            )
    return f"SELECT DISTINCT key, seen_at, 'more than one row' AS words FROM {twice}"


# ---------------------------------------------------------------- completeness


def check_sequences(inputs: CheckInputs) -> str:
    ends = inputs.create_state("ends", "connection BLOB, direction VARCHAR, last BIGINT")
    gaps = inputs.create_state(
        "gaps", "connection BLOB, direction VARCHAR, first BIGINT, last BIGINT, seen_at TIMESTAMPTZ"
    )
    inputs.db.execute(
        "CREATE OR REPLACE TEMP VIEW news AS SELECT connection, direction, sequence, observed_at FROM new_frames "
        f"WHERE {FROM_KAFKA}"
    )
    _reset_if(
        inputs,
        f"SELECT 1 FROM news JOIN {gaps} g USING (connection, direction) WHERE sequence BETWEEN g.first AND g.last",
    )
    inputs.db.execute(
        f"""INSERT INTO {gaps} SELECT connection, direction, before + 1, sequence - 1, observed_at FROM (
            SELECT news.*, greatest(coalesce(lag(sequence) OVER (
                PARTITION BY connection, direction ORDER BY sequence), 0), coalesce(ends.last, 0)) AS before
            FROM news LEFT JOIN {ends} ends USING (connection, direction)) WHERE sequence > before + 1"""
    )
    _upsert_greatest(inputs, ends, "connection, direction", "max(sequence)")
    return (
        f"SELECT json_object('connection', lower(hex(connection)), 'direction', direction, 'sequence', first) AS key, "
        f"seen_at, CASE WHEN first = last THEN 'frame ' || first || ' is missing' "
        f"ELSE 'frames ' || first || ' to ' || last || ' are missing' END AS words FROM {gaps}"
        + (" WHERE first > 1" if "frames" in inputs.context.retention else "")  # the first frames may have expired
    )


def check_connections_closed(inputs: CheckInputs) -> str:
    ends = inputs.create_state("ends", "connection BLOB, direction VARCHAR, closed BOOLEAN, seen_at TIMESTAMPTZ")
    inputs.db.execute(
        f"""CREATE OR REPLACE TEMP TABLE merged AS
            SELECT connection, direction, bool_or(closed) AS closed, max(seen_at) AS seen_at
            FROM (SELECT * FROM {ends} UNION ALL
                  SELECT connection, direction, octet_length(payload) = 0, observed_at FROM new_frames
                  WHERE protocol <> 'bep50' AND {FROM_KAFKA}) GROUP BY ALL"""
    )
    inputs.db.execute(f"DELETE FROM {ends}")
    # A connection that has ended in both directions needs no check.
    inputs.db.execute(
        f"INSERT INTO {ends} SELECT * FROM merged WHERE connection NOT IN "
        "(SELECT connection FROM merged GROUP BY connection HAVING count(*) = 2 AND bool_and(closed))"
    )
    settle = format_interval(inputs.duration("settle"))
    return (
        f"SELECT json_object('connection', lower(hex(o.connection)), 'direction', o.direction) AS key, "
        f"c.seen_at AS seen_at, 'the other direction has ended, and this one has no last frame' AS words "
        f"FROM {ends} o JOIN {ends} c ON o.connection = c.connection AND c.closed AND NOT o.closed "
        f"WHERE c.seen_at < (SELECT max(seen_at) FROM {ends}) - {settle} OR c.seen_at < {inputs.now} - {settle}"
    )


def check_offsets(inputs: CheckInputs) -> str:
    ends = inputs.create_state("ends", "kafka_partition INTEGER, last BIGINT")
    holes = inputs.create_state("holes", "kafka_partition INTEGER, first BIGINT, last BIGINT, seen_at TIMESTAMPTZ")
    quarantined = inputs.create_state("refused", "kafka_partition INTEGER, kafka_offset BIGINT, read_at TIMESTAMPTZ")
    inputs.db.execute(
        f"INSERT INTO {quarantined} SELECT DISTINCT kafka_partition, kafka_offset, {inputs.now} FROM "
        "(FROM new_quarantine SELECT kafka_partition, kafka_offset, message_index UNION ALL "
        "FROM new_quarantine_dropped SELECT kafka_partition, kafka_offset, message_index) "
        "WHERE kafka_offset IS NOT NULL AND message_index IS NULL"
    )
    inputs.db.execute(
        "CREATE OR REPLACE TEMP VIEW news AS SELECT kafka_partition, kafka_offset, observed_at FROM new_frames "
        f"WHERE {FROM_KAFKA}"
    )
    _reset_if(
        inputs,
        f"SELECT 1 FROM news JOIN {holes} h USING (kafka_partition) WHERE kafka_offset BETWEEN h.first AND h.last",
    )
    inputs.db.execute(
        f"""INSERT INTO {holes} SELECT kafka_partition, before + 1, kafka_offset - 1, observed_at FROM (
            SELECT news.*, greatest(lag(kafka_offset) OVER (
                PARTITION BY kafka_partition ORDER BY kafka_offset), ends.last) AS before
            FROM news LEFT JOIN {ends} ends USING (kafka_partition)) WHERE kafka_offset > before + 1"""
    )
    _upsert_greatest(inputs, ends, "kafka_partition", "max(kafka_offset)")
    # A whole frame in quarantine is no hole.
    inputs.db.execute(
        f"""DELETE FROM {holes} h WHERE (SELECT count(DISTINCT kafka_offset) FROM {quarantined} r
            WHERE r.kafka_partition = h.kafka_partition AND r.kafka_offset BETWEEN h.first AND h.last)
            = h.last - h.first + 1"""
    )
    inputs.delete_old(quarantined)
    return (
        "SELECT json_object('kafka_partition', kafka_partition, 'kafka_offset', first) AS key, seen_at, "
        f"'offsets ' || first || ' to ' || last || ' have no row' AS words FROM {holes}"
    )


def _upsert_greatest(inputs: CheckInputs, table: str, names: str, newest: str) -> None:
    """Update the column `last` of a state table for the names in `news`, which has the new rows."""
    inputs.db.execute(
        f"CREATE OR REPLACE TEMP TABLE merged AS SELECT {names}, max(last) AS last FROM (SELECT * FROM {table} "
        f"UNION ALL SELECT {names}, {newest} FROM news GROUP BY ALL) GROUP BY ALL"
    )
    inputs.db.execute(f"DELETE FROM {table}")
    inputs.db.execute(f"INSERT INTO {table} SELECT * FROM merged")


def _reset_if(inputs: CheckInputs, sql: str) -> None:
    if inputs.db.execute(f"{sql} LIMIT 1").fetchone():
        raise CheckReset


# ---------------------------------------------------------------- references


class _Reference(NamedTuple):
    """The tables to which a row may refer, and the columns of the reference."""

    name: str
    """name of the column of hashes in the state, and of the table of hashes that exist"""
    tables: list[str]
    columns: list[str]
    their_columns: list[str]


def check_rows_in_tables(inputs: CheckInputs) -> str:
    table, columns = inputs.check.table, inputs.texts("columns")
    references = [_Reference("h", inputs.texts("tables"), columns, inputs.texts("their_columns") or columns)]
    if others := inputs.texts("or_tables"):
        references.append(_Reference("other", others, inputs.texts("or_columns"), inputs.texts("or_columns")))
    pending = inputs.create_state("waits", "h UBIGINT, other UBIGINT, key JSON, seen_at TIMESTAMPTZ, since TIMESTAMPTZ")
    existing = {
        each.name: inputs.create_state(f"have_{each.name}", "h UBIGINT, read_at TIMESTAMPTZ") for each in references
    }
    for each in references:
        for other in each.tables:
            inputs.db.execute(
                f"INSERT INTO {existing[each.name]} SELECT h, {inputs.now} FROM "
                f"(SELECT DISTINCT {_hash(each.their_columns)} AS h FROM new_{other}) "
                f"ANTI JOIN {existing[each.name]} USING (h)"
            )
    if table in inputs.committed:
        since = format_timestamp(inputs.committed[table])
        where = inputs.check.arguments.get("where")
        key_columns = sorted(
            {*columns, *identity_columns(table)}, key=[column.name for column in TABLES[table].columns].index
        )
        missing = [f"{_hash(each.columns)} NOT IN (SELECT h FROM {existing[each.name]})" for each in references]
        inputs.db.execute(
            f"INSERT INTO {pending} SELECT {_hash(columns)}, {_hash(references[-1].columns)}, "
            f"{build_key_expression(table, key_columns)}, {_time_column(table)}, {since} "
            f"FROM new_{table} WHERE {' AND '.join([f'({where})'] * bool(where) + missing)}"
        )
    for each in references:
        inputs.db.execute(f"DELETE FROM {pending} WHERE {each.name} IN (SELECT h FROM {existing[each.name]})")
        inputs.delete_old(existing[each.name], inputs.duration("remember", KEY_RETENTION))
    due = f"since + {format_interval(inputs.duration('settle'))} <= {inputs.now}"
    _forget_expected_gaps(inputs, pending, due, [other for each in references for other in each.tables])
    for each in references:
        for other in each.tables:  # a row may refer to one that is older than the state
            if inputs.db.execute(f"SELECT 1 FROM {pending} WHERE {due} LIMIT 1").fetchone():
                theirs = f"SELECT {_hash(each.their_columns)} FROM ({inputs.select_all(other)})"
                inputs.db.execute(f"DELETE FROM {pending} WHERE {due} AND {each.name} IN ({theirs})")
    _count_pending(inputs, f"FROM {pending} WHERE NOT ({due})")
    where_to = " or ".join(other for each in references for other in each.tables)
    return f"SELECT key, seen_at, 'there is no such row in {where_to}' AS words FROM {pending} WHERE {due}"


def _hash(columns: Sequence[str]) -> str:
    return f"hash({', '.join(map(quote_name, columns))})"


def _count_pending(inputs: CheckInputs, rows: str) -> None:
    """Count rows that are not judged yet."""
    row = inputs.db.execute(f"SELECT count(*) {rows}").fetchone()
    inputs.pending["rows"] += row[0] if row else 0


def _forget_expected_gaps(inputs: CheckInputs, pending: str, due: str, tables: Sequence[str]) -> None:
    """Forget rows whose counterpart Kiln itself has removed: by retention, or with a batch that a swap replaced."""
    expiry = inputs.context.find_expiry(tables)
    if expiry is not None:
        inputs.db.execute(f"DELETE FROM {pending} WHERE seen_at IS NULL OR seen_at < {format_timestamp(expiry)}")
    if inputs.check.table != "batch_tips":
        return
    if inputs.db.execute(f"SELECT 1 FROM {pending} WHERE {due} LIMIT 1").fetchone():
        swaps = inputs.read_swaps()
        cut = " OR ".join(
            f"(epoch_us(opened_at) < {swap.high} AND epoch_us(closed_at) > {swap.high})" for swap in swaps
        )
        if swaps:  # a swap leaves the tips of replaced batches, and the last batch of a range has tips after it
            inputs.db.execute(
                f"DELETE FROM {pending} WHERE {due} AND key->>'batch_cid' NOT IN "
                f"(SELECT batch_cid FROM ({inputs.select_all('batches')}) WHERE NOT ({cut}))"
            )


def check_claims(inputs: CheckInputs) -> str:
    claims = inputs.create_state(
        "claims",
        "network VARCHAR, stream VARCHAR, separator_key VARCHAR, separator_value VARCHAR, source VARCHAR, "
        "from_peer VARCHAR, seen_at TIMESTAMPTZ, read_at TIMESTAMPTZ",
    )
    known = inputs.create_state(
        "known", "network VARCHAR, stream VARCHAR, separator_key VARCHAR, separator_value VARCHAR"
    )
    names = "network, stream, separator_key, separator_value, separator_source, from_peer"
    inputs.db.execute(
        f"CREATE OR REPLACE TEMP TABLE merged AS SELECT network, stream, separator_key, separator_value, source, "
        f"from_peer, max(seen_at) AS seen_at, max(read_at) AS read_at FROM (SELECT * FROM {claims} UNION ALL "
        f"SELECT {names}, max(observed_at), {inputs.now} FROM new_updates WHERE separator_source IN ('topic', 'model') "
        "GROUP BY ALL) GROUP BY ALL"
    )
    inputs.db.execute(f"DELETE FROM {claims}")
    inputs.db.execute(f"INSERT INTO {claims} SELECT * FROM merged")
    inputs.delete_old(claims)
    inputs.db.execute(
        f"INSERT INTO {known} SELECT network, stream, separator_key, separator_value FROM new_streams "
        "WHERE separator_key IS NOT NULL"
    )
    return (
        "SELECT json_object('network', c.network, 'stream', c.stream, 'from_peer', c.from_peer) AS key, "
        "max(c.seen_at) AS seen_at, any_value(c.source || ' claimed ' || c.separator_key || '/' || "
        f"c.separator_value || ', and the genesis names ' || k.separator_key || '/' || k.separator_value) AS words "
        f"FROM {claims} c JOIN {known} k USING (network, stream) WHERE c.separator_value <> k.separator_value "
        "AND (c.source = 'topic' OR c.separator_key = k.separator_key) GROUP BY c.network, c.stream, c.from_peer"
    )


# ---------------------------------------------------------------- volume, mix, repeats, lateness, freshness


def check_old_messages(inputs: CheckInputs) -> str:
    first = inputs.create_state("first", "h UBIGINT, seen_at TIMESTAMPTZ")
    again = inputs.create_state(
        "again", "network VARCHAR, message_id VARCHAR, remote_peer VARCHAR, n BIGINT, seen_at TIMESTAMPTZ"
    )
    after = format_interval(inputs.duration("after", timedelta(minutes=5)))
    h = "hash(network, message_id)"
    inputs.db.execute(
        f"INSERT INTO {first} SELECT h, seen_at FROM (SELECT {h} AS h, min(observed_at) AS seen_at FROM new_copies "
        f"WHERE {FROM_KAFKA} GROUP BY h) ANTI JOIN {first} USING (h)"
    )
    inputs.db.execute(
        f"INSERT INTO {again} SELECT network, message_id, remote_peer, count(*), max(observed_at) FROM new_copies "
        f"JOIN {first} f ON f.h = {h} WHERE observed_at > f.seen_at + {after} AND {FROM_KAFKA} GROUP BY ALL"
    )
    day = "(SELECT max(seen_at) FROM {0}) - INTERVAL 24 HOURS"
    for table in (first, again):
        inputs.db.execute(f"DELETE FROM {table} WHERE seen_at < {day.format(table)}")
    return (
        "SELECT json_object('network', network, 'message_id', message_id) AS key, max(seen_at) AS seen_at, "
        "sum(n)::BIGINT || ' late copies, most of them from ' || arg_max(remote_peer, n) AS words "
        "FROM (SELECT network, message_id, remote_peer, sum(n) AS n, max(seen_at) AS seen_at "
        f"FROM {again} GROUP BY ALL) GROUP BY network, message_id HAVING sum(n) >= {inputs.number('most', 100)}"
    )


def check_copies(inputs: CheckInputs) -> str:
    hours = inputs.create_state("hours", "hour TIMESTAMPTZ, copies BIGINT, messages BIGINT")
    inputs.db.execute(
        f"INSERT INTO {hours} SELECT date_trunc('hour', observed_at), count(*), 0 FROM new_copies WHERE {FROM_KAFKA} "
        "GROUP BY 1 UNION ALL SELECT date_trunc('hour', observed_at), 0, count(*) FROM new_messages "
        f"WHERE remote_peer <> '' AND {FROM_KAFKA} GROUP BY 1"
    )
    inputs.db.execute(f"DELETE FROM {hours} WHERE hour < (SELECT max(hour) FROM {hours}) - INTERVAL 24 HOURS")
    return (
        "SELECT json_object('copies', sum(copies)::BIGINT, 'messages', sum(messages)::BIGINT) AS key, "
        "max(hour) AS seen_at, round(sum(copies) / sum(messages), 1) || ' copies of a message' AS words "
        f"FROM {hours} HAVING sum(messages) > 0 AND sum(copies) > sum(messages) * {inputs.number('most', 20)}"
    )


def check_batch_lateness(inputs: CheckInputs) -> str:
    late = inputs.create_state("late", "seen_at TIMESTAMPTZ, late BIGINT")
    inputs.db.execute(
        f"INSERT INTO {late} SELECT emitted_at, epoch_us(emitted_at) - epoch_us(closed_at) FROM new_batches "
        "WHERE origin = 'LIVE'"
    )
    inputs.db.execute(f"DELETE FROM {late} WHERE seen_at < (SELECT max(seen_at) FROM {late}) - INTERVAL 1 HOUR")
    most, minutes = micros(inputs.duration("most")), inputs.number("minutes", 5)
    # A cold start, or a minute without Kafka, makes many batches late at once, and needs no action.
    late_minutes = f"count(DISTINCT date_trunc('minute', seen_at)) FILTER (late > {most})"
    return (
        "SELECT json_object('batches', count(*)) AS key, max(seen_at) AS seen_at, 'p99 ' || "
        f"round(quantile_cont(late, 0.99) / 1e6, 1) || ' s late, in ' || {late_minutes} || ' minutes' AS words "
        f"FROM {late} HAVING count(*) >= 100 AND quantile_cont(late, 0.99) > {most} AND {late_minutes} > {minutes}"
    )


def check_clocks(inputs: CheckInputs) -> str:
    minutes = inputs.create_state("minutes", "peer VARCHAR, minute TIMESTAMPTZ, least BIGINT")
    inputs.db.execute(
        f"INSERT INTO {minutes} SELECT local_peer, date_trunc('minute', kafka_timestamp), "
        "min(epoch_us(kafka_timestamp) - epoch_us(observed_at)) FROM new_frames WHERE origin = 'LIVE' GROUP BY ALL"
    )
    inputs.db.execute(f"DELETE FROM {minutes} WHERE minute < (SELECT max(minute) FROM {minutes}) - INTERVAL 10 MINUTES")
    within = micros(inputs.duration("within"))
    # Waiting for Kafka only delays frames, so the fastest frame shows the difference of the clocks.
    return (
        "SELECT json_object('local_peer', peer) AS key, max(minute) AS seen_at, 'the clock of the bridge is ' || "
        "round(abs(min(least)) / 1e6)::BIGINT || ' s ' || if(min(least) > 0, 'behind', 'ahead of') || "
        f"' the clock of the broker' AS words FROM {minutes} GROUP BY peer HAVING abs(min(least)) > {within}"
    )


def check_table_lag(inputs: CheckInputs) -> str:
    table, other = inputs.check.table, str(inputs.check.arguments["than"])
    newest = inputs.create_state("newest", "name VARCHAR, seen_at TIMESTAMPTZ")
    for name in (table, other):
        inputs.db.execute(
            f"INSERT INTO {newest} SELECT '{name}', max({_time_column(name)}) FROM new_{name}{_select_live(name)}"
        )
    _delete_older(inputs, newest)
    within = format_interval(inputs.duration("within"))
    return (
        f"SELECT json_object('table', '{table}') AS key, ahead.seen_at AS seen_at, coalesce('the newest row is of ' || "
        f"strftime(own.seen_at AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S'), 'there is no row') || "
        f"', and that of {other} of ' || "
        "strftime(ahead.seen_at AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S') AS words "
        f"FROM (SELECT seen_at FROM {newest} WHERE name = '{other}') ahead "
        f"LEFT JOIN (SELECT seen_at FROM {newest} WHERE name = '{table}') own ON true "
        f"WHERE ahead.seen_at IS NOT NULL AND (own.seen_at IS NULL OR own.seen_at < ahead.seen_at - {within})"
    )


def check_freshness(inputs: CheckInputs) -> str:
    table = inputs.check.table
    newest = inputs.create_state("newest", "name VARCHAR, seen_at TIMESTAMPTZ")
    inputs.db.execute(
        f"INSERT INTO {newest} SELECT '{table}', max({_time_column(table)}) FROM new_{table}{_select_live(table)}"
    )
    _delete_older(inputs, newest)
    within = format_interval(inputs.duration("within"))
    return (
        f"SELECT json_object('table', name) AS key, seen_at, 'the newest LIVE row is of ' || "
        f"strftime(seen_at AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S') AS words FROM {newest} "
        f"WHERE {str(inputs.context.running).lower()} AND seen_at < {inputs.now} - {within}"
    )


def _select_live(table: str) -> str:
    return " WHERE origin = 'LIVE'" if any(column.name == "origin" for column in TABLES[table].columns) else ""


def _delete_older(inputs: CheckInputs, newest: str) -> None:
    inputs.db.execute(
        f"CREATE OR REPLACE TEMP TABLE merged AS SELECT name, max(seen_at) AS seen_at FROM {newest} GROUP BY name"
    )
    inputs.db.execute(f"DELETE FROM {newest}")
    inputs.db.execute(f"INSERT INTO {newest} SELECT * FROM merged WHERE seen_at IS NOT NULL")


def check_volume(inputs: CheckInputs) -> str:
    hours = inputs.create_state("hours", "type VARCHAR, hour TIMESTAMPTZ, n BIGINT")
    inputs.db.execute(
        f"INSERT INTO {hours} SELECT type, date_trunc('hour', observed_at), count(*) FROM new_messages "
        "WHERE origin = 'LIVE' GROUP BY ALL"
    )
    inputs.db.execute(f"DELETE FROM {hours} WHERE hour < (SELECT max(hour) FROM {hours}) - INTERVAL 8 DAYS")
    factor, least = inputs.number("factor", 4), inputs.number("least", 1000)
    return f"""WITH last AS (SELECT max(hour) - INTERVAL 1 HOUR AS hour FROM {hours}),
        days AS (SELECT each.hour FROM (SELECT DISTINCT hour FROM {hours}) each, last
                 WHERE each.hour < last.hour AND date_diff('hour', each.hour, last.hour) % 24 = 0),
        known AS (SELECT DISTINCT type FROM {hours}),
        before AS (SELECT known.type, median(coalesce(n, 0)) AS n, count(*) AS days FROM days CROSS JOIN known
                   LEFT JOIN (SELECT type, hour, sum(n) AS n FROM {hours} GROUP BY ALL) h
                   ON h.hour = days.hour AND h.type = known.type GROUP BY known.type),
        now_ AS (SELECT known.type, coalesce(sum(n), 0) AS n FROM known CROSS JOIN last
                 LEFT JOIN {hours} h ON h.hour = last.hour AND h.type = known.type GROUP BY known.type)
        SELECT json_object('type', type) AS key, (SELECT hour FROM last) AS seen_at,
            now_.n::BIGINT || ' in the hour, and ' || before.n::BIGINT || ' in that hour of the days before' AS words
        FROM now_ JOIN before USING (type)
        WHERE days >= 3 AND greatest(now_.n, before.n) >= {least}
            AND (now_.n > before.n * {factor} OR now_.n * {factor} < before.n)"""


def check_announcements(inputs: CheckInputs) -> str:
    hours = inputs.create_state("hours", "hour TIMESTAMPTZ, n BIGINT, missing BIGINT")
    waits = inputs.create_state("waits", "h UBIGINT, hour TIMESTAMPTZ, since TIMESTAMPTZ")
    have = inputs.create_state("have", "h UBIGINT, read_at TIMESTAMPTZ")
    inputs.db.execute(
        f"INSERT INTO {have} SELECT h, {inputs.now} FROM (SELECT DISTINCT hash(message_id) AS h FROM new_copies) "
        f"ANTI JOIN {have} USING (h)"
    )
    if "controls" in inputs.committed:
        since = format_timestamp(inputs.committed["controls"])
        inputs.db.execute(
            f"INSERT INTO {waits} SELECT hash(id), min(hour), {since} FROM (SELECT unnest(message_ids) AS id, "
            "date_trunc('hour', observed_at) AS hour FROM new_controls WHERE kind = 'IHAVE' AND direction = 'IN' "
            f"AND {FROM_KAFKA}) GROUP BY id"
        )
    due = f"since + {format_interval(inputs.duration('settle'))} <= {inputs.now}"
    inputs.db.execute(
        f"INSERT INTO {hours} SELECT hour, count(*), count(*) FILTER (WHERE h NOT IN (SELECT h FROM {have})) "
        f"FROM {waits} WHERE {due} GROUP BY hour"
    )
    inputs.db.execute(f"DELETE FROM {waits} WHERE {due}")
    inputs.db.execute(f"DELETE FROM {hours} WHERE hour < (SELECT max(hour) FROM {hours}) - INTERVAL 24 HOURS")
    inputs.delete_old(have, _ANNOUNCED)
    _count_pending(inputs, f"FROM {waits}")
    return (
        "SELECT json_object('kind', 'IHAVE') AS key, max(hour) AS seen_at, "
        f"sum(missing)::BIGINT || ' of ' || sum(n)::BIGINT || ' announced messages never came' AS words FROM {hours} "
        f"HAVING sum(missing) >= {inputs.number('least', 20)} "
        f"AND sum(missing) > {inputs.number('share', 0.05)} * sum(n)"
    )


def check_quarantine_share(inputs: CheckInputs) -> str:
    hours = inputs.create_state("hours", "reason VARCHAR, hour TIMESTAMPTZ, n BIGINT")
    inputs.db.execute(
        f"INSERT INTO {hours} SELECT stage || ': ' || reason, date_trunc('hour', observed_at), "
        f"count(*) FROM new_quarantine WHERE stage <> '{HISTORY}' GROUP BY ALL UNION ALL "
        "SELECT '', date_trunc('hour', observed_at), count(*) FROM new_copies GROUP BY ALL"
    )
    inputs.db.execute(f"DELETE FROM {hours} WHERE hour < (SELECT max(hour) FROM {hours}) - INTERVAL 24 HOURS")
    return (
        "SELECT json_object('stage', split_part(reason, ': ', 1), 'reason', split_part(reason, ': ', 2)) AS key, "
        f"max(hour) AS seen_at, sum(n)::BIGINT || ' rows' AS words FROM {hours} WHERE reason <> '' GROUP BY reason "
        f"HAVING sum(n) >= {inputs.number('least', 20)} AND sum(n) > {inputs.number('share', 0.05)} * "
        f"(SELECT coalesce(sum(n), 0) FROM {hours} WHERE reason = '')"
    )
