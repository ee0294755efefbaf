"""Division of the topics between the bridges of a network."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Final

from kiln.bridge.cluster.group import LiveBridge
from kiln.bridge.cluster.rendezvous import find_owner
from kiln.conf.process.bounded_dict import BoundedDict

_MAX_CACHED_OWNERS: Final = 100_000  # owners of topics; strangers name topics


class TopicShares:
    """Division of the separator topics between live bridges with the same interests.

    Rendezvous hashing over these bridges chooses an owner for each topic, which joins the topic. No topic is missed. A
    bridge leaves a topic to the owner only while the owner is its gossip peer and subscribes to the topic. The owner
    subscribes only while it has a peer on the topic that is not one of our bridges. Bridges without a connection to
    each other, or with different interests, divide no topics.
    """

    def __init__(self, me: str) -> None:
        """Create the division for a bridge without others.

        Args:
            me: peer id of this bridge.
        """
        self._me = me
        self._bridges: tuple[LiveBridge, ...] = ()
        self._same_interests: tuple[str, ...] = (me,)
        self._owners = BoundedDict[str, str](_MAX_CACHED_OWNERS)
        self.left: frozenset[str] = frozenset()
        """topics that are left to other bridges now"""

    def set_bridges(self, bridges: tuple[LiveBridge, ...]) -> None:
        """Set the live bridges, including this one."""
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
            covered: Separator topics that a pattern of the interests covers.
            named: Separator topics that the interests name.
            seen: Topics to which peers other than our bridges subscribe.
            bridge_topics: Topics to which each connected bridge subscribes, by peer id.
        """
        connected = set(self._same_interests) & bridge_topics.keys()
        left: set[str] = set()
        for topic in {*covered, *named} if connected else ():
            if topic not in self._owners:
                self._owners[topic] = find_owner(topic, self._same_interests)
            owner = self._owners[topic]
            # an owner without a peer on a named topic leaves it to bridges that may have one
            if (owner in connected and topic in bridge_topics[owner]) or (owner == self._me and topic not in seen):
                left.add(topic)
        self.left = frozenset(left)
        return self.left
