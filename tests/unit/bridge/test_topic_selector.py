"""Which topics are joined when peers name more than there is room for."""

from __future__ import annotations

from collections.abc import Iterable

from kiln.bridge.app.interests import CeramicTopics, GossipTopics
from kiln.bridge.app.topic_selector import TopicSelector
from kiln.bridge.cluster.topics import TopicShares
from kiln.bridge.gossipsub.effects import Deliver, PeerView
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.schemas.proto.gossipsub.rpc_pb2 import Message
from kiln.schemas.wire.topics import parse_interest

NETWORK = "local-test"
OWN = f"/ceramic/{NETWORK}"
ALL = CeramicTopics(NETWORK, (parse_interest("*"),))


def topics(start: int, end: int) -> list[str]:
    return [f"{OWN}/sep/model/k{number:05d}" for number in range(start, end)]


def peer(names: Iterable[str], score: float = 0.0) -> PeerView:
    return PeerView("/meshsub/1.2.0", frozenset(names), score, False)


def test_within_the_bounds_all_are_joined() -> None:
    joining = TopicSelector(10, 5, TopicShares("me"))
    assert joining.select(ALL, {b"a": peer(topics(0, 5))}, ()) == {OWN, *topics(0, 5)}
    assert joining.select(ALL, {}, topics(0, 5)) == {OWN}
    assert (joining.refused, joining.refusals) == (0, 0)


def test_one_peer_alone_names_so_many_and_whoever_shares_names_more() -> None:
    joining = TopicSelector(100, 5, TopicShares("me"))
    peers = {b"a": peer(topics(0, 20)), b"b": peer(topics(10, 20))}
    chosen = joining.select(ALL, peers, ())
    assert chosen >= {OWN, *topics(10, 20)}
    assert len(chosen & set(topics(0, 10))) == 5
    assert (joining.refused, joining.refusals) == (5, 5)


def test_thousands_of_topics_of_strangers_do_not_crowd_out_anybodys_few() -> None:
    joining = TopicSelector(200, 100, TopicShares("me"))
    strangers = {b"s%d" % number: peer(topics(number * 5000, number * 5000 + 5000)) for number in range(1, 7)}
    joined = joining.select(ALL, strangers, ())
    assert len(joined) == 201
    for _ in range(20):  # rounds; they were first, and keep every place until somebody comes
        joined = joining.select(ALL, strangers, joined)
    assert joining.refusals == joining.refused == 30_000 - 200
    for _ in range(10):
        joined = joining.select(ALL, {**strangers, b"a": peer(topics(0, 40))}, joined)
    assert joined >= set(topics(0, 40))
    assert len(joined) == 201
    assert joining.refusals == 30_000 - 160


def test_other_kilns_never_take_the_node_for_one_that_floods() -> None:
    """Strangers come with thousands of topics and go again, round after round. Whoever hears the node from any round on
    is told, with what the node is on when he comes, no more than a Kiln takes."""
    joining, joined = TopicSelector(2000, 500, TopicShares("me")), {OWN}
    told: list[tuple[int, int]] = []  # on so many at the beginning of a round, so many changes in it
    steady = peer(topics(0, 5))
    for number in range(45):
        strangers = {
            b"s%d" % each: peer(topics(start, start + 2500)) for each in range(6) for start in [_fresh(number, each)]
        }
        before, joined = joined, joining.select(ALL, {**strangers, b"a": steady}, joined)
        told.append((len(before), len(before ^ joined)))
        assert len(joined) <= 2001
        assert joined >= {OWN, *topics(0, 5)}
    options = RouterOptions()
    for first, (already, _) in enumerate(told):
        level = float(already)
        for _, changes in told[first:]:
            level += changes
            assert level <= options.subscriptions
            level = max(0.0, level - options.subscriptions_per_heartbeat)


def _fresh(number: int, stranger: int) -> int:
    return 10 + (number // 3 * 6 + stranger) * 2500


def test_when_nothing_else_changes_all_that_nobody_is_on_is_left() -> None:
    joining = TopicSelector(2000, 500, TopicShares("me"))
    joined = joining.select(ALL, {b"a": peer(topics(0, 500)), b"b": peer(topics(500, 1000))}, {OWN})
    assert len(joined) == 1001
    for _ in range(200):
        joined = joining.select(ALL, {}, joined)
    assert joined == {OWN}


def test_what_the_interests_cover_no_longer_is_left_at_once() -> None:
    joining = TopicSelector(2000, 2000, TopicShares("me"))
    peers = {b"a": peer(topics(0, 1500))}
    joined = joining.select(ALL, peers, {OWN})
    assert joining.select(CeramicTopics(NETWORK, (parse_interest("tenant"),)), peers, joined) == {OWN}


def test_topics_that_the_interests_name_are_joined_in_any_case() -> None:
    joining = TopicSelector(1, 1, TopicShares("me"))
    named = CeramicTopics(NETWORK, (*ALL.interests, parse_interest("model/k00007")))
    chosen = joining.select(named, {b"a": peer(topics(0, 20))}, ())
    assert f"{OWN}/sep/model/k00007" in chosen
    assert len(chosen) == 3


def test_active_topics_and_those_of_peers_in_good_standing_stay() -> None:
    joining = TopicSelector(2, 2, TopicShares("me"))
    lively = topics(5, 6)[0]
    joining.record_message(Deliver(Message(), lively, b"a"))
    peers = {b"a": peer(topics(0, 6)), b"b": peer(topics(6, 7)), b"c": peer(topics(7, 8), score=-1.0)}
    assert joining.select(ALL, peers, ()) == {OWN, lively, *topics(6, 7)}


def test_what_is_joined_does_not_give_way_to_its_like() -> None:
    joining = TopicSelector(3, 3, TopicShares("me"))
    joined = {OWN, *topics(7, 10)}
    assert joining.select(ALL, {b"a": peer(topics(0, 5)), b"b": peer(topics(5, 10))}, joined) == joined


def test_on_another_network_names_are_joined_at_once_and_patterns_when_a_peer_is_on_them() -> None:
    rule = GossipTopics(("/fil/blocks/net", "/app/*/[a]"))
    joining = TopicSelector(10, 10, TopicShares("me"))
    assert joining.select(rule, {}, ()) == {"/fil/blocks/net"}
    peers = {b"a": peer(["/app/x/[a]", "/app/a", "/fil/msgs/net", "/ceramic/local-test"])}
    assert joining.select(rule, peers, ()) == {"/fil/blocks/net", "/app/x/[a]"}


def test_the_topics_of_a_pattern_are_bounded_and_those_by_name_are_not() -> None:
    joining = TopicSelector(3, 2, TopicShares("me"))
    named = tuple(f"/named/{number}" for number in range(5))
    peers = {b"a": peer(f"/a/{number}" for number in range(100)), b"b": peer(["/b"])}
    joined = joining.select(GossipTopics((*named, "*")), peers, ())
    assert joined >= {*named, "/b"}
    assert len(joined) == 5 + 3
    assert joining.refused == 98
