"""Context of the checks next to the tables: settings and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

_REPEATS: Final = timedelta(days=2)
"""maximum age of an update or a message to which a row still refers: more than `dedupe.signed_ttl`"""


@dataclass(frozen=True)
class CheckContext:
    """Settings and time of a check."""

    now: datetime
    running: bool = False
    """true if the status of the bridge is recent"""
    window: int = 1_000_000
    grace: int = 0
    block_limit: int = 1_000_000
    authors: frozenset[str] | None = None
    only_verified: bool = False
    retention: Mapping[str, timedelta] = field(default_factory=dict)
    """age from which maintenance removes rows, by table"""

    def find_expiry(self, tables: Sequence[str]) -> datetime | None:
        """Find the time of the newest rows whose counterpart in one of the tables may have expired."""
        ages = [self.retention[table] for table in tables if table in self.retention]
        return self.now - min(ages) + _REPEATS if ages else None
