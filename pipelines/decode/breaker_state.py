"""Record of a tripped breaker (decision 6), in `STATE/breaker.json` until the query starts again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from kiln.conf.process.small_files import read_small_file

_FILE: Final = "breaker.json"


@dataclass(frozen=True)
class BreakerState:
    """A tripped breaker: its query, the reason (`why`), and the time in UTC (`at`)."""

    query: str
    why: str
    at: datetime

    @property
    def description(self) -> str:
        """The cause and the remedy."""
        return (
            f"the breaker tripped at {self.at:%Y-%m-%d %H:%M} UTC: {self.why}. Fix the build, or raise "
            "breaker.consecutive_failures if Kiln is to refuse that format, and start Kiln again: "
            f"{self.query} continues from its checkpoint. See docs/RUNBOOK.md, The breaker tripped"
        )


def save_breaker_state(state: Path, trip: BreakerState) -> None:
    """Write the record into the state folder."""
    fresh = state / f"{_FILE}.new"
    fresh.write_bytes(msgspec.json.encode(trip))
    fresh.replace(state / _FILE)


def read_breaker_state(state: Path) -> BreakerState | None:
    """Read the record, if the query has not started since."""
    try:
        return msgspec.json.decode(read_small_file(state / _FILE), type=BreakerState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def clear_breaker_state(state: Path, query: str) -> None:
    """Delete the record of a query that has started."""
    trip = read_breaker_state(state)
    if trip is not None and trip.query == query:
        (state / _FILE).unlink()
