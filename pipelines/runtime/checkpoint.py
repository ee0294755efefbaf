"""Spark's files in a query's checkpoint: reading them, writing a new checkpoint, detecting files that a power cut left
empty or truncated, and syncing files to disk, because Spark syncs none. This module needs no Spark."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec

from kiln.conf.process.files import to_disk
from kiln.conf.process.location import Location
from kiln.pipelines.runtime.clocks import is_trailing
from kiln.pipelines.runtime.dedup_store import read_dedup_state
from kiln.schemas.kafka import topics as log
from kiln.schemas.kafka.records import Epoch

_NONE = -1

FIRST_OFFSETS_FILE = "sources/0/0"
"""file of the offsets at which the first micro-batch begins, with the name and format of Spark's own Kafka source
(KafkaSourceInitialOffsetWriter)"""

_FIRST_OFFSETS_HEAD = "\0v1\n"

REPLACED_EPOCH_FILE = "replaced-epoch"
"""Kiln's file in a checkpoint: the epoch that the first micro-batch replaces, as JSON"""


GENERATION_FILE = "generation"
"""Kiln's file in a checkpoint: how often `kiln recover` has replaced the checkpoint of the query"""


class CheckpointError(ValueError):
    """A checkpoint file does not have Spark's format; the message names the file."""


def parse_offsets(text: str) -> log.Offsets:
    """Parse a file of Spark's offset log, version 1: header, metadata, then one line per source ("-": no offsets).

    Raises:
        CheckpointError: The version is not 1, or a line holds no Kafka offsets.
    """
    header, *lines = text.splitlines() or [""]
    if header != "v1":
        raise CheckpointError(f"version {header!r} of Spark's offset log is not supported, only 'v1' is")
    merged: dict[str, dict[int, int]] = {}
    for line in lines[1:]:
        if line.strip() in ("", "-"):
            continue
        try:
            for topic, partitions in json.loads(line).items():
                merged.setdefault(topic, {}).update({int(part): int(offset) for part, offset in partitions.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"not Kafka offsets: {line[:80]}") from error
    return merged


def format_first_offsets(offsets: Mapping[str, Mapping[int, int]] | Mapping[str, Mapping[str, int]]) -> str:
    """Format the text of FIRST_OFFSETS_FILE."""
    return f"{_FIRST_OFFSETS_HEAD}{json.dumps(offsets)}"


def write_checkpoint(folder: Path, begin: log.Offsets, others: Mapping[str, str]) -> None:
    """Write and sync a checkpoint with a new query id, from which the query begins at the offsets `begin`. `others`:
    text of additional files, by name."""
    shutil.rmtree(folder, ignore_errors=True)
    files = {"metadata": json.dumps({"id": str(uuid4())}), FIRST_OFFSETS_FILE: format_first_offsets(begin), **others}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        to_disk(path)
        for parent in Path(name).parents:
            to_disk(folder / parent)


def describe_deleted_records(query: str, deleted: Mapping[str, int]) -> str:
    """Describe the records in `deleted` (`Checkpoint.deleted_records`); empty if there are none."""
    topics = " and ".join(f"the first {count:,} records of {topic}" for topic, count in sorted(deleted.items()))
    return topics and f"Kafka had deleted {topics} before {query} first ran: they are missing in its tables"


DELETED_ADVICE = (
    "run the queries before kafka.retention or the size limits of topics delete records, or raise these limits; "
    "records that a capture still has can be added with kiln replay"
)
"""Advice for records that `describe_deleted_records` describes."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with `metadata`, `offsets/` and `commits/`, as Structured Streaming writes them."""

    path: Location

    @property
    def exists(self) -> bool:
        return (self.path / "metadata").exists()

    @property
    def query_id(self) -> str:
        """The id of the query, which never changes within a checkpoint."""
        return str(json.loads((self.path / "metadata").read())["id"])

    @property
    def planned(self) -> int:
        """The newest micro-batch that was begun; -1 if none was begun."""
        return self._find_newest("offsets")

    @property
    def committed(self) -> int:
        """The newest micro-batch that was finished; -1 if none was finished."""
        return self._find_newest("commits")

    @property
    def watermark(self) -> int:
        """Time before which rows are late, in µs; 0 if no row is late."""
        return int(self._read_metadata(self.planned)["batchWatermarkMs"]) * 1000 if self.planned != _NONE else 0

    def newest_time(self, retention: int) -> int:
        """Return the newest time that a query with this retention has used (`MicroBatchClock`), µs; 0 if it has
        used none."""
        watermark = self.watermark
        return max(watermark and watermark + retention, read_dedup_state(self.path.folder).at)

    @property
    def conf(self) -> dict[str, str]:
        """Spark settings that are fixed in the checkpoint, once a micro-batch was begun."""
        values: dict[str, str] = json.loads(self._read_lines(self.planned)[1])["conf"]
        return values

    @property
    def first_offsets(self) -> log.Offsets | None:
        """The offsets at which the first micro-batch begins; None if they are not in the checkpoint."""
        path = self.path / FIRST_OFFSETS_FILE
        if not path.exists():
            return None
        offsets = json.loads(path.read().decode().splitlines()[-1])
        return {topic: {int(part): at for part, at in parts.items()} for topic, parts in offsets.items()}

    @property
    def deleted_records(self) -> dict[str, int]:
        """Count the records that Kafka had deleted before the query first ran, by full topic name."""
        if self.replaced_epoch is not None or self.generation:  # `kiln recover` chose the first offsets
            return {}
        counts = {topic: sum(parts.values()) for topic, parts in (self.first_offsets or {}).items()}
        return {topic: count for topic, count in counts.items() if count}

    @property
    def generation(self) -> int:
        """The number of times that `kiln recover` has replaced the checkpoint of the query."""
        path = self.path / GENERATION_FILE
        return int(path.read()) if path.exists() else 0

    @property
    def replaced_epoch(self) -> Epoch | None:
        """The epoch that the first micro-batch replaces, if `kiln recover` made this checkpoint (decision 19). That
        micro-batch writes nothing: the output of its records was written under the older checkpoint."""
        path = self.path / REPLACED_EPOCH_FILE
        return msgspec.json.decode(path.read(), type=Epoch) if path.exists() else None

    def behind_since(self, time: int) -> int | None:
        """Find since when the driver's clock has been behind `time`.

        Returns:
            Begin (µs) of the earliest micro-batch that Spark still keeps and that, like all later ones, began before
            `time` (`is_trailing`); None if the newest one did not.
        """
        since = None
        for batch_id in sorted(self._list_numbers("offsets"), reverse=True):
            began = int(self._read_metadata(batch_id)["batchTimestampMs"]) * 1000
            if not is_trailing(began, time):
                break
            since = began
        return since

    def ends(self, batch_id: int) -> log.Offsets:
        """Return the end offsets of a micro-batch, by full topic name and partition; empty for -1, the
        micro-batch before the first.

        Raises:
            CheckpointError: The file does not have Spark's format.
            OSError: The file cannot be read.
        """
        if batch_id == _NONE:
            return {}
        path = self.path / "offsets" / str(batch_id)
        try:
            return parse_offsets(path.read().decode())
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def starts(self, batch_id: int) -> log.Offsets:
        """Return the offsets at which a micro-batch begins. A partition that is new in the micro-batch is missing."""
        return self.ends(batch_id - 1) if batch_id > 0 else self.first_offsets or {}

    def list_planned(self) -> list[int]:
        """List the micro-batches that were begun and that Spark still keeps, in order."""
        return sorted(self._list_numbers("offsets"))

    def get_planned_at(self, batch_id: int) -> int:
        """Return when a micro-batch was planned, by the driver's clock, ms."""
        return int(self._read_metadata(batch_id)["batchTimestampMs"])

    def count_records(self, batch_id: int) -> int | None:
        """Count the records of a micro-batch; None if the first offset of a partition is not known."""
        before = self.starts(batch_id)
        starts = {(topic, part): at for topic, parts in before.items() for part, at in parts.items()}
        ends = {(topic, part): at for topic, parts in self.ends(batch_id).items() for part, at in parts.items()}
        return sum(ends.values()) - sum(starts.values()) if ends.keys() == starts.keys() else None

    def _read_metadata(self, batch_id: int) -> dict[str, int]:
        values: dict[str, int] = json.loads(self._read_lines(batch_id)[1])
        return values

    def _read_lines(self, batch_id: int) -> list[str]:
        return (self.path / "offsets" / str(batch_id)).read().decode().splitlines()

    def _find_newest(self, folder: str) -> int:
        return max(self._list_numbers(folder), default=_NONE)

    def _list_numbers(self, folder: str) -> list[int]:
        return [int(file.name) for file in (self.path / folder).files() if file.name.isdigit()]


_SST = re.compile(r'"dfsSstFileName":"([^"]+)"')
_HEAD = struct.Struct(">4sI")  # header of Hadoop's checksum files: "crc\0", and the bytes in each CRC-32


@dataclass(frozen=True, order=True)
class LastIntactMicroBatch:
    """The newest intact micro-batch of a checkpoint."""

    batch_id: int
    """number of the micro-batch; -1 if none was begun"""
    done: bool
    """true if Spark has recorded it as done"""

    @property
    def next(self) -> int:
        """The micro-batch that the query runs next."""
        return self.batch_id + 1 if self.done else self.batch_id


def is_whole(path: Path) -> bool:
    """Return true if a file exists, holds bytes, and agrees with the checksums that Hadoop keeps next to it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return False
    try:
        sums = path.with_name(f".{path.name}.crc").read_bytes()
    except FileNotFoundError:
        return bool(data)
    if len(sums) < _HEAD.size:
        return False
    _, size = _HEAD.unpack_from(sums)
    parts = (data[start : start + size] for start in range(0, len(data), size or 1))
    return bool(data) and size > 0 and sums[_HEAD.size :] == b"".join(zlib.crc32(part).to_bytes(4) for part in parts)


def find_sound_end(checkpoint: Path) -> LastIntactMicroBatch | None:
    """Find the newest micro-batch with intact files, which is done or can be repeated; None if there is none."""
    batches = sorted(_list_numbers(checkpoint / "offsets"), reverse=True)
    for batch_id in batches:
        previous = checkpoint / "commits" / str(batch_id - 1)
        if not _offsets_are_whole(checkpoint / "offsets" / str(batch_id)) or (
            previous.exists() and not is_whole(previous)
        ):
            continue
        done = checkpoint / "commits" / str(batch_id)
        if is_whole(done) and _state_is_whole(checkpoint, batch_id + 1):
            return LastIntactMicroBatch(batch_id, True)
        if _state_is_whole(checkpoint, batch_id):
            return LastIntactMicroBatch(batch_id, False)
    return None if batches else LastIntactMicroBatch(-1, True)


def list_torn_files(checkpoint: Path, end: LastIntactMicroBatch | None) -> list[Path]:
    """List the damaged files of the newest micro-batches, for messages. `end`: the result of `find_sound_end`."""
    least = -1 if end is None else end.batch_id
    logs = [
        checkpoint / folder / str(n) for folder in ("offsets", "commits") for n in _list_numbers(checkpoint / folder)
    ]
    state = [path for path, version in _list_state_files(checkpoint) if version > least]
    metadata = [checkpoint / "metadata"] if (checkpoint / "metadata").exists() else []
    return [path for path in (*metadata, *(p for p in logs if int(p.name) >= least), *state) if not is_whole(path)]


def list_files_after(checkpoint: Path, end: LastIntactMicroBatch) -> list[Path]:
    """List the files after `end`. Without these files, Spark continues at `end`."""
    version_to_keep = end.batch_id + 1 if end.done else end.batch_id
    files = [checkpoint / "offsets" / str(n) for n in _list_numbers(checkpoint / "offsets") if n > end.batch_id]
    files += [checkpoint / "commits" / str(n) for n in _list_numbers(checkpoint / "commits") if n >= end.next]
    files += [path for path, version in _list_state_files(checkpoint) if version > version_to_keep]
    checksums = [path.with_name(f".{path.name}.crc") for path in files]
    return files + [path for path in checksums if path.exists()]


def _offsets_are_whole(path: Path) -> bool:
    """Return true if a file of offsets is intact: version, metadata, and the offsets of the query's one source."""
    if not is_whole(path):
        return False
    try:
        version, *lines = path.read_text(encoding="utf-8").splitlines()
        return version == "v1" and len(lines) >= 2 and all(isinstance(json.loads(line), dict) for line in lines[:2])
    except ValueError:
        return False


def _state_is_whole(checkpoint: Path, version: int) -> bool:
    """Return true if each partition of the state can be read as of a version: a snapshot, and the changes since it."""
    return all(_partition_is_whole(folder, version) for folder in _list_partitions(checkpoint))


def _partition_is_whole(folder: Path, version: int) -> bool:
    for older in range(version, 0, -1):
        if (folder / f"{older}.zip").exists():
            return _snapshot_is_whole(folder / f"{older}.zip")
        if not is_whole(folder / f"{older}.changelog"):
            return False
    return True


def _snapshot_is_whole(path: Path) -> bool:
    if not is_whole(path):
        return False
    try:
        with zipfile.ZipFile(path) as snapshot:
            names = _SST.findall(snapshot.read("metadata").decode())
    except (zipfile.BadZipFile, KeyError, ValueError):
        return False
    tables = [path.parent / "SSTs" / name for name in names]
    return all(table.is_file() and table.stat().st_size for table in tables)


def _list_state_files(checkpoint: Path) -> Iterator[tuple[Path, int]]:
    for folder in _list_partitions(checkpoint):
        for path in folder.glob("[0-9]*.*"):
            if path.suffix in (".changelog", ".zip", ".delta", ".snapshot") and path.name.split(".")[0].isdigit():
                yield path, int(path.name.split(".")[0])


def _list_partitions(checkpoint: Path) -> list[Path]:
    return [path for path in sorted((checkpoint / "state").glob("[0-9]*/[0-9]*")) if path.is_dir()]


def _list_numbers(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()}


_UNFINISHED = ".tmp"
"""suffix of files that Spark renames once they are complete"""


class DurableCheckpoint:
    """Syncs new files of a checkpoint. For one thread."""

    def __init__(self, path: Path) -> None:
        """Create the synchronizer. `path`: folder of the query's checkpoint."""
        self._path = path
        self._synced: set[_FileVersion] = set()
        self._folders: set[str] = set()
        """folders whose entries in their parents are on disk"""

    def sync(self) -> None:
        """Sync every new file in the checkpoint, and the folder entry that names it."""
        if not self._synced:  # sync the folders above, once
            for folder in (self._path.parent.parent, self._path.parent):
                to_disk(folder)
        files = set(_list_files(str(self._path)))
        new = files - self._synced
        folders = {os.path.dirname(name) for name, _, _ in new}
        parents = {
            str(parent)
            for name in folders - self._folders
            for parent in Path(name).parents
            if parent.is_relative_to(self._path)
        }
        for name in (*(name for name, _, _ in new), *sorted(folders | parents)):
            with suppress(FileNotFoundError):  # Spark removes old files
                to_disk(Path(name))
        self._folders |= folders
        self._synced = files


_FileVersion = tuple[str, int, int]
"""path, inode, and modification time, ns"""


def _list_files(folder: str) -> Iterator[_FileVersion]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _list_files(entry.path)
            elif not entry.name.endswith(_UNFINISHED):
                with suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    yield entry.path, stat.st_ino, stat.st_mtime_ns


TOPICS_FILE: Final = "topics.json"
"""Kiln's file in a checkpoint: topic ids by full topic name"""


def read_topic_ids(checkpoint: Location) -> dict[str, str]:
    """Read the topic ids saved in a checkpoint, by full topic name; empty if no ids are saved."""
    path = checkpoint / TOPICS_FILE
    return msgspec.json.decode(path.read(), type=dict[str, str]) if path.exists() else {}


def save_topic_ids(checkpoint: Location, ids: Mapping[str, str]) -> None:
    """Save topic ids in a checkpoint, in addition to the ids already saved there."""
    saved = read_topic_ids(checkpoint)
    merged = saved | {topic: identity for topic, identity in ids.items() if identity}
    if merged != saved:
        (checkpoint / TOPICS_FILE).write([msgspec.json.encode(merged)])
