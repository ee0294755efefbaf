"""The router exactly at its limits: what is at a limit is accepted, and what is one over it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.gossipsub.score import ScoreOptions
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kit.scripted_peers import (
    T,
    asked,
    gossip_id,
    graft,
    ihave,
    iwant,
    message,
    node,
    peer,
    prune,
    receivers,
    rpc_of,
    subscribe,
    with_peers,
)

OPTIONS = RouterOptions()
FORGED = [message(90, sig=b"bad"), message(91, sig=b"bad")]
FORGED_SCORE = -40.0
SENDER, FLOODSUB_SENDER, OTHER = peer(0), peer(1), peer(2)
THRESHOLDS: Mapping[str, Callable[[float], ScoreOptions]] = {
    "gossip": lambda at: ScoreOptions(gossip_threshold=at),
    "publish": lambda at: ScoreOptions(publish_threshold=at),
    "graylist": lambda at: ScoreOptions(graylist_threshold=at),
}


def is_told(router: Router) -> bool:
    router.publish(message(1), 1.0)
    return any(send.peer == SENDER and send.rpc.control.ihave for send in router.heartbeat(1.0))


def is_answered(router: Router) -> bool:
    router.publish(message(1), 1.0)
    return router.receive(SENDER, iwant(gossip_id(message(1))), 1.0)[0] != []


def is_asked(router: Router) -> bool:
    return asked(router.receive(SENDER, ihave([b"lacking"]), 1.0)[0]) == [b"lacking"]


def is_published_to(router: Router) -> bool:
    return SENDER in receivers(router.publish(message(1), 1.0))


def is_flooded(router: Router) -> bool:
    return FLOODSUB_SENDER in receivers(router.receive(OTHER, rpc_of(message(1)), 1.0)[0])


def is_heard(router: Router) -> bool:
    return len(router.receive(SENDER, rpc_of(message(1)), 1.0)[1]) == 1


def is_kept(router: Router) -> bool:
    return not router.is_graylisted(SENDER)


@pytest.mark.parametrize(
    ("threshold", "is_served"),
    [
        ("gossip", is_told),
        ("gossip", is_answered),
        ("gossip", is_asked),
        ("publish", is_published_to),
        ("publish", is_flooded),
        ("graylist", is_heard),
        ("graylist", is_kept),
    ],
)
def test_a_peer_is_served_at_a_threshold_and_not_below(threshold: str, is_served: Callable[[Router], bool]) -> None:
    for at, expected in ((FORGED_SCORE, True), (FORGED_SCORE + 0.5, False)):
        router = with_peers(node(RouterOptions(score=THRESHOLDS[threshold](at))), 3)
        router.add_peer(FLOODSUB_SENDER, "/floodsub/1.0.0", True, 0.0)
        router.receive(FLOODSUB_SENDER, subscribe(T), 0.0)
        for sender in (SENDER, FLOODSUB_SENDER):
            router.receive(sender, rpc_of(*FORGED), 0.0)
            assert router.peers[sender].score == FORGED_SCORE
        assert is_served(router) is expected


@pytest.mark.parametrize(("threshold", "delivered"), [(FORGED_SCORE, 1), (FORGED_SCORE + 0.5, 0)])
def test_after_forgeries_the_rest_of_an_rpc_is_read_down_to_the_graylist(threshold: float, delivered: int) -> None:
    router = with_peers(node(RouterOptions(score=ScoreOptions(graylist_threshold=threshold))), 1)
    assert len(router.receive(peer(0), rpc_of(*FORGED, message(1)), 1.0)[1]) == delivered


@pytest.mark.parametrize(
    ("counter", "is_penalised", "limit", "build"),
    [
        ("messages_over_limit", True, OPTIONS.max_messages_per_rpc, lambda count: rpc_of(*map(message, range(count)))),
        ("control_over_limit", True, OPTIONS.max_control_per_rpc, lambda count: graft(*[T] * count)),
        ("subscription_flood", True, OPTIONS.subscriptions - 1, lambda count: subscribe(*[T] * count)),  # 1 from before
        ("iwant_over_limit", False, OPTIONS.max_iwant_length, lambda count: iwant(*[b"id"] * count)),
        ("id_too_long", False, OPTIONS.max_id_bytes, lambda size: ihave([bytes(size)])),
        ("bad_topic", False, OPTIONS.max_topic_length, lambda size: subscribe("t" * size)),
    ],
)
def test_what_is_at_a_limit_costs_nothing_and_one_more_is_counted(
    counter: str, is_penalised: bool, limit: int, build: Callable[[int], RPC]
) -> None:
    for over in (0, 1):
        router = with_peers(node(), 1)
        router.receive(peer(0), build(limit + over), 1.0)
        assert router.counters[counter] == over
        assert (router._peers[peer(0)].score.behaviour > 0) is (is_penalised and over == 1)


def test_idontwant_is_sent_from_the_threshold_on() -> None:
    router = with_peers(node(), 2)
    sizes = [OPTIONS.idontwant_threshold - 1, OPTIONS.idontwant_threshold]
    large = [message(number, size=size - 1) for number, size in enumerate(sizes)]
    assert [len(each.data) for each in large] == sizes
    sends, _, _ = router.receive(peer(0), rpc_of(*large), 1.0)
    told = [key for send in sends for item in send.rpc.control.idontwant for key in item.messageIDs]
    assert told == [gossip_id(large[1])]


@pytest.mark.parametrize(("seconds", "penalties"), [(9.5, 2), (10, 1), (59.5, 1), (60, 0)])
def test_a_graft_is_penalised_until_the_end_of_the_back_off_and_twice_at_its_beginning(
    seconds: float, penalties: int
) -> None:
    router = with_peers(node(), 1)
    router.receive(peer(0), prune(T, 60), 0.0)
    router.receive(peer(0), graft(T), seconds)
    assert router._peers[peer(0)].graft_penalties == penalties
