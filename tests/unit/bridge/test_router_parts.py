"""RPCs in parts that are small enough to send."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kit.scripted_peers import (
    T,
    message,
    node,
    peer,
)

from bridge.gossip.parts import split
from bridge.gossip.table_side import TableSide
from schemas.proto.gossipsub.rpc_pb2 import RPC
from schemas.topic_table import Bundles


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
