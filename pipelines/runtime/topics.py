"""Kafka topics, as the driver of a query sees them: ids, end offsets, and the progress of a query as committed offsets.

Spark identifies a topic only by its name. If a topic was deleted and created again, Spark would continue at the old
offset once the new topic has as many records, and would skip the records before it. So the topic ids of a checkpoint
are compared with those of the broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

import msgspec
from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as Assignment
from confluent_kafka.admin import AdminClient
from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, TopicPartition
from kiln.conf.process.kafka_clients import open_client
from kiln.conf.process.kafka_topics import CHECK_EVERY, TopicIdentity, describe_replaced_topic, describe_topics
from kiln.conf.process.librdkafka import LIBRDKAFKA_LOG, librdkafka_options
from kiln.pipelines.runtime.kafka_offsets import LATEST, list_partitions, read_offsets
from kiln.schemas.kafka import topics as log

if TYPE_CHECKING:
    from kafka.admin import OffsetSpec

    from kafka import KafkaAdminClient

_PATIENCE_MS: Final = 5_000


class TopicState(NamedTuple):
    """Current state of a topic, with offsets by partition."""

    id: str
    begin: Mapping[int, int]
    """offset of the oldest record"""
    end: Mapping[int, int]
    """offset after the newest record"""


class Topics(Protocol):
    """Reader of the topics of a broker, by name with prefix."""

    def read_states(self, topics: Iterable[str]) -> Mapping[str, TopicState]: ...
    def read_identities(self, topics: Iterable[str]) -> Mapping[str, TopicIdentity]: ...
    def close(self) -> None: ...


class KafkaTopics:
    """Reader of topics of a Kafka broker, by name with prefix. It omits topics that do not exist. For one thread."""

    def __init__(self, client_options: Callable[[], Mapping[str, object]]) -> None:
        """Create a reader, which connects at the first read. `client_options`: returns kafka-python's options."""
        self._options = client_options
        self._client: KafkaAdminClient | None = None

    def read_states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        """Read the ids, and the first and end offsets, of topics.

        Raises:
            KafkaError: No broker answers.
        """
        from kafka.admin import OffsetSpec  # slow, and `kiln status` may need no Kafka

        identities = self.read_identities(topics)
        begin, end = (self._read_offsets(identities, spec) for spec in (OffsetSpec.EARLIEST, OffsetSpec.LATEST))
        return {topic: TopicState(identity.id, begin[topic], end[topic]) for topic, identity in identities.items()}

    def _read_offsets(self, topics: Mapping[str, TopicIdentity], spec: OffsetSpec) -> dict[str, dict[int, int]]:
        from kafka.protocol.consumer import IsolationLevel

        from kafka import TopicPartition

        parts = [
            TopicPartition(topic, part) for topic, identity in topics.items() for part in range(identity.partitions)
        ]
        # the end is the offset at which readers stop: that of the first open transaction, if any
        specs = dict.fromkeys(parts, spec)
        answer = self._admin.list_partition_offsets(specs, IsolationLevel.READ_COMMITTED) if parts else {}
        offsets: dict[str, dict[int, int]] = {topic: {} for topic in topics}
        for part in parts:
            offsets[part.topic][part.partition] = answer[part].offset
        return offsets

    def read_identities(self, topics: Iterable[str]) -> dict[str, TopicIdentity]:
        """Read the ids and numbers of partitions of topics.

        Raises:
            KafkaError: No broker answers.
        """
        return describe_topics(self._admin, topics)

    @property
    def _admin(self) -> KafkaAdminClient:
        from kafka import KafkaAdminClient
        from kiln.conf.process.kafka_clients import open_client

        if self._client is None:
            self._client = open_client(
                KafkaAdminClient,
                **self._options(),
                bootstrap_timeout_ms=_PATIENCE_MS,
                request_timeout_ms=_PATIENCE_MS,
                reconnect_backoff_max_ms=1_000,
            )
        return self._client

    def close(self) -> None:
        """Close the connection. The next read opens another one."""
        if self._client is not None:
            self._client.close()
            self._client = None


class OffsetMismatch(NamedTuple):
    """A topic that was created again, or has lost records, since a checkpoint stored offsets of it."""

    description: str
    begin: Mapping[int, int]
    """offsets by partition at which the query can continue"""


def find_mismatches(
    saved: Mapping[str, str], read: log.Offsets, states: Mapping[str, TopicState]
) -> dict[str, OffsetMismatch]:
    """Compare the topic ids and offsets of a checkpoint with the topics of the broker.

    Topic names include the prefix.

    Args:
        saved: Topic ids in the checkpoint.
        read: End offsets of the query's newest micro-batch, which may be unfinished.
        states: States of the topics that the query reads, by name.

    Returns:
        The mismatches by topic name, with the offsets at which the query can continue. A topic that was created again
            is read from its oldest record. A topic that has lost its newest records, for example with a broker's disk,
            is read from its end, or from its oldest record if the topic's id is not known.
    """
    mismatches: dict[str, OffsetMismatch] = {}
    for topic, state in states.items():
        known = saved.get(topic, "")
        offsets = read.get(topic, {})
        beyond = next(((part, at) for part, at in offsets.items() if at > state.end.get(part, 0)), None)
        if known and state.id and known != state.id:
            mismatches[topic] = OffsetMismatch(describe_replaced_topic(topic, known, state.id), state.begin)
        elif beyond is not None:
            part, at = beyond
            description = (
                f"{topic}-{part} ends at the offset {state.end.get(part, 0):,}, but was read up to {at:,}: the topic "
                "was deleted and created again, or has lost records"
            )
            readable = {part: min(offsets.get(part, 0), end) for part, end in state.end.items()}
            mismatches[topic] = OffsetMismatch(description, readable if known and state.id else state.begin)
    return mismatches


Ends = Mapping[str, Mapping[int, int]]
"""End offset (exclusive) by topic and partition"""

_END_PATIENCE: Final = 1.0  # s; short, because the caller also watches the bridge and the queries


class TopicEnds:
    """Reader of the end offsets of topics. It omits topics that do not exist. For one thread.

    While the broker does not answer, `ends` keeps the last known offsets, and `error` is set.
    """

    def __init__(
        self, client_options: Mapping[str, object], topics: Iterable[str], check_every: float = CHECK_EVERY
    ) -> None:
        """Create a reader, which connects in the background.

        Args:
            client_options: kafka-python's options.
            topics: Names of the topics, with prefix.
            check_every: Seconds between two checks for added partitions and deleted topics.
        """
        # librdkafka: kafka-python's admin client takes 10 s to notice that a broker hangs
        self._admin = AdminClient({**librdkafka_options(client_options)}, logger=LIBRDKAFKA_LOG)
        self._names = tuple(topics)
        self._check_every = check_every
        self._parts: list[Assignment] = []
        self._listed_at = -inf
        self.ends: Ends = {}
        """end offsets in the broker's last response"""
        self.error = ""

    def read(self) -> Ends:
        """Read the end offsets from the broker. If it does not answer within a second, return the last known ones."""
        now = time.monotonic()
        try:
            if now >= self._listed_at + self._check_every:
                self._parts = list_partitions(self._admin, self._names, _END_PATIENCE)
                self._listed_at = now
            ends: dict[str, dict[int, int]] = {}
            for part, end in read_offsets(self._admin, self._parts, LATEST, _END_PATIENCE).items():
                ends.setdefault(part.topic, {})[part.partition] = end.offset
            self.ends, self.error = ends, ""
        except (KafkaException, TimeoutError) as error:
            reason = error.args[0].str() if isinstance(error, KafkaException) else error
            self.error = f"the broker does not answer: {reason}. Check that it runs"
        return self.ends


class ProgressReport(NamedTuple):
    """The newest micro-batch whose progress a query has committed to Kafka, and its end offsets."""

    query_id: str
    batch_id: int
    ends: log.Offsets


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """Metadata that Kafka stores with each committed offset, as JSON."""

    query_id: str
    batch_id: int


_METADATA = msgspec.json.Decoder(_Metadata)


class ProgressMarker:
    """Progress of a query, committed as the offsets of a consumer group. For one thread at a time.

    A query without tables needs it to detect that its checkpoint comes from an old backup. For other queries, a newer
    micro-batch in a table reveals this (decision 19). From the committed offsets, tools for consumer groups also show
    the query's lag.
    """

    def __init__(self, client_options: Mapping[str, object], group: str) -> None:
        """Open the consumer.

        Args:
            client_options: kafka-python's options.
            group: Name of the consumer group: the query's name, with the prefix of the topics.
        """
        self._consumer = open_client(KafkaConsumer, **client_options, group_id=group, enable_auto_commit=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def commit(self, query_id: str, batch_id: int, ends: log.Offsets) -> None:
        """Commit the end offsets of a micro-batch."""
        metadata = msgspec.json.encode(_Metadata(query_id, batch_id)).decode()
        offsets = {TopicPartition(topic, part): at for topic, parts in ends.items() for part, at in parts.items()}
        self._consumer.commit({partition: OffsetAndMetadata(at, metadata) for partition, at in offsets.items()})

    def find_offsets_since(self, ends: log.Offsets, stamp: int) -> log.Offsets:
        """Find, by partition, the first offset whose record has the broker's timestamp `stamp` (ms) or a later one.

        If this is not before the offset in `ends`, the offset in `ends` is returned.
        """
        parts = {TopicPartition(topic, part): end for topic, parts in ends.items() for part, end in parts.items()}
        by_time = self._consumer.offsets_for_times(dict.fromkeys(parts, stamp))
        firsts = {part: end if by_time[part] is None else min(by_time[part].offset, end) for part, end in parts.items()}
        return {topic: {part.partition: at for part, at in firsts.items() if part.topic == topic} for topic in ends}

    def read(self, topic: str) -> ProgressReport | None:
        """Read the progress in a topic, by its name with prefix.

        Returns:
            None if nothing was committed, or if Kafka has deleted the offsets: by default, a week after the consumer
                group became inactive.
        """
        offsets: dict[int, int] = {}
        newest: _Metadata | None = None
        for part in sorted(self._consumer.partitions_for_topic(topic) or ()):
            committed = self._consumer.committed(TopicPartition(topic, part), metadata=True)
            if committed is None:
                continue
            try:
                metadata = _METADATA.decode(committed.metadata)
            except msgspec.DecodeError:
                return None  # the offset was set by hand
            offsets[part] = committed.offset
            if newest is None or metadata.batch_id > newest.batch_id:
                newest = metadata
        return None if newest is None else ProgressReport(newest.query_id, newest.batch_id, {topic: offsets})
