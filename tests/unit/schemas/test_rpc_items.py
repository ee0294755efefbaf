"""RPCs of more items than any honest peer sends are refused before they are parsed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.schemas.kafka.frames import MAX_ITEMS, MAX_RPC, has_too_many_items, read_rpc
from kiln.schemas.proto.gossipsub.rpc_pb2 import (
    RPC,
    ControlIHave,
    ControlMessage,
    ControlPrune,
    Message,
    PeerInfo,
)
from kiln.schemas.reject import Rejected
from kit.cpu_time import measure_cpu

LONGEST = b"\xfb\xff\xff\x01"  # a length of MAX_RPC - 5 bytes, as a varint


def control_of(items: bytes) -> bytes:
    """An RPC of MAX_RPC bytes with one control field, filled with these items."""
    return b"\x1a" + LONGEST + (items * (MAX_RPC // len(items)))[: MAX_RPC - 5]


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x12\x00" * (MAX_RPC // 2), id="messages"),
        pytest.param(b"\x0a\x00" * (MAX_RPC // 2), id="subscriptions"),
        pytest.param(b"\x20\x00" * (MAX_RPC // 2), id="fields that Kiln does not know"),
        pytest.param(control_of(b"\x1a\x00"), id="GRAFT"),
        pytest.param(control_of(b"\x0a\x02\x12\x00"), id="an id in each IHAVE"),
        pytest.param(RPC.FromString(b"\x1a\x06\x2a\x04" + b"\x0a\x00" * 2).SerializeToString() * 600_000, id="ids"),
        pytest.param(
            control_of(ControlPrune(peers=[PeerInfo()]).SerializeToString().join((b"\x22\x02", b""))), id="peers"
        ),
    ],
)
def test_an_rpc_of_millions_of_items_is_refused_at_the_cost_of_the_first_ones(payload: bytes) -> None:
    with measure_cpu() as cost:
        refused = read_rpc(payload)
    assert cost.steps < 5e6  # parsing the 2 million messages takes 6 million steps
    assert isinstance(refused, Rejected)
    assert refused.reason == "rpc_too_costly"
    assert refused.detail == f"{len(payload)} bytes hold more than {MAX_ITEMS} items"


def test_the_largest_rpcs_of_honest_peers_are_read() -> None:
    topic = "/ceramic/testnet-clay/sep/model/kjzl6hvfrbw6c8x4r08h39j30tl3a19x0r80i15hubw8afv4fu2w9m9owz4cbol"
    hello = RPC(subscriptions=[RPC.SubOpts(subscribe=True, topicid=topic)] * 12_000)
    gossip = RPC()
    gossip.control.ihave.add(topicID=topic, messageIDs=[bytes(46)] * 5000)
    gossip.control.iwant.add(messageIDs=[bytes(46)] * 5000)
    gossip.control.idontwant.add(messageIDs=[bytes(46)] * 5000)
    answer = RPC(publish=[Message(data=bytes(200), seqno=bytes(8), topic=topic, signature=bytes(64))] * 5000)
    for rpc in (hello, gossip, answer, RPC(publish=[Message(data=bytes(MAX_RPC - 20))])):
        assert read_rpc(rpc.SerializeToString()) == rpc


messages = st.builds(Message, data=st.binary(max_size=9), topic=st.none() | st.text(max_size=3))
ids = st.lists(st.binary(max_size=3), max_size=4)
peers = st.lists(st.builds(PeerInfo, peerID=st.binary(max_size=2)), max_size=3)
controls = st.builds(
    ControlMessage,
    ihave=st.lists(st.builds(ControlIHave, messageIDs=ids), max_size=3),
    prune=st.lists(st.builds(ControlPrune, peers=peers), max_size=3),
)
subscriptions = st.builds(RPC.SubOpts, subscribe=st.booleans(), topicid=st.text(max_size=3))
rpcs = st.builds(
    RPC,
    publish=st.lists(messages, max_size=5),
    subscriptions=st.lists(subscriptions, max_size=5),
    control=controls,
)


@given(rpcs, st.integers(0, 40))
def test_items_are_the_entries_and_all_that_is_within_those_that_can_repeat(rpc: RPC, limit: int) -> None:
    entries = len(rpc.publish) + len(rpc.subscriptions) + 1  # and the control field
    repeated = sum(1 + len(each.messageIDs) for each in rpc.control.ihave)
    repeated += sum(1 + len(each.peers) for each in rpc.control.prune)
    payload = rpc.SerializeToString()
    # a payload too short for more than `limit` items has no more
    assert has_too_many_items(payload, limit) == (entries + repeated > limit)


@given(st.binary(max_size=200), st.integers(0, 20))
def test_any_bytes_are_counted_without_an_error(payload: bytes, limit: int) -> None:
    assert has_too_many_items(payload, limit) in (True, False)


@given(rpcs.filter(lambda rpc: rpc.ByteSize() > 4), st.integers(1, 3))
def test_an_rpc_that_is_cut_is_the_parsers_to_refuse(rpc: RPC, cut: int) -> None:
    assert has_too_many_items(rpc.SerializeToString()[:-cut]) is False
