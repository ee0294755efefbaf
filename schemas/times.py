"""The range of times that Kiln stores: the years 2000 to 2099.

Frames and records with other times go to quarantine. Every program that reads the tables supports these times, even
pandas, whose timestamps end in 2262.
"""

from __future__ import annotations

from typing import Final

MIN_MICROS: Final = 946_684_800_000_000
"""2000-01-01 00:00:00 UTC, in µs since the epoch"""
MAX_MICROS: Final = 4_102_444_799_999_999
"""2099-12-31 23:59:59.999999 UTC, in µs since the epoch"""
MIN_NANOS: Final = MIN_MICROS * 1000
MAX_NANOS: Final = MAX_MICROS * 1000 + 999


def clamp_micros(at: int) -> int:
    """Clamp a time, in µs since the epoch, to the years 2000 to 2099, which the tables can store."""
    return min(max(at, MIN_MICROS), MAX_MICROS)


def clamp_nanos(at: int) -> int:
    """Clamp a time, in ns since the epoch, to the years 2000 to 2099: a machine's clock may be wrong."""
    return min(max(at, MIN_NANOS), MAX_NANOS)
