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

_PATIENCE_MS = 1_000  # that the broker has to answer: the caller has a bridge and queries to look after


class TopicEnds:
    """Reader of end offsets from the broker. While it does not answer, the last known offsets stay, and `error` is set.

    A thread checks for added partitions. A topic that was deleted is left out from then on.
    """

    def __init__(
        self, client_options: Mapping[str, object], topics: Iterable[str], check_every: float = CHECK_EVERY
    ) -> None:
        """`topics`: full names; `check_every`: s between two looks for partitions. KafkaError: there is no broker."""
        self._options = client_options
        self._names = tuple(topics)
        self._topics = KafkaTopics(lambda: client_options)
        self._found = _partitions(self._topics.identities(self._names))
        self._parts: list[TopicPartition] = []
        self._consumer: KafkaConsumer | None = None
        self._check_every = check_every
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch_partitions, name="topics", daemon=True)
        self._thread.start()
        self.ends: Ends = {}
        """as of the last answer"""
        self.error = ""

    def read(self) -> Ends:
        """Read the end offsets, and wait at most a second."""
        try:
            if self._consumer is None or self._parts != self._found:
                self._connect()
            assert self._consumer is not None
            found: dict[str, dict[int, int]] = {}
            for part, end in self._consumer.end_offsets(self._parts, timeout_ms=_PATIENCE_MS).items():
                found.setdefault(part.topic, {})[part.partition] = end
            self.ends = found
            self.error = ""
        except KafkaError as error:
            self.error = f"the broker does not answer: {error}"
        return self.ends

    def _connect(self) -> None:
        """A consumer of kafka-python does not learn of partitions that were added since it has connected."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        parts = self._found
        self._consumer = open_client(
            KafkaConsumer, **self._options, reconnect_backoff_max_ms=1_000, bootstrap_timeout_ms=_PATIENCE_MS
        )
        self._parts = parts

    def _watch_partitions(self) -> None:
        while not self._closed.wait(self._check_every):
            with suppress(KafkaError, OSError):  # `read` says so
                self._found = _partitions(self._topics.identities(self._names))
        self._topics.close()

    def close(self) -> None:
        self._closed.set()
        if self._consumer is not None:
            self._consumer.close()


def _partitions(topics: Mapping[str, TopicIdentity]) -> list[TopicPartition]:
    return [TopicPartition(topic, part) for topic, each in topics.items() for part in range(each.partitions)]
