"""Inputs of the monitor: a snapshot of the run, and a recent status of the lake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kiln.deploy.ops.snapshot import Snapshot
from kiln.pipelines.runtime.query_status import RUNS

if TYPE_CHECKING:  # the image of the bridge has no library that reads tables
    from kiln.deploy.ops.status import TableStatus

_MAX_SNAPSHOT_AGE = 30.0
"""s after which a run without a new snapshot counts as hanging"""


@dataclass(frozen=True)
class MonitorInputs:
    """A snapshot, and the state of the lake.

    Attributes:
        at: Time of the snapshot, Unix seconds.
        read_at: Time of the request, Unix seconds.
    """

    snapshot: Snapshot
    at: float
    read_at: float
    version: str
    """of Kiln"""
    tables: tuple[TableStatus, ...] = ()


def why_dead(facts: MonitorInputs | None) -> list[str]:
    """Describe why the process is not alive, with `None` for a starting process; empty if it is."""
    age = 0.0 if facts is None else facts.read_at - facts.at
    return [f"the run has not checked its queries for {age:.0f} s"] if age > _MAX_SNAPSHOT_AGE else []


def why_not_ready(facts: MonitorInputs | None) -> list[str]:
    """Describe why the run is not ready; empty if it is."""
    if facts is None:
        return ["starting"]
    snapshot = facts.snapshot
    bridge = snapshot.bridge
    reasons = [f"{line.name} {line.phase}" for line in snapshot.queries if line.phase not in RUNS]
    if snapshot.broker:
        reasons.append(snapshot.broker)
    if bridge is not None and bridge.status is None:
        reasons.append("the bridge does not report its status")
    if bridge is not None and bridge.status is not None and bridge.status.spool.full:
        reasons.append("the bridge's spool is full, and it does not read from peers")
    return [*why_dead(facts), *reasons]
