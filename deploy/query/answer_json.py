"""Query results as JSON.

Times are ISO 8601 in UTC with microseconds. Binary is lower-case hex, which `unhex` reads back. Numbers of any size are
numbers; NaN and infinities are null. Maps and structs are objects. Intervals are ISO 8601 durations. All text is ASCII
with other characters escaped, so it cannot control a terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Protocol, TextIO, runtime_checkable

from kiln.deploy.query.ask import Answer


@runtime_checkable
class _Interval(Protocol):
    """An interval in a row: pyarrow's MonthDayNano, a slow import that most queries do not need."""

    months: int
    days: int
    nanoseconds: int


def encode_value(value: object) -> object:
    """Convert a value to JSON types, as the module's docstring describes."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case bytes():
            return value.hex()
        case datetime():
            stamp = value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
            return stamp.isoformat(timespec="microseconds").replace("+00:00", "Z")
        case date() | time():
            return value.isoformat()
        case _Interval():
            return _format_duration(value.months, value.days, value.nanoseconds)
        case timedelta():
            return _format_duration(0, 0, value // timedelta(microseconds=1) * 1000)
        case Mapping():
            return {str(key): encode_value(item) for key, item in value.items()}
        case list() | tuple():
            return [encode_value(item) for item in value]
    return str(value)


def _format_duration(months: int, days: int, nanoseconds: int) -> str:
    seconds = Decimal(nanoseconds).scaleb(-9).normalize()
    day_part = f"{f'{months}M' if months else ''}{f'{days}D' if days else ''}"
    return f"P{day_part}T{seconds:f}S"


def write_json(answer: Answer, out: TextIO) -> None:
    """Write the rows as a JSON array of objects, one per line, as they are read."""
    names = make_distinct(answer.columns)
    delimiter = "[\n"
    for row in answer.rows():
        record = {name: encode_value(value) for name, value in zip(names, row, strict=True)}
        out.write(delimiter + json.dumps(record))
        delimiter = ",\n"
    out.write("[]\n" if delimiter == "[\n" else "\n]\n")


def make_distinct(names: Iterable[str]) -> tuple[str, ...]:
    """Append `_2`, `_3` … to repeated names, as an object has each key once."""
    out: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in out:
            count += 1
            candidate = f"{name}_{count}"
        out.append(candidate)
    return tuple(out)
