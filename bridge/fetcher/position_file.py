"""The fetcher's place once more, in a file: for the day on which Kafka has lost the committed one.

Brokers forget a place that nobody commits for a week, by default. The file has what was committed last, by partition.
It names the topic by its id, because the place of another topic of that name is no place. Of several bridges the leader
alone has the file: that of a bridge that led before would tell an old place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kiln.schemas.kafka.records import UNREADABLE


class FilePosition(msgspec.Struct, frozen=True):
    """As committed."""

    offset: int
    metadata: str


class _PositionJson(msgspec.Struct, frozen=True):
    """The file: JSON of this."""

    topic: str
    places: dict[int, FilePosition]


_FILED = msgspec.json.Decoder(_PositionJson)


class PositionFile:
    """The file of one consumer group on one topic."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self, topic: str) -> Mapping[int, FilePosition] | None:
        """The places in this topic, by partition. None: there is no file, or one of another topic, or an unreadable
        one. OSError."""
        try:
            filed = _FILED.decode(self._path.read_bytes())
        except (FileNotFoundError, *UNREADABLE):
            return None
        return filed.places if filed.topic == topic else None

    def write(self, topic: str, places: Mapping[int, FilePosition]) -> None:
        """Replaces the file in one step. OSError."""
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(_PositionJson(topic, dict(places))))
        fresh.replace(self._path)

    def remove(self) -> None:
        """Removes the file, if it is there. OSError."""
        self._path.unlink(missing_ok=True)
