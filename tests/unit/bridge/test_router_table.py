"""Conduct of the router with topic tables: names inside, indices on each connection's wire only."""

from __future__ import annotations

from functools import partial
from random import Random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kiln.bridge.gossipsub.effects import PeerID, Send
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.router import Router
from kiln.bridge.gossipsub.table_agreements import SendMode, TableAgreements
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.identity import Verdict, check, compute_peer_id, sign
from kiln.schemas.wire.topic_table import BundleSet, build_hello_extensions

A, B, C = "/ceramic/a", "/ceramic/b", "/ceramic/c"
ONE = BundleSet({"one": [A, B]})  # a is 1, b is 2
OTHER_ORDER = BundleSet({"zero": ["/ceramic/0"], "one": [A, B]})
V13, V12 = "/meshsub/1.3.0", "/meshsub/1.2.0"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
OWN = b"\x00\x24own"


def peer(number: int) -> PeerID:
    return b"\x00\x24peer%03d" % number


def node(send: SendMode = "eager", bundles: BundleSet = ONE, topics: tuple[str, ...] = (A, B, C)) -> Router:
    router = Router(OWN, RouterOptions(), Random(1), partial(check, policy="strict"), TableAgreements(bundles, send))
    for topic in topics:
        router.join(topic)
    return router


def hello(bundles: BundleSet = ONE, topics: tuple[str, ...] = (A, B, C)) -> RPC:
    rpc = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid=topic) for topic in topics])
    rpc.control.extensions.CopyFrom(build_hello_extensions(bundles))
    return rpc


def greet(router: Router, number: int, protocol: str = V13, bundles: BundleSet | None = ONE) -> None:
    router.add_peer(peer(number), protocol, True, 0.0)
    rpc = hello(bundles or BundleSet())
    if bundles is None:
        rpc.ClearField("control")
    router.receive(peer(number), rpc, 0.0)


def signed(number: int, topic: str = A) -> Message:
    message = Message(data=b"%d" % number * 20, seqno=number.to_bytes(8), topic=topic)
    sign(message, KEY)
    return message


def indexed(message: Message, index: int, *, name: bool = False) -> RPC:
    wired = Message()
    wired.CopyFrom(message)
    if not name:
        wired.ClearField("topic")
    wired.topicIndex = index
    return RPC(publish=[wired])


def published(sends: list[Send]) -> dict[PeerID, list[tuple[str, int]]]:
    """(name, index) of each message by receiver; what is not on the wire is "" or 0."""
    got: dict[PeerID, list[tuple[str, int]]] = {}
    for send in sends:
        for message in send.rpc.publish:
            got.setdefault(send.peer, []).append((message.topic, message.topicIndex))
    return got


def test_a_message_by_index_is_verified_delivered_and_passed_on_by_its_name() -> None:
    router = node()
    greet(router, 1)
    greet(router, 2)  # agreed: by index
    greet(router, 3, V12, None)
    greet(router, 4, V13, None)  # speaks 1.3 and has no table
    message = signed(1, B)
    sends, (deliver,), verdicts = router.receive(peer(1), indexed(message, 2), 1.0)
    assert verdicts == bytes([Verdict.VALID])
    assert (deliver.message, deliver.topic) == (message, B)
    assert published(sends) == {peer(2): [("", 2)], peer(3): [(B, 0)], peer(4): [(B, 0)]}
    for send in sends:
        for each in send.rpc.publish:
            each.ClearField("topicIndex")
            each.topic = B
            assert each == message


def test_copies_by_name_and_by_index_are_one_message() -> None:
    router = node()
    for number in range(3):
        greet(router, number)
    message = signed(1)
    assert len(router.receive(peer(0), indexed(message, 1), 1.0)[1]) == 1
    assert router.receive(peer(1), RPC(publish=[message]), 1.0)[1:] == ([], bytes([Verdict.VALID]))
    assert router.receive(peer(2), indexed(message, 1), 1.0)[1:] == ([], bytes([Verdict.VALID]))
    assert router.counters["duplicate"] == 2


def test_what_is_kept_for_iwant_goes_in_the_askers_own_form() -> None:
    router = node()
    greet(router, 1, bundles=OTHER_ORDER)
    greet(router, 2)
    greet(router, 3, V12, None)
    router.receive(peer(1), indexed(signed(1), 1), 1.0)
    rpc = RPC()
    rpc.control.iwant.add(messageIDs=[compute_peer_id(KEY) + (1).to_bytes(8)])
    assert published(router.receive(peer(2), rpc, 1.0)[0]) == {peer(2): [("", 1)]}
    assert published(router.receive(peer(3), rpc, 1.0)[0]) == {peer(3): [(A, 0)]}


def test_our_own_messages_go_by_index_where_agreed_and_stay_as_they_are() -> None:
    router = node()
    greet(router, 1)
    greet(router, 2, V12, None)
    message = signed(1)
    before = message.SerializeToString()
    assert published(router.publish(message, 1.0)) == {peer(1): [("", 1)], peer(2): [(A, 0)]}
    assert message.SerializeToString() == before
    assert published(router.publish(signed(2, C), 1.0)) == {peer(1): [(C, 0)], peer(2): [(C, 0)]}


def test_an_index_that_does_not_resolve_goes_nowhere() -> None:
    router = node()
    greet(router, 1)
    greet(router, 2)
    greet(router, 3, V13, None)
    for number, index, kind in ((1, 0, "index_out_of_range"), (1, 3, "index_out_of_range"), (3, 1, "no_table_agreed")):
        before = router.counters.get(kind, 0)
        assert router.receive(peer(number), indexed(signed(7), index), 1.0) == ([], [], bytes([Verdict.NOT_CHECKED]))
        assert router.counters[kind] == before + 1
    # no trace is left: the same message by name is new
    sends, delivered, _ = router.receive(peer(1), RPC(publish=[signed(7)]), 1.0)
    assert len(delivered) == 1
    assert published(sends)


def test_a_name_wins_over_the_index_beside_it() -> None:
    router = node(topics=(A,))
    greet(router, 1)
    greet(router, 2)
    sends, (deliver,), _ = router.receive(peer(1), indexed(signed(1), 2, name=True), 1.0)
    assert (deliver.topic, deliver.message.HasField("topicIndex")) == (A, False)
    assert published(sends) == {peer(2): [("", 1)]}
    assert router.counters["name_and_index"] == 1


def test_without_bundles_an_index_beside_a_name_is_not_passed_on() -> None:
    router = Router(OWN, RouterOptions(), Random(1), partial(check, policy="strict"))
    router.join(A)
    greet(router, 1)
    greet(router, 2)
    sends, (deliver,), _ = router.receive(peer(1), indexed(signed(1), 2, name=True), 1.0)
    assert deliver.message == signed(1)
    assert published(sends) == {peer(2): [(A, 0)]}


def test_graft_prune_and_ihave_go_and_come_by_index() -> None:
    router = node(topics=())
    greet(router, 1)
    (join,) = router.join(A)
    (graft,) = join.rpc.control.graft
    assert (graft.topicIndex, graft.HasField("topicID")) == (1, False)
    assert [(each.topicid, each.HasField("topicIndex")) for each in join.rpc.subscriptions] == [(A, False)]
    rpc = RPC()
    rpc.control.prune.add(topicIndex=1, backoff=5)
    router.receive(peer(1), rpc, 2.0)
    assert router.mesh[A] == frozenset()
    rpc = RPC()
    rpc.control.graft.add(topicIndex=1)
    router.receive(peer(1), rpc, 30.0)
    assert router.mesh[A] == {peer(1)}
    rpc = RPC()
    rpc.control.ihave.add(topicIndex=1, messageIDs=[b"an id"])
    (asked,), _, _ = router.receive(peer(1), rpc, 31.0)
    assert list(asked.rpc.control.iwant[0].messageIDs) == [b"an id"]
    (leave,) = router.leave(A, 32.0)
    (prune,) = leave.rpc.control.prune
    assert (prune.topicIndex, prune.HasField("topicID"), prune.backoff) == (1, False, 10)


def test_gossip_goes_by_index() -> None:
    router = node(topics=(A,))
    for number in range(20):
        greet(router, number)
    router.receive(peer(0), indexed(signed(1), 1), 1.0)
    told = [item for send in router.heartbeat(1.0) for item in send.rpc.control.ihave]
    assert told
    assert {(item.topicIndex, item.HasField("topicID")) for item in told} == {(1, False)}


def test_a_subscription_is_read_by_index() -> None:
    router = node(topics=())
    router.add_peer(peer(1), V13, True, 0.0)
    router.receive(peer(1), hello(topics=()), 0.0)
    router.receive(peer(1), RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicIndex=2)]), 0.0)
    assert router.peers[peer(1)].topics == {B}
    router.receive(peer(1), RPC(subscriptions=[RPC.SubOpts(subscribe=False, topicIndex=2)]), 0.0)
    assert router.peers[peer(1)].topics == frozenset()


def test_cautious_waits_for_an_index_or_for_a_kiln() -> None:
    router = node("cautious")
    for number in (1, 2, 3):
        greet(router, number)
    router.set_agent(peer(2), "kiln/0.1.0")
    router.set_agent(peer(3), "go-libp2p/0.47")
    assert published(router.publish(signed(1), 1.0)) == {peer(1): [(A, 0)], peer(2): [("", 1)], peer(3): [(A, 0)]}
    router.receive(peer(1), indexed(signed(2, B), 2), 1.0)
    assert published(router.publish(signed(3), 2.0))[peer(1)] == [("", 1)]


def test_off_reads_indices_and_writes_none() -> None:
    router = node("off")
    greet(router, 1)
    greet(router, 2)
    sends, delivered, _ = router.receive(peer(1), indexed(signed(1), 1), 1.0)
    assert len(delivered) == 1
    assert published(sends) == {peer(2): [(A, 0)]}


def test_only_the_first_rpc_is_a_hello() -> None:
    router = node()
    router.add_peer(peer(1), V13, True, 0.0)
    router.receive(peer(1), RPC(), 0.0)  # one that could not be read
    router.receive(peer(1), hello(), 0.0)
    assert router.counters["hello_late"] == 1
    assert published(router.publish(signed(1), 1.0)) == {peer(1): [(A, 0)]}
    router.remove_peer(peer(1), 2.0)
    greet(router, 1)
    assert published(router.publish(signed(2), 3.0)) == {peer(1): [("", 1)]}
