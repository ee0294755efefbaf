"""The streaming queries of Kiln: which topics each reads, and which tables and topics it writes.

`QUERIES` declares each query once. `pipelines/NAME/query.py` defines its `start`; settings, screen, status and
supervisor read the rest from `QUERIES`.
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
    """topics, as in `kiln.schemas.kafka.topics.TOPICS`"""
    every: timedelta
    """default of `jobs.NAME.trigger`: the pause between the starts of two micro-batches"""
    tables: tuple[str, ...] = ()
    """Delta tables that this query alone appends to"""
    topics: tuple[str, ...] = ()
    """topics that this query writes"""
    looks_up: tuple[str, ...] = ()
    """topics that this query reads in full at each start of its application, without saving offsets"""
    appends: tuple[str, ...] = ()
    """the `tables` that are free of duplicates only as long as the query keeps its checkpoint (decision 13)"""
    at_most: int = 200_000
    """default of `jobs.NAME.max_offsets_per_trigger`: records of one micro-batch"""
    starts: int = 2
    """rank: queries of a lower rank start first. The first micro-batches of other queries occupy the cores for seconds,
    so the queries that make batches come first."""


CERAMIC_QUERIES: Final = frozenset({"updates", "batch"})
"""Queries that run only where `network.kind` is "ceramic"."""

CONTROL_PREFIX: Final = "control "
"""Prefix of the counts of subscriptions and control entries, by kind, that `archive` reports."""

# In the order of the commits: no reader sees a batch without its tips.
_SINK = ("updates", "tips", "batch_tips", "batches", "publications", "streams", "quarantine")

# In the order of the flow, which is the order in which settings and screen name them.
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
