"""The router and its peers: protocols, hellos, subscriptions."""

from __future__ import annotations

import pytest

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.protocols import VERSIONS
from kiln.bridge.gossipsub.table_agreements import TableAgreements
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.wire.topic_table import BundleSet, build_hello_extensions
from kit.scripted_peers import (
    MESHSUB,
    T,
    grafts,
    node,
    peer,
    subscribe,
    with_peers,
)


@pytest.mark.parametrize("protocol", VERSIONS)
def test_the_first_rpc_tells_our_topics_and_extensions_only_to_those_who_know_them(protocol: str) -> None:
    bundles = BundleSet({"one": ["a"]})
    router = node(table=TableAgreements(bundles), topics=("a", "b"))
    (first,) = router.add_peer(peer(1), protocol, True, 0.0)
    assert [(each.topicid, each.subscribe) for each in first.rpc.subscriptions] == [("a", True), ("b", True)]
    assert first.priority
    if protocol == "/meshsub/1.3.0":
        assert first.rpc.control.extensions == build_hello_extensions(bundles)
    else:
        assert not first.rpc.HasField("control")
    later = router.join("c") + router.heartbeat(1.0)
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
    router = node(RouterOptions(max_topics_per_peer=1000))
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
    router = node(RouterOptions(max_topics_per_peer=2), topics=())
    router.add_peer(peer(1), MESHSUB, True, 0.0)
    router.receive(peer(1), subscribe("a"), 0.0)
    for turn in range(5):
        router.join("a")
        router.leave("a", turn + 0.5)
    router.receive(peer(1), subscribe("b", "c"), 9.0)
    assert router.peers[peer(1)].topics == {"a", "b"}


def test_too_many_subscriptions_and_bad_names_are_counted() -> None:
    router = node(RouterOptions(max_subscriptions_per_rpc=10))
    router.add_peer(peer(1), MESHSUB, True, 0.0)
    router.receive(peer(1), subscribe(*map(str, range(30))), 0.0)
    assert (router.sizes["topics"], router.counters["subscriptions_over_limit"]) == (10, 20)
    not_utf8 = RPC.FromString(bytes.fromhex("0a0608011202fffe"))
    router.receive(peer(1), not_utf8, 0.0)
    router.receive(peer(1), subscribe("t" * 2000, ""), 0.0)
    assert (router.sizes["topics"], router.counters["bad_topic"]) == (10, 3)
