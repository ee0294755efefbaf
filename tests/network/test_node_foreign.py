"""Our node and peers that others wrote: go (Kubo), js-libp2p, rust-libp2p, each a process of its own.

KILN_TEST_NETWORK_MESSAGES: how many messages go each way, 200 unless told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric import ec

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.wire import encode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import Verdict, message_id, peer_bytes
from kit.chance import new_key
from kit.foreign_peer import ForeignPeer, NewPeer, Published, Received, build_payload
from kit.kubo_daemon import Daemon, program
from kit.node_town import (
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

pytest_plugins = ["kit.foreign_fixtures"]

COUNT = int(os.environ.get("KILN_TEST_NETWORK_MESSAGES", "200"))
RATE = 200
SIZE = 300
CATCH_UP = 16  # messages on the way: of more than 32 that come before a busy machine lets it read, Go drops some
UNSIGNED = replace(OPTIONS, gossip=RouterOptions(policy="none"))

T = TypeVar("T")


async def told(what: Callable[..., T], *arguments: object) -> T:
    """What a foreign peer is told, or awaited of it, which blocks: meanwhile our nodes go on."""
    return await trio.to_thread.run_sync(partial(what, *arguments))


async def meet(town: Town, one: Running, other: ForeignPeer) -> None:
    """Each knows that the other is on the topic."""
    one.node.join(TOPIC)
    await told(other.subscribe, TOPIC)
    await town.bell.until(lambda: knows(one, other))
    await told(other.wait_subscriber, TOPIC, one.peer)


def knows(one: Running, other: ForeignPeer) -> bool:
    view = one.node.router.peers.get(peer_bytes(other.peer))
    return view is not None and TOPIC in view.topics


def meshed(one: Running, other: ForeignPeer) -> bool:
    return peer_bytes(other.peer) in one.node.router.mesh[TOPIC]


async def publish(one: Running, tag: str, count: int = COUNT, taker: ForeignPeer | None = None) -> None:
    """At RATE, and no faster than the taker takes the messages; every message must be queued for one peer."""
    due = trio.current_time()
    for number in range(count):
        if taker is not None and number % CATCH_UP == 0:
            await told(taker.wait_received, number, TOPIC)
        due = max(due, trio.current_time() - CATCH_UP / RATE)
        await trio.sleep_until(due)
        assert one.node.publish(TOPIC, build_payload(tag, number, SIZE)) == 1
        due += 1 / RATE


async def publish_there(other: ForeignPeer, tag: str, count: int = COUNT) -> Published:
    outcome = await told(partial(other.publish, TOPIC, count, rate=RATE, size=SIZE, tag=tag))
    assert (outcome.sent, outcome.failed) == (count, 0), outcome.text
    return outcome


def payloads(tag: str, count: int = COUNT) -> list[bytes]:
    return sorted(build_payload(tag, number, SIZE) for number in range(count))


def ids(messages: Sequence[Received]) -> list[str]:
    return sorted(f"{each.author}/{(each.seqno or b'').hex()}" for each in messages)


def good(one: Running) -> list[str]:
    """Ids of the messages in captured frames that our node found good."""
    return sorted(
        message_id(each)
        for frame in one.tape.frames
        if frame.direction == Frame.IN and frame.verdicts
        for each, verdict in zip(RPC.FromString(frame.payload).publish, frame.verdicts, strict=True)
        if verdict in (Verdict.VALID, Verdict.UNSIGNED)
    )


async def exchange(town: Town, one: Running, other: ForeignPeer, *, signed: bool = True) -> None:
    """Messages both ways at once: all come, once, as they were sent and from whom; frames hold just their ids."""
    outcomes: list[Published] = []

    async def theirs() -> None:
        outcomes.append(await publish_there(other, "theirs"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(publish, one, "ours", COUNT, other)
        nursery.start_soon(theirs)
    received = await told(other.wait_received, COUNT, TOPIC)
    await town.bell.until(lambda: len(one.heard) >= COUNT)

    assert sorted(each.data for each in received) == payloads("ours")
    assert sorted(one.heard) == payloads("theirs")
    came = good(one)
    assert len(came) == len(set(came)) == COUNT
    if outcomes[0].ids:
        assert came == sorted(outcomes[0].ids)
    if signed:
        assert ids(received) == sorted(one.published) == sorted(one.captured(Frame.OUT, other.peer))
        assert {each.partition("/")[0] for each in came} == {other.peer}
    else:
        assert {(each.author, each.seqno) for each in received} == {(None, None)}
        (sent,) = {tuple(sorted(one.captured(Frame.OUT, other.peer)))}
        assert len(set(sent)) == COUNT
    counters = one.node.view().counters
    for kind in ("bad_signature", "against_policy", "dropped", "rpc_malformed", "broken_promise", "graft_backoff"):
        assert counters.get(kind, 0) == 0, kind
    assert all(view.score >= 0 for view in one.node.router.peers.values())


async def introduced(town: Town, one: Running, protocol: str, agent: str) -> None:
    """What the view says of its one peer."""

    def shown() -> str:
        (peer,) = one.node.view().peers
        assert peer.protocol == protocol
        return peer.agent

    await town.bell.until(lambda: shown().startswith(agent))


# ---------------------------------------------------------------- messages both ways


def test_go(go_peer: NewPeer, tmp_path: Path) -> None:
    go = go_peer()

    async def test(town: Town) -> None:
        one = await town.node(replace(OPTIONS, bootstrap=(go.address,)))
        await meet(town, one, go)
        await exchange(town, one, go)
        await introduced(town, one, "/meshsub/1.1.0", "kubo/")

    in_town(tmp_path, test)


@pytest.mark.parametrize(("version", "key"), [("1.2.0", "ed25519"), ("1.1.0", "rsa")])
def test_js(js_peer: NewPeer, tmp_path: Path, version: str, key: str) -> None:
    js = js_peer(protocol=version, key=key)

    async def test(town: Town) -> None:
        one = await town.node()
        await told(js.connect, one.address)
        await meet(town, one, js)
        await exchange(town, one, js)
        await introduced(town, one, f"/meshsub/{version}", "js-libp2p/")

    in_town(tmp_path, test)


def test_js_where_nobody_signs(js_peer: NewPeer, tmp_path: Path) -> None:
    js = js_peer(signing="none")

    async def test(town: Town) -> None:
        one = await town.node(replace(UNSIGNED, bootstrap=(js.address,)))
        await meet(town, one, js)
        await exchange(town, one, js, signed=False)

    in_town(tmp_path, test)


@pytest.mark.parametrize(("version", "key"), [("1.3.0", "secp256k1"), ("1.1.0", "ed25519")])
def test_rust(rust_peer: NewPeer, tmp_path: Path, version: str, key: str) -> None:
    rust = rust_peer(protocol=version, key=key)

    async def test(town: Town) -> None:
        one = await town.node()
        await told(rust.connect, one.address)
        await meet(town, one, rust)
        await exchange(town, one, rust)
        await introduced(town, one, f"/meshsub/{version}", "rust-libp2p/")

    in_town(tmp_path, test)


@pytest.mark.parametrize("kind", ["js", "rust"])
def test_signatures_are_refused_where_nobody_signs(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    new: NewPeer = request.getfixturevalue(f"{kind}_peer")
    strict = new()

    async def test(town: Town) -> None:
        one = await town.node(replace(UNSIGNED, bootstrap=(strict.address,)))
        await meet(town, one, strict)
        await told(partial(strict.publish, TOPIC, 1, tag="signed"))
        await town.bell.until(lambda: one.node.view().counters.get("against_policy", 0) == 1)
        assert one.heard == []
        assert b"".join(f.verdicts for f in one.tape.frames) == bytes([Verdict.AGAINST_POLICY])

    in_town(tmp_path, test)


@pytest.mark.parametrize("dialled", [True, False], ids=["dialled", "dials"])
def test_a_kubo_with_an_ecdsa_identity(tmp_path: Path, dialled: bool) -> None:
    kubo = Daemon(program(), tmp_path / "kubo")
    kubo.take_identity(ec.generate_private_key(ec.SECP256R1()))
    kubo.start().close()
    heard: list[bytes] = []

    async def test(town: Town) -> None:
        one = await town.node(replace(OPTIONS, bootstrap=(kubo.address,) if dialled else ()))
        one.node.join(TOPIC)
        if not dialled:
            await trio.to_thread.run_sync(kubo.connect, one.address)

        async def listen() -> None:
            async for data in kubo.hear(TOPIC):
                heard.append(data)
                town.bell.ring()

        town.nursery.start_soon(listen)
        await town.bell.until(lambda: subscribed(one, 1))
        one.node.publish(TOPIC, b"to the peer")
        await town.bell.until(lambda: heard == [b"to the peer"])
        await trio.to_thread.run_sync(kubo.say, TOPIC, b"from the peer")
        await town.until_heard(one, b"from the peer")
        assert b"".join(f.verdicts for f in one.tape.frames) == bytes([Verdict.VALID])

    try:
        in_town(tmp_path, test)
    finally:
        kubo.stop()


def test_where_some_sign_and_some_do_not_each_hears_its_kind_and_nobody_is_dropped(
    js_peer: NewPeer, tmp_path: Path
) -> None:
    strict, none = js_peer(), js_peer(signing="none")

    async def test(town: Town) -> None:
        either = RouterOptions(policy="either")
        one = await town.node(replace(OPTIONS, gossip=either, bootstrap=(strict.address, none.address)))
        await meet(town, one, strict)
        await meet(town, one, none)
        await publish_there(none, "first", 1)
        await town.bell.until(lambda: len(one.heard) == 1)
        await publish_there(strict, "first", 1)
        await town.bell.until(lambda: len(one.heard) == 2)
        for number in range(60):
            assert one.node.publish(TOPIC, b"batch %d" % number) == 1
        for each in (none, strict):
            await publish_there(each, "more", 60)
        await town.bell.until(lambda: len(one.heard) == 122)
        received = await told(strict.wait_received, 60, TOPIC)
        assert sorted(each.data for each in received) == sorted(b"batch %d" % number for number in range(60))
        assert none.received == []
        assert one.node.view().counters["withheld"] == 60 + 61 + 60
        signed = [message.HasField("signature") for rpc in one.rpcs(Frame.OUT, none.peer) for message in rpc.publish]
        assert not any(signed)

    in_town(tmp_path, test)


# ---------------------------------------------------------------- peers that do as they like


def test_a_peer_with_an_extension_that_nobody_knows(tmp_path: Path) -> None:
    """Its hello is captured as it is, and it is a peer like any other."""
    hello = RPC.FromString(subscription())
    hello.control.extensions.MergeFromString(bytes.fromhex("d281fa170568656c6c6f b8868c1801"))
    assert len(hello.control.extensions.SerializeToString()) == 15
    key = new_key()

    async def test(town: Town) -> None:
        one = await town.node()
        one.node.join(TOPIC)
        async with raw_peer() as host:
            stream = await call(host, one, "/meshsub/1.3.0")
            await stream.write(encode(hello.SerializeToString()))
            for number in range(COUNT):
                await stream.write(encode(message(number, key)))
            await town.bell.until(lambda: len(one.heard) == COUNT and subscribed(one, 1))
            await publish(one, "ours", 20)
            await town.bell.until(lambda: len(one.captured(Frame.OUT)) == 20)
            frames = [f for f in one.tape.frames if f.direction == Frame.IN]
            assert frames[0].payload == hello.SerializeToString()
            assert len(one.node.view().peers) == 1

    in_town(tmp_path, test)


@pytest.mark.parametrize("kind", ["go", "js", "rust"])
def test_a_peer_that_subscribes_late(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """It publishes to us before; once it is on the topic, it gets all that comes after."""
    new: NewPeer = request.getfixturevalue(f"{kind}_peer")
    late = new()

    async def test(town: Town) -> None:
        one = await town.node(replace(OPTIONS, bootstrap=(late.address,)))
        one.node.join(TOPIC)
        await town.bell.until(lambda: bool(one.node.view().peers))
        if kind == "go":  # which does not tell of others' subscriptions to what it is not on: ask it
            with trio.fail_after(60):
                while not one.heard:
                    await told(partial(late.publish, TOPIC, 1, tag="knock"))
                    with suppress(trio.TooSlowError):
                        await town.bell.until(lambda: bool(one.heard), 0.1)
            one.heard.clear()
        else:
            await told(late.wait_subscriber, TOPIC, one.peer)
        assert one.node.publish(TOPIC, b"too early") == 0
        await publish_there(late, "fanout", 50)
        await town.bell.until(lambda: len(one.heard) >= 50)
        assert sorted(one.heard) == payloads("fanout", 50)
        await told(late.subscribe, TOPIC)
        await town.bell.until(lambda: knows(one, late))
        await publish(one, "ours", 100, late)
        received = await told(late.wait_received, 100, TOPIC)
        assert sorted(each.data for each in received) == payloads("ours", 100)
        assert ids(received) == sorted(one.published[1:])

    in_town(tmp_path, test)


@pytest.mark.parametrize(("kind", "spelling"), [("js", "own"), ("js", "common"), ("rust", "own")])
def test_a_peer_that_pruned_us_gets_and_gives_by_gossip(
    kind: str, spelling: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """left – ours – foreign – right, where ours and the foreign peer are not in each other's mesh: what left and right
    say comes through by IHAVE and IWANT, whatever the foreign peer calls messages, and nobody is thought ill of."""
    new: NewPeer = request.getfixturevalue(f"{kind}_peer")
    foreign = new(ids=spelling)
    many = 60

    async def test(town: Town) -> None:
        ours = await town.node(replace(OPTIONS, bootstrap=(foreign.address,)))
        left = await town.node(replace(OPTIONS, bootstrap=(ours.address,)))
        right = await town.node(replace(OPTIONS, bootstrap=(foreign.address,)))
        for one in (ours, right):
            await meet(town, one, foreign)
            await town.bell.until(partial(meshed, one, foreign))
        left.node.join(TOPIC)
        await town.bell.until(lambda: left.node.peer in ours.node.router.mesh[TOPIC])

        await told(foreign.unsubscribe, TOPIC)
        await town.bell.until(lambda: ours.node.view().counters.get("pruned_by_peer", 0) == 1)
        assert ours.node.router.mesh[TOPIC] == {left.node.peer}
        await told(foreign.subscribe, TOPIC)
        await town.bell.until(lambda: knows(ours, foreign) and knows(right, foreign))
        pruned_at = len(ours.rpcs(Frame.OUT, foreign.peer))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish, left, "left", many)
            nursery.start_soon(publish, right, "right", many)
        received = await told(foreign.wait_received, 2 * many, TOPIC)
        await town.bell.until(lambda: len(left.heard) >= many and len(ours.heard) >= 2 * many)
        assert sorted(each.data for each in received) == sorted(payloads("left", many) + payloads("right", many))
        assert sorted(left.heard) == payloads("right", many)

        for rpc in ours.rpcs(Frame.OUT, foreign.peer)[pruned_at:]:
            assert not rpc.control.graft, "the back-off was not kept"
        counters = ours.node.view().counters
        assert counters["iwant_answered"] >= many
        assert counters["iwant_sent"] >= many
        assert ours.node.router.sizes["promises"] == 0, "brought, and not taken for what was asked for"
        assert counters.get("broken_promise", 0) == 0

    in_town(tmp_path, test)
