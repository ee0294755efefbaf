"""The rows of `subscriptions` and `controls` equal, entry by entry, the events of go-libp2p-pubsub's own tracer."""

from __future__ import annotations

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any  # the tracer's JSON

import pytest
import trio

from kiln.pipelines.archive.control_rows import CONTROLS, SUBSCRIPTIONS, build_control_rows
from kiln.schemas.delta.tables import Column
from kiln.schemas.kafka.frames import DIRECTIONS
from kiln.schemas.wire.gossip_id import format_gossip_id
from kiln.schemas.wire.identity import peer_bytes, peer_text
from kiln.schemas.wire.topic_table import BundleSet
from kit.foreign_peer import NewPeer, build_payload
from kit.node_town import OPTIONS, TOPIC, Running, Town, in_town

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

PEERS = 4
OTHER, LAST = f"{TOPIC}/sep/model/kother", f"{TOPIC}/sep/model/klast"
SIZE = 2_000  # from 1 KiB on, go sends IDONTWANT
KINDS = {"ihave", "iwant", "graft", "prune", "idontwant"}

Entry = tuple[str, str, str | None, tuple[str, ...] | bool]
"""Direction as the bridge sees it, kind, topic, and ids; of a subscription whether it is one."""


def traced(path: Path, bridge: bytes) -> Iterator[Entry]:
    """The entries in a trace of RPCs that went to the bridge, or came from it."""
    for line in path.read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        for name, side, direction in (("sendRPC", "sendTo", "IN"), ("recvRPC", "receivedFrom", "OUT")):
            rpc = event.get(name)
            if rpc is None or b64decode(rpc[side]) != bridge:
                continue
            for each in rpc["meta"].get("subscription", ()):
                yield direction, "SUBSCRIBE", each["topic"], each.get("subscribe", False)
            for kind, entries in rpc["meta"].get("control", {}).items():
                assert kind in KINDS
                for each in entries:
                    ids = tuple(format_gossip_id(b64decode(one)) for one in each.get("messageIDs") or ())
                    yield direction, kind.upper(), each.get("topic"), ids


def held(bridge: Running, peer: bytes) -> Iterator[Entry]:
    """The entries in the rows of the frames of that peer."""
    for frame in bridge.tape.frames:
        if frame.remote_peer != peer:
            continue
        rows = build_control_rows(frame, BundleSet(), 0, 0)
        direction = DIRECTIONS[frame.direction]
        # the tracer leaves out what go sends as the first RPC of a stream
        subscriptions = [] if direction == "IN" and frame.sequence == 1 else rows.subscriptions
        for each in map(partial(_named, SUBSCRIPTIONS), subscriptions):
            yield direction, "SUBSCRIBE", each["topic"], each["subscribe"]
        for each in map(partial(_named, CONTROLS), rows.controls):
            if each["kind"].lower() in KINDS:
                yield direction, each["kind"], each["topic"], tuple(each["message_ids"] or ())


def _named(columns: tuple[Column, ...], row: tuple[object, ...]) -> dict[str, Any]:
    return {column.name: value for column, value in zip(columns, row, strict=True)}


def test_every_entry_that_the_tracer_has_is_once_in_the_rows(go_pubsub_peer: NewPeer, tmp_path: Path) -> None:
    traces = [tmp_path / f"trace{number}.json" for number in range(PEERS)]

    async def test(town: Town) -> None:
        start = [partial(go_pubsub_peer, trace=str(trace), degree="2") for trace in traces]
        peers = [await trio.to_thread.run_sync(each) for each in start]
        for number, peer in enumerate(peers):
            for other in peers[:number]:
                await trio.to_thread.run_sync(peer.connect, other)
            for topic in (TOPIC, OTHER):
                await trio.to_thread.run_sync(peer.subscribe, topic)
        for peer in peers:  # their meshes are full when the bridge comes, so that some tell it of messages by IHAVE
            for other in peers:
                if other is not peer:
                    await trio.to_thread.run_sync(peer.wait_subscriber, TOPIC, other)
        bridge = await town.node(replace(OPTIONS, bootstrap=tuple(peer.addresses[0] for peer in peers)))
        for topic in (TOPIC, OTHER, LAST):
            bridge.node.join(topic)
        for peer in peers:
            for topic in (TOPIC, OTHER):
                await trio.to_thread.run_sync(peer.wait_subscriber, topic, bridge.peer)
        for number in range(0, 60, 10):
            sent = [build_payload("traced", number + each, SIZE) for each in range(10)]
            for each, data in enumerate(sent):
                await trio.to_thread.run_sync(peers[each % PEERS].publish_raw, TOPIC, data)
                bridge.node.publish(OTHER, build_payload("own", number + each, SIZE))
            for data in sent:
                await town.until_heard(bridge, data)
        for peer in peers:
            await trio.to_thread.run_sync(peer.subscribe, LAST)  # it grafts the bridge, which is there already
            await trio.to_thread.run_sync(peer.unsubscribe, OTHER)
        bridge.node.leave(TOPIC)
        ours = peer_bytes(bridge.peer)

        def agree() -> bool:
            return all(
                Counter(traced(trace, ours)) == Counter(held(bridge, peer_bytes(peer.peer)))
                for trace, peer in zip(traces, peers, strict=True)
            )

        with trio.move_on_after(20):
            while not agree():
                await trio.sleep(0.2)  # a file reports no growth, and heartbeats add entries
        found = Counter[tuple[str, str]]()
        for trace, peer in zip(traces, peers, strict=True):
            rows = Counter(held(bridge, peer_bytes(peer.peer)))
            assert rows == Counter(traced(trace, ours)), peer_text(peer_bytes(peer.peer))
            for (direction, kind, *_), count in rows.items():
                found[direction, kind] += count
        for kind in ("SUBSCRIBE", "GRAFT", "PRUNE", "IHAVE"):
            assert found["IN", kind], f"no {kind} came: {found}"
        for kind in ("SUBSCRIBE", "GRAFT", "IWANT"):
            assert found["OUT", kind], f"no {kind} went out: {found}"

    in_town(tmp_path, test)
