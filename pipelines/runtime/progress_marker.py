"""Progress of a query, committed to Kafka as the offsets of a consumer group. It is for a query that writes no table:
there is no table with which an older checkpoint could be compared (decision 19). Tools for consumer groups then show
the query's lag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import msgspec
from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, TopicPartition
from kiln.conf.process.kafka_clients import open_client
from kiln.schemas.kafka import topics as log


class ProgressReport(NamedTuple):
    """The newest micro-batch that a query committed, and its end offsets."""

    query_id: str
    batch_id: int
    ends: log.Offsets


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of each committed offset, as JSON."""

    query_id: str
    batch_id: int


_METADATA = msgspec.json.Decoder(_Metadata)


class ProgressMarker:
    """Offsets of one query, in the group of the query's full name. For one thread at a time."""

    def __init__(self, client_options: Mapping[str, object], group: str) -> None:
        """Open the consumer. `client_options`: kafka-python's options."""
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
        """Find the offsets, before `ends`, of the first records with this broker stamp (ms) or a later one."""
        parts = {TopicPartition(topic, part): end for topic, parts in ends.items() for part, end in parts.items()}
        by_time = self._consumer.offsets_for_times(dict.fromkeys(parts, stamp))
        firsts = {part: end if by_time[part] is None else min(by_time[part].offset, end) for part, end in parts.items()}
        return {topic: {part.partition: at for part, at in firsts.items() if part.topic == topic} for topic in ends}

    def read(self, topic: str) -> ProgressReport | None:
        """Read the progress in a topic, by its full name.

        Returns:
            None if nothing was committed, or if Kafka has expired the commit, a week after the last one.
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
                return None  # set by hand
            offsets[part] = committed.offset
            if newest is None or metadata.batch_id > newest.batch_id:
                newest = metadata
        return None if newest is None else ProgressReport(newest.query_id, newest.batch_id, {topic: offsets})
