"""The division of topics between several bridges."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Final

from kiln.bridge.cluster.group import LiveBridge
from kiln.bridge.cluster.rendezvous import find_owner
from kiln.conf.process.bounded_dict import BoundedDict

_MAX_CACHED_OWNERS: Final = 100_000  # owners of topics; strangers name topics


class TopicShares:
    """The topics of separators, divided between live bridges with the same interests.

    The owner of a topic, by rendezvous hashing over these bridges, joins it. No topic is missed: a bridge leaves a
    topic only while the owner is its gossip peer and subscribes to the topic, and an owner subscribes only where it has
    a peer on the topic that is not our bridge. So bridges that are not connected to each other, or that have different
    interests, receive everything of interest.
    """

    def __init__(self, me: str) -> None:
        """Create the shares of a bridge that is alone so far; `me` is its peer id."""
        self._me = me
        self._bridges: tuple[LiveBridge, ...] = ()
        self._same_interests: tuple[str, ...] = (me,)
        self._owners = BoundedDict[str, str](_MAX_CACHED_OWNERS)
        self.left: frozenset[str] = frozenset()
        """The topics that are left to others now."""

    def set_bridges(self, bridges: tuple[LiveBridge, ...]) -> None:
        """Set the live bridges, this one included."""
        if bridges != self._bridges:
            own = next((bridge.interests for bridge in bridges if bridge.peer == self._me), None)
            same_interests = {bridge.peer for bridge in bridges if bridge.interests == own}
            self._bridges, self._same_interests = bridges, tuple(sorted(same_interests | {self._me}))
            self._owners.clear()

    @property
    def others(self) -> Set[str]:
        """Peer ids of the other live bridges."""
        return {bridge.peer for bridge in self._bridges} - {self._me}

    def select_left(
        self,
        covered: Collection[str],
        named: Collection[str],
        seen: Collection[str],
        bridge_topics: Mapping[str, Set[str]],
    ) -> Set[str]:
        """Select the topics to leave to other bridges.

        Args:
            covered: Topics of separators that a pattern covers.
            named: Topics of separators that an interest names.
            seen: Topics of peers that are not our bridges.
            bridge_topics: Topics of each connected bridge.
        """
        connected = set(self._same_interests) & bridge_topics.keys()
        left: set[str] = set()
        for topic in {*covered, *named} if connected else ():
            owner = self._find_owner(topic)
            # an owner without a peer on a named topic leaves it to bridges that may have one
            if (owner in connected and topic in bridge_topics[owner]) or (owner == self._me and topic not in seen):
                left.add(topic)
        self.left = frozenset(left)
        return self.left

    def _find_owner(self, topic: str) -> str:
        if topic not in self._owners:
            self._owners[topic] = find_owner(topic, self._same_interests)
        return self._owners[topic]
