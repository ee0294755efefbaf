"""Views over the lake's tables, for `kiln sql`: answers that take more than one table, or some thought (docs/SQL.md).

A view is there whatever tables are: one that nothing has written yet counts as empty.
"""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from schemas.tables import TABLES
from schemas.topics import MAX_KEY, MAX_VALUE

_UPDATE_BYTES: Final = "coalesce(octet_length(m.data), 30 + strlen(u.stream) + strlen(u.tip))"
"""Length of the UPDATE of `updates` u and `messages` m; where the table `messages` has not got so far, of one of the
newest form with no `model`."""

HEARD_TABLES: Final = ("updates", "messages")
HEARD: Final = f"""
SELECT u.network, u.origin, u.separator_key, u.separator_value, u.stream, u.tip, false AS again,
       least(u.observed_at, u.updated_at) AS heard_at, {_UPDATE_BYTES} AS update_bytes
FROM updates AS u LEFT JOIN messages AS m USING (network, message)
UNION ALL
SELECT m.network, m.origin, u.separator_key, u.separator_value, m.stream, m.tip, true AS again,
       m.observed_at AS heard_at, octet_length(m.data) AS update_bytes
FROM (FROM messages ANTI JOIN updates USING (network, origin, message) WHERE type = 'UPDATE') AS m
     LEFT JOIN updates AS u ON u.network = m.network AND u.stream = m.stream AND u.tip = m.tip
QUALIFY row_number() OVER (
    PARTITION BY m.network, m.message
    ORDER BY u.message = m.message DESC NULLS LAST, u.origin = m.origin DESC, u.separator_source = 'genesis' DESC,
             u.separator_key IS NULL, u.log_partition, u.log_offset) = 1
"""
"""Every UPDATE that was sent, once for each origin: those in the table `updates`, and those in `messages` alone, which
said `again` what an earlier one had said (decision 1). The latter have the separator of the update that they repeat;
none where `updates` holds no such update (yet)."""

_BATCH_UPDATE_BYTES: Final = "27 + strlen(to_json(separator_key || '/' || separator_value)) + strlen(cid)"
"""Length of {"typ":3,"sep":"…","batch":"…"}; to_json escapes what JSON must, and brings the quotes of `sep`."""

LATEST_WITHIN: Final = 10
"""Seconds. What is heard of a stream in so short a time may be in any order: a batch comes T after its first update and
then its block is fetched. So none of it is taken for newer than the rest."""


class View(NamedTuple):
    """A view: a SELECT over `tables`."""

    name: str
    tables: tuple[str, ...]
    select: str


# A node announces what it holds to be the newest tip. So its later word on a stream takes back its earlier one, and
# nobody else's.
_LATEST_TIPS = f"""
WITH last_words AS (
    SELECT network, stream, from_peer, arg_max(tip, observed_at) AS tip
    FROM updates
    WHERE from_peer IS NOT NULL
    GROUP BY network, stream, from_peer),
taken_back AS (
    SELECT network, stream, u.tip
    FROM updates AS u LEFT JOIN last_words AS w USING (network, stream, from_peer)
    GROUP BY network, stream, u.tip
    HAVING bool_and(w.tip IS NOT NULL AND w.tip <> u.tip)),
heard AS (
    SELECT network, stream, tip, min(observed_at) AS first_heard, list_sort(list(DISTINCT source)) AS sources
    FROM tips
    GROUP BY network, stream, tip),
standing AS (
    SELECT *, max(first_heard) OVER (PARTITION BY network, stream) AS newest
    FROM heard
    WHERE sources <> ['update'] OR (network, stream, tip) NOT IN (FROM taken_back))
SELECT network, stream, tip, first_heard, sources, count(*) OVER (PARTITION BY network, stream) AS tips
FROM standing
WHERE first_heard >= newest - INTERVAL '{LATEST_WITHIN} seconds'
"""

# Topics are taken as schemas.topics.parse_topic takes them.
_MISPLACED = f"""
WITH named AS (
    SELECT *, regexp_extract(topic, '^/ceramic/[^/]+/sep/(.+)/([0-9a-z]+)$', ['key', 'value'], 's') AS place
    FROM messages
    WHERE type IN ('UPDATE', 'QUERY', 'RESPONSE', 'BATCH_UPDATE')),
placed AS (
    SELECT *, place.key AS topic_key,
           CASE WHEN place.value LIKE 'k%' THEN place.value ELSE 'k' || place.value END AS topic_value
    FROM named
    WHERE place.key <> '' AND length(place.key) <= {MAX_KEY} AND length(topic_value) BETWEEN 2 AND {MAX_VALUE}
      AND NOT regexp_matches(place.value, '^ba[efg]')),
about AS (
    SELECT *, unnest(CASE WHEN type = 'RESPONSE' THEN map_keys(tips) ELSE [stream] END) AS about
    FROM placed
    WHERE type <> 'BATCH_UPDATE')
SELECT network, origin, message, type, topic, topic_key, topic_value, about AS stream,
       s.separator_key, s.separator_value, from_peer, observed_at
FROM about AS a JOIN streams AS s USING (network)
WHERE s.stream = a.about AND source = 'genesis' AND s.separator_key IS NOT NULL
  AND (s.separator_key <> topic_key OR s.separator_value <> topic_value)
UNION ALL
SELECT network, origin, message, type, topic, topic_key, topic_value, NULL AS stream,
       regexp_extract(sep, '^(.+)/[^/]+$', 1, 's') AS separator_key, regexp_extract(sep, '[^/]+$') AS separator_value,
       from_peer, observed_at
FROM placed
WHERE type = 'BATCH_UPDATE' AND sep <> topic_key || '/' || topic_value
"""

# Equal tips of two separators give one CID: the separator is that of the batch, and not of the block.
_FALSE_CLAIMS = """
WITH known AS (
    SELECT network, stream, min(updated_at) AS known_since
    FROM updates
    WHERE separator_source = 'genesis'
    GROUP BY network, stream)
SELECT b.network, b.origin, b.separator_key, b.separator_value, b.cid, b.opened_at, b.closed_at, t.stream, t.tip,
       s.separator_key AS true_key, s.separator_value AS true_value, known_since
FROM batches AS b JOIN batch_tips AS t USING (cid)
     JOIN streams AS s ON s.network = b.network AND s.stream = t.stream
     LEFT JOIN known AS k ON k.network = s.network AND k.stream = s.stream
WHERE s.source = 'genesis' AND s.separator_key IS NOT NULL
  AND (s.separator_key <> b.separator_key OR s.separator_value <> b.separator_value)
"""

# A new update is in the batch that names its tip: hearing time alone does not say which batch, as windows may overlap
# in hearing time. No batch that closed before an update was heard has the update.
_BATCH_SAVINGS = f"""
WITH heard AS ({HEARD}),
timed AS (
    SELECT *, epoch_us(closed_at) - epoch_us(opened_at) AS length
    FROM batches),
named AS (
    SELECT network, origin, separator_key, separator_value, stream, tip, closed_at, length
    FROM timed JOIN batch_tips USING (cid)),
placed AS (
    SELECT h.*, b.length
    FROM (FROM heard WHERE NOT again) AS h ASOF JOIN named AS b
      ON h.network = b.network AND h.origin = b.origin AND h.separator_key = b.separator_key
     AND h.separator_value = b.separator_value AND h.stream = b.stream AND h.tip = b.tip AND h.heard_at < b.closed_at
    UNION ALL
    SELECT h.*, CASE WHEN h.heard_at < b.closed_at THEN b.length END
    FROM (FROM heard WHERE again) AS h ASOF LEFT JOIN timed AS b
      ON h.network = b.network AND h.origin = b.origin AND h.separator_key = b.separator_key
     AND h.separator_value = b.separator_value AND h.heard_at >= b.opened_at
    UNION ALL
    SELECT *, NULL FROM heard WHERE NOT again AND separator_key IS NULL),
replaced AS (
    SELECT network, origin, separator_key, separator_value, length,
           count(*) AS updates, sum(update_bytes)::BIGINT AS update_bytes
    FROM placed
    GROUP BY ALL),
made AS (
    SELECT network, origin, separator_key, separator_value, length,
           count(*) AS batches, sum({_BATCH_UPDATE_BYTES})::BIGINT AS batch_bytes, sum(bytes)::BIGINT AS block_bytes
    FROM timed
    GROUP BY ALL),
summed AS (
    SELECT r.*, coalesce(batches, 0) AS batches, coalesce(batch_bytes, 0) AS batch_bytes,
           coalesce(block_bytes, 0) AS block_bytes
    FROM replaced AS r LEFT JOIN made USING (network, origin, separator_key, separator_value, length))
SELECT network, origin, separator_key, separator_value, length / 1e6 AS window_seconds, batches, block_bytes,
       updates AS messages_before, update_bytes AS bytes_before,
       CASE WHEN length IS NULL THEN updates ELSE batches END AS messages_if_stopped,
       CASE WHEN length IS NULL THEN update_bytes ELSE batch_bytes END AS bytes_if_stopped,
       updates + batches AS messages_if_kept, update_bytes + batch_bytes AS bytes_if_kept
FROM summed
"""

VIEWS: Final[dict[str, View]] = {
    view.name: view
    for view in (
        View("latest_tips", ("tips", "updates"), _LATEST_TIPS),
        View("misplaced", ("messages", "streams"), _MISPLACED),
        View("batch_savings", (*HEARD_TABLES, "batches", "batch_tips"), _BATCH_SAVINGS),
        View("false_claims", ("batches", "batch_tips", "streams", "updates"), _FALSE_CLAIMS),
    )
}

# Names of Spark's DDL types in DuckDB, where they differ.
_TYPES: Final = {
    "string": "VARCHAR",
    "binary": "BLOB",
    "timestamp": "TIMESTAMPTZ",
    "map<string,string>": "MAP(VARCHAR, VARCHAR)",
    "array<string>": "VARCHAR[]",
}


def with_empty(select: str, tables: Iterable[str], there: Collection[str]) -> str:
    """The SELECT over `tables`, those that are not `there` being empty."""
    empty = [f"{name} AS ({_nothing(name)})" for name in tables if name not in there]
    return f"WITH {', '.join(empty)} SELECT * FROM ({select})" if empty else select


def _nothing(name: str) -> str:
    columns = (f"NULL::{_TYPES.get(column.type, column.type)} AS {column.name}" for column in TABLES[name].columns)
    return f"SELECT {', '.join(columns)} WHERE false"
