"""The tables `subscriptions` and `controls` equal the traces of foreign peers, with topics by name and by index,
although the bridge was killed; and a backfill fills them again where they were emptied."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable

from conftest import free_ports
from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.pipelines.runtime.table_ages import TABLES_FILE
from kiln.schemas.wire.identity import peer_bytes
from kit.awaiting import wait_until
from kit.control_traces import Entry, read_trace
from kit.foreign_peer import ForeignPeer, go_pubsub_peer
from kit.kiln_process import Kiln, end, kill_all
from kit.log_feed import kiln_beside

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.network, pytest.mark.timeout(1_200)]

NETWORK = "local-control"
WHOLE = f"/ceramic/{NETWORK}"
OTHER, LAST = f"{WHOLE}/sep/model/kother", f"{WHOLE}/sep/model/klast"
ROUNDS = 10
EDGE = 3_000_000
"""µs before and after the last frame of a connection: what was on its way when the bridge was killed or stopped is in
the trace or in the tables alone"""
PATIENCE = 120.0


@dataclass
class Scene:
    """A Kiln whose bridge ran among traced peers, and what they traced."""

    kiln: Kiln
    bridge: str
    traces: dict[str, Path]
    """trace file of each peer"""
    ends: list[int]
    """when the last frame of each connection was captured, unix µs"""
    by_index: set[str]
    """peers that write indices"""


def new_peers(name: str, binary: Path, folder: Path, stack: ExitStack, bundle: str = "") -> dict[str, ForeignPeer]:
    """Two peers that know each other, by their traces."""
    traces = [str(folder / f"{name}{number}.json") for number in range(2)]
    peers = [
        go_pubsub_peer(binary, Path(trace).with_suffix(""), trace=trace, degree="2", bundle=bundle) for trace in traces
    ]
    one, other = (stack.enter_context(peer) for peer in peers)
    one.connect(other)
    return {traces[0]: one, traces[1]: other}


def data(number: int, peer: int) -> bytes:
    """A KEEPALIVE, so long that go sends IDONTWANT."""
    return json.dumps({"typ": 3, "ts": 1_800_000_000_000 + number, "ver": f"{peer}.0.0"}).encode().ljust(1_500)


def publish(peers: list[ForeignPeer], numbers: range, before: int) -> None:
    """Each peer says something in each round, and each hears it, half of it through the bridge."""
    for number in numbers:
        for which, peer in enumerate(peers):
            peer.publish_raw(WHOLE, data(number, which))
        for peer in peers:
            peer.wait_received(before + len(peers) * (number - numbers.start + 1), WHOLE, PATIENCE)


@pytest.fixture(scope="module")
def scene(broker: EmbeddedBroker, go_pubsub_built: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("control")
    topics = [WHOLE, OTHER, LAST]
    with ExitStack() as stack:
        by_name = new_peers("name", go_pubsub_built, folder, stack)
        by_index = new_peers("index", go_pubsub_built, folder, stack, ",".join(topics))
        traced = by_name | by_index
        peers = list(traced.values())
        (listen,) = free_ports(1)
        environment = {
            "KILN_NETWORK": NETWORK,
            "KILN_BRIDGE__LISTEN": f"/ip4/127.0.0.1/tcp/{listen}",
            "KILN_BRIDGE__BOOTSTRAP": ",".join(peer.address for peer in peers),
            "KILN_DISCOVERY__ENABLED": "false",
            "KILN_PUBLISH__ENABLED": "false",
            "KILN_TOPIC_TABLE__BUNDLES": json.dumps({"all": topics}),
            "KILN_TOPIC_TABLE__SEND": "eager",
            "KILN_JOBS__QUERIES": "archive",
        }
        kiln = kiln_beside(broker.address, "control.", folder / "state", environment)
        for peer in peers:
            peer.subscribe(WHOLE)
            peer.subscribe(OTHER)
        process = kiln.start("bridge")
        try:
            bridge = await_bridge(kiln, process)
            await_subscribed(peers, bridge.peer, (WHOLE, OTHER))
            publish(peers, range(ROUNDS), 0)
            await_edge(kiln)
            kill_all(process)
            for peer in peers:
                gone = partial(lacks, peer, WHOLE, bridge.peer)
                peer.wait_for(gone, PATIENCE, "the end of the bridge's subscription")
            process = kiln.start("bridge")
            bridge = await_bridge(kiln, process)
            await_subscribed(peers, bridge.peer, (WHOLE, OTHER))
            publish(peers, range(ROUNDS, 2 * ROUNDS), len(peers) * ROUNDS)
            for peer in peers:
                peer.subscribe(LAST)
                peer.unsubscribe(OTHER)
            await_subscribed(peers, bridge.peer, (LAST,))
            publish(peers, range(2 * ROUNDS, 3 * ROUNDS), 2 * len(peers) * ROUNDS)
            await_edge(kiln)
            end(process)
        finally:
            if process.poll() is None:
                kill_all(process)
    kiln.run_kept("run", "--catch-up")
    last = kiln.sql("select epoch_us(max(observed_at)) as at from frames group by connection")
    ends = [int(str(row["at"])) for row in last]
    traces = {peer.peer: Path(trace) for trace, peer in traced.items()}
    return Scene(kiln, bridge.peer, traces, ends, {peer.peer for peer in by_index.values()})


def await_bridge(kiln: Kiln, process: subprocess.Popen[str]) -> BridgeStatus:
    """The status of a bridge once it has all its peers."""
    found: list[BridgeStatus] = []

    def runs() -> bool:
        assert process.poll() is None, (kiln.state / "started.out").read_text()
        status = read_status(kiln.state / "bridge" / "status.json")
        if status is not None and status.pid == process.pid and len(status.peers) == 4:
            found.append(status)
        return bool(found)

    wait_until(runs, "a bridge with its peers", PATIENCE)
    return found[0]


def await_edge(kiln: Kiln) -> None:
    """Wait until the bridge reports a time by which all that was said is older than `EDGE`."""
    file = kiln.state / "bridge" / "status.json"

    def await_status(since: float) -> float:
        wait_until(lambda: (status := read_status(file)) is not None and status.at > since, "a later status", PATIENCE)
        status = read_status(file)
        assert status is not None
        return status.at

    await_status(await_status(await_status(0)) + EDGE / 1e6)


def await_subscribed(peers: list[ForeignPeer], bridge: str, topics: tuple[str, ...]) -> None:
    for peer in peers:
        for topic in topics:
            peer.wait_subscriber(topic, bridge, PATIENCE)


def lacks(peer: ForeignPeer, topic: str, other: str) -> bool:
    return (topic, other) not in peer.subscribers


def entries_of(kiln: Kiln, peer: str) -> list[tuple[int, Entry]]:
    """The entries of the tables with a peer. What go sends first on a stream its tracer does not have."""
    same = "kafka_partition, kafka_offset"
    columns = f"remote_peer = '{peer}' and (direction = 'OUT' or sequence > 1)"
    subscriptions = kiln.sql(
        "select epoch_us(s.observed_at) as at, s.direction, 'SUBSCRIBE' as kind, topic, subscribe as content "
        f"from subscriptions as s join (select {same}, sequence from frames) using ({same}) where {columns}"
    )
    controls = kiln.sql(
        "select epoch_us(observed_at) as at, direction, kind, topic, coalesce(message_ids, []) as content "
        f"from controls where remote_peer = '{peer}' and kind not in ('EXTENSIONS', 'UNKNOWN')"
    )
    return [
        (
            int(str(row["at"])),
            Entry(
                str(row["direction"]),
                str(row["kind"]),
                None if row["topic"] is None else str(row["topic"]),
                tuple(map(str, row["content"])) if isinstance(row["content"], list) else bool(row["content"]),
            ),
        )
        for row in [*subscriptions, *controls]
    ]


def check(scene: Scene) -> Counter[tuple[str, str]]:
    """Compare the tables with the traces: each entry as often in one as in the other. Returns how many of each kind."""
    seen = Counter[tuple[str, str]]()
    for peer, path in scene.traces.items():
        trace = [(each.at // 1_000, each.entry) for each in read_trace(path, peer_bytes(scene.bridge))]
        rows = entries_of(scene.kiln, peer)
        assert firm(trace, scene.ends), f"no entry to compare, of {peer}"
        assert firm(trace, scene.ends) - Counter(entry for _, entry in rows) == Counter(), f"missing, of {peer}"
        assert firm(rows, scene.ends) - Counter(entry for _, entry in trace) == Counter(), f"too many, of {peer}"
        seen.update((entry.direction, entry.kind) for _, entry in rows)
    return seen


def firm(entries: list[tuple[int, Entry]], ends: list[int]) -> Counter[Entry]:
    """Those that were not on their way when the bridge ended."""
    return Counter(entry for at, entry in entries if not any(before - EDGE < at < before + EDGE for before in ends))


def test_every_entry_of_the_traces_is_once_in_the_tables(scene: Scene) -> None:
    seen = check(scene)
    assert seen.keys() >= {("IN", kind) for kind in ("SUBSCRIBE", "PRUNE", "IDONTWANT")}, seen
    assert seen.keys() >= {("OUT", kind) for kind in ("SUBSCRIBE", "GRAFT", "IDONTWANT")}, seen


def test_topics_went_by_index_with_the_peers_that_have_a_table(scene: Scene) -> None:
    rows = scene.kiln.sql(
        "select remote_peer, direction, kind, count(*) as n from controls where topic_source = 'index' group by all"
    )
    assert {row["remote_peer"] for row in rows} == scene.by_index
    assert {(row["direction"], row["kind"]) for row in rows} >= {("IN", "PRUNE"), ("OUT", "GRAFT")}
    unresolved = "topic is null and kind in ('IHAVE', 'GRAFT', 'PRUNE')"
    assert scene.kiln.count("controls", unresolved) == 0


def test_a_backfill_fills_tables_that_were_emptied(scene: Scene) -> None:
    kiln = scene.kiln
    before = {table: kiln.sql(f"select * from {table} order by all") for table in ("subscriptions", "controls")}
    DeltaTable(str(kiln.lake / "subscriptions")).delete()
    shutil.rmtree(kiln.lake / "controls")  # as in a lake of before there was one
    tables = kiln.state / "checkpoints" / "archive" / TABLES_FILE
    writes = json.loads(tables.read_bytes())
    tables.write_text(json.dumps({write: batches for write, batches in writes.items() if ":controls:" not in write}))
    (row,) = kiln.sql("select epoch_us(min(observed_at)) as low, epoch_us(max(observed_at)) as high from frames")
    low, high = (datetime.fromtimestamp(int(str(row[name])) / 1e6, UTC) for name in ("low", "high"))
    after = high + timedelta(seconds=1)
    kiln.run_kept(
        "backfill", "run", "--run", "again", "--source", "frames", "--from", low.isoformat(), "--to", after.isoformat()
    )
    kiln.run_kept("backfill", "swap", "again")
    assert check(scene)
    for table, rows in before.items():
        assert kiln.sql(f"select * from {table} order by all") == rows, table
