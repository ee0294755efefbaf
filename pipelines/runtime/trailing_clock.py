"""Detection of a clock that is behind a recorded time: it was ahead and was set back, or it is wrong now.

Times are µs since the epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

_TOLERANCE = 1_000_000
"""difference that clocks of one cluster may have, µs"""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class TrailingClock:
    """Comparison of a clock with the newest time that was recorded."""

    since: int | None = None
    """time, by that clock, at which it was first seen to be behind; `None` if it is not behind"""
    now: int = 0
    newest: int = 0

    def observe(self, now: int, newest: int) -> None:
        """Compare the clock with the newest time that was recorded."""
        self.now, self.newest = now, newest
        if not is_trailing(now, newest):
            self.since = None
        elif self.since is None:
            self.since = now


def is_trailing(now: int, newest: int) -> bool:
    """Return true if `now` trails `newest` by more than the tolerance."""
    return newest - now > _TOLERANCE


def describe_log_lag(topic: str, now: int, newest: int, since: int | None) -> str:
    """Describe the consequence, and what to do, if the broker's stamps trail log time (decision 1)."""
    return (
        f"the broker's clock trails the log {topic} by {_format_seconds(newest - now)}{_format_since(since)}: its "
        f"stamps were ahead before. Windows wait for log time, so batches are late until the broker's clock has passed "
        f"{_format_time(newest)}. Nothing is lost. If the broker's clock is wrong, correct it; else wait"
    )


def describe_watermark_lag(queries: Iterable[str], now: int, newest: int, since: int | None) -> str:
    """Describe the consequence, and what to do, if this machine's clock trails the time a query has used (decision
    5)."""
    return (
        f"the clock of this machine trails the watermark of {', '.join(queries)} by {_format_seconds(newest - now)}"
        f"{_format_since(since)}: it was ahead before. Nothing is lost: until it has passed {_format_time(newest)}, "
        "deduplication state is kept longer. If this clock is wrong, correct it; else wait"
    )


def _format_seconds(length: int) -> str:
    return f"{length / 1_000_000:,.0f} s"


def _format_since(at: int | None) -> str:
    return "" if at is None else f" since {_format_time(at)}"


def _format_time(at: int) -> str:
    return f"{_EPOCH + timedelta(microseconds=at):%Y-%m-%d %H:%M:%S} UTC"
