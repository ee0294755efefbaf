"""What a run looks like at one moment: plain data for the screen, the log line and whoever else shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

QueryPhase = Literal["starting", "running", "idle", "restarting", "failed", "stopped"]


@dataclass(frozen=True)
class BatchLine:
    """A batch as the screen shows it. `late`: how many seconds later than T after its first update was heard the broker
    had it; None: a replayed capture, which was heard before."""

    separator_key: str
    separator_value: str
    streams: int
    tips: int
    cid: str
    late: float | None = None


@dataclass(frozen=True)
class QueryLine:
    """A streaming query. Rates are rows a second; `took`: seconds of its last micro-batch; `lag`: records behind.

    None: not known (yet). `error`: why it last failed, in words, empty if it never did.
    """

    name: str
    phase: QueryPhase
    batch: int | None = None
    lag: int | None = None
    took: float | None = None
    input_rate: float | None = None
    process_rate: float | None = None
    restarts: int = 0
    error: str = ""


@dataclass(frozen=True)
class PeerLine:
    """A peer of the bridge; `outbound`: we dialled."""

    peer: str
    agent: str
    protocol: str
    outbound: bool


@dataclass(frozen=True)
class OverlayLine:
    """The BEP 50 overlay; `contacts` over all `topics`, `items` new ones heard or made, `dropped` datagrams."""

    topics: int
    contacts: int
    published: int
    items: int
    dropped: int
    publishing: str = ""


@dataclass(frozen=True)
class FetchLine:
    """What is wanted out of IPFS: records that wait, blocks under way, blocks had, updates let go, given up."""

    node: str
    waiting: int
    fetching: int
    blocks: int
    released: int
    given_up: int


@dataclass(frozen=True)
class BridgeLine:
    """The bridge on the screen; counts since it started. `heard`: BATCH_UPDATEs by node of the demo network."""

    state: str
    address: str = ""
    peers: Sequence[PeerLine] = ()
    topics: int = 0
    mesh: Sequence[tuple[str, int]] = ()
    """peers by topic"""
    frames_in: int = 0
    frames_out: int = 0
    spooled: int = 0
    """bytes on disk that Kafka has not taken"""
    published: int = 0
    publishing: str = ""
    heard: Mapping[str, int] = field(default_factory=dict)
    overlay: OverlayLine | None = None
    fetch: FetchLine | None = None
    """of both, None: it does not run"""


@dataclass(frozen=True)
class Snapshot:
    """All that the screen shows, at one moment. Counts are of this run; None: not known (yet). Newest batch first."""

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
    window: timedelta = timedelta(seconds=1)
    late_p50: float | None = None
    """seconds later than T after the first update was heard, of live batches"""
    late_p99: float | None = None
    quarantine: Mapping[str, int] = field(default_factory=dict)
    """by reason"""
    queries: Sequence[QueryLine] = ()
    bridge: BridgeLine | None = None
    """None: there is none in this run"""
    errors: Sequence[str] = ()
    """in words, newest last"""
