"""The checkpoint folder of a streaming query, as files: no Spark is needed.

This module reads a checkpoint and writes a new one, detects files that a power cut left empty or truncated, and syncs
files to disk, because Spark does not.
"""

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
from kiln.pipelines.runtime.dedup_store import read_dedup_state
from kiln.schemas.kafka import topics as log
from kiln.schemas.kafka.records import Epoch

_NONE = -1

FIRST_OFFSETS_FILE = "sources/0/0"
"""file in a checkpoint with the offsets at which the first micro-batch begins. It has the name and format of Spark's
own Kafka source (KafkaSourceInitialOffsetWriter)."""

_FIRST_OFFSETS_HEAD = "\0v1\n"

REPLACED_EPOCH_FILE = "replaced-epoch"
"""Kiln's JSON file in a checkpoint that `recovery.advance_query` made, with `Checkpoint.replaced_epoch`"""

GENERATION_FILE = "generation"
"""Kiln's file in a checkpoint: how often `recovery.recover_tables` has replaced the checkpoint of the query"""


class CheckpointError(ValueError):
    """A checkpoint file does not have Spark's format."""


def parse_offsets(text: str) -> log.Offsets:
    """Parse a file of Spark's offset log, version 1.

    The file has a header, a line of metadata, and then a line of JSON for each source ("-" if it has no offsets).

    Raises:
        CheckpointError: The version is not 1, or a line does not contain Kafka offsets.
    """
    header, *lines = text.splitlines() or [""]
    if header != "v1":
        raise CheckpointError(f"Spark's offset log has the version {header!r}, and Kiln supports only 'v1'")
    merged: dict[str, dict[int, int]] = {}
    for line in lines[1:]:
        if line.strip() in ("", "-"):
            continue
        try:
            for topic, partitions in json.loads(line).items():
                merged.setdefault(topic, {}).update({int(part): int(offset) for part, offset in partitions.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"a line does not contain Kafka offsets: {line[:80]}") from error
    return merged


def format_first_offsets(offsets: Mapping[str, Mapping[int, int]] | Mapping[str, Mapping[str, int]]) -> str:
    """Format the file with the offsets at which a query's first micro-batch begins."""
    return f"{_FIRST_OFFSETS_HEAD}{json.dumps(offsets)}"


def write_checkpoint(folder: Path, begin: log.Offsets, others: Mapping[str, str]) -> None:
    """Write a new checkpoint with a new query id, and sync it to disk. An existing folder is replaced.

    Args:
        folder: Folder of the checkpoint.
        begin: Offsets at which the query begins.
        others: Text of additional files, by name.
    """
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
    """Describe records that Kafka had deleted before a query first ran; empty if there are none.

    Args:
        deleted: Number of such records, by topic.
    """
    topics = " and ".join(f"the first {count:,} records of {topic}" for topic, count in sorted(deleted.items()))
    return topics and f"Kafka had deleted {topics} before the query {query} first ran, so the tables lack these records"


DELETED_ADVICE = (
    "start the queries before Kafka deletes records, or raise kafka.retention and the size limits of the topics. If a "
    "capture file has the deleted records, add them with kiln replay"
)
"""Advice that follows the result of `describe_deleted_records`."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a query: a folder with `metadata`, `offsets/` and `commits/`, written by Structured Streaming."""

    path: Location

    @property
    def exists(self) -> bool:
        return (self.path / "metadata").exists()

    @property
    def query_id(self) -> str:
        """Spark's id of the query, which never changes within a checkpoint."""
        return str(json.loads((self.path / "metadata").read())["id"])

    @property
    def planned(self) -> int:
        """Number of the newest micro-batch that Spark has begun; -1 if there is none."""
        return self._find_newest("offsets")

    @property
    def committed(self) -> int:
        """Number of the newest micro-batch that Spark has finished; -1 if there is none."""
        return self._find_newest("commits")

    @property
    def watermark(self) -> int:
        """Spark's watermark in the newest micro-batch, in µs; 0 if there is none."""
        return int(self._read_metadata(self.planned)["batchWatermarkMs"]) * 1000 if self.planned != _NONE else 0

    def newest_time(self, retention: int) -> int:
        """Return the newest time (µs) that the query's `MicroBatchClock` has given; 0 if there is none.

        Args:
            retention: The query's retention of deduplication state, µs.
        """
        watermark = self.watermark
        return max(watermark and watermark + retention, read_dedup_state(self.path.folder).at)

    @property
    def conf(self) -> dict[str, str]:
        """Spark settings that the checkpoint fixes. They exist once a micro-batch was begun."""
        values: dict[str, str] = json.loads(self._read_lines(self.planned)[1])["conf"]
        return values

    @property
    def first_offsets(self) -> log.Offsets | None:
        """Offsets at which the first micro-batch begins; `None` if the checkpoint does not contain them."""
        path = self.path / FIRST_OFFSETS_FILE
        if not path.exists():
            return None
        offsets = json.loads(path.read().decode().splitlines()[-1])
        return {topic: {int(part): at for part, at in parts.items()} for topic, parts in offsets.items()}

    @property
    def deleted_records(self) -> dict[str, int]:
        """Number of records that Kafka had deleted before the query first ran, by topic name with prefix."""
        if self.replaced_epoch is not None or self.generation:  # `kiln recover` chose the first offsets
            return {}
        counts = {topic: sum(parts.values()) for topic, parts in (self.first_offsets or {}).items()}
        return {topic: count for topic, count in counts.items() if count}

    @property
    def generation(self) -> int:
        """Number of times that `recovery.recover_tables` has replaced the query's checkpoint."""
        path = self.path / GENERATION_FILE
        return int(path.read()) if path.exists() else 0

    @property
    def replaced_epoch(self) -> Epoch | None:
        """Query id and micro-batch of the lost checkpoint's last output, if `recovery.advance_query` made this one.

        The first micro-batch of this checkpoint reads old records again, only to fill the deduplication state. It
        writes nothing, because their output was written under the lost checkpoint (decision 19).
        """
        path = self.path / REPLACED_EPOCH_FILE
        return msgspec.json.decode(path.read(), type=Epoch) if path.exists() else None

    def ends(self, batch_id: int) -> log.Offsets:
        """Return the end offsets of a micro-batch, by topic name with prefix and by partition; empty for -1.

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
        """Return the offsets at which a micro-batch begins, without partitions that no earlier micro-batch has."""
        return self.ends(batch_id - 1) if batch_id > 0 else self.first_offsets or {}

    def list_planned(self) -> list[int]:
        """List the numbers of the micro-batches that Spark has begun and whose files still exist, in order."""
        return sorted(self._list_numbers("offsets"))

    def get_planned_at(self, batch_id: int) -> int:
        """Return the time at which Spark planned a micro-batch, in ms by the driver's clock."""
        return int(self._read_metadata(batch_id)["batchTimestampMs"])

    def count_records(self, batch_id: int) -> int | None:
        """Count the Kafka records of a micro-batch; `None` if it has a partition whose first offset is not known."""
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
    """The newest micro-batch of a checkpoint whose files are intact."""

    batch_id: int
    """number of the micro-batch; -1 if none was begun"""
    done: bool
    """true if it is finished, false if Spark will repeat it"""

    @property
    def next(self) -> int:
        """Number of the micro-batch that the query runs next."""
        return self.batch_id + 1 if self.done else self.batch_id


def is_whole(path: Path) -> bool:
    """Return true if a file exists, is not empty, and matches Hadoop's checksum file next to it, if there is one."""
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
    """Find the newest micro-batch of a checkpoint whose files are intact: it is finished, or Spark can repeat it.

    Returns:
        None if there are micro-batches, but none is intact. Without micro-batches, the result has the number -1.
    """
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
    """List the damaged files of a checkpoint's newest micro-batches, for messages.

    Args:
        checkpoint: Folder of the checkpoint.
        end: The newest intact micro-batch. Files of earlier ones are not checked; `None` to check all files.
    """
    least = -1 if end is None else end.batch_id
    logs = [
        checkpoint / folder / str(n) for folder in ("offsets", "commits") for n in _list_numbers(checkpoint / folder)
    ]
    state = [path for path, version in _list_state_files(checkpoint) if version > least]
    metadata = [checkpoint / "metadata"] if (checkpoint / "metadata").exists() else []
    return [path for path in (*metadata, *(p for p in logs if int(p.name) >= least), *state) if not is_whole(path)]


def list_files_after(checkpoint: Path, end: LastIntactMicroBatch) -> list[Path]:
    """List the files of a checkpoint to remove so that Spark continues with the micro-batch `end.next`."""
    version_to_keep = end.batch_id + 1 if end.done else end.batch_id
    files = [checkpoint / "offsets" / str(n) for n in _list_numbers(checkpoint / "offsets") if n > end.batch_id]
    files += [checkpoint / "commits" / str(n) for n in _list_numbers(checkpoint / "commits") if n >= end.next]
    files += [path for path, version in _list_state_files(checkpoint) if version > version_to_keep]
    checksums = [path.with_name(f".{path.name}.crc") for path in files]
    return files + [path for path in checksums if path.exists()]


def _offsets_are_whole(path: Path) -> bool:
    """Return true if a file of the offset log is intact, and has a version, metadata, and offsets of a source."""
    if not is_whole(path):
        return False
    try:
        version, *lines = path.read_text(encoding="utf-8").splitlines()
        return version == "v1" and len(lines) >= 2 and all(isinstance(json.loads(line), dict) for line in lines[:2])
    except ValueError:
        return False


def _state_is_whole(checkpoint: Path, version: int) -> bool:
    """Return true if each partition of the state store has an intact snapshot and change logs up to a version."""
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
    """A checkpoint whose new files are synced to disk, because Spark does not sync them. For one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._synced: set[_FileVersion] = set()
        self._folders: set[str] = set()
        """folders whose parents are synced, so that the folders survive a power cut"""

    def sync(self) -> None:
        """Sync every new file of the checkpoint, and the folder of each, to disk."""
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
"""Kiln's file in a checkpoint: Kafka's topic ids, by topic name with prefix"""


def read_topic_ids(checkpoint: Location) -> dict[str, str]:
    """Read Kafka's topic ids from a checkpoint, by topic name with prefix; empty if none are saved."""
    path = checkpoint / TOPICS_FILE
    return msgspec.json.decode(path.read(), type=dict[str, str]) if path.exists() else {}


def save_topic_ids(checkpoint: Location, ids: Mapping[str, str]) -> None:
    """Save Kafka's topic ids in a checkpoint, by topic name. Ids of other topics stay."""
    saved = read_topic_ids(checkpoint)
    merged = saved | {topic: identity for topic, identity in ids.items() if identity}
    if merged != saved:
        (checkpoint / TOPICS_FILE).write([msgspec.json.encode(merged)])
