"""Clocks that trail what Kiln has kept, found out without Spark: from checkpoints, and from what the broker holds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.trailing_clock import describe_log_lag, describe_watermark_lag, is_trailing


@dataclass(frozen=True)
class ClockStatus:
    """A clock that trails. `since`: when a query was first seen to begin a micro-batch by such a clock, as far back as
    its checkpoint says. `until`: what the clock must pass."""

    name: str
    behind: float
    """s"""
    since: datetime | None
    until: datetime
    problem: str
    """in words, with what to do"""


def find_trailing_clocks(settings: Settings, partitions: Iterable[int]) -> tuple[ClockStatus, ...]:
    """The clocks that trail now; none where all is well. `partitions`: of `updates`, as the broker has them."""
    now = time.time_ns() // 1000
    topic = settings.kafka.topic("updates")
    kept = {name: _read_newest_time(settings, name) for name in ("archive", "updates", "sink")}
    return compare_clocks(settings, now, kept, topic, _read_log_time(settings, topic, partitions))


def compare_clocks(
    settings: Settings, now: int, kept: Mapping[str, int], topic: str, log_clock: int
) -> tuple[ClockStatus, ...]:
    """`kept`: by query, the time that the query has reckoned with; `log_clock`: where the clock of the topic stands;
    0: not known. µs."""
    found = []
    late = [name for name, at in kept.items() if is_trailing(now, at)]
    if late:
        until = max(kept[name] for name in late)
        since = _read_trailing_since(settings, late[0], kept[late[0]])
        found.append(_build_status("watermark", now, until, since, describe_watermark_lag(late, now, until, since)))
    if is_trailing(now, log_clock):
        since = _read_trailing_since(settings, "batch", log_clock)
        found.append(_build_status("log", now, log_clock, since, describe_log_lag(topic, now, log_clock, since)))
    return tuple(found)


def _build_status(name: str, now: int, until: int, since: int | None, problem: str) -> ClockStatus:
    return ClockStatus(
        name, (until - now) / 1e6, None if since is None else _to_datetime(since), _to_datetime(until), problem
    )


def _to_datetime(at: int) -> datetime:
    return datetime.fromtimestamp(at // 1_000_000, UTC)


def _read_newest_time(settings: Settings, query: str) -> int:
    try:
        return Checkpoint(settings.checkpoints_root / query).newest_time(micros(settings.dedupe.signed))
    except (OSError, ValueError, LookupError):  # what is wrong with a checkpoint, the query's own status says
        return 0


def _read_trailing_since(settings: Settings, query: str, kept: int) -> int | None:
    try:
        return Checkpoint(settings.checkpoints_root / query).behind_since(kept)
    except (OSError, ValueError, LookupError):
        return None


def _read_log_time(settings: Settings, topic: str, partitions: Iterable[int]) -> int:
    if not partitions:
        return 0
    from kafka.errors import KafkaError

    from kafka import TopicPartition
    from kiln.pipelines.batch.ticker import read_log_times

    try:
        stamps = read_log_times(settings.broker.client_options(), [TopicPartition(topic, part) for part in partitions])
    except (KafkaError, OSError):  # the broker went away since it was asked for its topics
        return 0
    return max(stamps.values(), default=0) * 1000
