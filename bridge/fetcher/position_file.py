"""A copy of the fetcher's committed offsets in a file, for the case that Kafka loses them.

Brokers forget an offset that is not committed for a week, by default. The file holds what was committed last, by
partition, and names the topic by its id, because offsets of another topic of that name mean nothing. Of several bridges
only the leader has the file: that of a former leader would hold old offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kiln.conf.process.small_files import read_small_file
from kiln.schemas.kafka.records import UNREADABLE


class FilePosition(msgspec.Struct, frozen=True):
    """The committed offset and metadata of a partition."""

    offset: int
    metadata: str


class _PositionJson(msgspec.Struct, frozen=True):
    """JSON in the file."""

    topic: str
    positions: dict[int, FilePosition]


_DECODER = msgspec.json.Decoder(_PositionJson)


class PositionFile:
    """The file of one consumer group on one topic."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self, topic: str) -> Mapping[int, FilePosition] | None:
        """Return the positions in this topic by partition, or `None` without a readable file of this topic.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            content = _DECODER.decode(read_small_file(self._path))
        except (FileNotFoundError, *UNREADABLE):
            return None
        return content.positions if content.topic == topic else None

    def write(self, topic: str, positions: Mapping[int, FilePosition]) -> None:
        """Replace the file atomically.

        Raises:
            OSError: the file cannot be written.
        """
        partial = self._path.with_suffix(".new")
        partial.write_bytes(msgspec.json.encode(_PositionJson(topic, dict(positions))))
        partial.replace(self._path)

    def remove(self) -> None:
        """Remove the file if it exists.

        Raises:
            OSError: the file cannot be removed.
        """
        self._path.unlink(missing_ok=True)
