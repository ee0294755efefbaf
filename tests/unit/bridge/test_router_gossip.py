"""IHAVE, IWANT and IDONTWANT: told, asked for, answered, bounded."""

from __future__ import annotations

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.schemas.wire.message_id import gossip_id
from kit.scripted_peers import (
    T,
    asked,
    idontwant,
    ihave,
    iwant,
    message,
    node,
    peer,
    receivers,
    rpc_of,
    with_peers,
)

# ---------------------------------------------------------------- gossip


def test_ids_of_new_messages_are_told_to_peers_outside_the_mesh_for_three_heartbeats() -> None:
    router = with_peers(node(), 30)
    router.heartbeat(0.0)
    source = next(iter(router.mesh[T]))
    router.receive(source, rpc_of(message(1)), 0.5)
    told = []
    for beat in range(1, 6):
        sends = [send for send in router.heartbeat(float(beat)) if send.rpc.control.ihave]
        assert router.mesh[T].isdisjoint(send.peer for send in sends)
        assert all(not send.priority for send in sends)
        told.append(len(sends))
    assert told == [7, 7, 7, 0, 0] or told == [6, 6, 6, 0, 0]
    ids = [gossip_id(message(1))]
    assert router.counters["ihave_sent"] == sum(told) * len(ids)


def test_ihave_is_answered_with_iwant_for_what_we_lack() -> None:
    router = with_peers(node(), 2)
    router.receive(peer(1), rpc_of(message(1)), 0.0)
    have, lack = gossip_id(message(1)), gossip_id(message(2))
    sends, _, _ = router.receive(peer(0), ihave([have, lack, lack]), 1.0)
    assert asked(sends) == [lack]
    assert router.receive(peer(0), ihave([lack], topic="/other"), 1.0)[0] == []
    # not asked of the same peer again while it has time to answer
    assert router.receive(peer(0), ihave([lack]), 1.1)[0] == []
    _, delivered, _ = router.receive(peer(0), rpc_of(message(2)), 1.5)
    assert len(delivered) == 1
    for beat in range(2, 8):
        router.heartbeat(float(beat))
    assert router.counters["broken_promise"] == 0


def test_a_full_queue_may_drop_what_is_requested_and_the_answers() -> None:
    router = with_peers(node(), 2)
    router.receive(peer(1), rpc_of(message(1)), 0.0)
    request = router.receive(peer(0), ihave([b"lacking"]), 1.0)[0]
    answer = router.receive(peer(0), iwant(gossip_id(message(1))), 1.0)[0]
    assert [send.priority for send in (*request, *answer)] == [False, False]


def test_an_ihave_flood_is_bounded_per_heartbeat() -> None:
    options = RouterOptions()
    router = with_peers(node(options), 2)
    ids = iter(range(10_000_000))
    wanted = 0
    for _ in range(50):
        rpc = ihave([b"%020d" % next(ids) for _ in range(2000)])
        wanted += len(asked(router.receive(peer(0), rpc, 1.0)[0]))
    assert wanted == options.max_requested_ids
    assert router.counters["ihave_flood"] == 40
    assert router.counters["ihave_over_limit"] == 10 * 2000 - 2000
    assert router.sizes["promises"] == 2000
    # another peer is heard all the same, and the next heartbeat begins anew
    assert len(asked(router.receive(peer(1), ihave([b"other"]), 1.0)[0])) == 1
    router.heartbeat(2.0)
    assert len(asked(router.receive(peer(0), ihave([b"again"]), 2.0)[0])) == 1


def test_a_single_ihave_over_its_length_is_read_so_far() -> None:
    router = with_peers(node(RouterOptions(max_ihave_length=10)), 1)
    assert len(asked(router.receive(peer(0), ihave([b"%d" % number for number in range(100)]), 1.0)[0])) == 10
    assert router.counters["ihave_over_limit"] == 90


def test_promises_not_kept_cost_score() -> None:
    router = with_peers(node(), 2)
    for beat in range(40):
        router.receive(peer(0), ihave([b"made up %d" % beat]), float(beat))
        router.heartbeat(beat + 0.5)
    assert router.counters["broken_promise"] > 12
    assert router.peers[peer(0)].score < RouterOptions().score.gossip_threshold
    assert router.peers[peer(1)].score >= 0
    assert peer(0) not in router.mesh[T]
    assert asked(router.receive(peer(0), ihave([b"more"]), 41.0)[0]) == []
    assert router.sizes["promises"] <= 3


def test_a_promise_is_broken_at_its_deadline_and_not_before() -> None:
    router = with_peers(node(), 1)
    router.receive(peer(0), ihave([b"a", b"b"]), 1.0)
    due = 1.0 + RouterOptions().iwant_followup
    router.heartbeat(due - 0.25)
    assert router.counters["broken_promise"] == 0
    router.heartbeat(due)
    assert router.counters["broken_promise"] == 2
    router.heartbeat(due + 1)
    assert router.counters["broken_promise"] == 2


def test_what_we_failed_to_ask_for_is_no_broken_promise() -> None:
    router = with_peers(node(), 1)
    (send,) = router.receive(peer(0), ihave([b"a", b"b"]), 1.0)[0]
    router.record_dropped(peer(0), send.rpc)
    assert router.sizes["promises"] == 0
    router.record_dropped(peer(0), rpc_of(message(1), message(2)))
    assert (router.counters["dropped_rpcs"], router.counters["dropped_messages"]) == (2, 2)


def test_iwant_is_answered_from_the_cache_three_times_a_message() -> None:
    router = with_peers(node(), 3)
    router.receive(peer(1), rpc_of(message(1)), 0.0)
    key = gossip_id(message(1))
    answers = [list(send.rpc.publish) for _ in range(10) for send in router.receive(peer(0), iwant(key), 1.0)[0]]
    assert answers == [[message(1)]] * 3
    assert router.counters["iwant_over_limit"] == 7
    assert router.receive(peer(0), iwant(b"never heard of"), 1.0)[0] == []
    assert router.counters["iwant_unknown"] == 1
    # another peer has its own count
    assert len(router.receive(peer(2), iwant(key), 1.0)[0]) == 1
    for beat in range(6):
        router.heartbeat(float(beat))
    assert router.receive(peer(2), iwant(key), 7.0)[0] == []


def test_iwant_cannot_draw_more_than_its_bytes_per_heartbeat() -> None:
    router = with_peers(node(RouterOptions(max_iwant_bytes=1 << 20)), 2)
    keys = []
    for number in range(100):
        router.receive(peer(1), rpc_of(message(number, size=100_000)), 0.0)
        keys.append(gossip_id(message(number, size=100_000)))
    sends, _, _ = router.receive(peer(0), iwant(*keys), 0.5)
    assert (1 << 20) <= sum(send.rpc.ByteSize() for send in sends) < (1 << 20) + 200_000
    assert all(send.rpc.ByteSize() <= 1 << 20 for send in sends)
    assert router.receive(peer(0), iwant(*keys), 0.6)[0] == []
    router.heartbeat(1.0)
    assert router.receive(peer(0), iwant(*keys), 1.1)[0] != []


def test_ids_in_the_form_of_js_libp2p_are_understood_and_spoken_back() -> None:
    author = b"\x00\x24\x08\x01\x12\x20" + b"k" * 32
    router = with_peers(node(), 30)
    router.heartbeat(0.0)
    outside = sorted(set(router.peers) - router.mesh[T])
    known, lacking = message(1, author=author), message(2, author=author)
    router.receive(next(iter(router.mesh[T])), rpc_of(known), 0.5)
    js = [gossip_id(known)[2:], gossip_id(lacking)[2:]]
    for each in outside:
        assert asked(router.receive(each, ihave(js), 0.5)[0]) == [js[1]]
    told = [list(item.messageIDs) for send in router.heartbeat(1.0) for item in send.rpc.control.ihave]
    assert told
    assert all(ids == [js[0]] for ids in told)
    (answer,) = router.receive(outside[0], iwant(js[0]), 1.0)[0]
    assert list(answer.rpc.publish) == [known]
    router.receive(outside[0], rpc_of(lacking), 1.5)
    assert router.sizes["promises"] == 0


# ---------------------------------------------------------------- IDONTWANT


def test_idontwant_is_sent_for_large_good_messages_to_those_who_know_it() -> None:
    router = with_peers(node(), 2, "/meshsub/1.2.0")
    with_peers(router, 1, "/meshsub/1.1.0", first=10)
    with_peers(router, 1, "/meshsub/1.3.0", first=20)
    sends, _, _ = router.receive(peer(0), rpc_of(message(1, size=1020), message(2, size=2000)), 1.0)
    told = {send.peer: list(send.rpc.control.idontwant[0].messageIDs) for send in sends if send.rpc.control.idontwant}
    assert told == {each: [gossip_id(message(2))] for each in (peer(1), peer(20))}
    # before the message itself
    assert [bool(send.rpc.publish) for send in sends if send.peer == peer(1)] == [False, True]
    forged = router.receive(peer(0), rpc_of(message(3, size=2000, sig=b"bad")), 1.0)[0]
    assert forged == []


def test_idontwant_is_honoured_for_three_heartbeats() -> None:
    router = with_peers(node(), 3)
    router.receive(peer(1), idontwant(gossip_id(message(1)), gossip_id(message(2))), 0.0)
    assert receivers(router.receive(peer(0), rpc_of(message(1)), 0.1)[0]) == {peer(2)}
    assert router.counters["idontwant_honoured"] == 1
    for beat in range(3):
        router.heartbeat(beat + 1.0)
    assert router.sizes["idontwant"] == 0
    assert receivers(router.receive(peer(0), rpc_of(message(2)), 4.0)[0]) == {peer(1), peer(2)}


def test_idontwant_is_bounded_and_not_taken_from_old_versions() -> None:
    router = with_peers(node(RouterOptions(max_idontwant_length=100)), 1)
    for start in range(0, 1000, 50):
        router.receive(peer(0), idontwant(*(b"%d" % number for number in range(start, start + 50))), 0.0)
    assert (router.sizes["idontwant"], router.counters["idontwant_over_limit"]) == (100, 900)
    router.receive(peer(0), idontwant(b"x" * 5000), 0.0)
    assert router.counters["id_too_long"] == 1
    with_peers(router, 1, "/meshsub/1.1.0", first=5)
    router.receive(peer(5), idontwant(b"x"), 0.0)
    assert router.counters["idontwant_wrong_version"] == 1
