"""Messages and RPCs over what peers accept: captured, and never sent to anybody."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.bridge.gossipsub.effects import Deliver, Send
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.gossipsub.rpc_parts import MessageTooLargeError, RpcLimits
from kiln.bridge.gossipsub.table_agreements import TableAgreements
from kiln.bridge.gossipsub.wire import encode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.identity import Verdict
from kiln.schemas.wire.topic_table import BundleSet, build_hello_extensions
from kit.scripted_peers import (
    OWN,
    T,
    asked,
    check,
    gossip_id,
    ihave,
    iwant,
    message,
    node,
    peer,
    receivers,
    rpc_of,
    with_peers,
)

GO = RpcLimits()
LARGER = RouterOptions(rpc_limits=RpcLimits(4 << 20, 4 << 20))
SIZES = st.one_of(st.integers(0, 4000), st.just(700 << 10), st.just(1 << 20))


def is_accepted(rpc: RPC) -> bool:
    """As go-libp2p-pubsub compares an RPC with its defaults."""
    size = len(rpc.SerializeToString())
    return size <= 1 << 20 and size - sum(len(each.data) for each in rpc.publish) <= 512 << 10


def large(number: int) -> Message:
    """A message with more data than an RPC carries."""
    return message(number, size=1_100_000)


def laden(number: int) -> Message:
    """A message with fields nobody knows, of more bytes than go accepts beside the data."""
    made = message(number)
    made.MergeFromString(b"\xa2\x06" + encode(bytes(600_000)))  # field 100
    assert made.ByteSize() > 600_000
    return made


@pytest.mark.parametrize("make", [large, laden])
def test_what_no_peer_accepts_is_delivered_and_neither_relayed_nor_announced_nor_sent(
    make: Callable[[int], Message],
) -> None:
    router = with_peers(node(), 3)
    with_peers(router, 1, "/floodsub/1.0.0", first=10)
    with_peers(router, 12, first=20)  # for some of these there is no room in the mesh: they are told by IHAVE
    sent = make(1)
    sends, delivered, verdicts = router.receive(peer(0), rpc_of(sent), 1.0)
    assert delivered == [Deliver(sent, T, peer(0))]
    assert verdicts == bytes([Verdict.VALID])
    assert receivers(sends) == set()
    beat = router.heartbeat(2.0)
    assert not [each for send in beat for each in send.rpc.control.ihave]
    assert router.receive(peer(20), iwant(gossip_id(sent)), 2.1)[0] == []
    assert router.counters["iwant_unknown"] == 1
    assert router.counters["message_too_large"] == 1
    # its id is known: nobody is asked for it, and a copy is a duplicate
    assert asked(router.receive(peer(21), ihave([gossip_id(sent)]), 2.2)[0]) == []
    assert router.receive(peer(1), rpc_of(sent), 2.3)[1:] == ([], bytes([Verdict.VALID]))


def test_who_has_a_large_message_is_told_that_it_need_not_be_sent() -> None:
    router = with_peers(node(), 3)
    sent = large(1)
    sends, _, _ = router.receive(peer(0), rpc_of(sent), 1.0)
    told = {send.peer for send in sends for each in send.rpc.control.idontwant if gossip_id(sent) in each.messageIDs}
    assert told == {peer(1), peer(2)}


@pytest.mark.parametrize("make", [large, laden])
def test_who_sends_such_messages_again_and_again_is_graylisted_and_others_are_not(
    make: Callable[[int], Message],
) -> None:
    router = with_peers(node(), 3)
    for number in range(30):
        router.receive(peer(0), rpc_of(make(number)), 1.0 + number)
        router.receive(peer(1), rpc_of(message(1000 + number)), 1.5 + number)
        if router.is_graylisted(peer(0)):
            break
    assert 10 < number < 25
    assert router.peers[peer(1)].score >= 0
    assert not router.is_graylisted(peer(1))


def test_a_copy_of_such_a_message_costs_its_sender_as_much() -> None:
    router = with_peers(node(), 3)
    for _ in range(30):
        router.receive(peer(0), rpc_of(large(1)), 1.0)
    assert router.is_graylisted(peer(0))


def test_where_the_network_accepts_more_such_messages_are_relayed_and_cost_nothing() -> None:
    router = with_peers(node(LARGER), 3)
    for number in range(30):
        sends, _, _ = router.receive(peer(0), rpc_of(large(number)), 1.0)
        assert receivers(sends) == {peer(1), peer(2)}
    assert router.peers[peer(0)].score >= 0
    assert router.counters["message_too_large"] == 0


def test_the_largest_message_that_go_accepts_is_relayed_and_one_more_byte_is_not() -> None:
    router = with_peers(node(), 3)
    fits = message(1, size=1 << 19)
    fits.data += bytes((1 << 20) - rpc_of(fits).ByteSize())
    assert rpc_of(fits).ByteSize() == 1 << 20
    sends, _, _ = router.receive(peer(0), rpc_of(fits), 1.0)
    assert receivers(sends) == {peer(1), peer(2)}
    assert all(is_accepted(send.rpc) for send in sends)
    over = message(2)
    over.data = fits.data + b"\0"
    sends, delivered, _ = router.receive(peer(0), rpc_of(over), 1.0)
    assert (receivers(sends), len(delivered)) == (set(), 1)


def test_a_large_message_among_small_ones_takes_none_of_them_along() -> None:
    router = with_peers(node(), 3)
    small = [message(number) for number in range(10)]
    sends, delivered, _ = router.receive(peer(0), rpc_of(*small[:5], large(99), *small[5:]), 1.0)
    assert len(delivered) == 11
    for one in (peer(1), peer(2)):
        assert [each for send in sends if send.peer == one for each in send.rpc.publish] == small


def test_an_unsigned_message_that_a_stranger_padded_stands_in_nobodys_way() -> None:
    """The id of an unsigned message is that of its data alone."""
    router = with_peers(node(), 3)
    true = Message(topic=T, data=bytes(2000))
    padded = Message(topic=T, data=bytes(2000))
    padded.MergeFromString(b"\xa2\x06" + encode(bytes(600_000)))  # field 100
    assert gossip_id(padded) == gossip_id(true)
    sends, _, verdicts = router.receive(peer(0), rpc_of(padded), 1.0)
    assert (sends, verdicts) == ([], bytes([Verdict.UNSIGNED]))
    assert asked(router.receive(peer(2), ihave([gossip_id(true)]), 1.1)[0]) == [gossip_id(true)]
    sends, delivered, _ = router.receive(peer(1), rpc_of(true), 1.2)
    assert receivers(sends) == {peer(0), peer(2)}
    assert [each.message for each in delivered] == [true]


def test_an_own_message_that_no_rpc_carries_is_refused_before_anything_is_remembered() -> None:
    router = with_peers(node(), 3)
    own = large(1)
    with pytest.raises(MessageTooLargeError, match=r"bridge\.max_rpc_bytes_out"):
        router.publish(own, 1.0)
    assert router.sizes["seen"] == router.sizes["mcache"] == 0
    assert not [each for send in router.heartbeat(2.0) for each in send.rpc.control.ihave]


@settings(max_examples=40)
@given(st.lists(st.tuples(SIZES, SIZES), max_size=7), st.integers(1, 3000), st.integers(1, 64), st.booleans())
def test_whatever_the_router_sends_is_accepted_and_nothing_that_fits_is_missing(
    sizes: list[tuple[int, int]], topics: int, seqno: int, tables: bool
) -> None:
    """Hello, JOIN, GRAFT, relayed messages, answers to IWANT, IHAVE, IWANT, IDONTWANT, PRUNE: each RPC that leaves."""
    names = [f"/ceramic/mainnet/sep/model/{number:0300d}" for number in range(topics)]
    bundles = BundleSet({"some": ["a", *names[: topics // 2]]})
    router = Router(OWN, RouterOptions(), Random(1), check, TableAgreements(bundles, "eager"))
    for name in (T, *names):
        router.join(name)
    sent: list[Send] = []
    hello = RPC()
    hello.control.extensions.CopyFrom(build_hello_extensions(bundles))
    for number in range(14):
        hellos = router.add_peer(peer(number), "/meshsub/1.3.0", True, 0.0)
        assert [each.topicid for send in hellos for each in send.rpc.subscriptions] == [T, *names]
        sent += hellos
        subscribed = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid=T)])
        if number < 2:
            subscribed.subscriptions.extend([RPC.SubOpts(subscribe=True, topicid=name) for name in names])
        if tables:
            router.receive(peer(number), hello, 0.0)
        sent += router.receive(peer(number), subscribed, 0.0)[0]
    made = []
    for number, (data, key) in enumerate(sizes):
        each = message(number, size=data)
        each.key, each.seqno = bytes(key), number.to_bytes(seqno, "big")
        made.append(each)
    fit = [each for each in made if is_accepted(rpc_of(each))]
    ids = [gossip_id(each) for each in made]
    sends = router.receive(peer(0), rpc_of(*made), 1.0)[0]
    sent += sends
    mesh = router.mesh[T] - {peer(0)}
    relayed = {one: [each.data for send in sends if send.peer == one for each in send.rpc.publish] for one in mesh}
    assert all(data == [each.data for each in fit] for data in relayed.values())
    answers = router.receive(peer(13), iwant(*ids), 1.1)[0]
    assert [each.data for send in answers for each in send.rpc.publish] == [each.data for each in fit]
    sent += answers
    sent += router.receive(
        peer(1), ihave(bytes([number % 256]) * 1000 + b"%d" % number for number in range(5000)), 1.2
    )[0]
    sent += router.heartbeat(2.0)
    for name in names[:3]:
        sent += router.leave(name, 3.0)
    assert [send for send in sent if not is_accepted(send.rpc)] == []
    assert router.counters["control_too_large"] == 0
