"""The streaming queries of Kiln: which topics each query reads, and which tables and topics it writes.

`pipelines/NAME/query.py` has the function that starts the query NAME. Settings, screen, status and supervisor take all
other facts about a query from `QUERIES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final


@dataclass(frozen=True)
class QuerySpec:
    """A streaming query with a checkpoint of its own."""

    name: str
    reads: tuple[str, ...]
    """topics that the query reads, named as in `kiln.schemas.kafka.topics.TOPICS`"""
    every: timedelta
    """default of the setting `jobs.NAME.trigger`: time from the start of a micro-batch to the start of the next"""
    tables: tuple[str, ...] = ()
    """Delta tables to which only this query appends rows"""
    topics: tuple[str, ...] = ()
    """topics to which the query writes records"""
    looks_up: tuple[str, ...] = ()
    """topics that the query reads from the beginning at each start, as lookup tables; it saves no offsets for them"""
    appends: tuple[str, ...] = ()
    """those of `tables` that would get duplicate rows if the query lost its checkpoint (decision 13)"""
    at_most: int = 200_000
    """default of the setting `jobs.NAME.max_offsets_per_trigger`: maximum number of records in a micro-batch"""
    starts: int = 2
    """start order: queries with a lower number start first. The first micro-batches after a start occupy the cores for
    seconds, so the queries that make batches go before the others"""


CERAMIC_QUERIES: Final = frozenset({"updates", "batch"})
"""Queries that run only if the setting `network.kind` is "ceramic"."""

CONTROL_PREFIX: Final = "control "
"""Prefix of the names of counts, such as "control GRAFT", in which the query `archive` reports control entries."""

# In this order the query commits to the tables: no reader sees a batch without its tips.
_SINK = ("updates", "tips", "batch_tips", "batches", "publications", "streams", "quarantine")

# In the order of the data flow, which is also the order of the settings and of the screen.
QUERIES: Final[dict[str, QuerySpec]] = {
    query.name: query
    for query in (
        QuerySpec(
            "archive",
            ("frames",),
            tables=("frames", "copies", "subscriptions", "controls", "messages", "bundles"),
            topics=("quarantine",),
            appends=("messages",),
            every=timedelta(seconds=10),
            at_most=400_000,
        ),
        QuerySpec(
            "updates",
            ("frames",),
            topics=("updates", "wanted", "quarantine"),
            looks_up=("streams",),
            every=timedelta(milliseconds=900),  # less than T (decision 1)
            at_most=100_000,
            starts=0,
        ),
        QuerySpec(
            "batch",
            ("updates",),
            topics=("batches", "quarantine"),
            every=timedelta(milliseconds=500),
            starts=0,
        ),
        QuerySpec(
            "sink",
            ("updates", "batches", "publications", "quarantine", "streams", "blocks"),
            tables=_SINK,
            appends=_SINK,
            every=timedelta(seconds=10),
        ),
    )
}
