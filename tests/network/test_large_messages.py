"""Messages over what go accepts in an RPC: captured, and go peers behind the bridge receive everything else.

go-libp2p-pubsub and Kubo reset the stream of a larger RPC. For as long as you like, with Kubo 0.43: `make hostile
ARGS="large"`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.rpc_parts import RpcLimits
from kiln.bridge.gossipsub.wire import encode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import peer_bytes
from kit.foreign_peer import NewPeer, build_payload
from kit.large_messages import large_message, message_of_overhead
from kit.node_town import (
    ENDS,
    OPTIONS,
    TOPIC,
    Running,
    Town,
    call,
    in_town,
    raw_peer,
    subscribed,
    subscription,
)

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

COUNT = 150  # honest messages
EACH = 5  # honest messages, and then one of the stranger
SIZE = 300


async def hear_honest_messages(town: Town, new_peer: NewPeer, make: Callable[[int], bytes]) -> Running:
    """Send honest messages through the bridge to a foreign peer, next to those of a stranger; returns the bridge."""
    bridge = await town.node()
    honest = await town.node(replace(OPTIONS, bootstrap=(bridge.address,)))
    peer = await trio.to_thread.run_sync(new_peer)
    for one in (bridge, honest):
        one.node.join(TOPIC)
    await trio.to_thread.run_sync(peer.connect, bridge.address)
    await trio.to_thread.run_sync(peer.subscribe, TOPIC)
    meshed = {honest.node.peer, peer_bytes(peer.peer)}
    await town.bell.until(lambda: meshed <= bridge.node.router.mesh[TOPIC] and subscribed(honest, 1))
    await trio.to_thread.run_sync(peer.wait_subscriber, TOPIC, bridge.peer)
    sent = 0
    async with raw_peer() as host:
        stranger = host.get_id()
        stream = await call(host, bridge, "/meshsub/1.2.0")
        await stream.write(encode(subscription()))
        for number in range(COUNT):
            assert honest.node.publish(TOPIC, build_payload("honest", number, SIZE)) == 1
            if (number + 1) % EACH:
                continue
            await trio.to_thread.run_sync(peer.wait_received, number + 1, TOPIC)
            with suppress(*ENDS):
                await stream.write(encode(make(sent)))
                sent += 1
                await town.bell.until(partial(has_come, bridge, stranger.to_bytes(), sent))
    received = [each.data for each in peer.received]
    assert sorted(received) == sorted(build_payload("honest", number, SIZE) for number in range(COUNT))
    assert peer.connected >= {bridge.peer}
    return bridge


def has_come(bridge: Running, stranger: bytes, count: int) -> bool:
    """The stranger's large messages are in frames, or the bridge has hung up on the stranger."""
    return large_frames(bridge, stranger, Frame.IN) >= count or bridge.node.view().kept_out > 0


def was_cut(bridge: Running, count: int) -> bool:
    """So many RPCs were cut, or the bridge has hung up on their sender."""
    return bridge.node.counters["rpc_oversized"] >= count or bridge.node.view().kept_out > 0


def large_frames(bridge: Running, stranger: bytes, direction: int) -> int:
    return sum(
        len(frame.payload) > 512 << 10
        for frame in bridge.tape.frames
        if frame.direction == direction and (frame.remote_peer == stranger or not stranger)
    )


@pytest.mark.parametrize("make", [large_message, message_of_overhead])
@pytest.mark.parametrize("kind", ["go_pubsub", "go"])
def test_go_hears_all_honest_messages_while_a_stranger_sends_large_ones(
    kind: str, make: Callable[[int], bytes], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    new_peer: NewPeer = request.getfixturevalue(f"{kind}_peer")

    async def test(town: Town) -> None:
        bridge = await hear_honest_messages(town, new_peer, make)
        assert large_frames(bridge, b"", Frame.IN) > 20
        assert large_frames(bridge, b"", Frame.OUT) == 0
        assert bridge.node.router.counters["message_too_large"] > 20
        assert bridge.node.view().kept_out == 1

    in_town(tmp_path, test)


def test_where_the_network_takes_more_large_messages_are_relayed_and_their_sender_stays(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        larger = replace(OPTIONS, gossip=RouterOptions(rpc_limits=RpcLimits(4 << 20)))
        bridge = await town.node(larger)
        other = await town.node(replace(larger, bootstrap=(bridge.address,)))
        for one in (bridge, other):
            one.node.join(TOPIC)
        await town.bell.until(lambda: other.node.peer in bridge.node.router.mesh[TOPIC])
        async with raw_peer() as host:
            stream = await call(host, bridge, "/meshsub/1.2.0")
            for number in range(30):
                large = large_message(number)
                await stream.write(encode(large))
                await town.until_heard(other, RPC.FromString(large).publish[0].data)
            assert bridge.node.router.peers[host.get_id().to_bytes()].score >= 0
        assert bridge.node.view().kept_out == 0

    in_town(tmp_path, test)


@pytest.mark.parametrize(("accepted", "kept_out"), [(64 << 10, 1), (1 << 20, 0)])
def test_rpcs_that_are_cut_cost_their_sender_where_no_peer_accepts_them(
    accepted: int, kept_out: int, tmp_path: Path
) -> None:
    async def test(town: Town) -> None:
        gossip = RouterOptions(rpc_limits=RpcLimits(accepted))
        bridge = await town.node(replace(OPTIONS, max_rpc_bytes=64 << 10, gossip=gossip))
        async with raw_peer() as host:
            stream = await call(host, bridge, "/meshsub/1.2.0")
            for number in range(1, 31):
                with suppress(*ENDS):
                    await stream.write(encode(bytes(100_000)))
                    await town.bell.until(partial(was_cut, bridge, number))
            assert bridge.node.view().kept_out == kept_out

    in_town(tmp_path, test)


def test_go_hears_a_bridge_that_is_on_thousands_of_topics(tmp_path: Path, go_pubsub_peer: NewPeer) -> None:
    """The hello of such a bridge is more than go accepts beside the data of messages in one RPC."""

    async def test(town: Town) -> None:
        bridge = await town.node()
        for number in range(5000):
            bridge.node.join(f"{TOPIC}/sep/model/{number:0120d}")
        bridge.node.join(TOPIC)
        peer = await trio.to_thread.run_sync(go_pubsub_peer)
        await trio.to_thread.run_sync(peer.connect, bridge.address)
        await trio.to_thread.run_sync(peer.subscribe, TOPIC)
        await town.bell.until(lambda: peer_bytes(peer.peer) in bridge.node.router.mesh[TOPIC])
        assert bridge.node.publish(TOPIC, b"heard") == 1
        received = await trio.to_thread.run_sync(peer.wait_received, 1, TOPIC)
        assert [each.data for each in received] == [b"heard"]
        hello = [len(frame.payload) for frame in bridge.tape.frames if frame.direction == Frame.OUT]
        assert sum(hello) > 512 << 10

    in_town(tmp_path, test)
