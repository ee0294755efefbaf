"""Select the topics to join if an interest covers too many (CIP-120, Specification)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from kiln.bridge.app.interests import network_topics, wanted_topics
from kiln.bridge.cluster.topics import TopicShares
from kiln.bridge.gossipsub.effects import Deliver, PeerView
from kiln.schemas.wire.identity import peer_text
from kiln.schemas.wire.topics import Interest

_ROUNDS_BETWEEN_CHOICES: Final = 10  # rounds at most between two choices while there are too many
_IN_A_ROUND: Final = 2000  # topics; a choice out of more takes longer, and is made more seldom
_LIVELY: Final = 600  # rounds for which a message at least makes a topic lively
_STAY: Final = 1.25  # a topic gives way to one that is so much more useful
_TALK: Final = 2.0  # a lively topic is as useful as one with so many times the peers
# Every peer is told of each change, and other Kilns take 2,500 at once and 10 a second (RouterOptions.subscriptions),
# what they are told when they come included: beyond that they hang up.
_CHANGES: Final = 2400
_CHANGES_MORE: Final = 8  # of a round


class TopicSelector:
    """Keeps what is joined by pattern within two bounds: of all topics, and of those that one peer alone names.

    The less useful topics give way. A peer counts for a topic by its share: one of N topics that the peer is on. So
    whoever names thousands weighs little for each. A peer whose score is below 0 counts nothing. `choose` is called
    once a round, of a second or so. It changes so little in a round that no peer takes the node for one that floods,
    whoever comes and goes: the most useful topics come first, and those that nobody is on are left when there is time.
    """

    def __init__(self, most: int, most_of_peer: int, shares: TopicShares | None = None) -> None:
        """`shares`: what other bridges of the same network take off this one; None: there are none."""
        self._most = most
        self._shares = shares
        self._most_of_peer = most_of_peer
        self._interests: tuple[Interest, ...] = ()
        self._network = ""
        self._covered: dict[str, bool] = {}  # by name; to read a name takes longer than to look it up
        self._chosen: set[str] = set()
        self._refused: set[str] = set()
        self._lively: set[str] = set()
        self._lively_before: set[str] = set()
        self._round = 0
        self._next = 0  # round of the next choice
        self._use: dict[str, float] = {}
        self._changes = float(_CHANGES)
        self._waiting = 0
        self.refusals = 0
        """topics refused since the start, each as often as it came anew"""

    @property
    def refused(self) -> int:
        """Number of topics that are not joined now, for lack of room or time."""
        return len(self._refused) + self._waiting

    def record_message(self, deliver: Deliver) -> None:
        """A good message came on a topic."""
        self._lively.add(deliver.topic)

    def choose(
        self, network: str, interests: Iterable[Interest], peers: Mapping[bytes, PeerView], joined: Collection[str]
    ) -> set[str]:
        """Select the topics to be on, given the connected `peers` and the `joined` topics."""
        followed = tuple(interests)
        bridges = self._bridges(peers)
        peers = {peer: view for peer, view in peers.items() if peer not in bridges}
        if (network, followed) != (self._network, self._interests):
            self._network, self._interests, self._covered = network, followed, {}
        fixed = wanted_topics(network, followed, ())
        seen = {topic for peer in peers.values() for topic in peer.topics}
        new = seen.difference(self._covered)
        found = wanted_topics(network, followed, new)
        self._covered = {topic: known for topic, known in self._covered.items() if topic in seen}
        self._covered.update((topic, topic in found) for topic in new)
        covered = {topic for topic, known in self._covered.items() if known} - fixed
        if self._shares is not None:
            whole = network_topics(network)
            on = {peer_text(peer): view.topics for peer, view in bridges.items()}
            left = self._shares.choose(covered.difference(whole), fixed.difference(whole), seen, on)
            covered, fixed = covered - left, fixed - left
        self._round += 1
        if self._round % _LIVELY == 0:
            self._lively_before, self._lively = self._lively, set()
        if len(covered) <= min(self._most, self._most_of_peer):
            self._chosen, self._refused, self._use = covered, set(), {}
        elif not self._refused or self._round >= self._next:
            self._next = self._round + min(_ROUNDS_BETWEEN_CHOICES, 1 + len(covered) // _IN_A_ROUND)
            self._chosen = self._best(covered, peers, set(joined))
            refused = covered - self._chosen
            self.refusals += len(refused - self._refused)
            self._refused = refused
        return self._paced(fixed, self._chosen & covered, set(joined))

    def _bridges(self, peers: Mapping[bytes, PeerView]) -> Mapping[bytes, PeerView]:
        """Of these peers, the other bridges of ours: what they are on says nothing about where there is traffic."""
        others = frozenset[str]() if self._shares is None else self._shares.others
        return {peer: view for peer, view in peers.items() if peer_text(peer) in others} if others else {}

    def _paced(self, fixed: set[str], chosen: set[str], joined: set[str]) -> set[str]:
        """Return the topics to be on in this round, on the way from the joined to the chosen ones."""
        most = max(_CHANGES_MORE, _CHANGES - len(joined))
        changes = min(self._changes + _CHANGES_MORE, most)
        idle = wanted_topics(self._network, self._interests, joined - chosen) & joined - fixed - chosen
        spare = sorted(idle)
        on = (joined & chosen) | idle
        self._waiting = 0
        for topic in sorted(chosen - joined, key=lambda each: (-self._use.get(each, 0.0), each)):
            full = len(on) >= self._most
            if changes < 1 + full:
                self._waiting += 1
                continue
            if full:
                on.remove(spare.pop())
            on.add(topic)
            changes -= 1 + full
        while spare and changes > most / 2:
            on.remove(spare.pop())
            changes -= 1
        self._changes = changes
        return fixed | on

    def _best(self, covered: set[str], peers: Mapping[bytes, PeerView], joined: set[str]) -> set[str]:
        use = self._use = dict.fromkeys(covered, 0.0)
        named = Counter[str]()
        by: dict[str, bytes] = {}
        for peer, view in peers.items():
            share = 1 / max(1, len(view.topics)) if view.score >= 0 else 0.0
            for topic in covered & view.topics:
                use[topic] += share
                named[topic] += 1
                by[topic] = peer
        for topic in covered & joined:
            use[topic] *= _STAY
        for topic in covered & (self._lively | self._lively_before):
            use[topic] *= _TALK
        alone = Counter[bytes]()
        chosen: set[str] = set()
        for topic in sorted(covered, key=lambda each: (-use[each], each)):
            if len(chosen) >= self._most:
                break
            if named[topic] == 1:
                if alone[by[topic]] >= self._most_of_peer:
                    continue
                alone[by[topic]] += 1
            chosen.add(topic)
        return chosen
