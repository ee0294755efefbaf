"""A simple model of the batches that follow from a log, written with other libraries than the code under test."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, NamedTuple

import dag_cbor
from multiformats import CID, multihash

from kafka import KafkaConsumer, TopicPartition
from kit.broker_access import client

Owner = tuple[str, str, str, str]
"""network, origin, separator key, separator value"""


class Update(NamedTuple):
    owner: Owner
    stream: str
    tip: str
    heard: int
    epoch: tuple[str, int] = ("", 0)
    message: str = ""


class Window(NamedTuple):
    owner: Owner
    opened_at: int
    tips: frozenset[tuple[str, str]]


def windows_of(log: Iterable[tuple[int, Update | None]], length: int) -> list[Window]:
    """Return the windows that end within a partition's records, in the order of their end (decision 1, with G = 0).

    Args:
        log: Timestamp and update of each record in the order of offsets; `None` for a tick.
        length: Window length T, in the unit of the timestamps.
    """
    records = list(log)
    clock = list(accumulate((stamp for stamp, _ in records), max))
    open_: dict[Owner, tuple[int, int, set[tuple[str, str]]]] = {}
    closed: list[Window] = []
    for now, (_, update) in zip(clock, records, strict=True):
        heard = min(update.heard, now) if update else 0
        for owner, (t0, c0, tips) in list(open_.items()):
            if now >= c0 + length or (update and update.owner == owner and heard >= t0 + length):
                closed.append(Window(owner, t0, frozenset(tips)))
                del open_[owner]
        if update is not None:
            open_.setdefault(update.owner, (heard, now, set()))[2].add((update.stream, update.tip))
    return closed


def without_repeats(log: Iterable[tuple[int, Update | None]]) -> list[tuple[int, Update | None]]:
    """Replace each repeat of a message within an epoch by a tick with the same timestamp."""
    seen: set[tuple[tuple[str, int], Owner, str]] = set()
    kept: list[tuple[int, Update | None]] = []
    for stamp, update in log:
        again = update is not None and (update.epoch, update.owner, update.message) in seen
        if update is not None:
            seen.add((update.epoch, update.owner, update.message))
        kept.append((stamp, None if again else update))
    return kept


def block_of(tips: Iterable[tuple[str, str]]) -> bytes:
    """Encode pairs of stream and tip as a CIP-123 block, with the library dag_cbor."""
    by_stream: dict[str, list[CID]] = {}
    for stream, tip in tips:
        by_stream.setdefault(stream, []).append(CID.decode(tip))
    links: dict[str, list[CID]] = {stream: sorted(cids, key=bytes) for stream, cids in by_stream.items()}
    return bytes(dag_cbor.encode({"tips": links}))


def cid_of(block: bytes) -> str:
    return str(CID("base32", 1, "dag-cbor", multihash.digest(block, "sha2-256")))


class Emitted(NamedTuple):
    """A record of `kiln.batches`."""

    owner: Owner
    opened_at: int
    cid: str


def expected_batches(logs: Iterable[list[tuple[int, Update | None]]], length: int) -> set[Emitted]:
    """Compute the batches that must follow from the partitions of a log. Times are in µs.

    No window may have more tips than fit into one block.
    """
    return {
        Emitted(window.owner, window.opened_at, cid_of(block_of(window.tips)))
        for log in logs
        for window in windows_of(without_repeats(log), length)
    }


def read_records(servers: str, topic: str) -> dict[int, list[tuple[int, bytes | None, bytes]]]:
    """Read all records of a topic: for each partition, timestamp in µs, key and value, in the order of offsets."""
    consumer = KafkaConsumer(**client(servers), max_partition_fetch_bytes=16 << 20)
    parts = [TopicPartition(topic, partition) for partition in sorted(consumer.partitions_for_topic(topic) or ())]
    consumer.assign(parts)
    consumer.seek_to_beginning(*parts)
    ends = consumer.end_offsets(parts)
    found: dict[int, list[tuple[int, bytes | None, bytes]]] = {part.partition: [] for part in parts}
    while any(consumer.position(part) < ends[part] for part in parts):
        for part, records in consumer.poll(timeout_ms=500).items():
            found[part.partition] += [(record.timestamp * 1000, record.key, record.value or b"") for record in records]
    consumer.close()
    return found


def read_log(servers: str, topic: str) -> list[list[tuple[int, Update | None]]]:
    """Read `kiln.updates` in the form that `expected_batches` takes: a list for each partition."""
    return [
        [(stamp, update_of(value) if value else None) for stamp, _, value in records]
        for records in read_records(servers, topic).values()
    ]


def update_of(value: bytes) -> Update | None:
    """Parse a record of `kiln.updates`. Return `None` if it has no separator and so belongs in no batch."""
    record = json.loads(value)
    if record["separator"] is None:
        return None
    owner = (record["network"], record["origin"], record["separator"]["key"], record["separator"]["value"])
    epoch = (record["epoch"]["query"], record["epoch"]["batch"])
    return Update(owner, record["stream"], record["tip"], record["observed_at"], epoch, record["message_id"])


def read_batches(servers: str, topic: str) -> list[Emitted]:
    """Read all records of `kiln.batches`, and assert that each block matches its CID."""
    return [emitted_of(value) for records in read_records(servers, topic).values() for _, _, value in records]


def emitted_of(value: bytes) -> Emitted:
    """Parse a record of `kiln.batches`, and assert that the block matches its CID."""
    record = json.loads(value)
    block = base64.b64decode(record["block"])
    assert cid_of(block) == record["batch_cid"]
    assert dag_cbor.decode(block)
    owner = (record["network"], record["origin"], record["separator"]["key"], record["separator"]["value"])
    return Emitted(owner, record["opened_at"], record["batch_cid"])


class Announced(NamedTuple):
    """An UPDATE message for one stream. `message` is its id, and `heard` the time of its first copy."""

    author: str | None
    tip: str
    separator: str | None
    heard: int
    message: str


def updates_among(said: Iterable[Announced], horizon: int) -> list[int]:
    """Find the announcements of a stream that are updates (decision 5, without an IPFS node), by a full search.

    Args:
        said: Announcements in the order of time.
        horizon: Time after which an update is forgotten, in the unit of `heard`.

    Returns:
        The positions of the updates in `said`.
    """
    before: list[Announced] = []
    updates: list[int] = []
    for number, each in enumerate(said):
        same = [
            other
            for other in updates
            if before[other].tip == each.tip
            and (each.separator is None or before[other].separator == each.separator)
            and each.heard - before[other].heard < horizon
        ]
        since = before[same[-1] :] if same else []
        own = [other for other in since if other.author == each.author is not None]
        if not same or (own and own[-1].tip != each.tip):
            updates.append(number)
        before.append(each)
    return updates


UNFOUNDED_REPEATS: Final = """
    WITH heard AS (
        SELECT network, message_id, min(observed_at) AS first_at, max(observed_at) AS last_at FROM copies GROUP BY ALL),
    said AS (
        SELECT network, stream, tip, from_peer, first_at, last_at
        FROM messages JOIN heard USING (network, message_id) WHERE type = 'UPDATE'),
    counted AS (
        SELECT *, lag(observed_at) OVER (
            PARTITION BY network, origin, separator_key, separator_value, stream, tip ORDER BY observed_at) AS before
        FROM updates)
    SELECT message_id, network, stream, tip
    FROM counted AS c
    WHERE before IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM said AS s
        WHERE s.network = c.network AND s.stream = c.stream AND s.from_peer = c.from_peer AND s.tip <> c.tip
              AND s.first_at <= c.observed_at AND s.last_at >= c.before)"""
"""SQL for repeated updates whose author announced no other tip in between. There must be none (decision 5)."""
