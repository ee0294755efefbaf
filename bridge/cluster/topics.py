"""The division of topics between several bridges."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Final

from kiln.bridge.cluster.group import LiveBridge
from kiln.bridge.cluster.rendezvous import find_owner

_MAX_CACHED_OWNERS: Final = 100_000  # owners of topics; strangers name topics


class TopicShares:
    """Bridges with the same interests split the topics of separators: the owner of a topic, by rendezvous hashing over
    those of them that live, hears it.

    No topic goes unheard. A bridge leaves a topic only while it sees the owner on it: the owner is its gossip peer, and
    has subscribed. And an owner subscribes only where it has a peer on the topic that is no bridge of ours. So bridges
    that are not connected with each other, or that follow different things, hear all that they follow.
    """

    def __init__(self, me: str) -> None:
        """`me`: peer id."""
        self._me = me
        self._bridges: tuple[LiveBridge, ...] = ()
        self._same_interests: tuple[str, ...] = (me,)
        self._owners: dict[str, str] = {}
        self.left: frozenset[str] = frozenset()
        """the topics that are left to others now"""

    def set_bridges(self, bridges: tuple[LiveBridge, ...]) -> None:
        """Set the live bridges, this one included."""
        if bridges != self._bridges:
            own = next((bridge.interests for bridge in bridges if bridge.peer == self._me), None)
            same_interests = {bridge.peer for bridge in bridges if bridge.interests == own}
            self._bridges, self._same_interests, self._owners = bridges, tuple(sorted(same_interests | {self._me})), {}

    @property
    def others(self) -> Set[str]:
        """Peer ids of the other live bridges."""
        return {bridge.peer for bridge in self._bridges} - {self._me}

    def choose(
        self, covered: Collection[str], named: Collection[str], seen: Collection[str], on: Mapping[str, Set[str]]
    ) -> Set[str]:
        """The topics to leave to others, of those of separators that a pattern covers and that an interest names.

        `seen`: the topics of peers that are no bridges of ours. `on`: the topics of each bridge that this one is
        connected with.
        """
        near = set(self._same_interests) & on.keys()
        left: set[str] = set()
        for topic in {*covered, *named} if near else ():
            owner = self._owner(topic)
            # an owner that knows nobody on a named topic leaves it to those who may
            if (owner in near and topic in on[owner]) or (owner == self._me and topic not in seen):
                left.add(topic)
        self.left = frozenset(left)
        return self.left

    def _owner(self, topic: str) -> str:
        if topic not in self._owners:
            if len(self._owners) >= _MAX_CACHED_OWNERS:
                self._owners.clear()
            self._owners[topic] = find_owner(topic, self._same_interests)
        return self._owners[topic]
