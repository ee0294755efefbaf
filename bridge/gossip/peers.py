"""What the router remembers of a connected peer, and of a topic that it publishes to without being on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bridge.gossip.outcomes import PeerID
from bridge.gossip.score import Score


@dataclass(slots=True, eq=False)
class PeerState:
    peer: PeerID
    protocol: str
    version: int
    outbound: bool
    score: Score
    discovered: bool
    topics: dict[str, None] = field(default_factory=dict)
    meshes: int = 0
    foreign: int = 0  # topics we are not on
    subscriptions: int = 0  # that it has sent, less what is forgiven with time
    silent: bool = True  # no RPC has come yet
    spell: Callable[[bytes], bytes] | None = None  # our id of a message to what it calls it; None: the same
    dont: dict[bytes, int] = field(default_factory=dict)  # id -> heartbeat until which it does not want it
    # since the last heartbeat
    ihaves: int = 0
    asked: int = 0
    iwants: int = 0
    iwant_bytes: int = 0
    donts: int = 0
    graft_penalties: int = 0


@dataclass(slots=True)
class Fanout:
    peers: dict[PeerID, PeerState]
    published: float
