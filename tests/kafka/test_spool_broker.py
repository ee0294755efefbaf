"""The frame sink with a real broker that pauses and dies: all frames arrive, in order on each connection."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient

from conftest import free_ports
from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.capture.sink import FrameSink
from kiln.bridge.capture.spool import Spool
from kiln.bridge.capture.tap import ConnectionTap
from kiln.bridge.kafka.producers import ONLY_REFUSALS, open_producer
from kiln.deploy.stack.embedded_broker import EmbeddedBroker, find_running_broker
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.schemas.kafka.frames import read_frame
from kiln.schemas.kafka.topics import MAX_RECORD, TOPICS
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kit.awaiting import awaited
from kit.broker_access import client, security

pytestmark = pytest.mark.kafka

CONNECTIONS = 8


@pytest.fixture(scope="module")
def own_broker(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    port, controller_port = free_ports(2)
    with EmbeddedBroker(tmp_path_factory.mktemp("own"), port, controller_port, broker_classpath, "256m") as running:
        yield running


@pytest.fixture
def faulty_broker(own_broker: EmbeddedBroker) -> EmbeddedBroker:
    """A running broker of the tests of this module, which may pause it, kill it and start it again."""
    own_broker.start()
    return own_broker


def new_sink(address: str, topic: str, folder: Path, limit: int = 256 << 20) -> FrameSink:
    spool = Spool(folder, limit, durable=True)
    return FrameSink(partial(open_producer, client(address), (topic,), ONLY_REFUSALS), topic, spool, 16 << 20)


def all_there(sink: FrameSink) -> bool:
    return sink.status().waiting == 0


def error_of(sink: FrameSink) -> str:
    return sink.status().error or ""


def more_spooled(sink: FrameSink) -> Callable[[], bool]:
    """Whether more is spooled than now."""
    before = sink.status().spooled
    return lambda: sink.status().spooled > before


class Peers:
    """Sends frames on some connections, at a pace, in a thread of its own, until told to stop.

    It sends none while the sink is full.
    """

    def __init__(self, sink: FrameSink, rate: int, size: int = 300) -> None:
        self.sink = sink
        self._rate = rate
        self._size = size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sent: dict[bytes, int] = defaultdict(int)
        self._thread.start()

    def _run(self) -> None:
        connections = [
            ConnectionTap("local-test", bytes([number]) * 16, b"us", b"them", "/meshsub/1.2.0")
            for number in range(CONNECTIONS)
        ]
        while not self._stop.wait(0.02):
            for _ in range(0 if self.sink.full else self._rate // 50 // CONNECTIONS):
                for connection in connections:
                    self.sink.put(connection.id, connection.frame("IN", random.randbytes(self._size), time.time_ns()))
                    self.sent[connection.id] += 1

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return sum(self.sent.values())


def firsts(address: str, topic: str) -> dict[bytes, list[int]]:
    """The sequences of each connection in the topic, first copies only, in the order of the log."""
    consumer = KafkaConsumer(**client(address), consumer_timeout_ms=30_000)
    parts = [TopicPartition(topic, partition) for partition in consumer.partitions_for_topic(topic)]
    consumer.assign(parts)
    consumer.seek_to_beginning(*parts)
    ends = consumer.end_offsets(parts)
    found: dict[bytes, dict[int, None]] = defaultdict(dict)
    while any(consumer.position(part) < end for part, end in ends.items()):
        for records in consumer.poll(timeout_ms=500).values():
            for record in records:
                frame = read_frame(record.value)
                assert isinstance(frame, Frame)
                assert record.key == frame.connection
                found[frame.connection].setdefault(frame.sequence)
    consumer.close()
    return {connection: list(sequences) for connection, sequences in found.items()}


def count_in_order(address: str, topic: str) -> dict[bytes, int]:
    """Number of frames of each connection in the topic, which must be its first ones in their order."""
    found = firsts(address, topic)
    for sequences in found.values():
        assert sequences == list(range(1, len(sequences) + 1))
    return {connection: len(sequences) for connection, sequences in found.items()}


def make_topics(broker: EmbeddedBroker, prefix: str) -> str:
    ensure_topics(
        broker.address,
        prefix,
        {"frames": 2, "updates": 1},
        dict.fromkeys(TOPICS, timedelta(days=1)),
        client_options=security(broker.address),
    )
    return f"{prefix}frames"


def test_broker_pauses(tmp_path: Path, faulty_broker: EmbeddedBroker, prefix: str) -> None:
    broker = faulty_broker
    topic = make_topics(broker, prefix)
    assert broker.pid is not None
    sink = new_sink(broker.address, topic, tmp_path / "spool")
    peers = Peers(sink, 2_000)
    assert awaited(lambda: sink.status().acknowledged > 1_000)
    assert error_of(sink) == ""
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        assert awaited(lambda: sink.status().spooled > 5_000)
        assert "frames wait for Kafka" in error_of(sink)
        assert sink.status().memory_bytes < 4_000_000
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    assert awaited(lambda: sink.status().waiting < 1_000)
    put = peers.stop()
    assert awaited(partial(all_there, sink))
    assert error_of(sink) == ""
    assert sink.close(10) == 0
    assert put == sink.status().put
    assert count_in_order(broker.address, topic) == peers.sent
    assert list((tmp_path / "spool").iterdir()) == []


def test_broker_is_killed_and_comes_back(tmp_path: Path, faulty_broker: EmbeddedBroker, prefix: str) -> None:
    broker = faulty_broker
    topic = make_topics(broker, prefix)
    sink = new_sink(broker.address, topic, tmp_path / "spool")
    peers = Peers(sink, 400)
    assert awaited(lambda: sink.status().acknowledged > 200)
    for _ in range(2):
        assert broker.pid is not None
        spooling = more_spooled(sink)
        os.kill(broker.pid, signal.SIGKILL)
        assert awaited(lambda: find_running_broker(broker.state) is None)
        assert awaited(lambda: broker.pid is None)
        assert awaited(spooling)
        broker.start()
        assert awaited(lambda: sink.status().waiting < 1_000)
    peers.stop()
    assert awaited(partial(all_there, sink))
    assert error_of(sink) == ""
    assert sink.close(10) == 0
    assert count_in_order(broker.address, topic) == peers.sent


def test_spool_outlives_the_process_and_the_broker(tmp_path: Path, faulty_broker: EmbeddedBroker, prefix: str) -> None:
    """A process that ends in peace, and one that is killed. Both at a time when Kafka is away."""
    broker = faulty_broker
    topic = make_topics(broker, prefix)
    address = broker.address
    broker.stop()
    sink = new_sink(address, topic, tmp_path / "ended")
    peers = Peers(sink, 2_000)
    assert awaited(lambda: sink.status().spooled > 1_000)
    peers.stop()
    assert sink.close(3_600) == 0, "frames are lost"  # and does not wait for a broker that is away
    arguments = [sys.executable, "-c", CHILD, str(tmp_path / "killed")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        in_spool = next(int(line) for line in child.stdout if int(line) > 1_000)
        child.kill()

    broker.start()
    for name in ("ended", "killed"):
        sink = new_sink(address, topic, tmp_path / name)
        assert awaited(partial(all_there, sink))
        assert sink.close(10) == 0
    found = count_in_order(address, topic)
    assert found.pop(b"k" * 16) >= in_spool
    assert found == peers.sent


CHILD = """
import itertools, sys, time
from pathlib import Path
from kiln.bridge.capture.sink import FrameSink
from kiln.bridge.capture.spool import Spool
from kiln.bridge.capture.tap import ConnectionTap
from kiln.bridge.kafka.producers import FramesProducerError

def connect():
    raise FramesProducerError("away")

sink = FrameSink(connect, "frames", Spool(Path(sys.argv[1]), 1 << 26, durable=True), 1 << 24)
connection = ConnectionTap("local-test", b"k" * 16, b"us", b"them", "/meshsub/1.2.0")
for number in itertools.count():
    sink.put(connection.id, connection.frame("IN", bytes(300), 1))
    if number % 20 == 0:
        print(sink.status().spooled, flush=True)
        time.sleep(0.01)  # the pace: 2,000 frames a second
"""


def test_a_full_spool_stops_the_peers_until_kafka_is_back(
    tmp_path: Path, faulty_broker: EmbeddedBroker, prefix: str
) -> None:
    broker = faulty_broker
    topic = make_topics(broker, prefix)
    assert broker.pid is not None
    sink = new_sink(broker.address, topic, tmp_path / "spool", 16 << 20)
    peers = Peers(sink, 2_000, size=10_000)
    assert awaited(lambda: sink.status().acknowledged > 100)
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        assert awaited(lambda: sink.full)
        assert "the spool is full" in error_of(sink)
        assert sum(path.stat().st_size for path in (tmp_path / "spool").iterdir()) <= 16 << 20
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    assert awaited(lambda: not sink.full)
    peers.stop()
    assert awaited(partial(all_there, sink))
    assert error_of(sink) == ""
    assert sink.close(10) == 0
    assert count_in_order(broker.address, topic) == peers.sent


def longest_record(address: str, topic: str, size: int) -> None:
    """Set the longest batch of records that the broker takes for the topic, in bytes, and wait until it applies."""
    resource = ConfigResource(ConfigResourceType.TOPIC, topic, {"max.message.bytes": size})
    with KafkaAdminClient(**client(address)) as admin:
        admin.alter_configs([resource])

        def applied() -> bool:
            described = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
            return bool(described["topic"][topic]["max.message.bytes"]["value"] == str(size))

        assert awaited(applied)


def test_nothing_overtakes_a_frame_that_the_broker_refuses(tmp_path: Path, broker: EmbeddedBroker, prefix: str) -> None:
    topic = make_topics(broker, prefix)
    longest_record(broker.address, topic, 200_000)
    sink = new_sink(broker.address, topic, tmp_path / "spool")
    connection = ConnectionTap("n", b"a" * 16, b"", b"", "/meshsub/1.2.0")
    for number in range(1, 101):
        payload = random.randbytes(300_000 if number == 51 else 300)
        sink.put(connection.id, connection.frame("IN", payload, number))
    assert awaited(lambda: "Message size too large" in error_of(sink))
    longest_record(broker.address, topic, MAX_RECORD)
    assert awaited(partial(all_there, sink))
    assert error_of(sink) == ""
    assert sink.close(5) == 0
    assert firsts(broker.address, topic) == {connection.id: list(range(1, 101))}


def test_topic_that_is_missing_is_told(tmp_path: Path, broker: EmbeddedBroker, prefix: str) -> None:
    sink = new_sink(broker.address, f"{prefix}frames", tmp_path / "spool")
    sink.put(b"a" * 16, ConnectionTap("n", b"a" * 16, b"", b"", "/meshsub/1.2.0").frame("IN", b"x", 1))
    assert awaited(lambda: f"{prefix}frames" in error_of(sink))
    assert awaited(lambda: sink.status().spooled == 1)
    make_topics(broker, prefix)
    assert awaited(partial(all_there, sink))
    assert error_of(sink) == ""
    assert sink.close(5) == 0
    assert list(firsts(broker.address, f"{prefix}frames").values()) == [[1]]
