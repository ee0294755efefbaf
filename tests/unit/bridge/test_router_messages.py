"""Messages through the router: judged, delivered, forwarded, published."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from random import Random

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.bridge.app.reporting import describe_policy_conflicts
from kiln.bridge.gossipsub import rpc_parts
from kiln.bridge.gossipsub.effects import Deliver, PolicyConflict
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.gossipsub.rpc_parts import RpcLimits, split
from kiln.schemas.kafka.frames import MAX_MESSAGES
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message, PublicKey
from kiln.schemas.wire import identity
from kiln.schemas.wire.identity import MAX_RPC_COST, Judgement, Verdict, compute_peer_id, sign
from kiln.schemas.wire.signing_policy import Policy
from kit.cpu_time import measure_cpu
from kit.key_bytes import KEY_ATTACKS, public_key
from kit.scripted_peers import (
    OWN,
    T,
    check,
    gossip_id,
    graft,
    iwant,
    message,
    node,
    peer,
    prune,
    receivers,
    rpc_of,
    with_peers,
)

# ---------------------------------------------------------------- messages


def test_a_message_is_handed_on_once_and_forwarded_to_the_mesh_but_not_back() -> None:
    router = with_peers(node(), 4)
    with_peers(router, 1, "/floodsub/1.0.0", first=10)
    sent = message(1, author=peer(2))
    sends, delivered, verdicts = router.receive(peer(0), rpc_of(sent), 1.0)
    assert delivered == [Deliver(sent, T, peer(0))]
    assert verdicts == bytes([Verdict.VALID])
    assert receivers(sends) == {peer(1), peer(3), peer(10)}
    assert all(send.rpc.publish[0] == sent for send in sends)
    assert router.receive(peer(1), rpc_of(sent), 1.1) == ([], [], bytes([Verdict.VALID]))
    assert router.counters["duplicate"] == 1


def test_a_forged_copy_first_masks_nothing() -> None:
    router = with_peers(node(), 3)
    forged, true = message(1, sig=b"bad", size=2000), message(1, size=2000)
    assert gossip_id(forged) == gossip_id(true)
    assert router.receive(peer(0), rpc_of(forged), 1.0) == ([], [], bytes([Verdict.INVALID]))
    sends, delivered, verdicts = router.receive(peer(1), rpc_of(true), 1.0)
    assert (len(delivered), verdicts) == (1, bytes([Verdict.VALID]))
    assert receivers(sends) == router.mesh[T] - {peer(1)}
    # nor does a forged copy pass for the true one afterwards
    assert router.receive(peer(2), rpc_of(forged), 1.0)[2] == bytes([Verdict.INVALID])
    assert router.counters["bad_signature"] == 2
    assert router.peers[peer(0)].score < 0


def test_signatures_are_checked_once_per_message_and_only_on_our_topics() -> None:
    calls: list[Message] = []

    def counting(each: Message) -> Judgement:
        calls.append(each)
        return check(each)

    router = Router(OWN, RouterOptions(), Random(1), counting)
    router.join(T)
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

    def bad(_: Message) -> Judgement:
        nonlocal calls
        calls += 1
        return Judgement(Verdict.INVALID)

    router = Router(OWN, RouterOptions(), Random(1), bad)
    router.join(T)
    with_peers(router, 1)
    _, _, verdicts = router.receive(peer(0), rpc_of(*(message(number) for number in range(5000))), 1.0)
    assert len(verdicts) == 5000
    assert calls < 50
    assert verdicts[-1] == Verdict.NOT_CHECKED


def test_of_an_rpc_that_is_expensive_to_check_the_rest_is_neither_checked_nor_relayed_and_the_sender_pays() -> None:
    router = Router(OWN, RouterOptions(), Random(1), lambda each: check(each)._replace(cost=MAX_RPC_COST // 10))
    router.join(T)
    with_peers(router, 3)
    rpc = rpc_of(*(message(number) for number in range(100)))
    _, delivered, verdicts = router.receive(peer(0), rpc, 1.0)
    assert (len(delivered), len(verdicts)) == (10, 100)
    assert verdicts == bytes([Verdict.VALID]) * 10 + bytes(90)
    assert router.counters["messages_over_cost"] == 90
    assert router.peers[peer(0)].score < 0
    # who brings them a few at a time brings them all
    for number in range(10, 100, 10):
        rpc = rpc_of(*(message(each) for each in range(number, number + 10)))
        assert len(router.receive(peer(1), rpc, 2.0)[1]) == 10


def test_as_many_ordinary_messages_as_kiln_requests_and_sends_at_once_are_relayed_whole() -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    most = max(RouterOptions().max_requested_ids, rpc_parts.MAX_MESSAGES)
    messages = [Message(data=bytes(250), seqno=number.to_bytes(8), topic=T) for number in range(most)]
    for each in messages:
        sign(each, key)
    rpc = rpc_of(*messages)
    router = Router(OWN, RouterOptions(), Random(1), partial(identity.check, policy="strict"))
    router.join(T)
    with_peers(router, 3)
    assert len(router.receive(peer(0), rpc, 1.0)[1]) == most
    assert router.peers[peer(0)].score >= 0


@pytest.mark.parametrize(("name", "kind", "data"), KEY_ATTACKS, ids=[name for name, _, _ in KEY_ATTACKS])
def test_one_key_that_is_made_to_be_expensive_is_enough(
    name: str, kind: PublicKey.KeyType.ValueType, data: bytes
) -> None:
    encoded = public_key(kind, data)
    bad = Message(data=b"x", seqno=b"\x01", topic=T, key=encoded, signature=bytes(64))
    setattr(bad, "from", b"\x12\x20" + sha256(encoded).digest())  # a keyword in Python
    router = Router(OWN, RouterOptions(), Random(1), partial(identity.check, policy="strict"))
    router.join(T)
    with_peers(router, 2)
    assert router.receive(peer(0), rpc_of(bad), 1.0) == ([], [], bytes([Verdict.INVALID]))
    assert router.is_graylisted(peer(0))
    assert not router.is_graylisted(peer(1))
    assert router.counters["key_algorithm"] == 1


def test_of_forty_thousand_messages_in_one_rpc_five_thousand_are_taken_and_the_sender_pays() -> None:
    router = with_peers(node(), 2)
    flood = RPC.FromString(b"\x12\x00" * (40_000))
    with measure_cpu() as cost:
        sends, delivered, verdicts = router.receive(peer(0), flood, 1.0)
    assert cost.steps < 1e7
    assert (sends, delivered, verdicts) == ([], [], bytes(MAX_MESSAGES))
    assert router.counters["unknown_topic"] == MAX_MESSAGES
    assert router.counters["messages_over_limit"] == (40_000) - MAX_MESSAGES
    assert router.peers[peer(0)].score < 0 <= router.peers[peer(1)].score
    router.receive(peer(0), flood, 1.0)
    router.receive(peer(0), flood, 1.0)
    router.receive(peer(0), rpc_of(message(1)), 1.0)
    assert router.counters["graylisted"] > 0
    assert router.receive(peer(9), flood, 1.0)[2] == bytes(MAX_MESSAGES)  # who is gone already


def test_good_messages_over_the_limit_of_one_rpc_are_left_and_what_goes_on_keeps_the_limit() -> None:
    router = with_peers(node(), 3)
    first, second = (rpc_of(*(message(number) for number in range(start, start + 4000))) for start in (0, 4000))
    for each in (first, second):
        sends, delivered, verdicts = router.receive(peer(0), each, 1.0)
        assert (len(delivered), verdicts) == (4000, b"\1" * 4000)
        assert all(send.rpc.ByteSize() <= 1 << 20 for send in sends)
    assert router.peers[peer(0)].score >= 0
    both = rpc_of(*(message(number) for number in range(8000, 8000 + MAX_MESSAGES + 1)))
    parts, _ = split(both, RpcLimits(1 << 30, 1 << 30))
    assert [len(part.publish) for part in parts] == [2000, 2000, 1001]
    _, delivered, verdicts = router.receive(peer(1), both, 1.0)
    assert (len(delivered), verdicts) == (MAX_MESSAGES, b"\1" * MAX_MESSAGES)


def test_control_items_and_ids_over_the_limits_cost_no_time_and_items_cost_their_sender() -> None:
    router = with_peers(node(), 2)
    items, asks, wants_not = RPC(), RPC(), RPC()
    for _ in range(5001):
        items.control.graft.add(topicID=T)
    asks.control.iwant.add(messageIDs=[b"i"] * 1_000_000)
    wants_not.control.idontwant.add(messageIDs=[b"i"] * 1_000_000)
    router.receive(peer(0), items, 1.0)
    assert router.counters["control_over_limit"] == 1
    assert router.peers[peer(0)].score < 0
    for rpc, counted in ((asks, "iwant_over_limit"), (wants_not, "idontwant_over_limit")):
        with measure_cpu() as cost:
            router.receive(peer(1), rpc, 1.0)
        assert cost.steps < 2.5e6
        assert router.counters[counted] == 995_000


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
        router = Router(compute_peer_id(key), RouterOptions(), Random(1), partial(identity.check, policy=policy))
        router.join(T)
        with_peers(router, 1)
        assert list(router.receive(peer(0), rpc_of(signed, tampered, plain), 1.0)[2]) == verdicts


# ---------------------------------------------------------------- peers of another policy


def unsigned(number: int) -> Message:
    return Message(data=b"unsigned %d" % number, topic=T)


def in_policy(policy: Policy) -> Router:
    """A router with peers 0 to 2 in its mesh, which checks signatures under the policy."""
    router = Router(
        OWN, RouterOptions(topic_policies={"/ceramic/*": policy}), Random(1), partial(stand_in_check, policy=policy)
    )
    router.join(T)
    return with_peers(router, 3)


def stand_in_check(message: Message, policy: Policy) -> Judgement:
    """Stand in for `identity.check`: signatures are good unless they are marked as bad."""
    judgement = check(message)
    refused = policy == "strict" and judgement.verdict == Verdict.UNSIGNED
    return Judgement(Verdict.AGAINST_POLICY, identity.MISSING_SIGNATURE) if refused else judgement


def told(router: Router, number: int) -> set[bytes]:
    """The ids that peers other than the mesh's would be offered of the peer's topic."""
    (state,) = (send for send in router.heartbeat(9.0) if send.peer == peer(number) and send.rpc.control.ihave)
    return {key for item in state.rpc.control.ihave for key in item.messageIDs}


def test_a_peer_that_signs_nothing_is_sent_no_signed_message_and_all_others() -> None:
    router = in_policy("either")
    router.receive(peer(0), rpc_of(unsigned(1)), 1.0)
    router.receive(peer(1), rpc_of(message(1)), 1.0)
    assert receivers(router.publish(message(2, author=OWN), 2.0)) == {peer(1), peer(2)}
    assert receivers(router.receive(peer(2), rpc_of(message(3)), 2.0)[0]) == {peer(1)}
    assert receivers(router.receive(peer(2), rpc_of(message(4), message(5)), 2.0)[0]) == {peer(1)}
    assert receivers(router.receive(peer(2), rpc_of(unsigned(2)), 2.0)[0]) == {peer(0)}  # and 1 signs all it sends
    assert router.receive(peer(0), iwant(gossip_id(message(3))), 3.0)[0] == []
    assert router.receive(peer(1), iwant(gossip_id(message(3))), 3.0)[0] != []
    assert router.counters["withheld"] == 6
    assert router.policy_conflicts == [(T, False, True), (T, True, True)]
    # one that sends both takes both
    router.receive(peer(0), rpc_of(message(6)), 4.0)
    assert receivers(router.publish(message(7, author=OWN), 5.0)) == {peer(0), peer(1), peer(2)}


def test_a_peer_that_signs_nothing_is_offered_no_signed_message() -> None:
    router = in_policy("either")
    router.receive(peer(0), rpc_of(unsigned(1)), 1.0)
    router.receive(peer(0), prune(T), 1.0)
    router.receive(peer(1), rpc_of(message(1), unsigned(2)), 1.0)
    assert told(router, 0) == {gossip_id(unsigned(1)), gossip_id(unsigned(2))}


def test_a_silent_peer_that_prunes_us_is_sent_no_signed_message_until_it_grafts_us_again() -> None:
    router = in_policy("either")
    assert peer(0) in receivers(router.publish(message(1, author=OWN), 1.0))
    router.receive(peer(0), prune(T, 1), 2.0)
    assert peer(0) not in receivers(router.publish(message(2, author=OWN), 3.0))
    router.receive(peer(0), graft(T), 100.0)
    assert peer(0) in receivers(router.publish(message(3, author=OWN), 101.0))


def test_a_prune_where_all_sign_is_no_sign_of_anything() -> None:
    router = in_policy("strict")
    router.receive(peer(0), prune(T), 2.0)
    assert peer(0) in receivers(router.publish(message(2, author=OWN), 3.0))


def test_another_kiln_is_sent_everything() -> None:
    router = in_policy("either")
    router.set_agent(peer(0), "kiln/0.1.0")
    router.receive(peer(0), rpc_of(unsigned(1)), 1.0)
    assert peer(0) in receivers(router.publish(message(2, author=OWN), 2.0))
    assert router.policy_conflicts == []


def test_whatever_is_against_the_policy_is_refused_counted_and_costs_its_sender_nothing() -> None:
    router = in_policy("strict")
    for number in range(60):
        _, delivered, verdicts = router.receive(peer(0), rpc_of(unsigned(number)), 1.0)
        assert (delivered, verdicts) == ([], bytes([Verdict.AGAINST_POLICY]))
    assert router.counters["against_policy"] == 60
    assert router.peers[peer(0)].score == 0
    assert router.policy_conflicts == [(T, False, False)]
    assert receivers(router.publish(message(1, author=OWN), 2.0)) == {peer(1), peer(2)}  # it would reject this one
    router.leave(T, 3.0)
    assert router.policy_conflicts == []


def test_conflicts_of_policies_are_described_with_the_setting_that_decides() -> None:
    conflicts = [PolicyConflict(f"/t/{number}", False, False) for number in range(5)]
    (refused,) = describe_policy_conflicts(conflicts)
    assert "without a signature on /t/0, /t/1, /t/2 and 2 more topics" in refused
    assert 'the policy is "strict". Set policy.topics' in refused
    withheld = [PolicyConflict("/t", True, True), PolicyConflict("/t", False, True)]
    assert "batches are not sent" in next(describe_policy_conflicts(withheld))


def test_an_rpc_of_a_stranger_is_counted_and_left() -> None:
    router = node()
    assert router.receive(peer(9), rpc_of(message(1)), 0.0) == ([], [], b"\0")
    assert router.counters["unknown_peer"] == 1


# ---------------------------------------------------------------- publishing


@pytest.mark.parametrize("topics", [(T,), ()], ids=["joined", "not joined"])
def test_what_we_publish_goes_to_all_on_the_topic_and_nobody_else(topics: tuple[str, ...]) -> None:
    router = with_peers(node(topics=topics), 20)
    with_peers(router, 2, "/floodsub/1.0.0", first=30)
    with_peers(router, 3, first=40, topic="/other")
    sends = router.publish(message(1, author=OWN), 1.0)
    assert receivers(sends) == {peer(number) for number in [*range(20), 30, 31]}
    assert all(send.priority for send in sends)


def test_nobody_there_is_no_send_and_the_same_message_can_be_published_again() -> None:
    router = node()
    ours = message(1, author=OWN)
    assert router.publish(ours, 0.0) == []
    with_peers(router, 2)
    assert len(router.publish(ours, 1.0)) == 2


def test_a_message_without_a_topic_is_not_published() -> None:
    with pytest.raises(ValueError, match="topic"):
        node().publish(Message(data=b"x"), 0.0)
