"""What a query's checkpoint says of the query: Spark's files, read and never written. No Spark takes part."""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

from kiln.conf.process.location import Location
from kiln.pipelines.runtime.dedup_store import read_dedup_state
from kiln.pipelines.runtime.trailing_clock import is_trailing
from kiln.schemas.kafka import topics as log
from kiln.schemas.kafka.records import Epoch

_NONE = -1

REPLACED_EPOCH_FILE = "stands-for"
"""A file of Kiln's in a checkpoint: an epoch as JSON."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with `metadata`, `offsets/` and `commits/`, as Structured Streaming keeps them."""

    path: Location

    @property
    def exists(self) -> bool:
        return (self.path / "metadata").exists()

    @property
    def query_id(self) -> str:
        """The id that the query has for life. OSError, ValueError: the file cannot be read."""
        return str(json.loads((self.path / "metadata").read())["id"])

    @property
    def planned(self) -> int:
        """The newest micro-batch that was begun; -1: none."""
        return self._newest("offsets")

    @property
    def committed(self) -> int:
        """The newest micro-batch that was finished; -1: none."""
        return self._newest("commits")

    @property
    def watermark(self) -> int:
        """Rows before this time are late, µs; 0: none are."""
        return int(self._metadata(self.planned)["batchWatermarkMs"]) * 1000 if self.planned != _NONE else 0

    def newest_time(self, remembered: int) -> int:
        """The newest time that a query which remembers for so long has reckoned with (`batch_clock`); 0: none. µs."""
        watermark = self.watermark
        return max(watermark and watermark + remembered, read_dedup_state(self.path.folder).at)

    @property
    def conf(self) -> dict[str, str]:
        """The settings of Spark that hold for the life of the checkpoint, in which a micro-batch was begun."""
        found: dict[str, str] = json.loads(self._lines(self.planned)[1])["conf"]
        return found

    @property
    def replaced_epoch(self) -> Epoch | None:
        """The epoch for which the first micro-batch stands, which writes nothing: what it reads was written under an
        older checkpoint, which `kiln recover` has replaced by this one (decision 19). None: there was none."""
        path = self.path / REPLACED_EPOCH_FILE
        return msgspec.json.decode(path.read(), type=Epoch) if path.exists() else None

    def behind_since(self, kept: int) -> int | None:
        """Of the newest micro-batches in a row that began before the time `kept` by the clock of the driver, when the
        first one began; as far back as Spark keeps them. None: the newest one began later. µs."""
        since = None
        for batch in sorted(self._numbers("offsets"), reverse=True):
            began = int(self._metadata(batch)["batchTimestampMs"]) * 1000
            if not is_trailing(began, kept):
                break
            since = began
        return since

    def ends(self, batch: int) -> log.Offsets:
        """Where a micro-batch ends, by full topic name and partition; nothing for the one before the first."""
        if batch == _NONE:
            return {}
        sources = self._lines(batch)[2:]
        return {
            topic: {int(partition): int(end) for partition, end in ends.items()}
            for source in sources
            for topic, ends in json.loads(source).items()
        }

    def count_records(self, batch: int) -> int | None:
        """How many records a micro-batch reads; None: nothing says where it begins."""
        starts = {(topic, part): at for topic, parts in self.ends(batch - 1).items() for part, at in parts.items()}
        ends = {(topic, part): at for topic, parts in self.ends(batch).items() for part, at in parts.items()}
        return sum(ends.values()) - sum(starts.values()) if ends.keys() == starts.keys() else None

    def _metadata(self, batch: int) -> dict[str, int]:
        found: dict[str, int] = json.loads(self._lines(batch)[1])
        return found

    def _lines(self, batch: int) -> list[str]:
        return (self.path / "offsets" / str(batch)).read().decode().splitlines()

    def _newest(self, folder: str) -> int:
        return max(self._numbers(folder), default=_NONE)

    def _numbers(self, folder: str) -> list[int]:
        return [int(found.name) for found in (self.path / folder).files() if found.name.isdigit()]
