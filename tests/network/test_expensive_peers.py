"""Peers that are expensive: their keys, their handshakes, and RPCs that take long to check."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric import ec
from libp2p.peer.id import ID

from kiln.bridge.gossipsub.wire import encode
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message, PublicKey
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import peer_text, sign
from kit.cpu_time import measure_cpu
from kit.key_bytes import diffie_hellman, public_key
from kit.node_town import ENDS, OPTIONS, TOPIC, Running, Town, call, in_town, raw_peer, subscribed, subscription
from kit.strange_identity import disguise

pytestmark = pytest.mark.network

DH = public_key(PublicKey.RSA, diffie_hellman(8192))
LOADED = 1e9  # steps that a loader of any kind of key takes to prove DH's prime: most of a minute


def with_key(key: bytes) -> bytes:
    message = Message(data=b"x", seqno=b"\x01", topic=TOPIC, key=key, signature=bytes(256))
    setattr(message, "from", b"\x12\x20" + hashlib.sha256(key).digest())  # a keyword in Python
    return RPC(publish=[message]).SerializeToString()


def names(one: Running) -> set[str]:
    return {peer.peer for peer in one.node.view().peers}


def test_who_sends_a_key_that_is_made_to_be_expensive_is_kept_out_at_once(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, ban=60.0))
        async with raw_peer() as host:
            name = peer_text(host.get_id().to_bytes())
            stream = await call(host, a)
            await stream.write(encode(subscription()))
            await town.bell.until(lambda: subscribed(a, 2))
            with measure_cpu() as cost:
                await stream.write(encode(with_key(DH)))
                await town.bell.until(lambda: name not in names(a), 60)
            assert cost.steps < LOADED / 10
            assert a.node.view().kept_out == 1
            assert with_key(DH) in a.tape.payloads(Frame.IN)
        a.node.publish(TOPIC, b"all the while")
        await town.until_heard(b, b"all the while")

    in_town(tmp_path, test)


def test_a_handshake_with_such_a_key_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    async def test(town: Town) -> None:
        a, b = await town.pair()
        async with raw_peer() as host:
            disguise(host, host.get_public_key().serialize())
            await call(host, a)
            await host.disconnect(ID(a.node.peer))
            disguise(host, DH)
            with measure_cpu() as cost, suppress(*ENDS), trio.fail_after(60):
                await call(host, a)
                raise AssertionError("the node took the connection")
            assert cost.steps < LOADED / 10
        a.node.publish(TOPIC, b"all the while")
        await town.until_heard(b, b"all the while")

    in_town(tmp_path, test)


def test_a_peer_over_its_budget_of_cpu_is_read_slowly_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    key = ec.derive_private_key(0xC0FFEE, ec.SECP256K1())
    messages = [Message(data=b"slow %d" % number, seqno=number.to_bytes(8), topic=TOPIC) for number in range(600)]
    for message in messages:
        sign(message, key)

    async def test(town: Town) -> None:
        a, b = await town.pair(replace(OPTIONS, peer_cpu=0.03, all_cpu=10.0))
        async with raw_peer() as host:
            stream = await call(host, a)
            await stream.write(encode(subscription()))
            await town.bell.until(lambda: subscribed(a, 2))
            for start in range(0, len(messages), 50):
                await stream.write(encode(RPC(publish=messages[start : start + 50]).SerializeToString()))
            await town.bell.until(lambda: len(a.heard) >= 100, 60)
            # another peer is read meanwhile
            b.node.publish(TOPIC, b"all the while")
            await town.until_heard(a, b"all the while")
            assert len(a.heard) < len(messages)
            await town.until_heard(a, messages[-1].data, 60)
            assert a.node.view().counters["over_budget_cpu"] > 0
        assert {message.data for message in messages} <= set(a.heard)

    in_town(tmp_path, test)
