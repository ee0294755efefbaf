"""Durations in the settings, such as `"100ms"` or `"24h"`, and points in time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

_UNITS = {
    "us": timedelta(microseconds=1),
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_DURATION = re.compile(r"([0-9]{1,18})(us|ms|s|m|h|d)")


def parse_duration(text: object) -> timedelta:
    """Parse a duration, such as `"100ms"`, `"24h"` or `"1h30m"`.

    Raises:
        ValueError: The text has another form, for example a number without a unit.
    """
    if isinstance(text, timedelta):
        return text
    if not isinstance(text, str) or not text or _DURATION.sub("", text):
        raise ValueError('a duration such as "100ms", "1s", "2m", "24h" or "7d"')
    try:
        return sum((int(number) * _UNITS[unit] for number, unit in _DURATION.findall(text)), timedelta())
    except OverflowError:
        raise ValueError("a duration of less than a billion days") from None


def duration_text(value: timedelta) -> str:
    """Format a duration as text for `parse_duration`, such as `1h30m`."""
    rest, parts = value, []
    for unit in ("d", "h", "m", "s", "ms", "us"):
        count, rest = divmod(rest, _UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def micros(value: timedelta) -> int:
    """Convert a duration to whole microseconds."""
    return value // timedelta(microseconds=1)


def parse_time(text: str) -> datetime:
    """Parse a time in ISO 8601, in UTC if it has no zone.

    Raises:
        ValueError: The text is no time.
    """
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def parse_micros(text: str) -> int:
    """Parse a time like `parse_time`, and return it in µs since the epoch.

    Raises:
        ValueError: The text is no time. The message describes the expected form.
    """
    try:
        return micros(parse_time(text) - datetime(1970, 1, 1, tzinfo=UTC))
    except ValueError:
        raise ValueError("a time such as 2026-11-01 or 2026-11-01T12:00:00Z") from None


def spark_interval(value: timedelta) -> str:
    """Format a duration for Spark's triggers and watermarks: `"2000 milliseconds"`."""
    return f"{value // timedelta(milliseconds=1)} milliseconds"


Duration = Annotated[timedelta, BeforeValidator(parse_duration), PlainSerializer(duration_text, return_type=str)]
