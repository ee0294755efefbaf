"""The partition of a record is the one that kafka-python, like every Kafka client, chooses for its key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner import DefaultPartitioner, Partitioner

from kiln.bridge.kafka.producers import CachingPartitioner

TOPIC = "kiln.frames"


class Cluster:
    def __init__(self, partitions: int) -> None:
        self.partitions = set(range(partitions))

    def topics(self) -> set[str]:
        return {TOPIC}

    def partitions_for_topic(self, topic: str) -> set[int]:
        return set(self.partitions)

    available_partitions_for_topic = partitions_for_topic


@given(
    st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=20),
    st.lists(st.integers(min_value=1, max_value=24), min_size=1, max_size=4),
)
def test_partition_is_the_usual_one_also_when_a_topic_grows(keys: list[bytes], counts: list[int]) -> None:
    ours, usual = CachingPartitioner(), DefaultPartitioner()
    for count in counts:
        cluster = Cluster(count)
        for key in keys * 2:
            wanted = usual.partition(TOPIC, key, key, b"", b"", cluster)
            assert ours.partition(TOPIC, key, key, b"", b"", cluster) == wanted


def test_what_it_remembers_is_bounded() -> None:
    ours, usual, cluster = CachingPartitioner(), DefaultPartitioner(), Cluster(12)
    for number in range(5000):
        key = number.to_bytes(16, "big")
        assert ours.partition(TOPIC, key, key, b"", b"", cluster) == usual.partition(TOPIC, key, key, b"", b"", cluster)
        assert ours.cached_count <= 1024


def test_kafka_python_takes_it_for_a_partitioner() -> None:
    assert isinstance(CachingPartitioner(), Partitioner)
