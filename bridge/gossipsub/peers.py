"""Router state: peers, back-offs, promises and retained scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

from kiln.bridge.gossipsub.effects import PeerID
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.score import Score
from kiln.bridge.gossipsub.signing import PeerSigning
from kiln.bridge.gossipsub.table_agreements import PeerTable
from kiln.conf.process.bounded_dict import BoundedDict
from kiln.schemas.wire.message_id import canonical_id, is_key_form, is_text_form, key_form, text_form

_TEXT_ID_COST: Final = 3  # an id in text form uses this much more of `max_ids_per_rpc`


@dataclass(slots=True, eq=False)
class PeerState:
    peer: PeerID
    protocol: str
    version: int
    outbound: bool
    score: Score
    discovered: bool
    table: PeerTable
    topics: dict[str, None] = field(default_factory=dict)
    meshes: int = 0
    unjoined_topics: int = 0  # number of `topics` that the node has not joined
    subscriptions: int = 0  # received (un)subscriptions, less an allowance per heartbeat
    awaits_first_rpc: bool = True  # no RPC has arrived yet
    encode_id: Callable[[bytes], bytes] | None = None  # converts a message id to the peer's form, if it has another
    signing: PeerSigning = field(default_factory=PeerSigning)
    unwanted: dict[bytes, int] = field(default_factory=dict)  # id in an IDONTWANT -> heartbeat at which it expires
    id_budget: int = 0  # ids of the current RPC that may still be processed
    # since the last heartbeat
    ihave_count: int = 0
    requested_ids: int = 0
    iwant_count: int = 0
    iwant_bytes: int = 0
    idontwant_count: int = 0
    graft_penalties: int = 0

    def read_id(self, raw: bytes) -> bytes:
        """Convert a message id from the peer to author ‖ seqno, and record the peer's own form in `encode_id`."""
        if is_key_form(raw):
            self.encode_id = key_form
        elif is_text_form(raw):
            self.encode_id, self.id_budget = text_form, self.id_budget - _TEXT_ID_COST
        return canonical_id(raw)

    def penalize_graft(self, count: int, limit: int) -> None:
        """Add `count` penalties (P7) for a GRAFT, but at most `limit` in total between two heartbeats."""
        count = min(count, limit - self.graft_penalties)
        if count > 0:
            self.graft_penalties += count
            self.score.penalize(count)


class Promises:
    """Messages requested by IWANT. Each has a deadline by which the peer must send it."""

    def __init__(self) -> None:
        self._pending: dict[bytes, dict[PeerID, float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._pending.values()))

    def add(self, key: bytes, peer: PeerID, until: float) -> None:
        self._pending.setdefault(key, {})[peer] = until

    def is_pending(self, key: bytes, peer: PeerID) -> bool:
        return peer in self._pending.get(key, ())

    def fulfil(self, key: bytes) -> None:
        """Remove a message that has arrived, whichever peer sent it."""
        self._pending.pop(key, None)

    def remove(self, key: bytes, peer: PeerID) -> None:
        deadlines = self._pending.get(key)
        if deadlines is not None and deadlines.pop(peer, None) is not None and not deadlines:
            del self._pending[key]

    def remove_peer(self, peer: PeerID) -> None:
        for key in [key for key, deadlines in self._pending.items() if peer in deadlines]:
            self.remove(key, peer)

    def pop_broken(self, now: float) -> Counter[PeerID]:
        """Remove the messages whose deadline has passed, and return how many each peer failed to send."""
        broken: Counter[PeerID] = Counter()
        for key, deadlines in list(self._pending.items()):
            for peer in [peer for peer, until in deadlines.items() if until <= now]:
                self.remove(key, peer)
                broken[peer] += 1
        return broken


class Backoffs:
    """Times before which a pruned peer may not be grafted again, by topic and peer.

    Beyond `limit` entries, the oldest ones are evicted, and `evicted` counts them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[tuple[str, PeerID], tuple[float, float]] = {}  # (end, start)
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: tuple[str, PeerID]) -> bool:
        return entry in self._entries

    def get(self, topic: str, peer: PeerID) -> tuple[float, float]:
        """Return the end and the start of a back-off, or two zeros if there is none."""
        return self._entries.get((topic, peer), (0.0, 0.0))

    def add(self, topic: str, peer: PeerID, seconds: float, now: float) -> None:
        entry = (topic, peer)
        until = max(now + seconds, self._entries.pop(entry, (0.0, 0.0))[0])
        self._entries[entry] = (until, now)
        if len(self._entries) > self._limit:
            del self._entries[next(iter(self._entries))]
            self.evicted += 1

    def expire(self, now: float) -> None:
        for entry in [entry for entry, (until, _) in self._entries.items() if until <= now]:
            del self._entries[entry]


class RetainedScores:
    """Negative scores of disconnected peers. Beyond `limit` entries, the oldest ones are evicted."""

    def __init__(self, limit: int) -> None:
        self._scores = BoundedDict[PeerID, tuple[Score, float]](limit)

    def __len__(self) -> int:
        return len(self._scores)

    def put(self, peer: PeerID, score: Score, until: float) -> None:
        self._scores[peer] = (score, until)

    def pop(self, peer: PeerID, now: float) -> Score | None:
        score, until = self._scores.pop(peer, (None, 0.0))
        return score if until > now else None

    def expire(self, now: float) -> None:
        for peer in [peer for peer, (_, until) in self._scores.items() if until <= now]:
            del self._scores[peer]


def select_mesh_peers(mesh: Mapping[PeerID, PeerState], options: RouterOptions, rng: Random) -> dict[PeerID, None]:
    """Select the D peers that stay in a mesh with too many.

    The D_score peers with the best scores stay, and random others. If possible, at least D_out of the D are outbound.
    """
    order = list(mesh.values())
    rng.shuffle(order)
    order.sort(key=lambda state: -state.score.value)
    rest = order[options.D_score :]
    rng.shuffle(rest)
    order[options.D_score :] = rest
    chosen, others = order[: options.D], order[options.D :]
    missing = options.D_out - sum(state.outbound for state in chosen)
    outbound = [state for state in others if state.outbound][: max(0, missing)]
    for state in outbound:
        # from the end, because the best come first
        worst = next(index for index in reversed(range(len(chosen))) if not chosen[index].outbound)
        chosen[worst] = state
    return dict.fromkeys(state.peer for state in chosen)
