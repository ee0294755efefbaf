"""How far the topics reach: the end offsets of all of Kiln's topics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

Ends = Mapping[str, Mapping[int, int]]
"""topic -> partition -> offset after the last record"""

_PATIENCE_MS = 1_000  # that the broker has to answer: the caller has a bridge and queries to look after


class TopicEnds:
    """Asks the broker for end offsets. While the broker is away, the last known offsets stand, and `error` says so."""

    def __init__(self, client_options: Mapping[str, object], topics: Iterable[str]) -> None:
        """`topics`: full names. KafkaError: there is no broker."""
        self._consumer = KafkaConsumer(**client_options, reconnect_backoff_max_ms=1_000)
        self._parts = [
            TopicPartition(topic, partition)
            for topic in topics
            for partition in self._consumer.partitions_for_topic(topic) or ()
        ]
        self.ends: Ends = {}
        """as of the last answer"""
        self.error = ""

    def read(self) -> Ends:
        """Asks the broker, and waits at most a second."""
        try:
            found: dict[str, dict[int, int]] = {}
            for part, end in self._consumer.end_offsets(self._parts, timeout_ms=_PATIENCE_MS).items():
                found.setdefault(part.topic, {})[part.partition] = end
            self.ends = found
            self.error = ""
        except KafkaError as error:
            self.error = f"the broker does not answer: {error}"
        return self.ends

    def close(self) -> None:
        self._consumer.close()
