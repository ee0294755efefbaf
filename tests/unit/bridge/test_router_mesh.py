"""The mesh of a topic: filled, kept in bounds, pruned, and back-off."""

from __future__ import annotations

import pytest

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.protocols import VERSIONS
from kit.scripted_peers import (
    MESHSUB,
    T,
    graft,
    grafts,
    message,
    node,
    peer,
    prune,
    prunes,
    rpc_of,
    subscribe,
    with_peers,
)

# ---------------------------------------------------------------- mesh


@pytest.mark.parametrize("protocol", [each for each in VERSIONS if each.startswith("/meshsub")])
def test_the_mesh_is_filled_to_d_and_kept_under_d_high(protocol: str) -> None:
    options = RouterOptions()
    router = with_peers(node(options), 40, protocol)
    router.heartbeat(1.0)
    assert options.D_low <= len(router.mesh[T]) <= options.D_high
    for number in range(40):
        router.receive(peer(number), graft(T), 2.0)
    assert len(router.mesh[T]) > options.D_high
    sends = router.heartbeat(3.0)
    assert len(router.mesh[T]) == options.D
    seconds = 0 if protocol == "/meshsub/1.0.0" else 60
    assert {each[2] for each in prunes(sends)} == {seconds}
    assert {each[0] for each in prunes(sends)} == {peer(number) for number in range(40)} - router.mesh[T]


def test_a_full_mesh_takes_no_inbound_peer_and_keeps_outbound_ones() -> None:
    options = RouterOptions()
    router = with_peers(node(options), 2, outbound=True)
    with_peers(router, 30, outbound=False, first=10)
    refused = 0
    for number in range(10, 40):
        refused += len(prunes(router.receive(peer(number), graft(T), 1.0)[0]))
    assert len(router.mesh[T]) == options.D_high
    assert refused == router.counters["graft_mesh_full"] > 0
    router.receive(peer(0), graft(T), 1.0)
    for beat in range(1, 30):
        router.heartbeat(beat)
        assert {peer(0), peer(1)} <= router.mesh[T]


@pytest.mark.parametrize("inbound", [RouterOptions().D_low, RouterOptions().D])
def test_outbound_peers_are_taken_into_a_mesh_that_has_too_few(inbound: int) -> None:
    router = with_peers(node(), inbound, outbound=False)
    router.heartbeat(1.0)
    with_peers(router, 3, outbound=True, first=10)
    for number in range(inbound):
        router.receive(peer(number), graft(T), 1.0)
    router.heartbeat(2.0)
    assert sum(router.peers[each].outbound for each in router.mesh[T]) >= 2


def test_the_best_peers_survive_pruning() -> None:
    router = with_peers(node(), 30)
    for number in range(30):
        router.receive(peer(number), graft(T), 0.0)
    best = {peer(number) for number in (3, 9, 17, 28)}
    for place, good in enumerate(sorted(best)):
        for number in range(5):
            router.receive(good, rpc_of(message(100 * place + number)), 0.5)
    router.heartbeat(1.0)
    assert best <= router.mesh[T]
    assert len(router.mesh[T]) == 6


def test_a_poor_mesh_is_bettered_now_and_then() -> None:
    router = with_peers(node(RouterOptions(D_out=0)), 20)
    router.heartbeat(1.0)
    outside = sorted(set(router.peers) - router.mesh[T])[0]
    for number in range(60):
        router.receive(outside, rpc_of(message(number)), 1.0)
    before = len(router.mesh[T])
    for beat in range(2, 61):
        router.heartbeat(1.0 + beat / 100)
    assert outside in router.mesh[T]
    assert len(router.mesh[T]) > before
    assert router.counters["opportunistic_graft"] >= 1


def test_floodsub_peers_are_never_in_a_mesh_and_get_no_control_messages() -> None:
    router = with_peers(node(), 3, "/floodsub/1.0.0")
    sends, _, _ = router.receive(peer(0), graft(T), 1.0)
    router.receive(peer(1), rpc_of(message(1, size=5000)), 1.0)
    sends += router.heartbeat(1.0) + router.heartbeat(2.0) + router.leave(T, 3.0)
    assert router.counters["control_from_floodsub"] == 1
    assert not any(send.rpc.HasField("control") for send in sends)


# ---------------------------------------------------------------- back-off


def test_a_peers_back_off_is_kept_to_the_second_and_then_some() -> None:
    router = with_peers(node(), 1)
    router.receive(peer(0), prune(T, 7), 10.0)
    assert router.mesh[T] == set()
    early = [send for beat in range(10, 18) for send in router.heartbeat(float(beat))]
    early += router.receive(peer(0), subscribe(T, subscribed=False), 12.0)[0]
    early += router.receive(peer(0), subscribe(T), 12.0)[0]
    assert grafts(early) == []
    later = [send for beat in range(18, 22) for send in router.heartbeat(float(beat))]
    assert grafts(later) == [(peer(0), T)]


@pytest.mark.parametrize("protocol", ["/meshsub/1.0.0", "/meshsub/1.1.0"])
def test_a_prune_without_seconds_means_the_usual_back_off(protocol: str) -> None:
    router = with_peers(node(), 1, protocol)
    router.receive(peer(0), prune(T), 0.0)
    assert grafts(send for beat in range(1, 60) for send in router.heartbeat(float(beat))) == []
    assert grafts(send for beat in range(60, 70) for send in router.heartbeat(float(beat))) == [(peer(0), T)]


def test_back_off_outlives_a_reconnection() -> None:
    router = with_peers(node(), 1)
    router.receive(peer(0), prune(T, 60), 0.0)
    router.remove_peer(peer(0), 1.0)
    router.add_peer(peer(0), MESHSUB, True, 2.0)
    assert grafts(router.receive(peer(0), subscribe(T), 2.0)[0]) == []


def test_an_absurd_back_off_does_not_last_for_ever() -> None:
    router = with_peers(node(RouterOptions(max_backoff=100)), 1)
    router.receive(peer(0), prune(T, 2**64 - 1), 0.0)
    assert grafts(router.heartbeat(99.0)) == []
    assert grafts(router.heartbeat(103.0)) == [(peer(0), T)]


def test_a_graft_within_back_off_is_refused_counted_and_penalised() -> None:
    router = with_peers(node(), 1)
    router.leave(T, 0.0)
    router.join(T)
    sends, _, _ = router.receive(peer(0), graft(T), 1.0)
    assert prunes(sends) == [(peer(0), T, 60)]
    assert router.mesh[T] == set()
    assert router.counters["graft_backoff"] == 1
    for _ in range(4):
        router.receive(peer(0), graft(T), 2.0)
    assert router.peers[peer(0)].score < 0
    # each refused GRAFT starts the back-off anew
    assert prunes(router.receive(peer(0), graft(T), 59.0)[0]) == [(peer(0), T, 60)]


def test_a_graft_right_after_the_prune_counts_twice() -> None:
    router = with_peers(node(), 2)
    for number, at in ((0, 1.0), (1, 20.0)):
        router.receive(peer(number), prune(T, 60), 0.0)
        router.receive(peer(number), graft(T), at)
    assert [router._peers[peer(number)].graft_penalties for number in range(2)] == [2, 1]


def test_a_graft_storm_ends_in_the_graylist_and_harms_nobody_else() -> None:
    router = with_peers(node(), 3)
    router.receive(peer(0), prune(T, 60), 0.0)
    others = router.mesh[T]
    answers = 0
    for beat in range(30):
        for _ in range(100):
            answers += len(router.receive(peer(0), graft(*[T] * 100), beat + 0.5)[0])
        router.heartbeat(beat + 1.0)
    assert router.peers[peer(0)].score < RouterOptions().score.graylist_threshold
    assert router.counters["graylisted"] > 0
    assert answers < 300
    assert router.mesh[T] == others == {peer(1), peer(2)}
    assert router.receive(peer(0), rpc_of(message(1)), 31.0) == ([], [], b"\0")
    assert router.receive(peer(1), rpc_of(message(1)), 31.0)[2] == b"\1"


def test_one_confused_burst_of_grafts_is_no_storm() -> None:
    topics = [f"/t/{number}" for number in range(200)]
    router = node(topics=topics)
    router.add_peer(peer(0), MESHSUB, False, 0.0)
    for topic in topics:
        router.receive(peer(0), prune(topic, 60), 0.0)
    sends, _, _ = router.receive(peer(0), graft(*topics), 20.0)
    assert len(prunes(sends)) == 200
    assert router.peers[peer(0)].score > RouterOptions().score.gossip_threshold


def test_a_bad_score_outlives_a_reconnection() -> None:
    router = with_peers(node(), 1)
    for number in range(5):
        router.receive(peer(0), rpc_of(message(number, sig=b"bad")), 0.0)
    before = router.peers[peer(0)].score
    router.remove_peer(peer(0), 1.0)
    router.add_peer(peer(0), MESHSUB, False, 2.0)
    assert router.peers[peer(0)].score == before < 0
    assert prunes(router.receive(peer(0), graft(T), 2.0)[0]) == [(peer(0), T, 60)]


def test_grafts_for_topics_we_are_not_on_get_no_answer() -> None:
    router = with_peers(node(), 1)
    assert router.receive(peer(0), graft("/other"), 1.0)[0] == []
    assert router.counters["graft_unknown_topic"] == 1


def test_the_back_off_map_is_bounded() -> None:
    router = with_peers(node(RouterOptions(max_backoffs=50)), 0)
    for number in range(200):
        router.add_peer(peer(number), MESHSUB, False, 0.0)
        router.receive(peer(number), prune(T, 1000), 0.0)
        router.remove_peer(peer(number), 0.0)
    assert router.sizes["backoff"] == 50
    assert router.counters["backoff_evicted"] == 150


def test_leaving_prunes_with_the_short_back_off_and_tells_all() -> None:
    router = with_peers(node(), 10)
    with_peers(router, 1, "/floodsub/1.0.0", first=20)
    router.heartbeat(1.0)
    mesh = router.mesh[T]
    sends = router.leave(T, 2.0)
    assert {each[0]: each[2] for each in prunes(sends)} == dict.fromkeys(mesh, 10)
    assert {send.peer for send in sends if not send.rpc.subscriptions[0].subscribe} == set(router.peers)
    assert T not in router.mesh
    # the back-off is ours to keep, too
    assert mesh.isdisjoint(each for each, _ in grafts(router.join(T)))


def test_peer_exchange_is_neither_used_nor_sent() -> None:
    router = with_peers(node(), 20)
    rpc = prune(T, 60)
    rpc.control.prune[0].peers.add(peerID=peer(99))
    sends, _, _ = router.receive(next(iter(router.mesh[T])), rpc, 1.0)
    sends += router.heartbeat(1.0) + router.leave(T, 2.0)
    assert router.counters["px_ignored"] == 1
    assert not any(each.peers for send in sends for each in send.rpc.control.prune)
