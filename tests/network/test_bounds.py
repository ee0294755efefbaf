"""What one peer may cost the node: bytes captured of it, and how long its conduct is borne."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from libp2p.host.basic_host import BasicHost
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.wire import encode
from kiln.bridge.libp2p.streams import get_swarm
from kiln.conf.process.bridge_status import PeerStatus
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import peer_bytes, peer_text
from kit.chance import new_key
from kit.node_town import (
    ENDS,
    OPTIONS,
    TOPIC,
    Running,
    Town,
    call,
    in_town,
    message,
    raw_peer,
    subscribed,
    subscription,
)

pytestmark = pytest.mark.network

MIB = 1 << 20
QUICK = RouterOptions(heartbeat=0.1)


def counted(one: Running, kind: str) -> int:
    return one.node.view().counters.get(kind, 0)


def names(one: Running) -> set[str]:
    return {peer.peer for peer in one.node.view().peers}


def forged(number: int) -> bytes:
    rpc = RPC.FromString(message(number, new_key()))
    rpc.publish[0].data = b"forged"
    return rpc.SerializeToString()


def flood() -> bytes:
    return b"\x12\x00" * 6000


def subscriptions() -> bytes:
    rpc = RPC()
    for number in range(5000):
        rpc.subscriptions.add(subscribe=True, topicid=f"/ceramic/local-test/sep/model/k{number}")
    return rpc.SerializeToString()


async def comes_again(host: BasicHost, one: Running) -> None:
    """Calls the node anew, and speaks until the node hangs up."""
    for conn in get_swarm(host).get_connections():
        await conn.close()
    with suppress(*ENDS):
        stream = await call(host, one)
        while True:
            await stream.write(encode(subscription()))
            await trio.sleep(0.05)  # the pace of the flood


@pytest.mark.parametrize(
    "misdeeds",
    [
        [forged(number) for number in range(20)],
        [flood()] * 4,
        [b"\xff not protobuf"] * 30,
        [subscriptions()] * 2,
    ],
    ids=["forged", "floods", "garbage", "subscriptions"],
)
def test_a_peer_of_bad_conduct_is_hung_up_on_and_kept_out_for_a_while(tmp_path: Path, misdeeds: list[bytes]) -> None:
    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=QUICK, ban=3.0))
        async with raw_peer() as host:
            name = peer_text(host.get_id().to_bytes())
            stream = await call(host, a)
            await stream.write(encode(subscription()))
            await town.bell.until(lambda: subscribed(a, 2))
            await stream.write(b"".join(map(encode, misdeeds)))
            await town.bell.until(lambda: name not in names(a), 60)
            view = a.node.view()
            assert (view.counters["peers_banned"], view.kept_out) == (1, 1)
            assert set(misdeeds) <= set(a.tape.payloads(Frame.IN))  # what it said until then is captured
            await comes_again(host, a)
            assert counted(a, "banned_refused") > 0
            assert name not in names(a)
        a.node.publish(TOPIC, b"all the while")
        await town.until_heard(b, b"all the while")

    in_town(tmp_path, test)


def test_who_was_kept_out_may_come_again_after_a_while(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a = await town.node(replace(OPTIONS, gossip=replace(QUICK, retain_score=0.0), ban=1.0))
        a.node.join(TOPIC)
        async with raw_peer() as host:
            stream = await call(host, a)
            await stream.write(b"".join(encode(forged(number)) for number in range(20)))
            await town.bell.until(lambda: a.node.view().kept_out == 1)
            await town.bell.until(lambda: a.node.view().kept_out == 0)
            for conn in get_swarm(host).get_connections():
                await conn.close()
            stream = await call(host, a)
            await stream.write(encode(subscription()))
            await town.bell.until(lambda: subscribed(a, 1))

    in_town(tmp_path, test)


def test_more_may_come_one_after_another_than_there_are_places(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        one = await town.node(replace(OPTIONS, max_connections=2))
        for _ in range(5):
            async with raw_peer() as host:
                await call(host, one)
                for conn in get_swarm(host).get_connections():
                    await conn.close()
            await town.bell.until(lambda: not get_swarm(one.node._host).get_connections())

    in_town(tmp_path, test)


def test_silent_connections_keep_nobody_out_and_who_brought_messages_stays(tmp_path: Path) -> None:
    """Three kinds of silence: peers without a stream, peers on the topic, and sockets without a handshake."""
    limit = 4

    async def test(town: Town) -> None:
        one = await town.node(replace(OPTIONS, max_connections=limit))
        one.node.join(TOPIC)
        good = await newcomer(town, one)
        good.node.publish(TOPIC, b"before")
        await town.until_heard(one, b"before")
        async with AsyncExitStack() as crowd:
            for number in range(2 * limit):
                host = await crowd.enter_async_context(raw_peer())
                await host.connect(info_from_p2p_addr(Multiaddr(one.address)))
                if number % 2:
                    await (await call(host, one)).write(encode(subscription()))
            for _ in range(2 * limit):
                stream = await trio.open_tcp_stream("127.0.0.1", int(Multiaddr(one.address).value_for_protocol("tcp")))
                crowd.push_async_callback(stream.aclose)
            for _ in range(3):
                late = await newcomer(town, one)
                late.node.publish(TOPIC, late.peer.encode())
                await town.until_heard(one, late.peer.encode())
                await town.until_heard(good, late.peer.encode())
            assert {good.peer, late.peer} <= names(one)
        assert len({f.connection for f in one.tape.frames if f.remote_peer == peer_bytes(good.peer)}) == 1
        assert counted(one, "connections_evicted") >= 3 * limit
        assert counted(one, "connections_refused") == 0
        await town.bell.until(lambda: counted(one, "handshakes_failed") >= limit)  # of sockets that were sent away

    in_town(tmp_path, test)


async def newcomer(town: Town, one: Running) -> Running:
    """A node on TOPIC that knows of one other."""
    node = await town.node(replace(OPTIONS, bootstrap=(one.address,)))
    node.node.join(TOPIC)
    await town.bell.until(lambda: subscribed(node, 1) and node.peer in names(one), 60)
    return node


def test_who_is_over_the_budget_of_all_cannot_have_bytes_taken_by_going(tmp_path: Path) -> None:
    """All together are over their budget: what a stranger says and leaves behind is not captured, and is counted."""

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=QUICK, max_bytes_per_hour=4 * MIB))
        a.node._traffic.budgets.bytes_in._left = -float(4 * MIB)
        async with raw_peer() as host:
            stream = await call(host, a)
            await stream.write(encode(message(1, new_key(), 20_000)))
            await town.bell.until(lambda: any(each.held_back for each in a.node.view().peers))
            b.node.publish(TOPIC, b"an honest word")
            await town.until_heard(a, b"an honest word")
            for conn in get_swarm(host).get_connections():
                await conn.close()
            peer = host.get_id().to_bytes()
        await town.bell.until(lambda: counted(a, "over_budget_unread") > 20_000)
        assert not [
            frame for frame in a.tape.frames if frame.remote_peer == peer and frame.payload and not frame.direction
        ]

    in_town(tmp_path, test)


def test_a_peer_over_its_budget_is_read_slowly_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    """An hour's bytes at once, then some 290 kB a second. Another peer is heard at once meanwhile."""
    key, size = new_key(), 20_000
    said = [message(number, key, size) for number in range(1, 131)]

    async def test(town: Town) -> None:
        a, b = await town.pair(
            replace(OPTIONS, gossip=QUICK, max_peer_bytes_per_hour=1000 * MIB, max_bytes_per_hour=4000 * MIB)
        )
        async with raw_peer() as host:
            peer = host.get_id().to_bytes()
            a.node._traffic.budgets.bytes_in._account(peer, trio.current_time()).own = float(MIB)
            stream = await call(host, a)
            await stream.write(encode(subscription()))
            began = trio.current_time()

            async def talk() -> None:
                for each in said:
                    await stream.write(encode(each))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(talk)
                await town.bell.until(lambda: any(each.held_back for each in a.node.view().peers))
                b.node.publish(TOPIC, b"an honest word")
                await town.until_heard(a, b"an honest word")
                assert len(a.rpcs(Frame.IN, peer_text(peer))) <= len(said), "the other peer waited for this one"
                await town.bell.until(lambda: len(a.rpcs(Frame.IN, peer_text(peer))) == len(said) + 1, 60)
            # 2.6 MB, of which 1 MiB at once and what was read last is paid for later
            assert trio.current_time() - began > 3
            assert counted(a, "over_budget") > 0
            assert [f.payload for f in a.tape.frames if f.remote_peer == peer and not f.direction][1:] == said

    in_town(tmp_path, test)


def seen(one: Running, peer: bytes) -> PeerStatus:
    return next(each for each in one.node.view().peers if each.peer == peer_text(peer))


@pytest.mark.parametrize("queue_bytes", [4 * MIB, MIB], ids=["room", "no room"])
def test_to_a_peer_over_its_budget_is_sent_slowly_and_what_is_not_sent_is_counted(
    tmp_path: Path, queue_bytes: int
) -> None:
    """An hour's bytes at once, then some 29 kB a second. Another peer hears all at once meanwhile."""
    said = [b"%04d" % number * 5000 for number in range(130)]

    async def test(town: Town) -> None:
        options = replace(OPTIONS, gossip=QUICK, max_peer_bytes_per_hour_out=100 * MIB, queue_bytes=queue_bytes)
        a, b = await town.pair(options)
        async with raw_peer() as host:
            peer = host.get_id().to_bytes()
            account = a.node._traffic.budgets.bytes_out._account(peer, trio.current_time())
            account.own = float(MIB)
            await (await call(host, a)).write(encode(subscription()))
            await town.bell.until(lambda: subscribed(a, 2))
            began = trio.current_time()
            for data in said:
                a.node.publish(TOPIC, data)
                await town.until_heard(b, data, 60)
            await town.bell.until(lambda: seen(a, peer).sent_slowly, 60)
            assert seen(a, peer).bytes_out < MIB + (trio.current_time() - began) * 30_000 + 128 * 1024
            account.own = float(100 * MIB)  # an hour later
            await town.bell.until(lambda: not seen(a, peer).queued and not seen(a, peer).sent_slowly, 60)
            assert counted(a, "over_budget_out") > 0
            sent = [m.data for rpc in a.rpcs(Frame.OUT, peer_text(peer)) for m in rpc.publish]
            dropped = seen(a, peer).dropped
            assert sent == [data for data in said if data in sent]
            assert len(sent) + dropped == len(said)
            assert bool(dropped) == (queue_bytes == MIB)

    in_town(tmp_path, test)


def test_who_comes_again_under_new_keys_is_sent_no_more_than_all_may_be(tmp_path: Path) -> None:
    """All together are over their budget: strangers wait for the list of topics, and others do not wait."""

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=QUICK, max_bytes_per_hour_out=4 * MIB))
        for number in range(500):
            a.node.join(f"/ceramic/local-test/sep/model/k{number}")
        await town.bell.until(lambda: not any(each.queued for each in a.node.view().peers))
        a.node._traffic.budgets.bytes_out._left = -float(4 * MIB)
        a.node.publish(TOPIC, b"before")
        await town.until_heard(b, b"before")
        for _ in range(3):
            before = counted(a, "over_budget_out")
            async with raw_peer() as host:
                await call(host, a)
                await town.bell.until(lambda: counted(a, "over_budget_out") > before)  # noqa: B023  # awaited in this turn of the loop
                stranger = peer_text(host.get_id().to_bytes())
            assert a.rpcs(Frame.OUT, stranger) == []
        a.node.publish(TOPIC, b"an honest word")
        await town.until_heard(b, b"an honest word", 60)

    in_town(tmp_path, test)


def test_unfinished_rpcs_of_all_peers_together_have_a_bound(tmp_path: Path) -> None:
    """Who holds most is hung up on, and the others are read."""

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=QUICK, unfinished_bytes=5 * MIB))
        begun = encode(message(1, new_key(), 4 * MIB - 1000))
        async with raw_peer() as small, raw_peer() as great:
            streams = [await call(host, a) for host in (small, great)]
            await streams[0].write(begun[: 2 * MIB])
            await streams[1].write(begun[: 3 * MIB + 1000])
            await town.bell.until(lambda: counted(a, "unfinished_dropped") == 1)
            await town.bell.until(lambda: peer_text(great.get_id().to_bytes()) not in names(a))
            await streams[0].write(begun[2 * MIB :])
            await town.bell.until(lambda: begun.endswith(a.tape.payloads(Frame.IN)[-1]))
            assert peer_text(small.get_id().to_bytes()) in names(a)
        b.node.publish(TOPIC, b"all the while")
        await town.until_heard(a, b"all the while")

    in_town(tmp_path, test)
