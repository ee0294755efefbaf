"""That the breaker tripped (decision 6), kept as `STATE/breaker.json` until the query starts again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

_FILE: Final = "breaker.json"


@dataclass(frozen=True)
class BreakerState:
    """`query`: whose breaker tripped; `why`: in words; `at`: when, UTC."""

    query: str
    why: str
    at: datetime

    @property
    def description(self) -> str:
        """What happened, and how to go on."""
        return (
            f"the breaker tripped at {self.at:%Y-%m-%d %H:%M} UTC: {self.why}. Mend the build, or raise breaker.streak "
            f"if Kiln is to refuse that format, and start Kiln again: {self.query} goes on from its checkpoint. "
            "docs/RUNBOOK.md, The breaker tripped, says more"
        )


def save_breaker_state(state: Path, trip: BreakerState) -> None:
    """Puts a trip into the state folder. OSError."""
    fresh = state / f"{_FILE}.new"
    fresh.write_bytes(msgspec.json.encode(trip))
    fresh.replace(state / _FILE)


def read_breaker_state(state: Path) -> BreakerState | None:
    """The trip that no start has followed; None: there is none."""
    try:
        return msgspec.json.decode((state / _FILE).read_bytes(), type=BreakerState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def clear_breaker_state(state: Path, query: str) -> None:
    """A query has started: what tripped it is over."""
    trip = read_breaker_state(state)
    if trip is not None and trip.query == query:
        (state / _FILE).unlink()
