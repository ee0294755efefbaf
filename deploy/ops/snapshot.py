"""What a run looks like at one moment: plain data, for the screen and for the line of a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from kiln.conf.process.bridge_status import BridgeStatus
from kiln.pipelines.runtime.query_status import QueryState


@dataclass(frozen=True)
class BatchLine:
    """A batch as the screen shows it. `late`: how many seconds later than T after its first update was heard the broker
    had it; None: a replayed capture, which was heard before."""

    separator_key: str
    separator_value: str
    stream_count: int
    tip_count: int
    batch_cid: str
    late: float | None = None


@dataclass(frozen=True)
class BridgeInRun:
    """The bridge of a run, as the bridge tells of itself."""

    status: BridgeStatus | None = None
    """None: the bridge has said nothing yet, or nothing for long"""
    heard: Mapping[str, int] = field(default_factory=dict)
    """BATCH_UPDATEs that each node of the demo network has heard"""


@dataclass(frozen=True)
class QualityInRun:
    """The last check of the tables. `at`: when it ended, unix s; `found`: expectations by table and by what became of
    them, one of `kiln.schemas.exposition.QUALITY_RESULTS`."""

    at: float
    found: Mapping[tuple[str, str], int]


def sum_by_reason(quarantined: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """What went to quarantine by stage and reason, by reason alone."""
    found: dict[str, int] = {}
    for (_, reason), number in quarantined.items():
        found[reason] = found.get(reason, 0) + number
    return found


@dataclass(frozen=True)
class Snapshot:
    """All that the screen shows, at one moment. Counts are of this run. None: not known (yet)."""

    network: str
    mode: str
    """where frames come from, in a word or two: "demo network", "live", "catching up", "no network" """
    elapsed: timedelta
    duration: timedelta | None = None
    """how long it is to run; None: until Ctrl-C, or until caught up"""
    frames: int = 0
    frames_rate: float | None = None
    messages: Mapping[str, int] = field(default_factory=dict)
    """by type"""
    copies: int | None = None
    """of all messages counted in `messages`"""
    open_separators: int | None = None
    batches: int = 0
    newest_batches: Sequence[BatchLine] = ()
    """the newest first"""
    window: timedelta = timedelta(seconds=1)
    late_p50: float | None = None
    """seconds later than T after the first update was heard, of live batches"""
    late_p99: float | None = None
    late_by_bucket: Sequence[int] = ()
    """live batches by lateness: as many numbers as `kiln.schemas.exposition.BATCH_DELAY_BUCKETS` has bounds, and one"""
    late_sum: float = 0.0
    tips: int = 0
    """in all batches"""
    quarantine: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """by stage and reason"""
    queries: Sequence[QueryState] = ()
    bridge: BridgeInRun | None = None
    """None: there is no bridge in this run"""
    quality: QualityInRun | None = None
    """None: no check has ended in this run"""
    broker: str = ""
    """what is wrong with the broker; empty: it answers"""
    errors: Sequence[str] = ()
    """in words, newest last"""
