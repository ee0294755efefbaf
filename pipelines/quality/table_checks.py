"""What spans rows, looked at by DuckDB: each finder takes the new rows of its tables into a small memory, and says
which keys are at fault by now.

The memory of a check is tables in the state of the checks, whose names begin with `Look.memory`. So a finder reads
each row of the lake once. A finder returns a query of three columns: `key` (a JSON object), `seen_at` (when the key was
on the wire; null where nothing says so) and `words`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import duckdb

from kiln.conf.settings.durations import micros, parse_duration
from kiln.pipelines.delta.duckdb_tables import quoted
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.schemas.delta.tables import TABLES

TIMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("frames", "copies", "messages", "updates", "tips", "quarantine"), "observed_at"),
    "batches": "emitted_at",
    "publications": "published_at",
    "bundles": "first_seen",
    "dropped": "dropped_at",
}
"""The column that says when a row's fact was; the other tables have none."""

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
"""The types of `kiln.schemas.delta.tables` in DuckDB."""

REMEMBERED: Final = timedelta(days=7)
"""How long a check remembers a key that it has read. So the memory of the checks grows with the rows of a week, and not
with the tables."""

_SETTLE: Final = timedelta(minutes=10)


@dataclass(frozen=True)
class CheckContext:
    """What the checks know beside the tables. `window`, `grace`: µs. `running`: whether a bridge says that it runs."""

    now: datetime
    running: bool = False
    window: int = 1_000_000
    grace: int = 0
    block_limit: int = 1_000_000
    authors: frozenset[str] | None = None
    only_verified: bool = False


@dataclass(frozen=True)
class CheckInputs:
    """What a finder sees. In `db` the view `new_TABLE` holds the new rows of each table that the finder names."""

    db: duckdb.DuckDBPyConnection
    memory: str
    check: SuiteCheck
    facts: CheckContext
    committed: Mapping[str, datetime]
    """by table: when the newest of the new rows was committed; a table without new rows is absent"""
    schemas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """by table: columns and types, as DuckDB has them"""
    whole: Callable[[str], str] = lambda table: f"FROM new_{table}"
    """a SELECT of all rows of a table, new or not: for what a check is about to report alone"""

    def keep(self, name: str, columns: str) -> str:
        """A table of the memory, made where it is missing."""
        table = f"{self.memory}_{name}"
        self.db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        return table

    def forget(self, table: str) -> None:
        """Forgets the rows of a table of the memory whose `read_at` is longer ago than REMEMBERED."""
        self.db.execute(f"DELETE FROM {table} WHERE read_at < {self.now} - {span(REMEMBERED)}")

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
        return stamp(self.facts.now)


class CheckReset(Exception):  # noqa: N818 - no error: rows came where the memory says that rows are missing
    """The check forgets what it remembers, and reads its tables from their beginning."""


Finder = Callable[[CheckInputs], str]


class TableCheck(NamedTuple):
    find: Finder
    reads: Callable[[SuiteCheck], Sequence[str]]
    """the tables whose rows the finder reads"""


def stamp(at: datetime) -> str:
    """A time in SQL."""
    return f"TIMESTAMPTZ '{at.isoformat()}'"


def span(length: timedelta) -> str:
    """A length of time in SQL."""
    return f"to_microseconds({micros(length)})"


def key_of(table: str, columns: Sequence[str]) -> str:
    """The key of a row as a JSON object, in SQL: bytes in hex, times in ISO 8601."""
    types = {column.name: column.type for column in TABLES[table].columns}
    told = {
        "binary": "lower(hex({0}))",
        "timestamp": "strftime({0} AT TIME ZONE 'UTC', '%Y-%m-%dT%H:%M:%S.%fZ')",
    }
    pairs = (f"'{name}', {told.get(types[name], '{0}').format(quoted(name))}" for name in columns)
    return f"json_object({', '.join(pairs)})"


def identity(table: str) -> tuple[str, ...]:
    """The columns that name a row: the key, or the next best."""
    return TABLES[table].key or ("kafka_partition", "kafka_offset", "message_index", "cid", "stage", "reason")


def _at(table: str) -> str:
    return TIMES.get(table, "NULL::TIMESTAMPTZ")


# ---------------------------------------------------------------- rows and keys


def rule_holds(look: CheckInputs) -> str:
    table, broken = look.check.table, look.keep("broken", "key JSON, seen_at TIMESTAMPTZ")
    look.db.execute(
        f"INSERT INTO {broken} SELECT {key_of(table, identity(table))}, {_at(table)} FROM new_{table} "
        f"WHERE NOT ({look.check.arguments['rule']})"
    )
    return f"SELECT key, seen_at, 'the rule is false' AS words FROM {broken}"


def columns_are_there(look: CheckInputs) -> str:
    wanted = {column.name: DUCKDB[column.type] for column in TABLES[look.check.table].columns}
    have = look.schemas[look.check.table]
    wrong = [
        (name, f"the type is {have.get(name, 'none: the column is missing')}, and should be {kind}")
        for name, kind in wanted.items()
        if have.get(name) != kind
    ]
    found = look.keep("wrong", "key JSON, seen_at TIMESTAMPTZ, words VARCHAR")
    look.db.execute(f"DELETE FROM {found}")
    for name, words in wrong:
        look.db.execute(f"INSERT INTO {found} VALUES (json_object('column', ?), NULL, ?)", [name, words])
    return f"SELECT key, seen_at, words FROM {found}"


def keys_are_unique(look: CheckInputs) -> str:
    table = look.check.table
    columns = look.texts("columns") or list(identity(table))
    names = ", ".join(map(quoted, columns))
    keys = look.keep("keys", "h UBIGINT, seen_at TIMESTAMPTZ, read_at TIMESTAMPTZ")
    twice = look.keep("twice", "key JSON, seen_at TIMESTAMPTZ")
    within = look.check.arguments.get("within")
    near = f"AND old.seen_at > rows.seen_at - {span(parse_duration(within))}" if within else ""
    close = f"AND max(seen_at) - min(seen_at) < {span(parse_duration(within))}" if within else ""
    look.db.execute(
        f"CREATE OR REPLACE TEMP TABLE hashes AS SELECT hash({names}) AS h, max({_at(table)}) AS seen_at, "
        f"count(*) AS n FROM new_{table} GROUP BY h"
    )
    # Rows of one key have one hash, and nearly all hashes are there once: the keys themselves are read for the rest.
    look.db.execute(
        "CREATE OR REPLACE TEMP TABLE again AS SELECT h FROM hashes WHERE n > 1 UNION "
        f"SELECT h FROM hashes SEMI JOIN {keys} USING (h)"
    )
    if look.db.execute("SELECT 1 FROM again LIMIT 1").fetchone():
        look.db.execute(
            f"CREATE OR REPLACE TEMP TABLE rows AS SELECT hash({names}) AS h, {names}, {_at(table)} AS seen_at "
            f"FROM new_{table} WHERE hash({names}) IN (SELECT h FROM again)"
        )
        key = key_of(table, columns)
        look.db.execute(
            f"INSERT INTO {twice} SELECT {key}, seen_at FROM rows WHERE EXISTS "
            f"(SELECT 1 FROM {keys} old WHERE old.h = rows.h {near})"
        )
        look.db.execute(
            f"INSERT INTO {twice} SELECT {key}, seen_at FROM (SELECT {names}, max(seen_at) AS seen_at FROM rows "
            f"GROUP BY ALL HAVING count(*) > 1 {close})"
        )
    look.db.execute(f"INSERT INTO {keys} SELECT h, seen_at, {look.now} FROM hashes")
    look.forget(keys)
    for whole in look.texts("parts_of"):
        if look.db.execute(f"SELECT 1 FROM {twice} LIMIT 1").fetchone():
            by = look.texts("named_by")
            ours, theirs = ", ".join(f"key->>'{name}'" for name in by), ", ".join(map(quoted, by))
            look.db.execute(
                f"DELETE FROM {twice} WHERE ({ours}) IN (SELECT ({theirs}) FROM ({look.whole(whole)}) "
                "GROUP BY ALL HAVING count(*) > 1)"
            )
    return f"SELECT DISTINCT key, seen_at, 'more than one row' AS words FROM {twice}"


# ---------------------------------------------------------------- completeness


def sequences_have_no_gaps(look: CheckInputs) -> str:
    ends = look.keep("ends", "connection BLOB, direction VARCHAR, last BIGINT")
    gaps = look.keep("gaps", "connection BLOB, direction VARCHAR, first BIGINT, last BIGINT, seen_at TIMESTAMPTZ")
    look.db.execute(
        "CREATE OR REPLACE TEMP VIEW news AS SELECT connection, direction, sequence, observed_at FROM new_frames"
    )
    _start_again_where(
        look,
        f"SELECT 1 FROM news JOIN {gaps} g USING (connection, direction) WHERE sequence BETWEEN g.first AND g.last",
    )
    look.db.execute(
        f"""INSERT INTO {gaps} SELECT connection, direction, before + 1, sequence - 1, observed_at FROM (
            SELECT news.*, greatest(coalesce(lag(sequence) OVER (
                PARTITION BY connection, direction ORDER BY sequence), 0), coalesce(ends.last, 0)) AS before
            FROM news LEFT JOIN {ends} ends USING (connection, direction)) WHERE sequence > before + 1"""
    )
    _newest(look, ends, "connection, direction", "max(sequence)")
    return (
        f"SELECT json_object('connection', lower(hex(connection)), 'direction', direction, 'sequence', first) AS key, "
        f"seen_at, CASE WHEN first = last THEN 'frame ' || first || ' is missing' "
        f"ELSE 'frames ' || first || ' to ' || last || ' are missing' END AS words FROM {gaps}"
    )


def connections_are_closed(look: CheckInputs) -> str:
    ends = look.keep("ends", "connection BLOB, direction VARCHAR, closed BOOLEAN, seen_at TIMESTAMPTZ")
    look.db.execute(
        f"""CREATE OR REPLACE TEMP TABLE merged AS
            SELECT connection, direction, bool_or(closed) AS closed, max(seen_at) AS seen_at
            FROM (SELECT * FROM {ends} UNION ALL
                  SELECT connection, direction, octet_length(payload) = 0, observed_at FROM new_frames
                  WHERE protocol <> 'bep50') GROUP BY ALL"""
    )
    look.db.execute(f"DELETE FROM {ends}")
    # A connection that both directions have ended says nothing more.
    look.db.execute(
        f"INSERT INTO {ends} SELECT * FROM merged WHERE connection NOT IN "
        "(SELECT connection FROM merged GROUP BY connection HAVING count(*) = 2 AND bool_and(closed))"
    )
    settle = span(look.duration("settle"))
    return (
        f"SELECT json_object('connection', lower(hex(o.connection)), 'direction', o.direction) AS key, "
        f"c.seen_at AS seen_at, 'the other direction has ended, and this one has no last frame' AS words "
        f"FROM {ends} o JOIN {ends} c ON o.connection = c.connection AND c.closed AND NOT o.closed "
        f"WHERE c.seen_at < (SELECT max(seen_at) FROM {ends}) - {settle} OR c.seen_at < {look.now} - {settle}"
    )


def offsets_have_no_holes(look: CheckInputs) -> str:
    ends = look.keep("ends", "kafka_partition INTEGER, last BIGINT")
    holes = look.keep("holes", "kafka_partition INTEGER, first BIGINT, last BIGINT, seen_at TIMESTAMPTZ")
    refused = look.keep("refused", "kafka_partition INTEGER, kafka_offset BIGINT, read_at TIMESTAMPTZ")
    look.db.execute(
        f"INSERT INTO {refused} SELECT DISTINCT kafka_partition, kafka_offset, {look.now} FROM "
        "(FROM new_quarantine SELECT kafka_partition, kafka_offset, message_index UNION ALL "
        "FROM new_dropped SELECT kafka_partition, kafka_offset, message_index) "
        "WHERE kafka_offset IS NOT NULL AND message_index IS NULL"
    )
    look.db.execute(
        "CREATE OR REPLACE TEMP VIEW news AS SELECT kafka_partition, kafka_offset, observed_at FROM new_frames"
    )
    _start_again_where(
        look,
        f"SELECT 1 FROM news JOIN {holes} h USING (kafka_partition) WHERE kafka_offset BETWEEN h.first AND h.last",
    )
    look.db.execute(
        f"""INSERT INTO {holes} SELECT kafka_partition, before + 1, kafka_offset - 1, observed_at FROM (
            SELECT news.*, greatest(lag(kafka_offset) OVER (
                PARTITION BY kafka_partition ORDER BY kafka_offset), ends.last) AS before
            FROM news LEFT JOIN {ends} ends USING (kafka_partition)) WHERE kafka_offset > before + 1"""
    )
    _newest(look, ends, "kafka_partition", "max(kafka_offset)")
    # whole frames in quarantine are no hole
    look.db.execute(
        f"""DELETE FROM {holes} h WHERE (SELECT count(DISTINCT kafka_offset) FROM {refused} r
            WHERE r.kafka_partition = h.kafka_partition AND r.kafka_offset BETWEEN h.first AND h.last)
            = h.last - h.first + 1"""
    )
    look.forget(refused)
    return (
        "SELECT json_object('kafka_partition', kafka_partition, 'kafka_offset', first) AS key, seen_at, "
        f"'offsets ' || first || ' to ' || last || ' have no row' AS words FROM {holes}"
    )


def _newest(look: CheckInputs, table: str, names: str, newest: str) -> None:
    """Takes the newest of `news` into a table of `names` and `last`."""
    look.db.execute(
        f"CREATE OR REPLACE TEMP TABLE merged AS SELECT {names}, max(last) AS last FROM (SELECT * FROM {table} "
        f"UNION ALL SELECT {names}, {newest} FROM news GROUP BY ALL) GROUP BY ALL"
    )
    look.db.execute(f"DELETE FROM {table}")
    look.db.execute(f"INSERT INTO {table} SELECT * FROM merged")


def _start_again_where(look: CheckInputs, sql: str) -> None:
    if look.db.execute(f"{sql} LIMIT 1").fetchone():
        raise CheckReset


# ---------------------------------------------------------------- references


def rows_are_in_tables(look: CheckInputs) -> str:
    table, columns = look.check.table, look.texts("columns")
    theirs = ", ".join(map(quoted, look.texts("their_columns") or columns))
    have = look.keep("have", "h UBIGINT, read_at TIMESTAMPTZ")
    waits = look.keep("waits", "h UBIGINT, key JSON, seen_at TIMESTAMPTZ, since TIMESTAMPTZ")
    for other in look.texts("tables"):
        look.db.execute(
            f"INSERT INTO {have} SELECT h, {look.now} FROM (SELECT DISTINCT hash({theirs}) AS h FROM new_{other}) "
            f"ANTI JOIN {have} USING (h)"
        )
    if table in look.committed:
        names = ", ".join(map(quoted, columns))
        since = stamp(look.committed[table])
        where = look.check.arguments.get("where")
        also = sorted({*columns, *identity(table)}, key=[column.name for column in TABLES[table].columns].index)
        look.db.execute(
            f"INSERT INTO {waits} SELECT hash({names}) AS h, {key_of(table, also)}, {_at(table)}, {since} "
            f"FROM new_{table} WHERE {f'({where}) AND' if where else ''} hash({names}) NOT IN (SELECT h FROM {have})"
        )
    look.db.execute(f"DELETE FROM {waits} WHERE h IN (SELECT h FROM {have})")
    look.forget(have)
    due = f"since + {span(look.duration('settle'))} <= {look.now}"
    for other in look.texts("tables"):  # a row may refer to one that is forgotten
        if look.db.execute(f"SELECT 1 FROM {waits} WHERE {due} LIMIT 1").fetchone():
            look.db.execute(
                f"DELETE FROM {waits} WHERE {due} AND h IN (SELECT hash({theirs}) FROM ({look.whole(other)}))"
            )
    where_to = " or ".join(look.texts("tables"))
    return f"SELECT key, seen_at, 'there is no such row in {where_to}' AS words FROM {waits} WHERE {due}"


def claims_agree(look: CheckInputs) -> str:
    claims = look.keep(
        "claims",
        "network VARCHAR, stream VARCHAR, separator_key VARCHAR, separator_value VARCHAR, source VARCHAR, "
        "from_peer VARCHAR, seen_at TIMESTAMPTZ, read_at TIMESTAMPTZ",
    )
    known = look.keep("known", "network VARCHAR, stream VARCHAR, separator_key VARCHAR, separator_value VARCHAR")
    names = "network, stream, separator_key, separator_value, separator_source, from_peer"
    look.db.execute(
        f"CREATE OR REPLACE TEMP TABLE merged AS SELECT network, stream, separator_key, separator_value, source, "
        f"from_peer, max(seen_at) AS seen_at, max(read_at) AS read_at FROM (SELECT * FROM {claims} UNION ALL "
        f"SELECT {names}, max(observed_at), {look.now} FROM new_updates WHERE separator_source IN ('topic', 'model') "
        "GROUP BY ALL) GROUP BY ALL"
    )
    look.db.execute(f"DELETE FROM {claims}")
    look.db.execute(f"INSERT INTO {claims} SELECT * FROM merged")
    look.forget(claims)
    look.db.execute(
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


def old_messages_do_not_flood(look: CheckInputs) -> str:
    first = look.keep("first", "h UBIGINT, seen_at TIMESTAMPTZ")
    again = look.keep("again", "network VARCHAR, message VARCHAR, remote_peer VARCHAR, n BIGINT, seen_at TIMESTAMPTZ")
    after = span(look.duration("after", timedelta(minutes=5)))
    h = "hash(network, message)"
    look.db.execute(
        f"INSERT INTO {first} SELECT h, seen_at FROM (SELECT {h} AS h, min(observed_at) AS seen_at FROM new_copies "
        f"GROUP BY h) ANTI JOIN {first} USING (h)"
    )
    look.db.execute(
        f"INSERT INTO {again} SELECT network, message, remote_peer, count(*), max(observed_at) FROM new_copies "
        f"JOIN {first} f ON f.h = {h} WHERE observed_at > f.seen_at + {after} GROUP BY ALL"
    )
    day = "(SELECT max(seen_at) FROM {0}) - INTERVAL 24 HOURS"
    for table in (first, again):
        look.db.execute(f"DELETE FROM {table} WHERE seen_at < {day.format(table)}")
    return (
        "SELECT json_object('network', network, 'message', message) AS key, max(seen_at) AS seen_at, sum(n)::BIGINT || "
        "' late copies, most of them from ' || arg_max(remote_peer, n) AS words "
        f"FROM (SELECT network, message, remote_peer, sum(n) AS n, max(seen_at) AS seen_at FROM {again} GROUP BY ALL) "
        f"GROUP BY network, message HAVING sum(n) >= {look.number('most', 100)}"
    )


def copies_are_few(look: CheckInputs) -> str:
    hours = look.keep("hours", "hour TIMESTAMPTZ, copies BIGINT, messages BIGINT")
    look.db.execute(
        f"INSERT INTO {hours} SELECT date_trunc('hour', observed_at), count(*), 0 FROM new_copies GROUP BY 1 UNION ALL "
        "SELECT date_trunc('hour', observed_at), 0, count(*) FROM new_messages WHERE remote_peer <> '' GROUP BY 1"
    )
    look.db.execute(f"DELETE FROM {hours} WHERE hour < (SELECT max(hour) FROM {hours}) - INTERVAL 24 HOURS")
    return (
        "SELECT json_object('copies', sum(copies)::BIGINT, 'messages', sum(messages)::BIGINT) AS key, "
        "max(hour) AS seen_at, round(sum(copies) / sum(messages), 1) || ' copies of a message' AS words "
        f"FROM {hours} HAVING sum(messages) > 0 AND sum(copies) > sum(messages) * {look.number('most', 20)}"
    )


def batches_are_in_time(look: CheckInputs) -> str:
    late = look.keep("late", "seen_at TIMESTAMPTZ, late BIGINT")
    look.db.execute(
        f"INSERT INTO {late} SELECT emitted_at, epoch_us(emitted_at) - epoch_us(closed_at) FROM new_batches "
        "WHERE origin = 'LIVE'"
    )
    look.db.execute(f"DELETE FROM {late} WHERE seen_at < (SELECT max(seen_at) FROM {late}) - INTERVAL 1 HOUR")
    most, minutes = micros(look.duration("most")), look.number("minutes", 5)
    # A cold start, or a minute without Kafka, makes many batches late at once, and nobody has anything to do about it.
    of_late = f"count(DISTINCT date_trunc('minute', seen_at)) FILTER (late > {most})"
    return (
        "SELECT json_object('batches', count(*)) AS key, max(seen_at) AS seen_at, 'p99 ' || "
        f"round(quantile_cont(late, 0.99) / 1e6, 1) || ' s late, in ' || {of_late} || ' minutes' AS words "
        f"FROM {late} HAVING count(*) >= 100 AND quantile_cont(late, 0.99) > {most} AND {of_late} > {minutes}"
    )


def clocks_agree(look: CheckInputs) -> str:
    minutes = look.keep("minutes", "peer VARCHAR, minute TIMESTAMPTZ, least BIGINT")
    look.db.execute(
        f"INSERT INTO {minutes} SELECT local_peer, date_trunc('minute', kafka_timestamp), "
        "min(epoch_us(kafka_timestamp) - epoch_us(observed_at)) FROM new_frames WHERE origin = 'LIVE' GROUP BY ALL"
    )
    look.db.execute(f"DELETE FROM {minutes} WHERE minute < (SELECT max(minute) FROM {minutes}) - INTERVAL 10 MINUTES")
    within = micros(look.duration("within"))
    # Frames that waited for Kafka are late and never early, so it is the quickest frame that tells the clocks apart.
    return (
        "SELECT json_object('local_peer', peer) AS key, max(minute) AS seen_at, 'the clock of the bridge is ' || "
        "round(abs(min(least)) / 1e6)::BIGINT || ' s ' || if(min(least) > 0, 'behind', 'ahead of') || "
        f"' the clock of the broker' AS words FROM {minutes} GROUP BY peer HAVING abs(min(least)) > {within}"
    )


def table_keeps_up(look: CheckInputs) -> str:
    table, than = look.check.table, str(look.check.arguments["than"])
    newest = look.keep("newest", "name VARCHAR, seen_at TIMESTAMPTZ")
    for name in (table, than):
        look.db.execute(f"INSERT INTO {newest} SELECT '{name}', max({_at(name)}) FROM new_{name}")
    _forget_older(look, newest)
    within = span(look.duration("within"))
    return (
        f"SELECT json_object('table', '{table}') AS key, ahead.seen_at AS seen_at, coalesce('the newest row is of ' || "
        f"strftime(own.seen_at AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S'), 'there is no row') || "
        f"', and that of {than} of ' || "
        "strftime(ahead.seen_at AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S') AS words "
        f"FROM (SELECT seen_at FROM {newest} WHERE name = '{than}') ahead "
        f"LEFT JOIN (SELECT seen_at FROM {newest} WHERE name = '{table}') own ON true "
        f"WHERE ahead.seen_at IS NOT NULL AND (own.seen_at IS NULL OR own.seen_at < ahead.seen_at - {within})"
    )


def table_is_fresh(look: CheckInputs) -> str:
    table = look.check.table
    newest = look.keep("newest", "name VARCHAR, seen_at TIMESTAMPTZ")
    live = "WHERE origin = 'LIVE'" if any(column.name == "origin" for column in TABLES[table].columns) else ""
    look.db.execute(f"INSERT INTO {newest} SELECT '{table}', max({_at(table)}) FROM new_{table} {live}")
    _forget_older(look, newest)
    within = span(look.duration("within"))
    return (
        f"SELECT json_object('table', name) AS key, seen_at, 'the newest LIVE row is of ' || "
        f"strftime(seen_at AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S') AS words FROM {newest} "
        f"WHERE {str(look.facts.running).lower()} AND seen_at < {look.now} - {within}"
    )


def _forget_older(look: CheckInputs, newest: str) -> None:
    look.db.execute(
        f"CREATE OR REPLACE TEMP TABLE merged AS SELECT name, max(seen_at) AS seen_at FROM {newest} GROUP BY name"
    )
    look.db.execute(f"DELETE FROM {newest}")
    look.db.execute(f"INSERT INTO {newest} SELECT * FROM merged WHERE seen_at IS NOT NULL")


def volume_is_as_before(look: CheckInputs) -> str:
    hours = look.keep("hours", "type VARCHAR, hour TIMESTAMPTZ, n BIGINT")
    look.db.execute(
        f"INSERT INTO {hours} SELECT type, date_trunc('hour', observed_at), count(*) FROM new_messages "
        "WHERE origin = 'LIVE' GROUP BY ALL"
    )
    look.db.execute(f"DELETE FROM {hours} WHERE hour < (SELECT max(hour) FROM {hours}) - INTERVAL 8 DAYS")
    factor, least = look.number("factor", 4), look.number("least", 1000)
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


def quarantine_is_small(look: CheckInputs) -> str:
    hours = look.keep("hours", "reason VARCHAR, hour TIMESTAMPTZ, n BIGINT")
    look.db.execute(
        f"INSERT INTO {hours} SELECT stage || ': ' || replace(reason, ' ', '_'), date_trunc('hour', observed_at), "
        "count(*) FROM new_quarantine GROUP BY ALL UNION ALL "
        "SELECT '', date_trunc('hour', observed_at), count(*) FROM new_copies GROUP BY ALL"
    )
    look.db.execute(f"DELETE FROM {hours} WHERE hour < (SELECT max(hour) FROM {hours}) - INTERVAL 24 HOURS")
    return (
        "SELECT json_object('stage', split_part(reason, ': ', 1), 'reason', split_part(reason, ': ', 2)) AS key, "
        f"max(hour) AS seen_at, sum(n)::BIGINT || ' rows' AS words FROM {hours} WHERE reason <> '' GROUP BY reason "
        f"HAVING sum(n) >= {look.number('least', 20)} AND sum(n) > {look.number('share', 0.05)} * "
        f"(SELECT coalesce(sum(n), 0) FROM {hours} WHERE reason = '')"
    )
