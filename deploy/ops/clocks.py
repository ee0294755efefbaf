"""Clocks that are behind stored times, detected without Spark from checkpoints and the broker's log."""

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
    """A clock that is behind a stored time.

    Attributes:
        behind: Seconds.
        since: Start of the first micro-batch under such a clock, as far as the checkpoint goes back.
        until: Stored time, which the clock must pass.
        problem: Description with a remedy.
    """

    name: str
    behind: float
    since: datetime | None
    until: datetime
    problem: str


def find_trailing_clocks(settings: Settings, partitions: Iterable[int]) -> tuple[ClockStatus, ...]:
    """Find the clocks that are behind now.

    Args:
        settings: The settings.
        partitions: Partitions of `updates` on the broker.
    """
    now = time.time_ns() // 1000
    topic = settings.kafka.topic("updates")
    stored = {name: _read_newest_time(settings, name) for name in ("archive", "updates", "sink")}
    return compare_clocks(settings, now, stored, topic, _read_log_time(settings, topic, partitions))


def compare_clocks(
    settings: Settings, now: int, stored: Mapping[str, int], topic: str, log_time: int
) -> tuple[ClockStatus, ...]:
    """Compare the clock with stored times.

    Args:
        settings: The settings.
        now: Current time, µs.
        stored: Newest time in the checkpoint of each query, µs; 0 if not known.
        topic: Full name of the topic `updates`.
        log_time: Log time of that topic, µs; 0 if not known.
    """
    clocks = []
    late = [name for name, newest in stored.items() if is_trailing(now, newest)]
    if late:
        until = max(stored[name] for name in late)
        since = _read_trailing_since(settings, late[0], stored[late[0]])
        clocks.append(_build_status("watermark", now, until, since, describe_watermark_lag(late, now, until, since)))
    if is_trailing(now, log_time):
        since = _read_trailing_since(settings, "batch", log_time)
        clocks.append(_build_status("log", now, log_time, since, describe_log_lag(topic, now, log_time, since)))
    return tuple(clocks)


def _build_status(name: str, now: int, until: int, since: int | None, problem: str) -> ClockStatus:
    return ClockStatus(
        name, (until - now) / 1e6, None if since is None else _to_datetime(since), _to_datetime(until), problem
    )


def _to_datetime(stored: int) -> datetime:
    return datetime.fromtimestamp(stored // 1_000_000, UTC)


def _read_newest_time(settings: Settings, query: str) -> int:
    try:
        return Checkpoint(settings.checkpoints_root / query).newest_time(micros(settings.dedupe.signed_ttl))
    except (OSError, ValueError, LookupError):  # the query's own status reports what is wrong with its checkpoint
        return 0


def _read_trailing_since(settings: Settings, query: str, stored: int) -> int | None:
    try:
        return Checkpoint(settings.checkpoints_root / query).behind_since(stored)
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
    except (KafkaError, OSError):  # the broker went away after its topics were read
        return 0
    return max(stamps.values(), default=0) * 1000
