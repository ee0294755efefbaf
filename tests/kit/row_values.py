"""Normal form of query results, equal for DuckDB and Spark."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal


def value_of(value: object) -> object:
    """Convert a value to a form that is the same for all engines: times in UTC, numbers of one type, maps as pairs."""
    match value:
        case bool() | None | str() | bytes() | timedelta():
            return value
        case int() | Decimal():
            return float(value)
        case float():
            return float(f"{value:.12g}") if math.isfinite(value) else str(value)
        case datetime():
            assert value.tzinfo is not None
            return value.astimezone(UTC)
        case dict():
            return sorted((str(key), value_of(each)) for key, each in value.items())
        case list() | tuple():
            return [value_of(each) for each in value]
    raise TypeError(f"{type(value)} in an answer")


def values_of(rows: Iterable[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return [tuple(map(value_of, row)) for row in rows]


def in_any_order(rows: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    return sorted(rows, key=repr)
