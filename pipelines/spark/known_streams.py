"""The verified separators of streams, read from `kiln.streams` by each Python worker as it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kafka import KafkaConsumer, TopicPartition

from schemas.records import UNREADABLE, SeparatorRecord, decode_stream

_POLL_MS: Final = 1_000
_PATIENCE_MS: Final = 30_000  # until a broker answers; after that the task fails, and the query starts again


@dataclass(frozen=True)
class StreamsTopic:
    """Where to read: the full name of the topic, brokers, and kafka-python's options as (name, value) pairs."""

    topic: str
    servers: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()


class KnownStreams:
    """The verified separators of all networks, as of the last `refresh`. Takes some 300 bytes for each stream."""

    def __init__(self, where: StreamsTopic) -> None:
        """kafka.errors.KafkaError: no broker answers."""
        self._known: dict[tuple[str, str], SeparatorRecord | None] = {}
        self._consumer = KafkaConsumer(
            bootstrap_servers=list(where.servers),
            **dict(where.options),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            bootstrap_timeout_ms=_PATIENCE_MS,
        )
        partitions = self._consumer.partitions_for_topic(where.topic) or set()
        self._parts = [TopicPartition(where.topic, partition) for partition in sorted(partitions)]
        self._consumer.assign(self._parts)
        if self._parts:
            self._consumer.seek_to_beginning(*self._parts)

    @property
    def known(self) -> Mapping[tuple[str, str], SeparatorRecord | None]:
        """By (network, StreamID). None: the genesis names no separator."""
        return self._known

    def refresh(self) -> None:
        """Reads on to where the topic ends now."""
        ends = self._consumer.end_offsets(self._parts) if self._parts else {}
        while any(self._consumer.position(part) < end for part, end in ends.items()):
            for records in self._consumer.poll(timeout_ms=_POLL_MS).values():
                for record in records:
                    self._take(record.value)

    def _take(self, value: bytes | None) -> None:
        try:
            stream = decode_stream(value or b"")
        except UNREADABLE:
            return  # the sink puts it into quarantine
        self._known[stream.network, stream.stream] = stream.separator


@lru_cache(maxsize=2)
def known_streams(where: StreamsTopic) -> KnownStreams:
    """The one `KnownStreams` of this process: a worker serves many tasks, and need not read the topic anew in each."""
    return KnownStreams(where)
