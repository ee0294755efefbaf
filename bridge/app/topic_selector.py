"""Selection of the topics to join if the interests cover too many (CIP-120, Specification)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from kiln.bridge.app.interests import TopicRule
from kiln.bridge.cluster.topics import TopicShares
from kiln.bridge.gossipsub.effects import Deliver, PeerView
from kiln.schemas.wire.identity import peer_text

_MAX_SELECTION_INTERVAL: Final = 10  # rounds between two selections while there are too many topics
_TOPICS_PER_ROUND: Final = 2000  # a selection from more topics takes longer, and is made less often
_ACTIVITY_ROUNDS: Final = 600  # minimum number of rounds for which a message makes its topic active
_JOINED_FACTOR: Final = 1.25  # usefulness of a joined topic, so that only a clearly more useful topic replaces it
_ACTIVE_FACTOR: Final = 2.0  # usefulness of an active topic
# Every change is sent to all peers. Other Kilns accept 2,500 at once and 10 a second (RouterOptions.subscriptions),
# including the first RPC, and disconnect a peer that sends more.
_CHANGES: Final = 2400
_CHANGES_PER_ROUND: Final = 8


class TopicSelector:
    """Selector of the most useful topics among those that a pattern covers.

    Two limits apply: one to all these topics, and one, for each peer, to topics to which only this peer subscribes.
    Each subscriber makes a topic more useful: a peer with N topics adds 1 / N to each of them. So a peer with thousands
    of topics has little weight. A peer with a score below 0 adds nothing.

    The caller calls `select` about once a second. The number of changes per call is limited, because peers disconnect a
    node that changes many. A call first adds the most useful topics, then drops joined ones that are no longer chosen.
    """

    def __init__(self, max_topics: int, max_topics_per_peer: int, shares: TopicShares) -> None:
        """Create the selector.

        Args:
            max_topics: Maximum number of topics joined by pattern.
            max_topics_per_peer: Maximum number of these topics whose only subscriber is the same peer.
            shares: The topics that other bridges of the same network join instead.
        """
        self._max_topics = max_topics
        self._shares = shares
        self._max_topics_per_peer = max_topics_per_peer
        self._rule: TopicRule | None = None
        self._covered: dict[str, bool] = {}  # by name, since parsing a name takes longer than a lookup
        self._chosen: set[str] = set()
        self._refused: set[str] = set()
        self._active: set[str] = set()
        self._previously_active: set[str] = set()
        self._round = 0
        self._next = 0  # round of the next selection
        self._usefulness: dict[str, float] = {}
        self._changes = float(_CHANGES)
        self._waiting = 0
        self.refusals = 0
        """Number of times that a topic was refused because of a limit. A topic that stays refused counts once."""

    @property
    def refused(self) -> int:
        """Number of topics that are not joined now because of the limits, or are not joined yet."""
        return len(self._refused) + self._waiting

    def record_message(self, deliver: Deliver) -> None:
        """Record a valid message on a topic."""
        self._active.add(deliver.topic)

    def select(self, rule: TopicRule, peers: Mapping[bytes, PeerView], joined: Collection[str]) -> set[str]:
        """Select the topics to be joined, given the connected `peers` and the `joined` topics."""
        bridges = self._select_bridges(peers)
        peers = {peer: view for peer, view in peers.items() if peer not in bridges}
        if rule != self._rule:
            self._rule, self._covered = rule, {}
        fixed = rule.select(())
        seen = {topic for peer in peers.values() for topic in peer.topics}
        new = seen.difference(self._covered)
        new_covered = rule.select(new)
        self._covered = {topic: is_covered for topic, is_covered in self._covered.items() if topic in seen}
        self._covered.update((topic, topic in new_covered) for topic in new)
        covered = {topic for topic, is_covered in self._covered.items() if is_covered} - fixed
        shared = rule.shared
        bridge_topics = {peer_text(peer): view.topics for peer, view in bridges.items()}
        left = self._shares.select_left(covered.difference(shared), fixed.difference(shared), seen, bridge_topics)
        covered, fixed = covered - left, fixed - left
        self._round += 1
        if self._round % _ACTIVITY_ROUNDS == 0:
            self._previously_active, self._active = self._active, set()
        if len(covered) <= min(self._max_topics, self._max_topics_per_peer):
            self._chosen, self._refused, self._usefulness = covered, set(), {}
        elif not self._refused or self._round >= self._next:
            self._next = self._round + min(_MAX_SELECTION_INTERVAL, 1 + len(covered) // _TOPICS_PER_ROUND)
            self._chosen = self._choose_most_useful(covered, peers, set(joined))
            refused = covered - self._chosen
            self.refusals += len(refused - self._refused)
            self._refused = refused
        return self._limit_changes(rule, fixed, self._chosen & covered, set(joined))

    def _select_bridges(self, peers: Mapping[bytes, PeerView]) -> Mapping[bytes, PeerView]:
        """Select our other bridges among the peers. Their subscriptions do not make a topic useful, because they are no
        evidence of traffic."""
        others = self._shares.others
        return {peer: view for peer, view in peers.items() if peer_text(peer) in others} if others else {}

    def _limit_changes(self, rule: TopicRule, fixed: set[str], chosen: set[str], joined: set[str]) -> set[str]:
        """Return the topics to be joined after this round, in which the number of changes is limited."""
        max_changes = max(_CHANGES_PER_ROUND, _CHANGES - len(joined))
        changes = min(self._changes + _CHANGES_PER_ROUND, max_changes)
        idle = rule.select(joined - chosen) & joined - fixed - chosen
        spare = sorted(idle)
        topics = (joined & chosen) | idle
        self._waiting = 0
        for topic in sorted(chosen - joined, key=lambda name: (-self._usefulness.get(name, 0.0), name)):
            full = len(topics) >= self._max_topics
            if changes < 1 + full:
                self._waiting += 1
                continue
            if full:
                topics.remove(spare.pop())
            topics.add(topic)
            changes -= 1 + full
        while spare and changes > max_changes / 2:
            topics.remove(spare.pop())
            changes -= 1
        self._changes = changes
        return fixed | topics

    def _choose_most_useful(self, covered: set[str], peers: Mapping[bytes, PeerView], joined: set[str]) -> set[str]:
        usefulness = self._usefulness = dict.fromkeys(covered, 0.0)
        peer_counts = Counter[str]()
        last_peer: dict[str, bytes] = {}
        for peer, view in peers.items():
            share = 1 / max(1, len(view.topics)) if view.score >= 0 else 0.0
            for topic in covered & view.topics:
                usefulness[topic] += share
                peer_counts[topic] += 1
                last_peer[topic] = peer
        for topic in covered & joined:
            usefulness[topic] *= _JOINED_FACTOR
        for topic in covered & (self._active | self._previously_active):
            usefulness[topic] *= _ACTIVE_FACTOR
        sole_topics = Counter[bytes]()  # chosen topics to which only this peer subscribes
        chosen: set[str] = set()
        for topic in sorted(covered, key=lambda name: (-usefulness[name], name)):
            if len(chosen) >= self._max_topics:
                break
            if peer_counts[topic] == 1:
                if sole_topics[last_peer[topic]] >= self._max_topics_per_peer:
                    continue
                sole_topics[last_peer[topic]] += 1
            chosen.add(topic)
        return chosen
