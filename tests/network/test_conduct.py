"""How our node takes peers that break the rules, and whether it keeps them itself (gossipsub 1.0 and 1.1).

Each test has two nodes of ours that talk, and a raw peer that does its worst meanwhile. The two must hear all of each
other; what the raw one costs must be bounded, counted, and is printed (`pytest -rP`).
"""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.protocols import VERSIONS
from kiln.bridge.gossipsub.wire import RpcSplitter, encode
from kiln.bridge.libp2p.streams import get_swarm
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, ControlMessage
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import peer_text
from kit.chance import new_key
from kit.node_town import (
    ENDS,
    OPTIONS,
    TOPIC,
    Bell,
    Running,
    Town,
    call,
    in_town,
    message,
    raw_peer,
    subscribed,
)
from kit.scripted_peers import gossip_id

BEAT = 0.1  # seconds
QUICK = RouterOptions(heartbeat=BEAT)
TALK = 150  # messages from each of the two that behave
MIB = 1 << 20
PAGE = resource.getpagesize()


@dataclass
class Odd:
    """A peer that says what the test wants, and notes what it is told, when it listens at all."""

    peer: bytes
    stream: INetStream
    heard: list[tuple[float, RPC]] = field(default_factory=list)

    async def say(self, *rpcs: RPC) -> None:
        await self.stream.write(b"".join(encode(rpc.SerializeToString()) for rpc in rpcs))

    def count(self, of: Callable[[ControlMessage], Iterable[object]]) -> int:
        return sum(len(list(of(rpc.control))) for _, rpc in self.heard)

    def messages(self) -> list[bytes]:
        return [gossip_id(each) for _, rpc in self.heard for each in rpc.publish]


@asynccontextmanager
async def odd(one: Running, bell: Bell, *, reads: bool = True) -> AsyncIterator[Odd]:
    """A peer of `one`, subscribed to TOPIC there."""
    heard: list[tuple[float, RPC]] = []

    async def listen(stream: INetStream) -> None:
        if not reads:
            await trio.sleep_forever()
        splitter = RpcSplitter()
        with suppress(*ENDS):
            while chunk := await stream.read(65536):
                for payload in splitter.feed(chunk):
                    assert isinstance(payload, bytes)
                    heard.append((trio.current_time(), RPC.FromString(payload)))
                bell.ring()

    async with raw_peer() as host:
        for protocol in VERSIONS:
            host.set_stream_handler(TProtocol(protocol), listen)
        stream = await call(host, one, "/meshsub/1.2.0")
        peer = Odd(host.get_id().to_bytes(), stream, heard)
        await peer.say(subscribe(TOPIC))
        await bell.until(lambda: TOPIC in topics_of(one, peer.peer))
        yield peer
        for conn in get_swarm(host).get_connections():  # a host that is cancelled leaves them open
            await conn.close()


def topics_of(one: Running, peer: bytes) -> frozenset[str]:
    view = one.node.router.peers.get(peer)
    return view.topics if view else frozenset()


def subscribe(*topics: str, on: bool = True) -> RPC:
    rpc = RPC()
    for topic in topics:
        rpc.subscriptions.add(subscribe=on, topicid=topic)
    return rpc


def graft() -> RPC:
    rpc = RPC()
    rpc.control.graft.add(topicID=TOPIC)
    return rpc


def prune(seconds: int) -> RPC:
    rpc = RPC()
    rpc.control.prune.add(topicID=TOPIC, backoff=seconds)
    return rpc


def ihave(ids: Iterable[bytes]) -> RPC:
    rpc = RPC()
    rpc.control.ihave.add(topicID=TOPIC, messageIDs=ids)
    return rpc


def iwant(ids: Iterable[bytes]) -> RPC:
    rpc = RPC()
    rpc.control.iwant.add(messageIDs=ids)
    return rpc


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def counted(one: Running, kind: str) -> int:
    return one.node.view().counters.get(kind, 0)


async def while_others_talk(
    town: Town, one: Running, other: Running, attack: Callable[[], Awaitable[None]], growth: int = 32 * MIB
) -> None:
    """The attack, and meanwhile TALK messages each way between those that behave: all are heard, once, soon."""
    before, slowest = resident(), 0.0
    heard = {id(each): len(each.heard) for each in (one, other)}

    async def talk(source: Running, target: Running) -> None:
        nonlocal slowest
        for number in range(TALK):
            data = b"%b %d" % (source.node.peer, number)
            began = trio.current_time()
            source.node.publish(TOPIC, data)
            await town.until_heard(target, data, 60)
            slowest = max(slowest, trio.current_time() - began)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attack)
        nursery.start_soon(talk, one, other)
        nursery.start_soon(talk, other, one)
    for each in (one, other):
        honest = [data for data in each.heard[heard[id(each)] :] if data[:2] == one.node.peer[:2]]
        assert len(honest) == len(set(honest)) == TALK
    assert not any(peer.dropped for peer in other.node.view().peers)
    grown = resident() - before
    odd_ones = {k: v for k, v in one.node.view().counters.items() if v}
    print(
        f"memory grew {grown / MIB:.1f} MiB of this process, all peers and captured frames in it; the others' slowest "
        f"message took {slowest * 1e3:.0f} ms\nheld: {dict(one.node.router.sizes)}\ncounted: {odd_ones}"
    )
    assert grown < growth


# ---------------------------------------------------------------- mesh


def grafts_taken(one: Running, number: int) -> bool:
    return counted(one, "graft_backoff") + counted(one, "graylisted") >= number


def test_a_storm_of_grafts_in_the_back_off(tmp_path: Path) -> None:
    """It is refused each time, loses its standing, and is not even heard in the end."""

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=QUICK, ban=0))
        async with odd(a, town.bell) as storm:
            await town.bell.until(lambda: storm.peer in a.node.router.mesh[TOPIC])
            await storm.say(prune(60))
            await town.bell.until(lambda: storm.peer not in a.node.router.mesh[TOPIC])

            async def attack() -> None:
                for volley in range(1, 101):
                    await storm.say(*[graft()] * 50)
                    await town.bell.until(partial(grafts_taken, a, 50 * volley))
                await town.bell.until(lambda: counted(a, "graylisted") > 0)

            await while_others_talk(town, a, b, attack)
            assert storm.peer not in a.node.router.mesh[TOPIC]
            assert counted(a, "graft_backoff") + counted(a, "graylisted") == 5000
            await town.bell.until(lambda: storm.count(lambda c: c.prune) == counted(a, "graft_backoff"))
            assert storm.count(lambda c: c.graft) == 1  # when it came
            assert a.node.router.peers[storm.peer].score < a.node.router.peers[b.node.peer].score
            assert a.node.router.sizes["backoff"] == 1
            assert b.node.peer in a.node.router.mesh[TOPIC]

    in_town(tmp_path, test)


def test_a_peer_that_prunes_us_is_left_alone_for_the_time_it_says(tmp_path: Path) -> None:
    """No GRAFT before that, gossip meanwhile, and a GRAFT after."""

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=QUICK))
        async with odd(a, town.bell) as shy:
            await town.bell.until(lambda: shy.count(lambda c: c.graft) == 1)
            pruned = trio.current_time()
            await shy.say(prune(1))
            await town.bell.until(lambda: shy.peer not in a.node.router.mesh[TOPIC])
            b.node.publish(TOPIC, b"told of, not sent")
            await town.bell.until(lambda: shy.count(lambda c: c.ihave) > 0)
            assert shy.messages() == []
            (told,) = {key for _, rpc in shy.heard for each in rpc.control.ihave for key in each.messageIDs}
            await shy.say(iwant([told]))
            await town.bell.until(lambda: shy.messages() == [told])
            await town.bell.until(lambda: shy.count(lambda c: c.graft) == 2, 60)
            again = next(at for at, rpc in reversed(shy.heard) if rpc.control.graft)
            assert again - pruned >= 1

    in_town(tmp_path, test)


def test_a_peer_we_left_is_refused_until_the_back_off_that_we_said_is_over(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a, _ = await town.pair(replace(OPTIONS, gossip=replace(QUICK, unsubscribe_backoff=1.0)))
        async with odd(a, town.bell) as peer:
            await town.bell.until(lambda: peer.count(lambda c: c.graft) == 1)
            a.node.leave(TOPIC)
            a.node.join(TOPIC)
            await town.bell.until(lambda: peer.count(lambda c: c.prune) == 1)
            said = next(rpc.control.prune[0] for _, rpc in peer.heard if rpc.control.prune)
            assert (said.topicID, said.backoff) == (TOPIC, 1)
            await peer.say(graft())
            await town.bell.until(lambda: counted(a, "graft_backoff") == 1)
            assert peer.peer not in a.node.router.mesh[TOPIC]

    in_town(tmp_path, test)


# ---------------------------------------------------------------- gossip


@pytest.mark.parametrize(
    ("limits", "answers"),
    [
        (RouterOptions(heartbeat=60), 150),  # thrice each
        (RouterOptions(heartbeat=60, max_iwant_length=100), 50),  # half of what is asked for is not there
        (RouterOptions(heartbeat=60, max_iwant_bytes=200_000), 20),
    ],
    ids=["copies", "ids", "bytes"],
)
def test_a_peer_that_wants_everything_again_and_again(tmp_path: Path, limits: RouterOptions, answers: int) -> None:
    """Each message is sent three times at most; so many ids and so many bytes are answered of a heartbeat."""

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=limits))
        async with odd(a, town.bell) as greedy:
            await greedy.say(prune(60))
            await town.bell.until(lambda: greedy.peer not in a.node.router.mesh[TOPIC])
            for number in range(50):
                b.node.publish(TOPIC, b"%04d" % number * 2500)
            await town.bell.until(lambda: len(a.heard) == 50)
            ids = [gossip_id(each) for rpc in b.rpcs(Frame.OUT) for each in rpc.publish]
            assert len(ids) == 50
            assert greedy.messages() == []

            async def attack() -> None:
                for _ in range(20):
                    await greedy.say(iwant(ids), iwant(b"nobody has this %d" % i for i in range(50)))
                kinds = ("iwant_answered", "iwant_over_limit", "iwant_unknown")
                await town.bell.until(lambda: sum(counted(a, kind) for kind in kinds) == 2000)

            await while_others_talk(town, a, b, attack)
            assert counted(a, "iwant_answered") == answers
            # what `a` itself published went to it, too
            await town.bell.until(lambda: sum(key in ids for key in greedy.messages()) >= answers)
            copies = [greedy.messages().count(key) for key in ids]
            assert (sum(copies), max(copies)) == (answers, 3 if answers == 150 else 1)

    in_town(tmp_path, test)


def test_a_peer_that_wants_everything_and_reads_nothing(tmp_path: Path) -> None:
    """What waits for it is bounded; what has no room is dropped and counted; it is sent away."""

    async def test(town: Town) -> None:
        options = replace(OPTIONS, gossip=replace(QUICK, mcache_len=500), queue_bytes=300_000, stuck_after=2.0)
        a, b = await town.pair(options)
        async with odd(a, town.bell, reads=False) as deaf:
            for number in range(100):
                data = b"%04d" % number * 2500
                b.node.publish(TOPIC, data)
                await town.until_heard(a, data)
            ids = [gossip_id(each) for rpc in b.rpcs(Frame.OUT) for each in rpc.publish]
            most = 0

            async def attack() -> None:
                nonlocal most
                with suppress(BaseLibp2pError, trio.BrokenResourceError):
                    for key in ids * 3:
                        await deaf.say(iwant([key]))
                        queued = [p.queued for p in a.node.view().peers if p.peer == peer_text(deaf.peer)]
                        most = max(most, *queued, 0)
                await town.bell.until(lambda: deaf.peer not in a.node.router.peers)

            await while_others_talk(town, a, b, attack)
            print(f"most that waited for it: {most} bytes")
            assert most <= 300_000 + options.control_bytes
            assert counted(a, "dropped_messages") > 0
            assert counted(a, "peer_stuck") == 1

    in_town(tmp_path, test)


def test_a_flood_of_ihave_with_ids_of_nothing(tmp_path: Path) -> None:
    """Asked for once and up to a limit; what it does not bring then counts against it, and is forgotten."""

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=RouterOptions(heartbeat=0.5, iwant_followup=0.5)))
        limits = a.node._options.gossip
        most = 0
        async with odd(a, town.bell) as liar:

            async def attack() -> None:
                nonlocal most
                await liar.say(*(ihave([b"one of many %d" % number]) for number in range(60)))  # in one heartbeat
                for batch in range(60):
                    await liar.say(ihave(b"no such message %d/%d" % (batch, i) for i in range(5000)))
                    most = max(most, a.node.router.sizes["promises"])
                await town.bell.until(lambda: counted(a, "ihave_flood") + counted(a, "ihave_over_limit") > 0)
                await town.bell.until(lambda: a.node.router.sizes["promises"] == 0)

            await while_others_talk(town, a, b, attack, growth=64 * MIB)

            def asked() -> int:
                return sum(len(each.messageIDs) for _, rpc in liar.heard for each in rpc.control.iwant)

            await town.bell.until(lambda: asked() == counted(a, "iwant_sent") == counted(a, "broken_promise"))
            print(f"asked for {asked()} of 300060; most promises at a time: {most}")
            # as many heartbeats' worth as the attack lasted, and two heartbeats may meet in one followup
            assert most <= 3 * limits.max_ihave_length
            assert counted(a, "ihave_flood") > 0
            assert a.node.router.peers[liar.peer].score <= a.node.router.peers[b.node.peer].score

    in_town(tmp_path, test)


# ---------------------------------------------------------------- subscriptions, and sizes


def test_thousands_of_topics_from_one_peer(tmp_path: Path) -> None:
    """A thousand are remembered, the rest counted; ours has its place all the same; all go with the peer."""

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=replace(QUICK, subscriptions=100_000)))
        limit = a.node._options.gossip.max_topics_per_peer
        async with odd(a, town.bell) as broad:
            await broad.say(subscribe(*[f"/first/{number}" for number in range(1000)]))
            await town.bell.until(lambda: len(topics_of(a, broad.peer)) == 1001)

            async def attack() -> None:
                for batch in range(20):
                    await broad.say(subscribe(*[f"/topic/{batch}/{number}" for number in range(1000)]))
                await town.bell.until(lambda: counted(a, "topics_over_limit") == 21_000 - limit)

            await while_others_talk(town, a, b, attack)
            assert len(topics_of(a, broad.peer)) == limit + 1
            assert a.node.router.sizes["topics"] == limit + 2
            a.node.join("/ceramic/another")
            await broad.say(subscribe("/ceramic/another"))
            await town.bell.until(lambda: "/ceramic/another" in topics_of(a, broad.peer))
            await broad.say(subscribe(*[f"/first/{number}" for number in range(1000)], on=False))
            await town.bell.until(lambda: len(topics_of(a, broad.peer)) == limit - 1000 + 2)
        await town.bell.until(lambda: a.node.router.sizes["topics"] == 1)

    in_town(tmp_path, test)


def test_rpcs_of_many_megabytes(tmp_path: Path) -> None:
    """Three peers, 24 MiB in one RPC each: 64 KiB of it are held, and what comes after it is read."""
    size, piece = 24 * MIB, bytes(64 * 1024)
    key = new_key()

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=QUICK))
        async with odd(a, town.bell) as one, odd(a, town.bell) as two, odd(a, town.bell) as three:

            async def send(peer: Odd, number: int) -> None:
                await peer.stream.write(encode_length(size))
                for _ in range(size // len(piece)):
                    await peer.stream.write(piece)
                await peer.stream.write(encode(message(number, key)))

            async def attack() -> None:
                async with trio.open_nursery() as nursery:
                    for number, peer in enumerate((one, two, three)):
                        nursery.start_soon(send, peer, number + 1)
                await town.bell.until(lambda: sum(len(data) == 300 for data in a.heard) == 3)

            await while_others_talk(town, a, b, attack, growth=24 * MIB)
            assert counted(a, "rpc_oversized") == 3
            cut = [f for f in a.tape.frames if f.declared_length]
            assert [(f.declared_length, len(f.payload)) for f in cut] == [(size, 64 * 1024)] * 3
            await town.bell.until(lambda: sum(len(data) == 300 for data in b.heard) == 3)

    in_town(tmp_path, test)


def encode_length(size: int) -> bytes:
    """The varint of a length."""
    out = bytearray()
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*out, size))


def test_forged_messages_do_not_stand_in_the_way_of_the_true_ones(tmp_path: Path) -> None:
    """Copies with broken signatures come first: refused, and the true ones are delivered all the same."""
    key = new_key()
    true = [RPC.FromString(message(number, key)) for number in range(1, 51)]

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=QUICK, ban=0))
        async with odd(a, town.bell) as forger, odd(a, town.bell) as honest:

            async def attack() -> None:
                for rpc in true:
                    forged = RPC.FromString(rpc.SerializeToString())
                    forged.publish[0].data = b"forged" + forged.publish[0].data[6:]
                    await forger.say(forged)
                await town.bell.until(lambda: counted(a, "bad_signature") + counted(a, "graylisted") >= 50)
                await honest.say(*true)
                await town.bell.until(lambda: sum(len(data) == 300 for data in b.heard) == 50)

            await while_others_talk(town, a, b, attack)
            assert not any(data.startswith(b"forged") for data in a.heard + b.heard)
            assert forger.peer not in a.node.router.mesh[TOPIC]
            assert subscribed(a, 3)

    in_town(tmp_path, test)
