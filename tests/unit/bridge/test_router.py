"""Conduct of the router: gossipsub v1.0 to v1.3, alone against scripted peers and in simulated networks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from random import Random

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bridge.gossip.cache import gossip_id
from bridge.gossip.router import PROTOCOLS, Deliver, Options, PeerID, Router, Send, split, verifier
from bridge.gossip.table_side import TableSide
from schemas.identity import Policy, Verdict, peer_of, sign
from schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from schemas.topic_table import Bundles, hello_extensions

T = "/ceramic/mainnet"
OWN = b"\x00\x24own"
MESHSUB = "/meshsub/1.2.0"


def check(message: Message) -> Verdict:
    """A stand-in for signatures: good unless it says so."""
    if not message.HasField("signature"):
        return Verdict.UNSIGNED
    return Verdict.GOOD if message.signature == b"good" else Verdict.BAD


def message(
    number: int, topic: str = T, author: bytes = b"\x00\x24author", size: int = 20, sig: bytes = b"good"
) -> Message:
    made = Message(data=b"%d" % number + bytes(size), seqno=number.to_bytes(8, "big"), topic=topic, signature=sig)
    setattr(made, "from", author)
    return made


def rpc_of(*messages: Message) -> RPC:
    return RPC(publish=messages)


def graft(*topics: str) -> RPC:
    rpc = RPC()
    for topic in topics:
        rpc.control.graft.add(topicID=topic)
    return rpc


def prune(topic: str, backoff: int | None = None) -> RPC:
    rpc = RPC()
    rpc.control.prune.add(topicID=topic, backoff=backoff)
    return rpc


def ihave(ids: Iterable[bytes], topic: str = T) -> RPC:
    rpc = RPC()
    rpc.control.ihave.add(topicID=topic, messageIDs=ids)
    return rpc


def iwant(*ids: bytes) -> RPC:
    rpc = RPC()
    rpc.control.iwant.add(messageIDs=ids)
    return rpc


def subscribe(*topics: str, subscribed: bool = True) -> RPC:
    return RPC(subscriptions=[RPC.SubOpts(subscribe=subscribed, topicid=topic) for topic in topics])


def peer(number: int) -> PeerID:
    return b"\x00\x24peer%03d" % number


def node(options: Options | None = None, table: TableSide | None = None, topics: Iterable[str] = (T,)) -> Router:
    router = Router(OWN, options or Options(), Random(1), check, table)
    for topic in topics:
        router.join(topic, 0.0)
    return router


def with_peers(
    router: Router, count: int, protocol: str = MESHSUB, *, outbound: bool = True, first: int = 0, topic: str = T
) -> Router:
    for number in range(first, first + count):
        router.add_peer(peer(number), protocol, outbound, 0.0)
        router.receive(peer(number), subscribe(topic), 0.0)
    return router


def grafts(sends: Iterable[Send]) -> list[tuple[PeerID, str]]:
    return [(send.peer, each.topicID) for send in sends for each in send.rpc.control.graft]


def prunes(sends: Iterable[Send]) -> list[tuple[PeerID, str, int]]:
    return [(send.peer, each.topicID, each.backoff) for send in sends for each in send.rpc.control.prune]


def receivers(sends: Iterable[Send]) -> set[PeerID]:
    got = [send.peer for send in sends if send.rpc.publish]
    assert len(got) == len(set(got))
    return set(got)


def asked(sends: Iterable[Send]) -> list[bytes]:
    return [key for send in sends for item in send.rpc.control.iwant for key in item.messageIDs]


# ---------------------------------------------------------------- peers and subscriptions


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_first_rpc_tells_our_topics_and_extensions_only_to_those_who_know_them(protocol: str) -> None:
    bundles = Bundles({"one": ["a"]})
    router = node(table=TableSide(bundles), topics=("a", "b"))
    (first,) = router.add_peer(peer(1), protocol, True, 0.0)
    assert [(each.topicid, each.subscribe) for each in first.rpc.subscriptions] == [("a", True), ("b", True)]
    assert first.priority
    if protocol == "/meshsub/1.3.0":
        assert first.rpc.control.extensions == hello_extensions(bundles)
    else:
        assert not first.rpc.HasField("control")
    later = router.join("c", 1.0) + router.heartbeat(1.0)
    assert not any(send.rpc.control.HasField("extensions") for send in later)


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match=r"/meshsub/9\.9\.9"):
        node().add_peer(peer(1), "/meshsub/9.9.9", True, 0.0)


def test_unknown_and_repeated_extensions_are_ignored() -> None:
    router = node()
    router.add_peer(peer(1), "/meshsub/1.3.0", True, 0.0)
    rpc = RPC.FromString(bytes.fromhex("1a0832060a04deadbeef") + subscribe(T).SerializeToString())
    rpc.control.extensions.testExtension.SetInParent()
    for _ in range(2):
        assert router.receive(peer(1), rpc, 0.0)[1:] == ([], b"")
    assert router.counters["extensions_repeated"] == 1
    assert router.peers[peer(1)].topics == {T}


def test_a_name_wins_over_field_3_of_subopts() -> None:
    router = with_peers(node(), 0)
    router.add_peer(peer(1), MESHSUB, True, 0.0)
    rpc = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid=T, topicIndex=0)])
    router.receive(peer(1), rpc, 0.0)
    assert router.peers[peer(1)].topics == {T}


def test_a_late_subscriber_is_grafted_at_once_while_the_mesh_is_small() -> None:
    router = node()
    router.add_peer(peer(1), MESHSUB, False, 0.0)
    sends, _, _ = router.receive(peer(1), subscribe(T), 5.0)
    assert grafts(sends) == [(peer(1), T)]
    assert router.mesh[T] == {peer(1)}


def test_who_unsubscribes_or_goes_leaves_the_mesh() -> None:
    router = with_peers(node(), 2)
    router.receive(peer(0), subscribe(T, subscribed=False), 1.0)
    assert router.mesh[T] == {peer(1)}
    router.remove_peer(peer(1), 2.0)
    assert router.mesh[T] == set()
    assert list(router.peers) == [peer(0)]


def test_a_thousand_topics_and_more_from_one_peer_are_bounded_and_counted_and_ours_still_count() -> None:
    router = node(Options(max_topics_per_peer=1000))
    router.add_peer(peer(1), MESHSUB, True, 0.0)
    for start in range(0, 5000, 1000):
        router.receive(peer(1), subscribe(*(f"/x/{number}" for number in range(start, start + 1000))), 0.0)
    assert router.sizes["topics"] == 1000
    assert router.counters["topics_over_limit"] == 4000
    router.receive(peer(1), subscribe(T), 0.0)
    assert T in router.peers[peer(1)].topics
    router.receive(peer(1), subscribe(*(f"/x/{number}" for number in range(1000)), subscribed=False), 0.0)
    router.receive(peer(1), subscribe("/x/4999"), 0.0)
    assert router.peers[peer(1)].topics == {T, "/x/4999"}


def test_joining_and_leaving_leaves_a_peers_room_for_topics_as_it_was() -> None:
    router = node(Options(max_topics_per_peer=2), topics=())
    router.add_peer(peer(1), MESHSUB, True, 0.0)
    router.receive(peer(1), subscribe("a"), 0.0)
    for turn in range(5):
        router.join("a", float(turn))
        router.leave("a", turn + 0.5)
    router.receive(peer(1), subscribe("b", "c"), 9.0)
    assert router.peers[peer(1)].topics == {"a", "b"}


def test_too_many_subscriptions_and_bad_names_are_counted() -> None:
    router = node(Options(max_subscriptions_per_rpc=10))
    router.add_peer(peer(1), MESHSUB, True, 0.0)
    router.receive(peer(1), subscribe(*map(str, range(30))), 0.0)
    assert (router.sizes["topics"], router.counters["subscriptions_over_limit"]) == (10, 20)
    not_utf8 = RPC.FromString(bytes.fromhex("0a0608011202fffe"))
    router.receive(peer(1), not_utf8, 0.0)
    router.receive(peer(1), subscribe("t" * 2000, ""), 0.0)
    assert (router.sizes["topics"], router.counters["bad_topic"]) == (10, 3)


# ---------------------------------------------------------------- mesh


@pytest.mark.parametrize("protocol", [each for each in PROTOCOLS if each.startswith("/meshsub")])
def test_the_mesh_is_filled_to_d_and_kept_under_d_high(protocol: str) -> None:
    options = Options()
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
    options = Options()
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


def test_outbound_peers_are_taken_into_a_mesh_that_has_too_few() -> None:
    router = with_peers(node(), 6, outbound=False)
    router.heartbeat(1.0)
    with_peers(router, 3, outbound=True, first=10)
    for number in range(6):
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
    router = with_peers(node(Options(D_out=0)), 20)
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
    router = with_peers(node(Options(max_backoff=100)), 1)
    router.receive(peer(0), prune(T, 2**64 - 1), 0.0)
    assert grafts(router.heartbeat(99.0)) == []
    assert grafts(router.heartbeat(103.0)) == [(peer(0), T)]


def test_a_graft_within_back_off_is_refused_counted_and_penalised() -> None:
    router = with_peers(node(), 1)
    router.leave(T, 0.0)
    router.join(T, 0.5)
    sends, _, _ = router.receive(peer(0), graft(T), 1.0)
    assert prunes(sends) == [(peer(0), T, 60)]
    assert router.mesh[T] == set()
    assert router.counters["graft_backoff"] == 1
    for _ in range(4):
        router.receive(peer(0), graft(T), 2.0)
    assert router.peers[peer(0)].score < 0
    # each refused GRAFT starts the back-off anew
    assert prunes(router.receive(peer(0), graft(T), 59.0)[0]) == [(peer(0), T, 60)]


def test_a_graft_storm_ends_in_the_graylist_and_harms_nobody_else() -> None:
    router = with_peers(node(), 3)
    router.receive(peer(0), prune(T, 60), 0.0)
    others = router.mesh[T]
    answers = 0
    for beat in range(30):
        for _ in range(100):
            answers += len(router.receive(peer(0), graft(*[T] * 100), beat + 0.5)[0])
        router.heartbeat(beat + 1.0)
    assert router.peers[peer(0)].score < Options().score.graylist_threshold
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
    assert router.peers[peer(0)].score > Options().score.gossip_threshold


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
    router = with_peers(node(Options(max_backoffs=50)), 0)
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
    assert mesh.isdisjoint(each for each, _ in grafts(router.join(T, 3.0)))


def test_peer_exchange_is_neither_used_nor_sent() -> None:
    router = with_peers(node(), 20)
    rpc = prune(T, 60)
    rpc.control.prune[0].peers.add(peerID=peer(99))
    sends, _, _ = router.receive(next(iter(router.mesh[T])), rpc, 1.0)
    sends += router.heartbeat(1.0) + router.leave(T, 2.0)
    assert router.counters["px_ignored"] == 1
    assert not any(each.peers for send in sends for each in send.rpc.control.prune)


# ---------------------------------------------------------------- messages


def test_a_message_is_handed_on_once_and_forwarded_to_the_mesh_but_not_back() -> None:
    router = with_peers(node(), 4)
    with_peers(router, 1, "/floodsub/1.0.0", first=10)
    sent = message(1, author=peer(2))
    sends, delivered, verdicts = router.receive(peer(0), rpc_of(sent), 1.0)
    assert delivered == [Deliver(sent, T, peer(0))]
    assert verdicts == bytes([Verdict.GOOD])
    assert receivers(sends) == {peer(1), peer(3), peer(10)}
    assert all(send.rpc.publish[0] == sent for send in sends)
    assert router.receive(peer(1), rpc_of(sent), 1.1) == ([], [], bytes([Verdict.GOOD]))
    assert router.counters["duplicate"] == 1


def test_a_forged_copy_first_masks_nothing() -> None:
    router = with_peers(node(), 3)
    forged, true = message(1, sig=b"bad", size=2000), message(1, size=2000)
    assert gossip_id(forged) == gossip_id(true)
    assert router.receive(peer(0), rpc_of(forged), 1.0) == ([], [], bytes([Verdict.BAD]))
    sends, delivered, verdicts = router.receive(peer(1), rpc_of(true), 1.0)
    assert (len(delivered), verdicts) == (1, bytes([Verdict.GOOD]))
    assert receivers(sends) == router.mesh[T] - {peer(1)}
    # nor does a forged copy pass for the true one afterwards
    assert router.receive(peer(2), rpc_of(forged), 1.0)[2] == bytes([Verdict.BAD])
    assert router.counters["bad_signature"] == 2
    assert router.peers[peer(0)].score < 0


def test_signatures_are_checked_once_per_message_and_only_on_our_topics() -> None:
    calls: list[Message] = []

    def counting(each: Message) -> Verdict:
        calls.append(each)
        return check(each)

    router = Router(OWN, Options(), Random(1), counting)
    router.join(T, 0.0)
    with_peers(router, 3)
    for number in range(3):
        router.receive(peer(number), rpc_of(message(1), message(2, topic="/other")), 1.0)
    assert len(calls) == 1
    assert router.counters["unknown_topic"] == 3


def test_messages_of_other_topics_are_not_checked_not_delivered_not_forwarded() -> None:
    router = with_peers(node(), 3)
    assert router.receive(peer(0), rpc_of(message(1, topic="/other")), 1.0) == ([], [], b"\0")
    nameless = message(2)
    nameless.ClearField("topic")
    nameless.topicIndex = 1
    assert router.receive(peer(0), rpc_of(nameless), 1.0) == ([], [], b"\0")
    assert router.sizes["seen"] == 0


def test_one_verdict_for_each_message_of_an_rpc() -> None:
    router = with_peers(node(), 2)
    unsigned = Message(data=b"x", topic=T)
    batch = rpc_of(message(1), message(1), message(2, sig=b"bad"), message(3, topic="/other"), unsigned, unsigned)
    sends, delivered, verdicts = router.receive(peer(0), batch, 1.0)
    assert list(verdicts) == [1, 1, 2, 0, 3, 3]
    assert [each.message for each in delivered] == [message(1), unsigned]
    (send,) = sends
    assert list(send.rpc.publish) == [message(1), unsigned]


def test_our_own_messages_coming_back_are_left_alone_even_after_a_restart() -> None:
    router = with_peers(node(), 3)
    ours = message(1, author=OWN)
    assert receivers(router.publish(ours, 0.0)) == {peer(0), peer(1), peer(2)}
    assert router.receive(peer(0), rpc_of(ours), 1.0) == ([], [], b"\1")
    before_restart = message(2, author=OWN)
    assert router.receive(peer(0), rpc_of(before_restart), 1.0) == ([], [], b"\1")
    assert router.counters["own_message"] == 2


def test_garbage_stops_buying_our_time() -> None:
    calls = 0

    def bad(_: Message) -> Verdict:
        nonlocal calls
        calls += 1
        return Verdict.BAD

    router = Router(OWN, Options(), Random(1), bad)
    router.join(T, 0.0)
    with_peers(router, 1)
    _, _, verdicts = router.receive(peer(0), rpc_of(*(message(number) for number in range(5000))), 1.0)
    assert len(verdicts) == 5000
    assert calls < 50
    assert verdicts[-1] == Verdict.NOT_CHECKED


def test_a_hundred_thousand_messages_in_one_rpc_are_all_taken() -> None:
    router = with_peers(node(), 2)
    batch = rpc_of(*(message(number) for number in range(100_000)))
    sends, delivered, verdicts = router.receive(peer(0), batch, 1.0)
    assert len(delivered) == 100_000
    assert verdicts == b"\1" * 100_000
    assert {send.peer for send in sends} == {peer(1)}
    assert sum(len(send.rpc.publish) for send in sends) == 100_000
    assert all(send.rpc.ByteSize() <= 1 << 20 for send in sends)


def test_real_signatures_under_each_policy() -> None:
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    signed = Message(data=b"x", seqno=bytes(7) + b"\1", topic=T)
    sign(signed, key)
    tampered = Message()
    tampered.CopyFrom(signed)
    tampered.data = b"y"
    plain = Message(data=b"x", topic=T)
    expected: dict[Policy, list[int]] = {"strict": [1, 2, 4], "none": [4, 4, 3], "either": [1, 2, 3]}
    for policy, verdicts in expected.items():
        router = Router(peer_of(key), Options(), Random(1), verifier(policy))
        router.join(T, 0.0)
        with_peers(router, 1)
        assert list(router.receive(peer(0), rpc_of(signed, tampered, plain), 1.0)[2]) == verdicts


def test_an_rpc_of_a_stranger_is_counted_and_left() -> None:
    router = node()
    assert router.receive(peer(9), rpc_of(message(1)), 0.0) == ([], [], b"\0")
    assert router.counters["unknown_peer"] == 1


# ---------------------------------------------------------------- publishing


def test_flood_publish_goes_to_all_on_the_topic_and_nobody_else() -> None:
    router = with_peers(node(), 20)
    with_peers(router, 2, "/floodsub/1.0.0", first=30)
    with_peers(router, 3, first=40, topic="/other")
    sends = router.publish(message(1, author=OWN), 1.0)
    assert receivers(sends) == {peer(number) for number in [*range(20), 30, 31]}
    assert all(send.priority for send in sends)


def test_without_flood_publish_it_goes_to_the_mesh_and_floodsub_peers() -> None:
    router = with_peers(node(Options(flood_publish=False)), 20)
    with_peers(router, 2, "/floodsub/1.0.0", first=30)
    router.heartbeat(1.0)
    got = receivers(router.publish(message(1, author=OWN), 1.0))
    assert router.mesh[T] | {peer(30), peer(31)} <= got
    assert len(got) == max(6, len(router.mesh[T])) + 2


def test_nobody_there_is_no_send_and_the_same_message_can_be_published_again() -> None:
    router = node()
    ours = message(1, author=OWN)
    assert router.publish(ours, 0.0) == []
    with_peers(router, 2)
    assert len(router.publish(ours, 1.0)) == 2


def test_fanout_serves_topics_we_are_not_on_and_ends() -> None:
    router = with_peers(node(Options(flood_publish=False), topics=()), 20)
    first = receivers(router.publish(message(1, author=OWN), 0.0))
    assert len(first) == 6
    assert receivers(router.publish(message(2, author=OWN), 1.0)) == first
    told = router.heartbeat(2.0)
    assert {send.peer for send in told if send.rpc.control.ihave}.isdisjoint(first)
    assert any(send.rpc.control.ihave for send in told)
    router.heartbeat(61.5)
    assert router.sizes["fanout"] == 0
    # who joins takes the fanout into the mesh
    again = receivers(router.publish(message(3, author=OWN), 70.0))
    router.join(T, 71.0)
    assert router.mesh[T] == again


def test_a_message_without_a_topic_is_not_published() -> None:
    with pytest.raises(ValueError, match="topic"):
        node().publish(Message(data=b"x"), 0.0)


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


def test_an_ihave_flood_is_bounded_per_heartbeat() -> None:
    options = Options()
    router = with_peers(node(options), 2)
    ids = iter(range(10_000_000))
    wanted = 0
    for _ in range(50):
        rpc = ihave([b"%020d" % next(ids) for _ in range(2000)])
        wanted += len(asked(router.receive(peer(0), rpc, 1.0)[0]))
    assert wanted == options.max_ihave_length
    assert router.counters["ihave_flood"] == 40
    assert router.counters["ihave_over_limit"] == 10 * 2000 - 5000
    assert router.sizes["promises"] == 5000
    # another peer is heard all the same, and the next heartbeat begins anew
    assert len(asked(router.receive(peer(1), ihave([b"other"]), 1.0)[0])) == 1
    router.heartbeat(2.0)
    assert len(asked(router.receive(peer(0), ihave([b"again"]), 2.0)[0])) == 1


def test_a_single_ihave_over_its_length_is_read_so_far() -> None:
    router = with_peers(node(Options(max_ihave_length=10)), 1)
    assert len(asked(router.receive(peer(0), ihave([b"%d" % number for number in range(100)]), 1.0)[0])) == 10
    assert router.counters["ihave_over_limit"] == 90


def test_promises_not_kept_cost_score() -> None:
    router = with_peers(node(), 2)
    for beat in range(40):
        router.receive(peer(0), ihave([b"made up %d" % beat]), float(beat))
        router.heartbeat(beat + 0.5)
    assert router.counters["broken_promise"] > 12
    assert router.peers[peer(0)].score < Options().score.gossip_threshold
    assert router.peers[peer(1)].score >= 0
    assert peer(0) not in router.mesh[T]
    assert asked(router.receive(peer(0), ihave([b"more"]), 41.0)[0]) == []
    assert router.sizes["promises"] <= 3


def test_what_we_failed_to_ask_for_is_no_broken_promise() -> None:
    router = with_peers(node(), 1)
    (send,) = router.receive(peer(0), ihave([b"a", b"b"]), 1.0)[0]
    router.dropped(peer(0), send.rpc)
    assert router.sizes["promises"] == 0
    router.dropped(peer(0), rpc_of(message(1), message(2)))
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
    router = with_peers(node(Options(max_iwant_bytes=1 << 20)), 2)
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


def idontwant(*keys: bytes) -> RPC:
    rpc = RPC()
    rpc.control.idontwant.add(messageIDs=keys)
    return rpc


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
    router = with_peers(node(Options(max_idontwant_length=100)), 1)
    for start in range(0, 1000, 50):
        router.receive(peer(0), idontwant(*(b"%d" % number for number in range(start, start + 50))), 0.0)
    assert (router.sizes["idontwant"], router.counters["idontwant_over_limit"]) == (100, 900)
    router.receive(peer(0), idontwant(b"x" * 5000), 0.0)
    assert router.counters["id_too_long"] == 1
    with_peers(router, 1, "/meshsub/1.1.0", first=5)
    router.receive(peer(5), idontwant(b"x"), 0.0)
    assert router.counters["idontwant_wrong_version"] == 1


# ---------------------------------------------------------------- sizes


def ids_in(rpc: RPC, name: str) -> list[bytes]:
    return [key for item in getattr(rpc.control, name) for key in item.messageIDs]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 300), max_size=20),
    st.lists(st.text(max_size=20), max_size=20),
    st.lists(st.lists(st.binary(max_size=50), max_size=30), max_size=5),
    st.integers(150, 700),
)
def test_parts_are_small_and_hold_the_same_things(
    sizes: list[int], topics: list[str], ids: list[list[bytes]], limit: int
) -> None:
    rpc = RPC()
    rpc.control.extensions.testExtension.SetInParent()
    for topic in topics:
        rpc.subscriptions.add(subscribe=True, topicid=topic)
        rpc.control.graft.add(topicID=topic)
        rpc.control.prune.add(topicID=topic, backoff=60)
    for number, size in enumerate(sizes):
        rpc.publish.append(message(number, size=size))
    for each in ids:
        rpc.control.ihave.add(topicID=T, messageIDs=each)
        rpc.control.iwant.add(messageIDs=each)
        rpc.control.idontwant.add(messageIDs=each)
    before = rpc.SerializeToString()
    parts = split(rpc, limit)
    assert rpc.SerializeToString() == before
    assert [part.control.HasField("extensions") for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [each for part in parts for each in part.publish] == list(rpc.publish)
    assert [each for part in parts for each in part.subscriptions] == list(rpc.subscriptions)
    for name in ("graft", "prune"):
        assert [each for part in parts for each in getattr(part.control, name)] == list(getattr(rpc.control, name))
    for name in ("ihave", "iwant", "idontwant"):
        assert [key for part in parts for key in ids_in(part, name)] == ids_in(rpc, name)
    for part in parts:
        assert part.ByteSize() <= limit or (len(part.publish) == 1 and len(part.subscriptions) == 0)


def test_a_hello_of_very_many_topics_is_parted() -> None:
    topics = [f"/ceramic/mainnet/sep/model/{number:0100d}" for number in range(20_000)]
    sends = node(topics=topics, table=TableSide(Bundles({"one": ["a"]}))).add_peer(peer(1), "/meshsub/1.3.0", True, 0.0)
    assert len(sends) > 1
    assert all(send.rpc.ByteSize() <= 1 << 20 for send in sends)
    assert [each.topicid for send in sends for each in send.rpc.subscriptions] == topics


# ---------------------------------------------------------------- networks


class Network:
    """Routers joined by links that keep order and lose nothing; each tick delivers all that is under way."""

    def __init__(self, count: int, seed: int, options: Options | None = None) -> None:
        self.options = options or Options()
        self.now = 0.0
        self.routers = [
            Router(peer(number), self.options, Random(seed * 1000 + number), check) for number in range(count)
        ]
        self.links: set[tuple[int, int]] = set()
        self.queue: deque[tuple[int, Send]] = deque()
        self.delivered: Counter[tuple[int, bytes]] = Counter()
        self.copies = 0

    def number(self, of: PeerID) -> int:
        return int(of[-3:])

    def put(self, source: int, sends: Iterable[Send]) -> None:
        self.queue.extend((source, send) for send in sends)

    def connect(self, a: int, b: int, protocol: str) -> None:
        if a == b or (a, b) in self.links or (b, a) in self.links:
            return
        self.links.add((a, b))
        self.put(a, self.routers[a].add_peer(peer(b), protocol, True, self.now))
        self.put(b, self.routers[b].add_peer(peer(a), protocol, False, self.now))

    def disconnect(self, a: int, b: int) -> None:
        self.links.discard((a, b))
        self.routers[a].remove_peer(peer(b), self.now)
        self.routers[b].remove_peer(peer(a), self.now)

    def linked(self, a: int, b: int) -> bool:
        return (a, b) in self.links or (b, a) in self.links

    def drain(self) -> None:
        while self.queue:
            source, send = self.queue.popleft()
            target = self.number(send.peer)
            if not self.linked(source, target):
                continue
            # over the wire: nothing shared
            rpc = RPC.FromString(send.rpc.SerializeToString())
            self.copies += len(rpc.publish)
            sends, delivered, verdicts = self.routers[target].receive(peer(source), rpc, self.now)
            assert len(verdicts) == len(rpc.publish)
            for each in delivered:
                self.delivered[target, gossip_id(each.message)] += 1
            self.put(target, sends)

    def beat(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            for number, router in enumerate(self.routers):
                self.put(number, router.heartbeat(self.now))
            self.drain()

    def component(self, start: int, topic: str) -> set[int]:
        """Who can be reached over nodes that are on the topic."""
        reached, waiting = {start}, [start]
        while waiting:
            at = waiting.pop()
            for other, router in enumerate(self.routers):
                if other not in reached and self.linked(at, other) and topic in router.mesh:
                    reached.add(other)
                    waiting.append(other)
        return reached


@pytest.mark.parametrize("flood", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_thirty_nodes_of_all_versions_hear_every_message_once(seed: int, flood: bool) -> None:
    network = Network(30, seed, Options(flood_publish=flood))
    rng = Random(seed)
    for a in range(30):
        for b in rng.sample(range(30), 10):
            network.connect(a, b, rng.choice([*PROTOCOLS, MESHSUB, MESHSUB, MESHSUB]))
    for number, router in enumerate(network.routers):
        network.put(number, router.join(T, 0.0))
    network.drain()
    network.beat(5)
    options = network.options
    for number, router in enumerate(network.routers):
        mesh = router.mesh[T]
        assert len(mesh) <= options.D_high + options.D_out
        candidates = sum(view.protocol != "/floodsub/1.0.0" for view in router.peers.values())
        assert len(mesh) >= min(options.D_low, candidates) or any(
            peer(number) in other.mesh[T] for other in network.routers
        )
    for count in range(60):
        author = rng.randrange(30)
        sent = message(count, author=peer(author), size=rng.choice([10, 2000]))
        network.put(author, network.routers[author].publish(sent, network.now))
        network.drain()
        if count % 5 == 0:
            network.beat()
        assert {key[0] for key in network.delivered if key[1] == gossip_id(sent)} == set(range(30)) - {author}
    network.beat(3)
    assert set(network.delivered.values()) == {1}
    assert all(router.counters["broken_promise"] == 0 for router in network.routers)
    assert all(view.score >= 0 for router in network.routers for view in router.peers.values())


def test_what_the_mesh_lost_comes_by_gossip() -> None:
    network = Network(12, 3)
    for a in range(12):
        for b in range(a):
            network.connect(a, b, MESHSUB)
    for number, router in enumerate(network.routers):
        network.put(number, router.join(T, 0.0))
    network.drain()
    network.beat(3)
    sent = message(1, author=peer(0))
    first, *_ = network.routers[0].publish(sent, network.now)
    network.put(0, [first])
    # of all copies pushed only the first arrives
    while network.queue:
        source, send = network.queue.popleft()
        target = network.number(send.peer)
        sends, delivered, _ = network.routers[target].receive(peer(source), send.rpc, network.now)
        network.delivered.update((target, gossip_id(each.message)) for each in delivered)
        network.put(target, (each for each in sends if not each.rpc.publish))
    assert len(network.delivered) == 1
    network.beat(5)
    reached = {number for number, _ in network.delivered}
    outside = set(range(1, 12)) - {network.number(each) for each in network.routers[0].mesh[T]}
    assert outside <= reached
    assert set(network.delivered.values()) == {1}


class RandomNetwork(RuleBasedStateMachine):
    """Nodes of all versions connect, part, join, leave and publish; time passes."""

    TOPICS = (T, T + "/sep/model/kabc")
    nodes = st.integers(0, 7)
    topics = st.sampled_from(TOPICS)

    @initialize(seed=st.integers(0, 1000), flood=st.booleans())
    def begin(self, seed: int, flood: bool) -> None:
        # seen ids outlive any run of this machine
        self.options = Options(
            D=3, D_low=2, D_high=4, D_out=1, D_score=2, D_lazy=3, flood_publish=flood, max_topics_per_peer=1,
            seen_horizon=1e6,
        )  # fmt: skip
        self.network = Network(8, seed, self.options)
        self.count = 0
        self.beaten = False

    def _done(self) -> None:
        self.network.drain()
        self.beaten = False

    @rule(a=nodes, b=nodes, protocol=st.sampled_from(list(PROTOCOLS)))
    def connect(self, a: int, b: int, protocol: str) -> None:
        self.network.connect(a, b, protocol)
        self._done()

    @rule(protocol=st.sampled_from(list(PROTOCOLS)), topic=topics)
    def everybody(self, protocol: str, topic: str) -> None:
        for a in range(8):
            for b in range(a):
                self.network.connect(a, b, protocol)
            self.network.put(a, self.network.routers[a].join(topic, self.network.now))
        self._done()

    @precondition(lambda self: self.network.links)
    @rule(pick=st.integers(0, 100))
    def disconnect(self, pick: int) -> None:
        links = sorted(self.network.links)
        self.network.disconnect(*links[pick % len(links)])
        self._done()

    @rule(a=nodes, topic=topics)
    def join(self, a: int, topic: str) -> None:
        self.network.put(a, self.network.routers[a].join(topic, self.network.now))
        self._done()

    @rule(a=nodes, topic=topics)
    def leave(self, a: int, topic: str) -> None:
        self.network.put(a, self.network.routers[a].leave(topic, self.network.now))
        self._done()

    @rule(times=st.integers(1, 20))
    def beat(self, times: int) -> None:
        self.network.beat(times)
        self.beaten = True

    @rule(a=nodes, topic=topics, size=st.sampled_from([1, 3000]))
    def publish(self, a: int, topic: str, size: int) -> None:
        network = self.network
        self.count += 1
        sent = message(self.count, topic, peer(a), size)
        reachable = network.component(a, topic)
        network.put(a, network.routers[a].publish(sent, network.now))
        network.drain()
        network.beat(10)
        got = {number for number, key in network.delivered if key == gossip_id(sent)}
        if topic in network.routers[a].mesh:
            assert got == reachable - {a}
        else:
            assert got <= {number for number, router in enumerate(network.routers) if topic in router.mesh}
        self.beaten = True

    @invariant()
    def nobody_hears_twice(self) -> None:
        assert not self.network.delivered or set(self.network.delivered.values()) == {1}

    @invariant()
    def nobody_is_held_to_be_bad(self) -> None:
        for router in self.network.routers:
            assert all(view.score >= 0 for view in router.peers.values()), dict(router.counters)

    @invariant()
    def meshes_are_of_connected_subscribers(self) -> None:
        for router in self.network.routers:
            peers = router.peers
            for topic, mesh in router.mesh.items():
                for each in mesh:
                    assert topic in peers[each].topics
                    assert peers[each].protocol != "/floodsub/1.0.0"
                if self.beaten:
                    assert len(mesh) <= self.options.D_high + self.options.D_out + self.options.opportunistic_peers + 7

    @invariant()
    def memory_is_bounded(self) -> None:
        for router in self.network.routers:
            sizes = router.sizes
            assert sizes["promises"] <= 7 * self.count
            assert sizes["backoff"] <= 7 * len(self.TOPICS)
            assert sizes["topics"] <= 7 * len(self.TOPICS)
            assert sizes["seen"] <= self.count


TestRandomNetwork = RandomNetwork.TestCase
TestRandomNetwork.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
