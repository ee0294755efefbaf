"""The ids of the topics in which a consumer group commits its offsets, in a file of the bridge's folder.

Kafka drops the offsets of a group together with the topic, so that no id in Kafka would outlive a topic that was
deleted and re-created. Of several bridges only the leader has the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kiln.conf.process.small_files import read_small_file
from kiln.schemas.kafka.records import UNREADABLE


class NotedTopic(msgspec.Struct, frozen=True):
    """The id of a topic. With `from_beginning`, committed offsets are ignored (`kiln recover`)."""

    id: str
    from_beginning: bool = False


_NOTES = msgspec.json.Decoder(dict[str, NotedTopic])


class TopicNotes:
    """The file of one consumer group: JSON of `NotedTopic` by full topic name. Methods raise `OSError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def group(self) -> str:
        """The part of the bridge whose file this is."""
        return self._path.stem.removeprefix(PREFIX)

    def read(self) -> dict[str, NotedTopic]:
        """Read the notes; none if there is no file, or a power cut has damaged it."""
        try:
            return _NOTES.decode(read_small_file(self._path))
        except (FileNotFoundError, *UNREADABLE):
            return {}

    def write(self, topics: Mapping[str, NotedTopic]) -> None:
        """Replace the file atomically."""
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(topics))
        new.replace(self._path)

    def remove(self) -> None:
        """Remove the file if it exists."""
        self._path.unlink(missing_ok=True)


PREFIX = "topics-"
"""Prefix of the file names."""


def locate_topic_notes(bridge_dir: Path, part: str) -> TopicNotes:
    """Locate the file of a part of the bridge, such as `publisher`."""
    return TopicNotes(bridge_dir / f"{PREFIX}{part}.json")


def list_topic_notes(bridge_dir: Path) -> list[TopicNotes]:
    """Find the files of all parts of a bridge."""
    return [TopicNotes(path) for path in sorted(bridge_dir.glob(f"{PREFIX}*.json"))]
