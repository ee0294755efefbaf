"""Peers that strangers named are at most half of a mesh, whichever way they would come into it."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.router import Router
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.wire.identity import Judgement, Verdict

T = "/ceramic/mainnet"
HALF = RouterOptions().D // 2


def peer(number: int) -> bytes:
    return b"\x00\x24peer%03d" % number


def says(*, subscribe: bool = True, graft: bool = False) -> RPC:
    rpc = RPC()
    if subscribe:
        rpc.subscriptions.add(subscribe=True, topicid=T)
    if graft:
        rpc.control.graft.add(topicID=T)
    return rpc


def router(topics: Iterable[str] = (T,)) -> Router:
    made = Router(b"\x00\x24own", RouterOptions(), Random(1), lambda message: Judgement(Verdict.VALID))
    for topic in topics:
        made.join(topic)
    return made


def meet(made: Router, numbers: range, *, discovered: bool, graft: bool = False) -> None:
    for number in numbers:
        made.add_peer(peer(number), "/meshsub/1.2.0", True, 0.0, discovered)
        made.receive(peer(number), says(graft=graft), 0.0)


def beat(made: Router, times: int = 100) -> None:
    for second in range(1, times):
        made.heartbeat(float(second))


@pytest.mark.parametrize("graft", [False, True])
def test_by_subscribing_and_grafting(graft: bool) -> None:
    made = router()
    meet(made, range(20), discovered=True, graft=graft)
    assert len(made.mesh[T]) == HALF
    beat(made)
    assert len(made.mesh[T]) == HALF
    meet(made, range(20, 40), discovered=False)
    beat(made)
    assert len(made.mesh[T]) >= RouterOptions().D_low
    assert sum(number in made.mesh[T] for number in map(peer, range(20))) <= HALF


def test_by_joining() -> None:
    made = router(topics=())
    meet(made, range(20), discovered=True)
    made.join(T)
    assert len(made.mesh[T]) == HALF


def test_by_joining_what_was_published_on() -> None:
    made = router(topics=())
    meet(made, range(20), discovered=True)
    made.publish(Message(topic=T, data=b"1", seqno=b"1"), 1.0)
    made.join(T)
    assert len(made.mesh[T]) == HALF


def test_who_is_refused_is_told() -> None:
    made = router()
    meet(made, range(HALF), discovered=True)
    made.add_peer(peer(50), "/meshsub/1.2.0", True, 0.0, True)
    sends, _, _ = made.receive(peer(50), says(graft=True), 1.0)
    assert [each.topicID for send in sends for each in send.rpc.control.prune] == [T]
    assert made.counters["graft_discovered_full"] == 1
    made.remove_peer(peer(0), 2.0)
    made.add_peer(peer(51), "/meshsub/1.2.0", True, 2.0, True)
    made.receive(peer(51), says(graft=True), 2.0)
    assert peer(51) in made.mesh[T]
