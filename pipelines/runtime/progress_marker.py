"""How far a query has got, told to Kafka as the place of a consumer group: for a query that writes no table, against
which an older checkpoint could be held (decision 19). Tools that watch consumer groups see the query's lag by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import msgspec
from kafka.structs import OffsetAndMetadata

from kafka import KafkaConsumer, TopicPartition
from kiln.conf.process.kafka_clients import open_client
from kiln.schemas.kafka import topics as log


class ProgressReport(NamedTuple):
    """The newest micro-batch that a query told of, and where it ends."""

    query_id: str
    batch: int
    ends: log.Offsets


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    """Beside each offset: JSON of this."""

    query_id: str
    batch: int


_METADATA = msgspec.json.Decoder(_Metadata)


class ProgressMarker:
    """The place of one query, as the group of the query's full name. For one thread at a time. KafkaError."""

    def __init__(self, client_options: Mapping[str, object], group: str) -> None:
        """`client_options`: kafka-python's."""
        self._consumer = open_client(KafkaConsumer, **client_options, group_id=group, enable_auto_commit=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def commit(self, query_id: str, batch: int, ends: log.Offsets) -> None:
        """Keeps where a micro-batch ends."""
        metadata = msgspec.json.encode(_Metadata(query_id, batch)).decode()
        places = {TopicPartition(topic, part): at for topic, parts in ends.items() for part, at in parts.items()}
        self._consumer.commit({place: OffsetAndMetadata(at, metadata) for place, at in places.items()})

    def find_offsets_since(self, ends: log.Offsets, stamp: int) -> log.Offsets:
        """From which offset on the records before `ends` bear this stamp of the broker (ms), or a later one."""
        parts = {TopicPartition(topic, part): end for topic, parts in ends.items() for part, end in parts.items()}
        found = self._consumer.offsets_for_times(dict.fromkeys(parts, stamp))
        firsts = {part: end if found[part] is None else min(found[part].offset, end) for part, end in parts.items()}
        return {topic: {part.partition: at for part, at in firsts.items() if part.topic == topic} for topic in ends}

    def read(self, topic: str) -> ProgressReport | None:
        """What was told of a topic, by its full name. None: nothing, or Kafka has forgotten it, as Kafka does a week
        after the last time."""
        found: list[tuple[_Metadata, int, int]] = []
        for part in sorted(self._consumer.partitions_for_topic(topic) or ()):
            kept = self._consumer.committed(TopicPartition(topic, part), metadata=True)
            if kept is None:
                continue
            try:
                found.append((_METADATA.decode(kept.metadata), part, kept.offset))
            except msgspec.DecodeError:
                return None  # set by hand
        if not found:
            return None
        newest = max((metadata for metadata, _, _ in found), key=lambda metadata: metadata.batch)
        return ProgressReport(newest.query_id, newest.batch, {topic: {part: at for _, part, at in found}})
