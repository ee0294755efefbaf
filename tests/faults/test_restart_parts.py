"""SIGKILL to the parts of a live run in a seeded order: each comes back, and the tables are as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from conftest import free_ports
from kit.awaiting import wait_until
from kit.kiln_process import Kiln, kill_all
from kit.log_model import expected_batches, read_batches, read_log, read_records

from bridge.status import read_status
from conf.settings.model import Kafka, Settings
from deploy.embedded.broker import running, stop_running
from deploy.kafka.broker import broker
from schemas.frames import BEP50, read_frame, read_rpc
from schemas.identity import Verdict, judge, message_id
from schemas.proto.gossipsub.rpc_pb2 import RPC
from schemas.proto.kiln.frame_pb2 import Frame
from schemas.pubsub import PubsubMessage, read_message
from schemas.tables import TABLES

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.network, pytest.mark.crash, pytest.mark.timeout(3_000)]

ROUNDS = int(os.environ.get("KILN_TEST_ROUNDS", "1"))
SEED = int(os.environ.get("KILN_TEST_SEED", "1"))
OUTAGE = float(os.environ.get("KILN_TEST_PAUSE", "3"))
PARTS = ("application", "bridge", "broker", "demo network")
WINDOW = 1_000_000  # µs
ENVIRONMENT = {
    "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
    "KILN_TRAFFIC__RATE": "30",
    "KILN_TRAFFIC__SEPARATORS": "10",
}


@dataclass
class Live:
    """A live Kiln whose parts are killed."""

    kiln: Kiln
    process: subprocess.Popen[str]
    killed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def until(self, true: Callable[[], bool], what: str, seconds: float = 120) -> None:
        def holds() -> bool:
            if true():
                return True
            ended = self.process.poll() is not None
            assert not ended, f"kiln ended\n{self.said()}"
            return False

        wait_until(holds, lambda: f"{what}\n{self.said()}\n{self.kiln.log()}", seconds)

    def pid(self, part: str) -> int:
        """Of a part that runs, else 0."""
        state = self.kiln.state
        if part == "application":
            return self.process.pid
        if part == "broker":
            told = state / "broker" / "address.json"
            return int(json.loads(told.read_bytes())["pid"]) if running(state) and told.exists() else 0
        if part == "bridge":
            status = read_status(state / "bridge" / "status.json")
            return status.pid if status is not None and time.time() - status.at < 3 else 0
        lock = state / "demo" / "locks" / "network"
        text = lock.read_text() if lock.exists() else ""
        return int(text) if text and Path(f"/proc/{text}").exists() else 0

    def kill(self, part: str) -> None:
        """Where Kiln does not look after a part itself, the test starts it again."""
        self.until(lambda: self.pid(part) not in (0, *self.killed[part]), f"{part} runs")
        pid = self.pid(part)
        self.killed[part].append(pid)
        os.kill(pid, signal.SIGKILL)
        if part == "application":
            self.process.wait()
            self.process = self.kiln.start("run")

    def pause_broker(self, seconds: float) -> None:
        """It answers nobody, and hangs up on nobody."""
        pid = self.pid("broker")
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)  # the outage itself
        finally:
            os.kill(pid, signal.SIGCONT)

    def flows(self) -> bool:
        """Whether messages of the demo network come in, and Kafka takes them."""
        status = read_status(self.kiln.state / "bridge" / "status.json")
        if status is None or any(self.pid(part) in (0, *self.killed[part]) for part in PARTS):
            return False
        return len(status.peers) > 1 and status.frames_in > 100 and status.spool.put - status.spool.acknowledged < 50

    def publishes(self) -> bool:
        """Whether the bridge that runs now has sent batches to the demo network."""
        status = read_status(self.kiln.state / "bridge" / "status.json")
        return self.flows() and status is not None and status.publisher.published > 0

    def said(self) -> str:
        """What the screen said, all of it."""
        return (self.kiln.state / "started.out").read_text()


@dataclass
class Run:
    kiln: Kiln
    killed: list[str]
    """the parts, in the order in which they were killed"""
    said: str
    servers: str


@contextmanager
def broker_of(kiln: Kiln) -> Iterator[str]:
    port = int(kiln.servers.rpartition(":")[2])
    kafka = Kafka(embedded_port=port, embedded_controller_port=free_ports(1)[0])
    with broker(Settings(state=kiln.state, kafka=kafka), lambda words: None, die_with_parent=True) as servers:
        yield servers


@pytest.fixture(scope="module")
def run(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A live run in which each part was killed, some while others were away; then caught up, its broker running."""
    kiln = Kiln(tmp_path_factory.mktemp("parts"), free_ports(2), ENVIRONMENT)
    random = Random(SEED)
    order = [part for _ in range(ROUNDS) for part in random.sample(PARTS, len(PARTS))]
    live = Live(kiln, kiln.start("run"))
    try:
        for part in order:
            if random.random() < 0.7:
                live.until(live.flows, "frames flow")
            time.sleep(random.uniform(0, 5))  # killed at any moment, seeded
            live.kill(part)
        live.until(live.flows, "frames flow at the end")
        live.pause_broker(OUTAGE)
        live.until(live.flows, "frames flow after all")
        live.until(live.publishes, "batches go out after all")
        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(timeout=90) == 0, live.said()
        kiln.run("run", "--catch-up")
        with broker_of(kiln) as servers:
            yield Run(kiln, order, live.said(), servers)
    finally:
        if live.process.poll() is None:
            kill_all(live.process)
        stop_running(kiln.state)


def test_the_screen_says_which_part_ended(run: Run) -> None:
    for before, part, after in zip(["", *run.killed], run.killed, [*run.killed[1:], ""], strict=False):
        if "application" not in (before, part, after):  # else there may have been no screen at the moment
            ended = "the broker has ended" if part == "broker" else f"the {part} ended with -9"
            assert ended in run.said, run.said


def test_each_thing_is_once_in_the_tables(run: Run) -> None:
    keys = {name: ", ".join(table.key) for name, table in TABLES.items() if (run.kiln.lake / name).exists()}
    keys["quarantine"] = "kafka_partition, kafka_offset, message_index, stage"
    twice = " union all ".join(
        f"select '{name}' as name, count(*) as n from (select {key} from {name} group by all having count(*) > 1)"
        for name, key in keys.items()
        if key
    )
    assert {str(row["name"]): row["n"] for row in run.kiln.sql(twice) if row["n"]} == {}
    filled = ("frames", "copies", "messages", "updates", "batches", "batch_tips", "tips", "publications")
    rows = " union all ".join(f"select '{name}' as name, count(*) as n from {name}" for name in filled)
    assert [row["name"] for row in run.kiln.sql(rows) if not row["n"]] == []


def test_every_frame_of_the_log_is_in_the_lake_and_no_connection_has_a_gap(run: Run) -> None:
    found: dict[tuple[bytes, int], list[int]] = defaultdict(list)
    for frame in frames_of(run.servers):
        found[frame.connection, frame.direction].append(frame.sequence)
    for sequences in found.values():
        firsts = list(dict.fromkeys(sequences))
        assert firsts == list(range(1, len(firsts) + 1))  # a killed bridge lost the last ones, if any
    assert run.kiln.count("frames") == sum(len(set(sequences)) for sequences in found.values())


def test_every_good_message_of_the_log_is_in_the_lake(run: Run) -> None:
    gossip = "message not like 'bep50/%'"  # announcements of the DHT have no signature of libp2p
    good: set[str] = set()
    for frame in frames_of(run.servers):
        rpc = read_rpc(frame.payload)
        if frame.direction != Frame.IN or frame.protocol == BEP50 or not isinstance(rpc, RPC):
            continue
        for message in rpc.publish:
            if judge(message, "strict")[0] is Verdict.GOOD and isinstance(read_message(message.data), PubsubMessage):
                good.add(message_id(message))
    assert {row["message"] for row in run.kiln.sql(f"select message from messages where {gossip}")} == good
    run.kiln.check_updates_are_new_once()


def test_the_batches_are_those_of_the_model_over_the_log(run: Run) -> None:
    expected = expected_batches(read_log(run.servers, "kiln.updates"), WINDOW)
    assert len(expected) > 10
    assert set(read_batches(run.servers, "kiln.batches")) == expected
    rows = run.kiln.sql("select network, origin, separator_key, separator_value, cid from batches")
    assert Counter(tuple(row.values()) for row in rows) == Counter((*each.owner, each.cid) for each in expected)
    missed = "select stream, tip from updates where separator_key is not null except select stream, tip from batch_tips"
    assert run.kiln.sql(missed) == []


def test_each_batch_has_a_receipt(run: Run) -> None:
    # the catch-up closes the last windows, and has no bridge
    unsent = run.kiln.sql(
        "select cid, emitted_at from batches where cid not in (select cid from publications) "
        "and emitted_at < (select max(published_at) - interval 1 second from publications)"
    )
    assert unsent == []


def frames_of(servers: str) -> Iterator[Frame]:
    for records in read_records(servers, "kiln.frames").values():
        for _, _, value in records:
            frame = read_frame(value)
            assert isinstance(frame, Frame)
            yield frame
