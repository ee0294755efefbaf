"""The range of times that Kiln stores: the years 2000 to 2099.

Frames and records with other times go to quarantine. Every reader of the tables supports the times in this range:
pandas ends in 2262, Python's datetime in 9999. No node has received a message before 2000.
"""

from __future__ import annotations

from typing import Final

MIN_MICROS: Final = 946_684_800_000_000
"""2000-01-01 00:00:00 UTC, µs since the epoch"""
MAX_MICROS: Final = 4_102_444_799_999_999
"""2099-12-31 23:59:59.999999 UTC"""
MIN_NANOS: Final = MIN_MICROS * 1000
MAX_NANOS: Final = MAX_MICROS * 1000 + 999


def clamp_micros(at: int) -> int:
    """Return the nearest time in the range, µs, for rows that must have a time."""
    return min(max(at, MIN_MICROS), MAX_MICROS)


def clamp_nanos(at: int) -> int:
    """Return the nearest time in the range, ns: the clock of this machine, or of a file system, may be wrong."""
    return min(max(at, MIN_NANOS), MAX_NANOS)
