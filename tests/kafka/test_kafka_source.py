"""A worker's own reader of Kafka, and the planner of its ranges, on a real broker."""

from __future__ import annotations

import random
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from kafka.admin import NewPartitions, NewTopic
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kiln.conf.process.librdkafka import librdkafka_options
from kiln.conf.process.location import parse_location
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.pipelines.runtime import kafka
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.kafka import KafkaReader, KafkaSource, TaskRanges, pack_task
from kiln.pipelines.runtime.kafka_offsets import list_partitions
from kiln.pipelines.runtime.kafka_ranges import (
    RECORDS,
    ClientOptions,
    LostRecordsError,
    OffsetRange,
    read_ranges,
)
from kiln.schemas.kafka.topics import MAX_RECORD
from kit.awaiting import wait_until
from kit.broker_access import client
from kit.strange_records import Writer

pytestmark = pytest.mark.kafka

Row = tuple[str, int, int, int, bytes | None, bytes | None]
"""RECORDS"""


AS_IS = pack_task(lambda rows: rows)


class Log:
    """A topic with two partitions, and the clients that write and shorten it."""

    def __init__(self, address: str, prefix: str) -> None:
        self.address = address
        self.prefix, self.topic = prefix, f"{prefix}frames"
        self.client = client(address)
        self.options: ClientOptions = (*librdkafka_options(self.client).items(), ("group.id", f"{prefix}reader"))
        with KafkaAdminClient(**self.client) as admin:
            admin.create_topics([NewTopic(self.topic, 2, 1)])

    def write(self, *values: tuple[int, bytes | None, bytes | None], transaction: str | None = None) -> None:
        """Records: partition, key, value. A transaction ends with an offset that has no record."""
        producer = KafkaProducer(**self.client, transactional_id=transaction, max_request_size=MAX_RECORD)
        if transaction:
            producer.init_transactions()
            producer.begin_transaction()
        for partition, key, value in values:
            producer.send(self.topic, value=value, key=key, partition=partition)
        if transaction:
            producer.commit_transaction()
        producer.flush()
        producer.close()

    def truncate(self, partition: int, before: int) -> None:
        with KafkaAdminClient(**self.client) as admin:
            admin.delete_records({TopicPartition(self.topic, partition): before})

    def rows(self) -> list[Row]:
        """Read all records with kafka-python."""
        parts = [TopicPartition(self.topic, partition) for partition in (0, 1)]
        consumer = KafkaConsumer(**self.client, max_partition_fetch_bytes=16 << 20)
        consumer.assign(parts)
        consumer.seek_to_beginning(*parts)
        ends, rows = consumer.end_offsets(parts), []
        while any(consumer.position(part) < ends[part] for part in parts):
            rows += [
                ("frames", each.partition, each.offset, each.timestamp * 1000, each.key, each.value)
                for each in chain.from_iterable(consumer.poll(timeout_ms=1000).values())
            ]
        consumer.close()
        return sorted(rows)

    def read(self, *ranges: tuple[int, int, int]) -> list[Row]:
        """Read ranges (partition, first, end) as a worker does."""
        wanted = [OffsetRange(self.topic, *each) for each in ranges]
        rows: list[Row] = []
        for batch in read_ranges(wanted, self.options, self.prefix):
            assert batch.schema == RECORDS
            rows += zip(*(column.to_pylist() for column in batch.columns), strict=True)
        for partition, _, _ in ranges:
            offsets = [row[2] for row in rows if row[1] == partition]
            assert offsets == sorted(offsets)
        return sorted(rows)

    def reader(self, max_records: int = 0) -> KafkaReader:
        return KafkaReader(KafkaSource((self.topic,), self.prefix, self.options, max_records), {}, AS_IS)


@pytest.fixture
def log(broker: EmbeddedBroker, prefix: str) -> Log:
    return Log(broker.address, prefix)


def test_a_worker_reads_exactly_the_ranges(log: Log) -> None:
    """Records of no bytes, of none, and of megabytes; ranges within the log and up to its end."""
    sizes = [0, 1, 300, 70_000, 2_000_000]
    picked = random.Random(1)
    records = [(n % 2, None if n % 3 else b"key %d" % n, picked.randbytes(sizes[n % 5])) for n in range(200)]
    log.write(*records, (0, b"key", None))
    everything = log.rows()
    assert len(everything) == 201
    assert log.read((0, 0, 101), (1, 0, 100)) == everything
    for ranges in [((0, 7, 60),), ((1, 99, 100), (0, 100, 101)), ((0, 0, 1), (1, 50, 50))]:
        parts = {part: range(first, end) for part, first, end in ranges}
        assert log.read(*ranges) == [row for row in everything if row[2] in parts.get(row[1], ())]
    assert log.read() == []


def test_offsets_without_records_end_a_range(log: Log) -> None:
    """A transaction leaves such an offset, within the log and at its end."""
    log.write((0, None, b"one"), (0, None, b"two"), transaction=f"{log.topic} t")
    assert [row[5] for row in log.read((0, 0, 3))] == [b"one", b"two"]
    log.write((0, None, b"three"))
    assert [row[5] for row in log.read((0, 0, 3))] == [b"one", b"two"]
    assert log.read((0, 2, 3)) == []
    assert [row[5] for row in log.read((0, 2, 4))] == [b"three"]


def test_only_what_is_committed_is_read(log: Log) -> None:
    start = {log.topic: {"0": 0, "1": 0}}
    log.write((0, None, b"one"))
    Writer(log.address, "none", f"{log.topic} aborted").abort({log.topic: b"aborted"})
    log.write((0, None, b"two"))
    assert [row[5] for row in log.read((0, 0, 4))] == [b"one", b"two"]
    assert log.read((0, 1, 2), (1, 0, 0)) == []
    producer = KafkaProducer(**log.client, transactional_id=f"{log.topic} open")
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(log.topic, value=b"three", partition=0)
    producer.flush()
    log.write((0, None, b"four"))
    reader = log.reader()
    assert reader.latestOffset(start, ReadAllAvailable()) == {log.topic: {"0": 4, "1": 0}}
    producer.commit_transaction()
    producer.close()
    wait_until(
        lambda: reader.latestOffset(start, ReadAllAvailable())[log.topic]["0"] == 7, "the end of the transaction"
    )
    assert [row[5] for row in log.read((0, 0, 7))] == [b"one", b"two", b"three", b"four"]


def test_records_that_are_missing_are_never_skipped(log: Log) -> None:
    log.write(*((0, None, b"%d" % n) for n in range(20)))
    with pytest.raises(LostRecordsError, match=r"to 20 of \S+frames-0: the partition ends at the offset 20"):
        log.read((0, 5, 21))
    log.truncate(0, before=10)
    assert len(log.read((0, 10, 20))) == 10
    with pytest.raises(LostRecordsError, match=r"cannot read the offsets 5 to 19 of \S+frames-0"):
        log.read((0, 5, 20))


def test_the_planner_reads_to_the_end_of_the_log_within_its_limit(log: Log) -> None:
    log.write(*((n % 4 // 3, None, b"%d" % n) for n in range(40)))
    start = {log.topic: {"0": 0, "1": 0}}
    reader = log.reader(max_records=8)
    assert reader.getDefaultReadLimit() == ReadMaxRows(8)
    assert reader.latestOffset(start, ReadAllAvailable()) == {log.topic: {"0": 30, "1": 10}}
    assert reader.latestOffset(start, ReadMaxRows(8)) == {log.topic: {"0": 6, "1": 2}}
    done = {log.topic: {"0": 30, "1": 10}}
    assert reader.latestOffset(done, ReadMaxRows(8)) == done
    assert list(reader.partitions(done, done)) == []
    (task,) = reader.partitions({log.topic: {"0": 29}}, done)  # of partition 1 nothing was planned before
    assert isinstance(task, TaskRanges)
    assert sorted(task.ranges) == [(log.topic, 0, 29, 30), (log.topic, 1, 0, 10)]
    assert sum(batch.num_rows for batch in reader.read(task)) == 11
    with pytest.raises(LostRecordsError, match="frames-0 ends at the offset 30, but was read up to 31"):
        reader.latestOffset({log.topic: {"0": 31, "1": 10}}, ReadAllAvailable())
    with pytest.raises(LostRecordsError, match="frames-2 ends at the offset 0, but was read up to 1"):
        reader.latestOffset({log.topic: {"0": 30, "1": 10, "2": 1}}, ReadAllAvailable())


def test_a_partition_that_is_added_to_a_running_query_is_read_from_its_beginning(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.write((0, None, b"old"))
    reader, start = log.reader(), {log.topic: {"0": 1, "1": 0}}
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    with KafkaAdminClient(**log.client) as admin:
        admin.create_partitions({log.topic: NewPartitions(3)})
    log.write((2, None, b"new"))
    monkeypatch.setattr(kafka, "_LIST_EVERY", 0.0)
    end = reader.latestOffset(start, ReadMaxRows(100))
    assert end == {log.topic: {"0": 1, "1": 0, "2": 1}}
    (task,) = reader.partitions(start, end)
    assert task.ranges == [(log.topic, 2, 0, 1)]


def test_a_query_waits_while_no_broker_answers_and_fails_after_a_minute(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**dict(log.options), "bootstrap.servers": "127.0.0.1:1"}
    reader = KafkaReader(KafkaSource((log.topic,), log.prefix, tuple(options.items())), {}, AS_IS)
    start = {log.topic: {"0": 3, "1": 0}}
    monkeypatch.setattr(kafka, "list_partitions", partial(list_partitions, timeout=0.1))
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    monkeypatch.setattr(kafka, "_PATIENCE", 0.0)
    with pytest.raises(KafkaException):
        reader.latestOffset(start, ReadAllAvailable())


def test_the_beginning_of_the_first_micro_batch_stays_where_it_was(log: Log, tmp_path: Path) -> None:
    """A crash may repeat it after retention has removed some of its records: then the query must fail."""
    log.write(*((0, None, b"%d" % n) for n in range(20)))
    log.truncate(0, before=4)
    source = KafkaSource((log.topic,), log.prefix, log.options)
    checkpoint = Checkpoint(parse_location(tmp_path / "archive"))
    first = {log.topic: {"0": 4, "1": 0}}
    assert kafka.load_first_offsets(checkpoint, source) == first
    log.truncate(0, before=12)
    assert kafka.load_first_offsets(checkpoint, source) == first
    assert checkpoint.first_offsets == {log.topic: {0: 4, 1: 0}}
