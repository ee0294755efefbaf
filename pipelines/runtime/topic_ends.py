"""End offsets of Kiln's topics."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress

from kafka.errors import KafkaError

from kafka import KafkaConsumer, TopicPartition
from kiln.conf.process.kafka_clients import open_client
from kiln.conf.process.kafka_topics import CHECK_EVERY, TopicIdentity
from kiln.pipelines.runtime.topics import KafkaTopics

Ends = Mapping[str, Mapping[int, int]]
"""topic -> partition -> offset after the last record"""

_PATIENCE_MS = 1_000  # short, because the caller also watches the bridge and the queries


class TopicEnds:
    """Reader of end offsets from the broker. While it does not answer, the last known offsets stay, and `error` is set.

    A thread checks for added partitions. A topic that was deleted is left out from then on.
    """

    def __init__(
        self, client_options: Mapping[str, object], topics: Iterable[str], check_every: float = CHECK_EVERY
    ) -> None:
        """Read the partitions, and start the thread.

        Args:
            client_options: kafka-python's options.
            topics: Full names.
            check_every: Interval of the thread, s.

        Raises:
            KafkaError: No broker answers.
        """
        self._options = client_options
        self._names = tuple(topics)
        self._topics = KafkaTopics(lambda: client_options)
        self._known_parts = _list_partitions(self._topics.read_identities(self._names))
        self._parts: list[TopicPartition] = []
        self._consumer: KafkaConsumer | None = None
        self._check_every = check_every
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch_partitions, name="topics", daemon=True)
        self._thread.start()
        self.ends: Ends = {}
        """end offsets in the broker's last response"""
        self.error = ""

    def read(self) -> Ends:
        """Read the end offsets, and wait at most a second."""
        try:
            if self._consumer is None or self._parts != self._known_parts:
                self._connect()
            assert self._consumer is not None
            ends: dict[str, dict[int, int]] = {}
            for part, end in self._consumer.end_offsets(self._parts, timeout_ms=_PATIENCE_MS).items():
                ends.setdefault(part.topic, {})[part.partition] = end
            self.ends = ends
            self.error = ""
        except KafkaError as error:
            self.error = f"the broker does not answer: {error}"
        return self.ends

    def _connect(self) -> None:
        """Connect again, because kafka-python's consumer does not learn of partitions added after it connected."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        parts = self._known_parts
        self._consumer = open_client(
            KafkaConsumer,
            **self._options,
            reconnect_backoff_max_ms=1_000,
            bootstrap_timeout_ms=_PATIENCE_MS,
            isolation_level="read_committed",  # nothing behind an open transaction is read, so it is no lag
        )
        self._parts = parts

    def _watch_partitions(self) -> None:
        while not self._closed.wait(self._check_every):
            with suppress(KafkaError, OSError):  # `read` reports it
                self._known_parts = _list_partitions(self._topics.read_identities(self._names))
        self._topics.close()

    def close(self) -> None:
        self._closed.set()
        if self._consumer is not None:
            self._consumer.close()


def _list_partitions(topics: Mapping[str, TopicIdentity]) -> list[TopicPartition]:
    return [TopicPartition(topic, part) for topic, state in topics.items() for part in range(state.partitions)]
