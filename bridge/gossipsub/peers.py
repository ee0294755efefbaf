"""What the router remembers of peers, and of a topic that it publishes to without being on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kiln.bridge.gossipsub.effects import PeerID
from kiln.bridge.gossipsub.score import Score


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
    looks: int = 0  # ids of this RPC's control messages that may still be looked at
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


class Promises:
    """Messages that peers were asked for, each with the time until which a peer is to bring it."""

    def __init__(self) -> None:
        self._asked: dict[bytes, dict[PeerID, float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._asked.values()))

    def add(self, key: bytes, peer: PeerID, until: float) -> None:
        self._asked.setdefault(key, {})[peer] = until

    def holds(self, key: bytes, peer: PeerID) -> bool:
        return peer in self._asked.get(key, ())

    def keep(self, key: bytes) -> None:
        """The message has come, whoever brought it."""
        self._asked.pop(key, None)

    def forget(self, key: bytes, peer: PeerID) -> None:
        asked = self._asked.get(key)
        if asked is not None and asked.pop(peer, None) is not None and not asked:
            del self._asked[key]

    def forget_peer(self, peer: PeerID) -> None:
        for key in [key for key, asked in self._asked.items() if peer in asked]:
            self.forget(key, peer)

    def broken(self, now: float) -> Counter[PeerID]:
        """Forget what is overdue. Returns how many promises each peer broke."""
        broken: Counter[PeerID] = Counter()
        for key, asked in list(self._asked.items()):
            for peer in [peer for peer, until in asked.items() if until <= now]:
                self.forget(key, peer)
                broken[peer] += 1
        return broken


class Backoffs:
    """Topics and peers with which there is to be no mesh for a while. Holds so many; the oldest go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[tuple[str, PeerID], tuple[float, float]] = {}  # (until, when it was pruned)
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: tuple[str, PeerID]) -> bool:
        return entry in self._entries

    def get(self, topic: str, peer: PeerID) -> tuple[float, float]:
        """Until when, and since when; zeros if there is none."""
        return self._entries.get((topic, peer), (0.0, 0.0))

    def add(self, topic: str, peer: PeerID, seconds: float, now: float) -> None:
        entry = (topic, peer)
        until = max(now + seconds, self._entries.pop(entry, (0.0, 0.0))[0])
        self._entries[entry] = (until, now)
        if len(self._entries) > self._most:
            del self._entries[next(iter(self._entries))]
            self.evicted += 1

    def expire(self, now: float) -> None:
        for entry in [entry for entry, (until, _) in self._entries.items() if until <= now]:
            del self._entries[entry]


class RetainedScores:
    """Bad scores of peers that have gone. Holds so many; the oldest go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._scores: dict[PeerID, tuple[Score, float]] = {}

    def __len__(self) -> int:
        return len(self._scores)

    def put(self, peer: PeerID, score: Score, until: float) -> None:
        self._scores[peer] = (score, until)
        if len(self._scores) > self._most:
            del self._scores[next(iter(self._scores))]

    def take(self, peer: PeerID, now: float) -> Score | None:
        score, until = self._scores.pop(peer, (None, 0.0))
        return score if until > now else None

    def expire(self, now: float) -> None:
        for peer in [peer for peer, (_, until) in self._scores.items() if until <= now]:
            del self._scores[peer]
