"""RPCs split so that every peer accepts them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.bridge.gossipsub.rpc_parts import RpcLimits, split
from kiln.bridge.gossipsub.table_agreements import TableAgreements
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.wire.topic_table import BundleSet
from kit.scripted_peers import T, message, node, peer


def ids_in(rpc: RPC, name: str) -> list[bytes]:
    return [key for item in getattr(rpc.control, name) for key in item.messageIDs]


def is_accepted(rpc: RPC, limits: RpcLimits) -> bool:
    """Compare an RPC with the limits as go does: ReadMsg of go-msgio, ValidateRawRPCControlMessageSize of pubsub."""
    data = sum(len(each.data) for each in rpc.publish)
    return len(rpc.SerializeToString()) <= limits.size and rpc.ByteSize() - data <= limits.overhead


def test_ids_are_split_into_as_few_items_as_fit() -> None:
    rpc = RPC()
    ids = [b"%040d" % number for number in range(100)]
    rpc.control.ihave.add(topicID=T, messageIDs=ids)
    rpc.control.iwant.add(messageIDs=ids)
    rpc.control.idontwant.add(messageIDs=ids)
    # an item fills at most half of a part: 100 ids take 4 kB and more, half a part has 3.5 kB
    parts, left_out = split(rpc, RpcLimits(7_000, 7_000))
    assert left_out == 0
    for name in ("ihave", "iwant", "idontwant"):
        assert [key for part in parts for key in ids_in(part, name)] == ids
        assert sum(len(getattr(part.control, name)) for part in parts) == 2


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), max_size=20),
    st.lists(st.text(max_size=300), max_size=20),
    st.lists(st.lists(st.binary(max_size=400), max_size=30), max_size=5),
    st.integers(150, 1000),
    st.integers(150, 1000),
)
def test_parts_are_accepted_and_hold_the_same_things(
    sizes: list[tuple[int, int]], topics: list[str], ids: list[list[bytes]], size: int, overhead: int
) -> None:
    limits = RpcLimits(size, overhead)
    rpc = RPC()
    rpc.control.extensions.testExtension.SetInParent()
    for topic in topics:
        rpc.subscriptions.add(subscribe=True, topicid=topic)
        rpc.control.graft.add(topicID=topic)
        rpc.control.prune.add(topicID=topic, backoff=60).peers.add(signedPeerRecord=bytes(3 * len(topic)))
    for number, (data, key) in enumerate(sizes):
        made = message(number, size=data)
        made.key = bytes(key)
        rpc.publish.append(made)
    for each in ids:
        rpc.control.ihave.add(topicID=T, messageIDs=each)
        rpc.control.iwant.add(messageIDs=each)
        rpc.control.idontwant.add(messageIDs=each)
    before = rpc.SerializeToString()
    parts, left_out = split(rpc, limits)
    assert rpc.SerializeToString() == before
    assert all(is_accepted(part, limits) for part in parts)
    assert [part.control.HasField("extensions") for part in parts] == [True] + [False] * (len(parts) - 1)
    carried = sum(
        len(part.publish) + len(part.subscriptions) + len(part.control.graft) + len(part.control.prune)
        + sum(len(ids_in(part, name)) for name in ("ihave", "iwant", "idontwant"))
        for part in parts
    )  # fmt: skip
    assert carried + left_out == len(sizes) + 3 * len(topics) + 3 * sum(map(len, ids))
    # what is left out fits in no RPC, and the rest is there, in order
    fits = [each for each in rpc.publish if limits.accept(each.ByteSize(), len(each.data))]
    assert [each for part in parts for each in part.publish] == fits
    assert all(is_accepted(RPC(publish=[each]), limits) for each in fits)
    subscribed = [each for part in parts for each in part.subscriptions]
    assert is_subsequence(subscribed, list(rpc.subscriptions))
    assert all(each in subscribed for each in rpc.subscriptions if is_accepted(RPC(subscriptions=[each]), limits))
    for name in ("graft", "prune"):
        items = [each for part in parts for each in getattr(part.control, name)]
        assert is_subsequence(items, list(getattr(rpc.control, name)))
    for name in ("ihave", "iwant", "idontwant"):
        sent = [key for part in parts for key in ids_in(part, name)]
        assert is_subsequence(sent, ids_in(rpc, name))
        assert [key for key in sent if len(key) < 50] == [key for key in ids_in(rpc, name) if len(key) < 50]


def is_subsequence(some: Sequence[object], of: Sequence[object]) -> bool:
    rest = iter(of)
    return all(each in rest for each in some)


def test_an_rpc_that_peers_accept_is_sent_as_it_is() -> None:
    limits = RpcLimits()
    rpc = RPC(publish=[message(0, size=limits.size - 100)])
    rpc.publish[0].data += bytes(limits.size - rpc.ByteSize())
    assert rpc.ByteSize() == limits.size
    assert split(rpc, limits)[0][0] is rpc
    rpc.publish[0].data += b"\0"
    assert split(rpc, limits) == ([], 1)


def test_a_message_that_alone_reaches_a_limit_is_not_left_out() -> None:
    messages = [message(1, size=1000), message(2, size=1000)]
    size = RPC(publish=messages[:1]).ByteSize()
    for limits in (RpcLimits(size, size), RpcLimits(2 * size, size - len(messages[0].data))):
        assert split(RPC(publish=messages), limits) == ([RPC(publish=[each]) for each in messages], 0)
        assert limits.accept(messages[0].ByteSize(), len(messages[0].data))


def test_an_rpc_over_the_size_is_split_also_below_the_overhead() -> None:
    rpc = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid=T)] * 100)
    limits = RpcLimits(rpc.ByteSize() - 1, 2 * rpc.ByteSize())
    parts, left_out = split(rpc, limits)
    assert all(is_accepted(part, limits) for part in parts)
    assert (sum(len(part.subscriptions) for part in parts), len(parts), left_out) == (100, 2, 0)


def test_five_thousand_small_messages_are_more_than_peers_accept_at_once() -> None:
    limits = RpcLimits()
    rpc = RPC(publish=[message(number, sig=bytes(64), size=1) for number in range(5000)])
    assert limits.overhead < rpc.ByteSize() < limits.size
    parts, left_out = split(rpc, limits)
    assert all(is_accepted(part, limits) for part in parts)
    assert ([len(part.publish) for part in parts], left_out) == ([2000, 2000, 1000], 0)
    assert [each for part in parts for each in part.publish] == list(rpc.publish)


def test_a_hello_of_very_many_topics_is_parted() -> None:
    topics = [f"/ceramic/mainnet/sep/model/{number:0100d}" for number in range(20_000)]
    sends = node(topics=topics, table=TableAgreements(BundleSet({"one": ["a"]}))).add_peer(
        peer(1), "/meshsub/1.3.0", True, 0.0
    )
    assert len(sends) > 1
    assert all(is_accepted(send.rpc, RpcLimits()) for send in sends)
    assert [each.topicid for send in sends for each in send.rpc.subscriptions] == topics
