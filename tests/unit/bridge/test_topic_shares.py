"""Which topics bridges of one network leave to each other, round after round, as the node chooses them."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kiln.bridge.app.interests import build_topic_rule
from kiln.bridge.app.topic_selector import TopicSelector
from kiln.bridge.cluster.group import LiveBridge, interests_digest
from kiln.bridge.cluster.rendezvous import find_owner
from kiln.bridge.cluster.topics import TopicShares
from kiln.bridge.gossipsub.effects import PeerView
from kiln.schemas.wire.identity import peer_text

NETWORK = "local-test"
OWN = f"/ceramic/{NETWORK}"
VALUES = [f"k{number:04d}" for number in range(40)]
TOPICS = [f"{OWN}/sep/model/{value}" for value in VALUES]
BRIDGES = [b"bridge a", b"bridge b", b"bridge c"]


class Town:
    """Bridges, and what each is connected to. A round is a second: each tells the others what it is on, and chooses."""

    def __init__(self, interests: Mapping[bytes, tuple[str, ...]]) -> None:
        self.interests = dict(interests)
        self.shares = {bridge: TopicShares(peer_text(bridge)) for bridge in interests}
        self.joining = {bridge: TopicSelector(1_000, 1_000, self.shares[bridge]) for bridge in interests}
        self.on: dict[bytes, set[str]] = {bridge: set() for bridge in interests}
        self.strangers: dict[bytes, set[str]] = {bridge: set() for bridge in interests}
        self.apart: set[frozenset[bytes]] = set()
        self.dead: set[bytes] = set()

    def run(self, rounds: int = 6) -> None:
        for _ in range(rounds):
            self.on = {bridge: self._choose(bridge) for bridge in self.on if bridge not in self.dead}

    def heard(self, bridge: bytes) -> set[str]:
        """The topics that a bridge is on, of which somebody tells it."""
        return self.on[bridge] & self.strangers[bridge]

    def _choose(self, bridge: bytes) -> set[str]:
        live = [other for other in self.interests if other not in self.dead]
        view = [LiveBridge(peer_text(other), "", interests_digest(self.interests[other])) for other in live]
        self.shares[bridge].set_bridges(tuple(view))
        peers = {b"stranger": self._view(self.strangers[bridge])}
        for other in live:
            if other != bridge and frozenset((bridge, other)) not in self.apart:
                peers[other] = self._view(self.on[other])
        rule = build_topic_rule(NETWORK, self.interests[bridge], is_ceramic=True)
        return self.joining[bridge].select(rule, peers, self.on[bridge])

    @staticmethod
    def _view(topics: set[str]) -> PeerView:
        return PeerView("/meshsub/1.2.0", frozenset(topics), 0.0, False)


def test_a_bridge_alone_hears_everything_at_once() -> None:
    town = Town({BRIDGES[0]: ("*",)})
    town.strangers[BRIDGES[0]] = set(TOPICS)
    town.run(rounds=1)
    assert town.on[BRIDGES[0]] == {OWN, *TOPICS}


def test_bridges_with_the_same_peers_split_the_topics_and_take_over_what_one_had() -> None:
    town = Town(dict.fromkeys(BRIDGES, ("*",)))
    town.strangers = {key: set(TOPICS) for key in BRIDGES}
    town.run()
    names = {peer_text(bridge): bridge for bridge in BRIDGES}
    for topic in TOPICS:
        assert [bridge for bridge in BRIDGES if topic in town.on[bridge]] == [names[find_owner(topic, names)]]
    assert all(OWN in on for on in town.on.values())
    had = {bridge: town.on[bridge] for bridge in BRIDGES[1:]}
    town.dead = {BRIDGES[0]}
    town.run(rounds=2)
    left = [peer_text(bridge) for bridge in BRIDGES[1:]]
    for topic in TOPICS:
        assert [bridge for bridge in BRIDGES[1:] if topic in town.on[bridge]] == [names[find_owner(topic, left)]]
    assert all(town.on[bridge] >= had[bridge] for bridge in BRIDGES[1:])


def test_named_topics_are_split_too() -> None:
    named = tuple(f"model/{value}" for value in VALUES)
    town = Town(dict.fromkeys(BRIDGES[:2], named))
    town.strangers = {key: set(TOPICS) for key in BRIDGES[:2]}
    town.run()
    assert set(TOPICS) == (town.on[BRIDGES[0]] | town.on[BRIDGES[1]]) - {OWN}
    assert town.on[BRIDGES[0]] & town.on[BRIDGES[1]] == {OWN}


def test_named_topics_that_no_peer_is_on_yet_are_joined_by_somebody() -> None:
    town = Town(dict.fromkeys(BRIDGES[:2], tuple(f"model/{value}" for value in VALUES)))
    town.run()
    assert town.on[BRIDGES[0]] | town.on[BRIDGES[1]] == {OWN, *TOPICS}


@given(st.data())
def test_no_topic_goes_unheard_whoever_knows_whom(data: st.DataObject) -> None:
    interests = st.sampled_from([("*",), ("model",), tuple(f"model/{value}" for value in VALUES[:10])])
    town = Town({bridge: data.draw(interests) for bridge in BRIDGES})
    some = st.sets(st.sampled_from(TOPICS), max_size=12)
    pairs = [frozenset((one, other)) for one in BRIDGES for other in BRIDGES if one < other]
    for _ in range(3):  # who knows whom changes, and then stays so for a while
        town.strangers = {bridge: data.draw(some) for bridge in BRIDGES}
        town.apart = data.draw(st.sets(st.sampled_from(pairs)))
        town.dead |= data.draw(st.sets(st.sampled_from(BRIDGES), max_size=1))
        if len(town.dead) == len(BRIDGES):
            return
        town.on = {bridge: on for bridge, on in town.on.items() if bridge not in town.dead}
        town.run()
        heard = set[str]().union(*(town.heard(bridge) for bridge in town.on))
        for bridge in town.on:
            rule = build_topic_rule(NETWORK, town.interests[bridge], is_ceramic=True)
            alone = TopicSelector(1_000, 1_000, TopicShares("me")).select(
                rule, {b"s": town._view(town.strangers[bridge])}, ()
            )
            assert heard >= alone & town.strangers[bridge]
