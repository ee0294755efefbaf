"""State of a run at one moment: plain data for the screen, the log line and the status page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from kiln.conf.process.bridge_status import BridgeStatus
from kiln.pipelines.runtime.query_status import QueryState

BATCH_DELAY_BUCKETS: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of buckets of batch delays, in seconds."""

CONTROL_KINDS: Final = ("IHAVE", "IWANT", "IDONTWANT", "GRAFT", "PRUNE")
"""Kinds of control entries whose rates are shown."""

QUALITY_RESULTS: Final = ("passed", "warn", "error")
"""Results of an expectation: `passed`, or the level of a failed one."""


@dataclass(frozen=True)
class BatchLine:
    """A batch as the screen shows it.

    Attributes:
        late: Delay in seconds from the end of the window in event time (T after the first update) to the broker's
            timestamp, or `None` for a replayed capture.
    """

    separator_key: str
    separator_value: str
    stream_count: int
    tip_count: int
    batch_cid: str
    late: float | None = None


@dataclass(frozen=True)
class BridgeInRun:
    """The bridge of a run, and what the demo network received from it."""

    status: BridgeStatus | None = None
    """newest status; `None` if there is none, or only an old one"""
    received: Mapping[str, int] = field(default_factory=dict)
    """number of BATCH_UPDATEs that each node of the demo network has received"""
    fetched: Mapping[str, int] = field(default_factory=dict)
    """number of blocks of batches that each node has fetched from the bridge"""


@dataclass(frozen=True)
class QualityInRun:
    """The last check of the tables.

    Attributes:
        at: Time when the check ended, Unix seconds.
        counts: Number of expectations by table and result, one of `QUALITY_RESULTS`.
    """

    at: float
    counts: Mapping[tuple[str, str], int]


def sum_by_reason(quarantined: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Sum counts by stage and reason to counts by reason."""
    counts: dict[str, int] = {}
    for (_, reason), number in quarantined.items():
        counts[reason] = counts.get(reason, 0) + number
    return counts


@dataclass(frozen=True)
class Snapshot:
    """State of a run at one moment. Counts cover only this run; values not known yet are `None`."""

    network: str
    mode: str
    """source of frames: "demo network", "live", "catching up", "no network"; at the end "draining" """
    elapsed: timedelta
    duration: timedelta | None = None
    """duration limit; `None` for a run until Ctrl-C, or until caught up"""
    frames: int = 0
    frames_rate: float | None = None
    messages: Mapping[str, int] = field(default_factory=dict)
    """valid messages by type, without duplicates"""
    copies: int | None = None
    """copies of all messages counted in `messages`"""
    core_differences: int = 0
    """number of records that the native core and Python decoded differently"""
    control_entries: Mapping[str, int] = field(default_factory=dict)
    """subscriptions and control entries in both directions, by kind"""
    control_rates: Mapping[str, float] = field(default_factory=dict)
    """mean rate of each kind over the last minute, per second"""
    open_separators: int | None = None
    batches: int = 0
    newest_batches: Sequence[BatchLine] = ()
    """newest first"""
    window: timedelta = timedelta(seconds=1)
    late_p50: float | None = None
    """delay of live batches, in seconds (`BatchLine.late`)"""
    late_p99: float | None = None
    late_by_bucket: Sequence[int] = ()
    """live batches by delay: a number for each bound of `BATCH_DELAY_BUCKETS`, and one for longer delays"""
    late_sum: float = 0.0
    tips: int = 0
    """tips in all batches"""
    quarantine: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """quarantined records by stage and reason"""
    queries: Sequence[QueryState] = ()
    bridge: BridgeInRun | None = None
    """`None` if this run has no bridge"""
    quality: QualityInRun | None = None
    """`None` before the first completed check of this run"""
    broker: str = ""
    """problem with the broker; empty if it answers"""
    errors: Sequence[str] = ()
    """newest last"""
    is_ceramic: bool = True
    """false on a network that has no batches"""
