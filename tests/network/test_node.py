"""Nodes of ours, and raw libp2p peers that misbehave, on 127.0.0.1."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import trio
import trio.testing
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from multiaddr import Multiaddr

from kiln.bridge.app.reporting import describe_bootstrap
from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.protocols import VERSIONS
from kiln.bridge.gossipsub.wire import encode
from kiln.bridge.libp2p.addresses import NodeError
from kiln.bridge.libp2p.dialling import dial
from kiln.bridge.libp2p.host import Node
from kiln.bridge.libp2p.options import NodeOptions
from kiln.bridge.libp2p.seqno import Seqno
from kiln.bridge.libp2p.streams import GossipStream, get_swarm
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import Verdict, compute_peer_id, peer_bytes, peer_text
from kit.awaiting import until
from kit.chance import new_key
from kit.node_town import (
    ENDS,
    OPTIONS,
    TOPIC,
    Bell,
    Running,
    Tape,
    Town,
    call,
    call_at,
    check_sequences,
    in_town,
    message,
    raw_peer,
    subscribed,
    subscription,
)

# ---------------------------------------------------------------- messages and frames


@pytest.mark.parametrize("policy", ["strict", "none"])
def test_all_messages_are_delivered_once_and_every_frame_is_captured_byte_for_byte(tmp_path: Path, policy: str) -> None:
    async def test(town: Town) -> None:
        a, b = await town.pair(
            replace(OPTIONS, gossip=RouterOptions(policy="strict" if policy == "strict" else "none"))
        )
        from_a = [b"a%d" % i * 60 for i in range(300)]
        from_b = [b"b%d" % i * 60 for i in range(300)]
        for i in range(300):
            assert a.node.publish(TOPIC, from_a[i]) == 1
            assert b.node.publish(TOPIC, from_b[i]) == 1
            await trio.lowlevel.checkpoint()
        await town.bell.until(lambda: len(a.heard) >= 300 and len(b.heard) >= 300)
        a.node.close()
        await town.bell.until(
            lambda: all(any(not f.payload and f.direction == Frame.IN for f in one.tape.frames) for one in (a, b))
        )
        assert sorted(b.heard) == sorted(from_a)
        assert sorted(a.heard) == sorted(from_b)
        for one, other in ((a, b), (b, a)):
            sent, came = one.tape.payloads(Frame.OUT), other.tape.payloads(Frame.IN)
            assert came == sent[: len(came)]
            assert sum(len(RPC.FromString(p).publish) for p in came) == 300
            check_sequences(one.tape, closed=True)
        ends = [f for one in (a, b) for f in one.tape.frames if f.HasField("dialled")]
        assert all(not f.payload and f.direction == Frame.IN for f in ends)
        assert sorted(f.dialled for f in ends) == [False, True]
        assert {f.agent for f in ends} <= {OPTIONS.agent, ""}  # identify may come late
        assert [f.end_reason for f in ends].count("the bridge is stopping") == 1
        fields = {
            f.name for p in a.tape.payloads(Frame.IN) for m in RPC.FromString(p).publish for f, _ in m.ListFields()
        }
        assert fields == ({"from", "data", "seqno", "topic", "signature"} if policy == "strict" else {"data", "topic"})
        verdict = Verdict.VALID if policy == "strict" else Verdict.UNSIGNED
        for direction in (Frame.IN, Frame.OUT):
            verdicts = b"".join(f.verdicts for f in a.tape.frames if f.direction == direction)
            assert verdicts == bytes([verdict]) * 300

    in_town(tmp_path, test)


def test_a_node_in_the_middle_relays(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        middle = await town.node()
        ends = [await town.node(replace(OPTIONS, bootstrap=(middle.address,))) for _ in range(2)]
        for one in (middle, *ends):
            one.node.join(TOPIC)
        await town.bell.until(lambda: subscribed(middle, 2) and all(subscribed(end, 1) for end in ends))
        ends[0].node.publish(TOPIC, b"through the middle")
        await town.bell.until(lambda: bool(ends[1].heard))
        assert ends[1].heard == middle.heard == [b"through the middle"]
        assert ends[0].heard == []

    in_town(tmp_path, test)


def test_a_late_subscriber_hears_what_comes_after_and_one_that_left_nothing(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a = await town.node()
        b = await town.node(replace(OPTIONS, bootstrap=(a.address,)))
        await town.bell.until(lambda: bool(a.node.view().peers) and bool(b.node.view().peers))
        assert a.node.publish(TOPIC, b"too early") == 0
        b.node.join(TOPIC)
        await town.bell.until(lambda: subscribed(a, 1))
        assert a.node.publish(TOPIC, b"in time") == 1
        await town.bell.until(lambda: bool(b.heard))
        b.node.leave(TOPIC)
        await town.bell.until(lambda: not subscribed(a, 1))
        assert a.node.publish(TOPIC, b"too late") == 0
        assert b.heard == [b"in time"]

    in_town(tmp_path, test)


def test_the_view_says_who_is_there(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, agent="kiln/test"))
        await town.bell.until(lambda: a.tape.payloads(Frame.IN) != [])
        await town.bell.until(lambda: bool(a.node.view().peers[0].agent))
        view = b.node.view()
        (peer,) = view.peers
        assert peer.peer == peer_text(a.node.peer)
        assert peer.protocol == "/meshsub/1.3.0"
        assert peer.outbound
        assert not a.node.view().peers[0].outbound
        assert a.address.startswith(peer.address)
        assert a.node.view().peers[0].agent == "kiln/test"
        assert view.topics == (TOPIC,)
        assert view.frames_in == len(b.tape.payloads(Frame.IN)) > 0
        assert view.bootstrap[0].connected
        assert view.bootstrap[0].error == ""

    in_town(tmp_path, test)


# ---------------------------------------------------------------- odd peers


def test_what_is_malformed_or_too_long_is_captured_and_the_rest_still_read(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a = await town.node()
        a.node.join(TOPIC)
        key = new_key()
        unknown = subscription() + bytes.fromhex("9a0603616263")  # field 99: "abc"
        garbage = b"\xff" * 50
        long = b"\x0a" * (4 * 1024 * 1024 + 1)
        good = message(7, key)
        async with raw_peer() as host:
            stream = await call(host, a)
            for payload in (unknown, garbage, b"", long, good):
                await stream.write(encode(payload))
            await town.bell.until(lambda: bool(a.heard))
        frames = [f for f in a.tape.frames if f.direction == Frame.IN][:4]
        assert [f.payload for f in frames] == [unknown, garbage, long[: 64 * 1024], good]
        assert [f.declared_length for f in frames] == [0, 0, len(long), 0]
        assert [f.verdicts for f in frames] == [b"", b"", b"", bytes([Verdict.VALID])]
        counters = a.node.view().counters
        assert (counters["rpc_malformed"], counters["rpc_oversized"], counters["rpc_empty"]) == (1, 1, 1)
        assert frames[0].remote_peer == host.get_id().to_bytes()
        assert frames[0].protocol == "/meshsub/1.3.0"

    in_town(tmp_path, test)


@pytest.mark.parametrize("protocol", VERSIONS)
def test_every_version_is_spoken(tmp_path: Path, protocol: str) -> None:
    async def test(town: Town) -> None:
        a = await town.node()
        a.node.join(TOPIC)
        async with raw_peer() as host:
            for other in VERSIONS:
                if other != protocol:
                    host.remove_stream_handler(TProtocol(other))
            stream = await call(host, a, protocol)
            await stream.write(encode(message(1, new_key())))
            await town.bell.until(lambda: bool(a.heard))
            assert a.node.view().peers[0].protocol == protocol

    in_town(tmp_path, test)


def has_heard(one: Running, count: int) -> bool:
    return len(one.heard) == count


async def call_again(host: BasicHost, node: Running) -> INetStream:
    """Open a second connection to a node, and a pubsub stream on it."""
    info = info_from_p2p_addr(Multiaddr(node.address))
    conn = await get_swarm(host).dial_addr(Multiaddr(node.address), info.peer_id)
    stream = await conn.new_stream()
    protocol = await host.multiselect_client.select_one_of(
        [TProtocol("/meshsub/1.3.0")], MultiselectCommunicator(stream), 60
    )
    stream.set_protocol(protocol)
    return stream


def test_both_streams_of_a_peer_with_two_connections_are_read(tmp_path: Path) -> None:
    """As rust-libp2p sends on each of its connections, and its subscriptions on the first alone."""
    key = new_key()

    async def test(town: Town) -> None:
        a, b = await town.pair()
        async with raw_peer() as host:
            first = await call(host, a)
            await first.write(encode(subscription()))
            await town.bell.until(lambda: subscribed(a, 2))
            second = await call_again(host, a)
            for number in range(1, 21):
                await (first, second)[number % 2].write(encode(message(number, key)))
                await town.bell.until(partial(has_heard, b, number))
            assert a.node.counters["stream_added"] == 1
            assert a.node.counters["stream_replaced"] == a.node.counters["stream_ended"] == 0
            assert subscribed(a, 2)
            (peer,) = (each for each in a.node.view().peers if each.peer == peer_text(host.get_id().to_bytes()))
            frames = [f for f in a.tape.frames if peer_text(f.remote_peer) == peer.peer and f.direction == Frame.IN]
            assert [f.sequence for f in frames] == list(range(1, 22))
            await second.reset()
            await first.write(encode(message(21, key)))
            await town.bell.until(lambda: len(b.heard) == 21)
            assert subscribed(a, 2), "the end of one stream is not the end of the other"

    in_town(tmp_path, test)


class Relay:
    """A TCP relay to a node that can fall silent, as a path does after a power cut or a change of address."""

    def __init__(self, node: Running) -> None:
        _, _, host, _, port, *self._rest = node.address.split("/")
        self._target = host, int(port)
        self._scope = trio.CancelScope()
        self.address = ""

    async def listen(self, nursery: trio.Nursery) -> None:
        (listener,) = await nursery.start(partial(trio.serve_tcp, self._relay, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        self.address = "/".join(("", "ip4", "127.0.0.1", "tcp", str(port), *self._rest))

    def fall_silent(self) -> None:
        self._scope.cancel()

    async def _relay(self, near: trio.SocketStream) -> None:
        far = await trio.open_tcp_stream(*self._target)
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._copy, near, far)
                nursery.start_soon(self._copy, far, near)
        await trio.sleep_forever()  # neither side is told

    @staticmethod
    async def _copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        async for chunk in source:
            await sink.send_all(chunk)


def test_a_peer_that_is_back_on_a_new_connection_is_served_there(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, negotiate_timeout=4.0))
        relay = Relay(a)
        await relay.listen(town.nursery)
        async with raw_peer() as host:
            first = await call_at(host, relay.address)
            await first.write(encode(subscription()))
            await town.bell.until(lambda: subscribed(a, 2))
            link = a.node._links[host.get_id().to_bytes()]
            before = link.session
            relay.fall_silent()
            second = await call_again(host, a)
            await second.write(encode(message(1, new_key())))
            await town.bell.until(lambda: len(b.heard) == 1)
            await town.bell.until(lambda: link.session not in (before, None))

    in_town(tmp_path, test)


def test_a_peer_that_never_reads_costs_bounded_memory_and_is_sent_away(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        options = replace(OPTIONS, queue_bytes=200_000, stuck_after=10.0)  # long after the queue is full
        a, b = await town.pair(options)
        async with raw_peer(reads=False) as host:
            stream = await call(host, a)
            await stream.write(encode(subscription()))
            await town.bell.until(lambda: subscribed(a, 2))
            deaf = peer_text(host.get_id().to_bytes())
            queued, dropped = 0, 0
            for i in range(400):
                data = b"%04d" % i * 2500
                a.node.publish(TOPIC, data)
                for peer in a.node.view().peers:
                    if peer.peer == deaf:
                        queued, dropped = max(queued, peer.queued), peer.dropped
                await town.until_heard(b, data)
            assert queued <= 200_000
            assert dropped > 0
            assert a.node.counters["dropped"] == a.node.router.counters["dropped_rpcs"] >= dropped
            await town.bell.until(lambda: not any(p.peer == deaf for p in a.node.view().peers))
        assert a.node.view().counters["peer_stuck"] == 1
        assert len(b.heard) == 400
        assert not any(p.dropped for p in a.node.view().peers)

    in_town(tmp_path, test)


def test_a_second_stream_of_a_peer_is_a_new_connection(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a = await town.node()
        a.node.join(TOPIC)
        key = new_key()
        async with raw_peer() as host:
            first = await call(host, a)
            await first.write(encode(message(1, key)))
            await town.bell.until(lambda: len(a.heard) == 1)
            second = await call(host, a)
            await second.write(encode(message(2, key)))
            await town.bell.until(lambda: len(a.heard) == 2)
        a.node.close()
        await town.bell.until(lambda: sum(not f.payload for f in a.tape.frames) == 4)
        assert len({f.connection for f in a.tape.frames}) == 2
        check_sequences(a.tape, closed=True)

    in_town(tmp_path, test)


# ---------------------------------------------------------------- back-pressure


def test_a_full_sink_stops_the_reading_and_nothing_is_lost(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a = await town.node()
        a.node.join(TOPIC)
        key = new_key()
        payloads = [message(i, key, 4000) for i in range(1, 501)]  # 2 MB; the window is 256 KiB
        async with raw_peer() as host, trio.open_nursery() as nursery:
            stream = await call(host, a)
            await stream.write(encode(payloads[0]))
            await town.bell.until(lambda: len(a.heard) == 1)
            a.tape.full = True
            written = [0]

            async def write() -> None:
                for payload in payloads[1:]:
                    await stream.write(encode(payload))
                    written[0] += 1

            nursery.start_soon(write)
            before = -1
            while written[0] != before or not a.node.view().counters.get(
                "reads_paused"
            ):  # the writer has come to a stop
                before = written[0]
                await trio.testing.wait_all_tasks_blocked(0.005)
            assert written[0] < 300
            assert len(a.heard) <= 100  # what one read had taken
            a.tape.make_room()
            await town.bell.until(lambda: len(a.heard) == 500)
        assert a.tape.payloads(Frame.IN) == payloads

    in_town(tmp_path, test)


def test_a_peer_that_overruns_its_window_while_we_pause_is_cut_off(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a = await town.node()
        a.node.join(TOPIC)
        key = new_key()
        async with raw_peer() as host, trio.open_nursery() as nursery:
            stream = await call(host, a)
            await stream.write(encode(message(1, key)))
            await town.bell.until(lambda: len(a.heard) == 1)
            a.tape.full = True
            assert isinstance(stream, NetStream)
            assert isinstance(stream.muxed_stream, GossipStream)
            stream.muxed_stream.send_window = 1 << 30

            async def flood() -> None:
                with suppress(BaseLibp2pError):
                    await stream.write(encode(bytes(4_000_000)))

            nursery.start_soon(flood)
            await town.bell.until(lambda: not a.node._swarm.get_connections())
            nursery.cancel_scope.cancel()

    in_town(tmp_path, test)


# ---------------------------------------------------------------- coming and going


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_peer_that_restarts_is_dialled_again(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        key = new_key()
        first = await town.node(key=key)
        address = first.address
        port = Multiaddr(address).value_for_protocol("tcp")
        a = await town.node(replace(OPTIONS, listen=(), bootstrap=(first.address,)))
        a.node.join(TOPIC)
        first.node.join(TOPIC)
        await town.bell.until(lambda: subscribed(a, 1) and subscribed(first, 1))
        first.node.close()
        await town.bell.until(lambda: not a.node.view().peers)
        await until(lambda: refuses(int(port)), "the old one gone from its port")
        assert first.node.addresses == (address,)  # its own discovery may still ask
        again = await town.node(replace(OPTIONS, listen=(f"/ip4/127.0.0.1/tcp/{port}",)), key)
        again.node.join(TOPIC)
        await town.bell.until(lambda: subscribed(a, 1) and subscribed(again, 1))
        again.node.publish(TOPIC, b"back")
        await town.bell.until(lambda: a.heard == [b"back"])
        assert len({f.connection for f in a.tape.frames}) == 2
        assert a.node.bootstrap_peers[0].attempts >= 2

    in_town(tmp_path, test)


def test_a_bootstrap_peer_that_is_not_there_is_tried_again_and_said(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        nobody = peer_text(compute_peer_id(new_key()))
        a = await town.node(replace(OPTIONS, bootstrap=(f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}",)))
        await town.bell.until(lambda: a.node.bootstrap_peers[0].attempts >= 3)
        assert "127.0.0.1/tcp/1" in a.node.view().bootstrap[0].error
        assert not a.node.view().bootstrap[0].connected
        (told,) = describe_bootstrap(a.node.view(), OPTIONS.bootstrap)
        assert told.startswith(
            f"cannot reach bootstrap peer /ip4/127.0.0.1/tcp/1/p2p/{nobody}: no program listens there"
        )

    in_town(tmp_path, test)


def test_a_node_that_is_its_own_only_bootstrap_peer_is_told_so_while_nobody_else_comes(tmp_path: Path) -> None:
    key = new_key()
    own = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_text(compute_peer_id(key))}"

    async def test(town: Town) -> None:
        one = await town.node(replace(OPTIONS, bootstrap=(own,)), key)
        (told,) = describe_bootstrap(one.node.view(), (own,))
        assert told.startswith("bridge.bootstrap contains only this bridge itself")
        await town.node(replace(OPTIONS, bootstrap=(one.address,)))
        await town.bell.until(lambda: bool(one.node.view().peers))
        assert list(describe_bootstrap(one.node.view(), (own,))) == []

    in_town(tmp_path, test)


class _NoNames(trio.abc.HostnameResolver):
    """The answer of the system's resolver to a name that does not exist, without a question to a name server."""

    async def getaddrinfo(self, host: bytes | None, port: bytes | str | int | None, *_: int, **more: int) -> NoReturn:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def getnameinfo(self, sockaddr: tuple[str, int], flags: int) -> NoReturn:
        raise AssertionError("no test looks up the name of an address")


def test_of_a_bootstrap_peer_that_does_not_answer_the_reason_is_told(tmp_path: Path) -> None:
    nobody = peer_text(compute_peer_id(new_key()))
    key = new_key()
    own = peer_text(compute_peer_id(key))

    async def answer_in_http(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await stream.receive_some()

    async def test(town: Town) -> None:
        trio.socket.set_custom_hostname_resolver(_NoNames())
        there, mine = await town.node(), await town.node(key=key)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            free = closed.getsockname()[1]
        (web,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        town.nursery.start_soon(trio.serve_listeners, answer_in_http, [web])
        reasons = {
            f"/ip4/127.0.0.1/tcp/{free}/p2p/{nobody}": "no program listens there (connection refused)",
            f"{there.address.rpartition('/')[0]}/{nobody}": f"{there.peer} answers at this address",
            f"{mine.address.rpartition('/')[0]}/{nobody}": "it is an address of this bridge itself",
            f"/dns4/kiln.invalid/tcp/1/p2p/{nobody}": "the host name has no address (Name or service not known)",
            f"/ip4/127.0.0.1/tcp/{web.socket.getsockname()[1]}/p2p/{nobody}": "does not speak libp2p",
        }
        for address, reason in reasons.items():
            error = await dial(get_swarm(mine.node._host), Multiaddr(address), ID(peer_bytes(nobody)), 10)
            assert error.startswith(f"{address}: "), error
            assert reason in error, error
        assert own not in str(reasons)

    in_town(tmp_path, test)


@pytest.mark.parametrize("kind", ["dns", "dns4"])
def test_names_of_the_hosts_file_are_looked_up(tmp_path: Path, kind: str) -> None:
    async def test(town: Town) -> None:
        there = await town.node()
        address = there.address.replace("/ip4/127.0.0.1/", f"/{kind}/localhost/")
        one = await town.node(replace(OPTIONS, bootstrap=(address,)))
        await town.bell.until(lambda: bool(one.node.view().peers))
        assert one.node.view().bootstrap[0].error == ""

    in_town(tmp_path, test)


def test_of_a_bootstrap_peer_without_pubsub_it_is_told(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        async with raw_peer(listen=True) as host:
            for protocol in VERSIONS:
                host.remove_stream_handler(TProtocol(protocol))
            one = await town.node(replace(OPTIONS, bootstrap=(str(host.get_addrs()[0]),)))
            await town.bell.until(lambda: bool(one.node.view().bootstrap[0].error))
            (state,) = one.node.view().bootstrap
            assert state.connected
            assert state.error.startswith("connected, but the peer does not speak pubsub: none of its ")
            told = list(describe_bootstrap(one.node.view(), state.addresses))
            assert told == [f"bootstrap peer {state.addresses[0]}: {state.error}"]

    in_town(tmp_path, test)


def test_a_bootstrap_peer_that_opens_no_stream_is_dialled_again_with_more_patience(tmp_path: Path) -> None:
    """A peer of go-libp2p-pubsub opens none if the node was too busy to answer its identify request."""

    async def test(town: Town) -> None:
        async with raw_peer(listen=True) as host:
            address = str(host.get_addrs()[0])
            options = replace(OPTIONS, bootstrap=(address,), inbound_timeout=0.2, redial_first=0.01)
            one = await town.node(options)
            target = one.node.bootstrap_peers[0]
            await town.bell.until(lambda: target.streamless >= 3)
            assert one.node.view().counters["stream_missing"] >= 3
            while not subscribed(one, 1):  # a slow machine may miss a connection; the next one has twice the time
                await town.bell.until(lambda: bool(one.node.view().peers))
                with suppress(*ENDS):
                    stream = await host.new_stream(ID(one.node.peer), [TProtocol("/meshsub/1.3.0")])
                    await stream.write(encode(subscription()))
                await town.bell.until(lambda: subscribed(one, 1) or not one.node.view().peers)
            assert target.attempts >= 4
            assert target.streamless == 0

    in_town(tmp_path, test)


def test_each_topic_has_its_policy(tmp_path: Path) -> None:
    unsigned = f"{TOPIC}/sep/model/k1"
    gossip = RouterOptions(topic_policies={"/ceramic/*/sep/*": "none"})

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, gossip=gossip))
        for one in (a, b):
            one.node.join(unsigned)
        await town.bell.until(lambda: len(a.node.router.subscribers(unsigned)) == 1)
        for topic in (TOPIC, unsigned):
            assert a.node.publish(topic, topic.encode()) == 1
            await town.until_heard(b, topic.encode())
        came = [each for rpc in b.rpcs(Frame.IN) for each in rpc.publish]
        assert [each.HasField("signature") for each in came] == [True, False]
        assert b"".join(f.verdicts for f in b.tape.frames) == bytes([Verdict.VALID, Verdict.UNSIGNED])

    in_town(tmp_path, test)


def test_closing_ends_with_peers_that_read_and_one_that_does_not(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a, _ = await town.pair()
        async with raw_peer(reads=False) as host:
            stream = await call(host, a)
            await stream.write(encode(subscription()))
            await town.bell.until(lambda: subscribed(a, 2))
            for _ in range(500):
                a.node.publish(TOPIC, bytes(4000))
            await trio.testing.wait_all_tasks_blocked(0.005)
            a.node.close()
            await town.bell.until(lambda: sum(not f.payload for f in a.tape.frames) == 4)
            await town.bell.until(lambda: not get_swarm(a.node._host).manager.is_running)

    in_town(tmp_path, test)


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a = await town.node()
        port = Multiaddr(a.address).value_for_protocol("tcp")
        with pytest.RaisesGroup(pytest.RaisesExc(NodeError, match=f"tcp/{port}")):
            async with trio.open_nursery() as nursery:
                await Town(nursery, town.folder).node(replace(OPTIONS, listen=(f"/ip4/127.0.0.1/tcp/{port}",)))

    in_town(tmp_path, test)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("listen", "127.0.0.1:4001"),
        ("listen", "/ip4/127.0.0.1/udp/4001/quic-v1"),
        ("bootstrap", "/ip4/127.0.0.1/tcp/4001"),
        ("bootstrap", "/ip4/127.0.0.1/tcp/4001/p2p/Qm"),
        ("bootstrap", ""),
        ("listen", ""),
    ],
)
def test_an_address_that_is_none_is_named(tmp_path: Path, field: str, text: str) -> None:
    options = NodeOptions("local", listen=(text,)) if field == "listen" else NodeOptions("local", bootstrap=(text,))
    with pytest.raises(NodeError, match=field):
        Node(options, new_key(), Seqno(tmp_path / "s", lambda: 1), Tape(Bell()))
