"""A broker, and a thread that makes batches from the frames in the broker without Spark, for tests of the bridge."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from conftest import free_ports
from kafka import KafkaConsumer, KafkaProducer
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.jars import list_jars
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.pipelines.batch.batching import build_batch_records
from kiln.pipelines.batch.offset_range import WindowKey
from kiln.pipelines.batch.windows import PartitionWindows, Window
from kiln.schemas.kafka.records import build_batch_key, encode
from kiln.schemas.kafka.topics import TOPICS
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.batch_block import MAX_BLOCK
from kiln.schemas.wire.cid import cid_bytes
from kiln.schemas.wire.identity import message_id
from kiln.schemas.wire.pubsub import PubsubMessage, read_message
from kiln.schemas.wire.topics import Separator, parse_topic
from kit.broker_access import client, security

WINDOW = 1_000_000  # µs
_PREFIX = "kiln."


@contextmanager
def running_broker(folder: Path) -> Iterator[EmbeddedBroker]:
    """Run an embedded broker with all of Kiln's topics for the duration of the context."""
    port, controller_port = free_ports(2)
    with EmbeddedBroker(folder, port, controller_port, list_jars("broker"), heap="256m") as broker:
        days = dict.fromkeys(TOPICS, timedelta(days=1))
        ensure_topics(broker.address, _PREFIX, {}, days, client_options=security(broker.address))
        yield broker


class LiveBatches:
    """A thread that reads new records of `kiln.frames`, and writes batches of their updates to `kiln.batches`.

    Other threads may read the attributes at any time. These only grow.
    """

    def __init__(self, address: str) -> None:
        self.captured: Counter[str] = Counter()
        """number of received copies, by message id"""
        self.captured_data: set[bytes] = set()
        """data of the received messages"""
        self.written_at: dict[str, float] = {}
        """monotonic time in seconds at which each batch was first written, by CID"""
        self._address = address
        self._windows = PartitionWindows(WINDOW)
        self._stopping = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread for the duration of the context. An error of the thread is raised at the end."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self._run)
            try:
                yield
            finally:
                self._stopping.set()
            done.result()

    def _run(self) -> None:
        topic = f"{_PREFIX}frames"
        consumer = KafkaConsumer(topic, **client(self._address), auto_offset_reset="earliest", group_id=None)
        producer = KafkaProducer(**client(self._address), acks="all")
        while not self._stopping.is_set():
            for records in consumer.poll(timeout_ms=100).values():
                for record in records:
                    self._write(producer, self._windows.advance(record.timestamp * 1000))
                    frame = Frame.FromString(record.value)
                    if frame.direction == Frame.IN and frame.payload:
                        for message in RPC.FromString(frame.payload).publish:
                            self._write(producer, self._add_message(message, frame))
            self._write(producer, self._windows.advance(time.time_ns() // 1000))
        producer.close()
        consumer.close()

    def _add_message(self, message: Message, frame: Frame) -> list[Window]:
        identity = message_id(message)
        self.captured[identity] += 1
        if self.captured[identity] > 1:
            return []
        self.captured_data.add(message.data)
        content = read_message(message.data)
        if not isinstance(content, PubsubMessage) or content.type != "UPDATE":
            return []
        topic = parse_topic(message.topic)
        separator = topic.separator if topic is not None else None
        if separator is None and content.model is not None:
            separator = Separator("model", content.model)
        if separator is None or content.stream is None or content.tip is None:
            return []
        key = WindowKey(frame.network, "LIVE", separator.key, separator.value)
        event_time = min(frame.observed_at // 1000, self._windows.log_time)
        return self._windows.add(key, content.stream, cid_bytes(content.tip), event_time)

    def _write(self, producer: KafkaProducer, windows: list[Window]) -> None:
        for closed in windows:
            for record in build_batch_records(closed, MAX_BLOCK):
                producer.send(
                    f"{_PREFIX}batches", key=build_batch_key(record.network, record.separator), value=encode(record)
                )
                self.written_at.setdefault(record.batch_cid, time.monotonic())
