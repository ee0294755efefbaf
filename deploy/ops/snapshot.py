"""State of `kiln run` at one moment: plain data for the screen, the log line, the status page and the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from kiln.conf.process.bridge_status import BridgeStatus
from kiln.pipelines.runtime.query_status import QueryState

BATCH_DELAY_BUCKETS: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram buckets of batch delays, in seconds."""

CONTROL_KINDS: Final = ("IHAVE", "IWANT", "IDONTWANT", "GRAFT", "PRUNE")
"""Kinds of gossipsub control entries whose rates are shown."""

QUALITY_RESULTS: Final = ("passed", "warn", "error")
"""Results of a quality expectation: `passed`, or the level of a failed expectation."""


@dataclass(frozen=True)
class BatchLine:
    """A batch, for its line on the screen.

    Attributes:
        late: Batch delay in seconds: from the end of the window, in event time, to the broker's timestamp of the batch.
            `None` for a batch of replayed frames.
    """

    separator_key: str
    separator_value: str
    stream_count: int
    tip_count: int
    batch_cid: str
    late: float | None = None


@dataclass(frozen=True)
class BridgeInRun:
    """Status of a run's bridge, and counts of its batches that nodes of the demo network have received."""

    status: BridgeStatus | None = None
    """newest status of the bridge; `None` if it does not report one"""
    received: Mapping[str, int] = field(default_factory=dict)
    """number of batch announcements that each node of the demo network has received"""
    fetched: Mapping[str, int] = field(default_factory=dict)
    """number of blocks of these batches that each node has fetched from the bridge"""


@dataclass(frozen=True)
class QualityInRun:
    """The last quality check of a run.

    Attributes:
        at: Time when the check ended, in Unix seconds.
        counts: Number of expectations by table and result (one of `QUALITY_RESULTS`).
    """

    at: float
    counts: Mapping[tuple[str, str], int]


def sum_by_reason(quarantined: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Convert counts by stage and reason to counts by reason."""
    counts: dict[str, int] = {}
    for (_, reason), number in quarantined.items():
        counts[reason] = counts.get(reason, 0) + number
    return counts


@dataclass(frozen=True)
class Snapshot:
    """State of a run at one moment. Counts cover only this run. A value that is not known yet is `None`."""

    network: str
    mode: str
    """"demo network", "live", "no network", "catching up" (`--catch-up`) or "draining" (`--for` is over)"""
    elapsed: timedelta
    duration: timedelta | None = None
    """value of `--for`; `None` without it"""
    frames: int = 0
    """frames written to Kafka"""
    frames_rate: float | None = None
    messages: Mapping[str, int] = field(default_factory=dict)
    """valid messages by type, without duplicates"""
    copies: int | None = None
    """copies of these messages, including the first copy of each"""
    core_differences: int = 0
    """number of records that the native core and Python decoded differently"""
    control_entries: Mapping[str, int] = field(default_factory=dict)
    """subscriptions and control entries in both directions, by kind"""
    control_rates: Mapping[str, float] = field(default_factory=dict)
    """entries per second, mean of the last minute, by kind"""
    open_separators: int | None = None
    """number of open windows"""
    batches: int = 0
    newest_batches: Sequence[BatchLine] = ()
    """newest first"""
    window: timedelta = timedelta(seconds=1)
    late_p50: float | None = None
    """median of `BatchLine.late`, in seconds"""
    late_p99: float | None = None
    late_by_bucket: Sequence[int] = ()
    """number of live batches in each bucket: one for each bound of `BATCH_DELAY_BUCKETS`, and one for longer delays"""
    late_sum: float = 0.0
    """sum of the delays, in seconds"""
    tips: int = 0
    """number of tips in all batches"""
    quarantine: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """number of quarantined records by stage and reason"""
    queries: Sequence[QueryState] = ()
    bridge: BridgeInRun | None = None
    """`None` if this run has no bridge"""
    quality: QualityInRun | None = None
    """`None` before the first completed check of this run"""
    broker: str = ""
    """problem with the Kafka broker; empty if it answers"""
    errors: Sequence[str] = ()
    """current errors of all components"""
    is_ceramic: bool = True
    """false on a network other than Ceramic, which has no batches"""
