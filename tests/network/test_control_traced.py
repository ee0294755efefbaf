"""The rows of `subscriptions` and `controls` equal, entry by entry, what foreign peers report of their own RPCs.

go-libp2p-pubsub has a tracer, which sees names also where topics go by index; js is traced in the same form, where it
decodes and encodes. rust reports subscribers and its mesh, and Kubo writes a log.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any  # JSON

import pytest
import trio

from kiln.pipelines.archive.rows import build_control_rows, read_control_rpc
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.schemas.kafka.frames import DIRECTIONS
from kiln.schemas.wire.identity import peer_bytes
from kiln.schemas.wire.topic_table import BundleSet
from kit.control_traces import KINDS, Entry, read_trace
from kit.foreign_peer import NewPeer, build_payload
from kit.kubo_daemon import Daemon, program
from kit.node_town import OPTIONS, TOPIC, Running, Town, in_town, subscribed

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.network, pytest.mark.timeout(300)]

PEERS = 4
OTHER, LAST = f"{TOPIC}/sep/model/kother", f"{TOPIC}/sep/model/klast"
TOPICS = (TOPIC, OTHER, LAST)
BUNDLES = BundleSet({"all": TOPICS})
SIZE = 2_000  # from 1 KiB on, peers send IDONTWANT

Row = dict[str, Any]


def rows(bridge: Running, peer: str) -> Iterator[tuple[str, int, Row]]:
    """The rows of the frames of that peer, with the frame's direction and sequence."""
    for frame in bridge.tape.frames:
        if frame.remote_peer != peer_bytes(peer):
            continue
        rpc = read_control_rpc(frame)
        if rpc is None:
            continue
        built = build_control_rows(frame, rpc, DecodeConfig(bundles=BUNDLES), 0, 0)
        rows = [row._asdict() for row in built.subscriptions] + [row._asdict() for row in built.controls]
        for row in rows:
            yield DIRECTIONS[frame.direction], frame.sequence, row


def held(bridge: Running, peer: str, traces_first: bool) -> Iterator[Entry]:
    """The entries in the rows. `traces_first`: those of the first RPC that the peer sends are in its trace."""
    for direction, sequence, row in rows(bridge, peer):
        if "subscribe" in row:
            if traces_first or direction == "OUT" or sequence > 1:
                yield Entry(direction, "SUBSCRIBE", row["topic"], row["subscribe"])
        elif row["kind"].lower() in KINDS:
            yield Entry(direction, row["kind"], row["topic"], tuple(row["message_ids"] or ()))


@pytest.mark.parametrize("kind", ["go", "go by index", "js"])
def test_every_entry_of_a_trace_is_once_in_the_rows(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    by_index, traces_first = kind == "go by index", kind == "js"
    new: NewPeer = request.getfixturevalue("js_peer" if kind == "js" else "go_pubsub_peer")
    options = {"bundle": ",".join(TOPICS)} if by_index else {}
    traces = [tmp_path / f"trace{number}.json" for number in range(PEERS)]

    async def test(town: Town) -> None:
        start = [partial(new, trace=str(trace), degree="2", **options) for trace in traces]
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
        bootstrap = tuple(peer.addresses[0] for peer in peers)
        bridge = await town.node(
            replace(OPTIONS, bootstrap=bootstrap, bundles=BUNDLES, send_indices="eager")
            if by_index
            else replace(OPTIONS, bootstrap=bootstrap)
        )
        for topic in TOPICS:
            bridge.node.join(topic)
        for peer in peers:
            for topic in (TOPIC, OTHER):
                await trio.to_thread.run_sync(peer.wait_subscriber, topic, bridge.peer)
        for number in range(0, 70, 10):
            if number == 60:  # who comes back at once is in no mesh for a while, and hears of messages by IHAVE
                bridge.node.leave(TOPIC)
                bridge.node.join(TOPIC)
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

        def compare() -> list[tuple[Counter[Entry], Counter[Entry]]]:
            """The entries of each peer, in the rows and in its trace."""
            return [
                (
                    Counter(held(bridge, peer.peer, traces_first)),
                    Counter(each.entry for each in read_trace(trace, ours)),
                )
                for trace, peer in zip(traces, peers, strict=True)
            ]

        compared = compare()
        with trio.move_on_after(20):
            while any(entries != traced for entries, traced in compared):
                await trio.sleep(0.2)  # a file reports no growth, and heartbeats add entries
                compared = compare()
        seen = Counter[tuple[str, str]]()
        forms = Counter[tuple[str, str, str | None]]()
        for peer, (entries, traced) in zip(peers, compared, strict=True):
            assert entries == traced, peer.peer
            for entry, count in entries.items():
                seen[entry.direction, entry.kind] += count
            for direction, _, row in rows(bridge, peer.peer):
                forms[direction, row.get("kind", "SUBSCRIBE"), row["topic_source"]] += 1
        for kind in ("SUBSCRIBE", "GRAFT", "PRUNE", "IHAVE"):
            assert seen["IN", kind], f"no {kind} came: {seen}"
        for kind in ("SUBSCRIBE", "GRAFT", "IHAVE" if traces_first else "IWANT"):  # js takes back who comes back
            assert seen["OUT", kind], f"no {kind} went out: {seen}"
        for kind in ("GRAFT", "PRUNE", "IHAVE"):
            assert bool(forms["IN", kind, "index"]) is by_index, forms

    in_town(tmp_path, test)


# ---------------------------------------------------------------- peers that report less


def test_rust_has_the_subscribers_and_the_mesh_that_the_rows_say(rust_peer: NewPeer, tmp_path: Path) -> None:
    rust = rust_peer()

    async def test(town: Town) -> None:
        bridge = await town.node(replace(OPTIONS, bootstrap=(rust.address,)))

        def said() -> tuple[set[str], set[str], set[str]]:
            """Topics that the bridge is on, that rust is on, and in whose mesh both are, by the rows in their order."""
            on: dict[str, set[str]] = {"IN": set(), "OUT": set()}
            mesh = set[str]()
            for direction, _, row in rows(bridge, rust.peer):
                if "subscribe" in row:
                    (on[direction].add if row["subscribe"] else on[direction].discard)(row["topic"])
                    if not row["subscribe"]:
                        mesh.discard(row["topic"])
                elif row["kind"] in ("GRAFT", "PRUNE"):
                    (mesh.add if row["kind"] == "GRAFT" else mesh.discard)(row["topic"])
            return on["OUT"], on["IN"], mesh

        def reported() -> tuple[set[str], set[str]]:
            return (
                {topic for topic, peer in set(rust.subscribers) if peer == bridge.peer},
                {topic for topic, peer in set(rust.mesh) if peer == bridge.peer},
            )

        async def agree(ours: set[str], theirs: set[str]) -> None:
            await town.bell.until(lambda: said() == (ours, theirs, ours & theirs), 60)
            await town.bell.until(lambda: reported() == (ours, ours & theirs), 60)

        for topic in (TOPIC, OTHER):
            bridge.node.join(topic)
            await trio.to_thread.run_sync(rust.subscribe, topic)
        await agree({TOPIC, OTHER}, {TOPIC, OTHER})
        bridge.node.leave(OTHER)
        await agree({TOPIC}, {TOPIC, OTHER})
        await trio.to_thread.run_sync(rust.subscribe, LAST)
        bridge.node.join(LAST)
        await agree({TOPIC, LAST}, {TOPIC, OTHER, LAST})
        await trio.to_thread.run_sync(rust.unsubscribe, TOPIC)
        await agree({TOPIC, LAST}, {OTHER, LAST})

    in_town(tmp_path, test)


LOGGED = {
    "JOIN topic": ("IN", "SUBSCRIBE"),
    "LEAVE topic": ("IN", "UNSUBSCRIBE"),
    "GRAFT: add mesh link from peer in topic": ("OUT", "GRAFT"),
    "JOIN: Add mesh link to peer in topic": ("IN", "GRAFT"),
    "HEARTBEAT: Add mesh link to peer in topic": ("IN", "GRAFT"),
    "PRUNE: Remove mesh link to peer in topic": ("OUT", "PRUNE"),
    "LEAVE: Remove mesh link to peer in topic": ("IN", "PRUNE"),
    "HEARTBEAT: Remove mesh link to peer in topic": ("IN", "PRUNE"),
}
"""Log lines of go-libp2p-pubsub, and the control entry that each reports."""


def test_the_log_of_kubo_has_the_entries_of_the_rows(tmp_path: Path) -> None:
    kubo = Daemon(program(), tmp_path / "kubo")
    kubo.log("pubsub")
    kubo.start().close()

    def logged() -> Counter[tuple[str, str, str]]:
        lines = [json.loads(line) for line in kubo.lines() if line.startswith("{")]
        return Counter((*LOGGED[line["msg"]], line["topic"]) for line in lines if line["msg"] in LOGGED)

    def kind_of(row: Row) -> str:
        return str(row["kind"]) if "kind" in row else "SUBSCRIBE" if row["subscribe"] else "UNSUBSCRIBE"

    async def test(town: Town) -> None:
        bridge = await town.node(replace(OPTIONS, bootstrap=(kubo.address,)))
        bridge.node.join(TOPIC)
        bridge.node.join(OTHER)
        kubo_peer = kubo.address.rpartition("/")[2]

        def entries() -> Counter[tuple[str, str, str]]:
            found = ((direction, kind_of(row), row["topic"]) for direction, _, row in rows(bridge, kubo_peer))
            return Counter(each for each in found if each[:2] in LOGGED.values())

        async def agree(*expected: tuple[str, str]) -> None:
            def holds() -> bool:
                # a GRAFT that crosses its own is not logged
                unlogged = {each[:2] for each in entries() - logged()}
                return logged() <= entries() and unlogged <= {("OUT", "GRAFT")}

            with trio.move_on_after(30):
                await town.bell.until(lambda: holds() and {each[:2] for each in logged()} >= {*expected})
            assert holds(), (entries(), logged())
            assert {each[:2] for each in logged()} >= {*expected}

        async with trio.open_nursery() as listening:
            for topic in (TOPIC, OTHER):
                listening.start_soon(listen, kubo, topic)
            await town.bell.until(lambda: subscribed(bridge, 1))
            await agree(("IN", "SUBSCRIBE"))
            bridge.node.leave(TOPIC)
            await agree(("OUT", "PRUNE"))
            listening.cancel_scope.cancel()
        await agree(("IN", "UNSUBSCRIBE"), ("IN", "PRUNE"))

    try:
        in_town(tmp_path, test)
    finally:
        kubo.stop()


async def listen(kubo: Daemon, topic: str) -> None:
    async for _ in kubo.hear(topic):
        pass
