"""What a node is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bridge.gossip.options import RouterOptions
from bridge.gossip.table_side import SendMode
from schemas.topic_table import Bundles


@dataclass(frozen=True)
class NodeOptions:
    """What a node is told. Sizes in bytes, times in seconds."""

    network: str
    listen: Sequence[str] = ()  # multiaddrs; none: it only dials
    bootstrap: Sequence[str] = ()  # multiaddrs that end in /p2p/<peer id>
    gossip: RouterOptions = field(default_factory=RouterOptions)
    bundles: Bundles = field(default_factory=Bundles)  # of topics that may go by index; none: no topic does
    send_indices: SendMode = "cautious"
    agent: str = "kiln"
    max_connections: int = 300
    dial_timeout: float = 15.0
    redial_first: float = 1.0  # after the first failure; doubles with each
    redial_most: float = 60.0
    negotiate_timeout: float = 10.0
    # What waits for one peer is bounded: our own messages and those of others, each by queue_bytes, are dropped and
    # counted over it; subscriptions and mesh upkeep have control_bytes more, then the peer is disconnected.
    queue_bytes: int = 4 * 1024 * 1024
    control_bytes: int = 1024 * 1024
    stuck_after: float = 30.0  # a peer that takes nothing for so long is disconnected
