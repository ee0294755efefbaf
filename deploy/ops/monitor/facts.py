"""What the monitor shows is made of: one snapshot of the run, and the lake as it was a moment ago."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiln.deploy.ops.snapshot import Snapshot
from kiln.pipelines.runtime.query_status import RUNS

if TYPE_CHECKING:  # the image of the bridge has no library that reads tables
    from kiln.deploy.ops.status import TableStatus

_SILENT = 30.0
"""s after which a run that makes no snapshot hangs"""


@dataclass(frozen=True)
class MonitorInputs:
    """`at`: when the snapshot was made, `read_at`: when the facts were asked for, unix s."""

    snapshot: Snapshot
    at: float
    read_at: float
    version: str
    """of Kiln"""
    tables: tuple[TableStatus, ...] = ()


def why_dead(facts: MonitorInputs | None) -> list[str]:
    """Why the process does not count as alive, in words; empty: it does. None: it still starts."""
    silent = 0.0 if facts is None else facts.read_at - facts.at
    return [f"the run has not looked after its queries for {silent:.0f} s"] if silent > _SILENT else []


def why_not_ready(facts: MonitorInputs | None) -> list[str]:
    """Why the run does not do its work, in words; empty: it does."""
    if facts is None:
        return ["starting"]
    snapshot = facts.snapshot
    bridge = snapshot.bridge
    reasons = [f"{line.name} {line.phase}" for line in snapshot.queries if line.phase not in RUNS]
    if snapshot.broker:
        reasons.append(snapshot.broker)
    if bridge is not None and bridge.status is None:
        reasons.append("the bridge says nothing")
    if bridge is not None and bridge.status is not None and bridge.status.spool.full:
        reasons.append("the bridge's spool is full, and peers wait")
    return [*why_dead(facts), *reasons]
