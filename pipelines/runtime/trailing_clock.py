"""Clock that trails a time which Kiln has recorded: the clock was ahead before and was put back, or is wrong now.

Pure; times are µs since the epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_TOLERANCE = 1_000_000
"""Less than this is what clocks of one cluster differ by."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class TrailingClock:
    """Comparison of a clock with the newest time that was recorded."""

    since: int | None = None
    """when the clock was first seen to trail, by itself; None: the clock does not trail"""
    now: int = 0
    newest: int = 0

    def observe(self, now: int, newest: int) -> None:
        """`newest`: what the clock has passed already."""
        self.now, self.newest = now, newest
        if not is_trailing(now, newest):
            self.since = None
        elif self.since is None:
            self.since = now


def is_trailing(now: int, newest: int) -> bool:
    """Report if a clock that says `now` trails `newest` by more than clocks differ."""
    return newest - now > _TOLERANCE


def describe_log_lag(topic: str, now: int, newest: int, since: int | None) -> str:
    """Describe the consequence, and what to do, if the broker's stamps trail log time (decision 1)."""
    return (
        f"the broker's clock trails the log {topic} by {_seconds(newest - now)}{_since(since)}: its stamps were ahead "
        f"before. Windows wait for the log's clock, so batches come late until the broker's clock has passed "
        f"{_time(newest)}. Nothing is lost. If the broker's clock is wrong, set it right; else wait"
    )


def describe_watermark_lag(queries: Iterable[str], now: int, newest: int, since: int | None) -> str:
    """The same where the clock of a query's machine trails what the query has reckoned with (decision 5)."""
    return (
        f"the clock of this machine trails the watermark of {', '.join(queries)} by {_seconds(newest - now)}"
        f"{_since(since)}: it was ahead before. Nothing is lost: until it has passed {_time(newest)}, copies are "
        "remembered for longer. If this clock is wrong, set it right; else wait"
    )


def _seconds(length: int) -> str:
    return f"{length / 1_000_000:,.0f} s"


def _since(at: int | None) -> str:
    return "" if at is None else f" since {_time(at)}"


def _time(at: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=at):%Y-%m-%d %H:%M:%S} UTC"
