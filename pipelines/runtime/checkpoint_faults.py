"""Detection of checkpoint files that a power cut left empty or truncated, and of the last micro-batch that is intact.

Nothing is written here.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SST = re.compile(r'"dfsSstFileName":"([^"]+)"')
_HEAD = struct.Struct(">4sI")  # header of Hadoop's checksum files: "crc\0", and the bytes in each CRC-32


@dataclass(frozen=True, order=True)
class LastIntactMicroBatch:
    """The newest intact micro-batch of a checkpoint."""

    batch_id: int
    """-1 if none was begun"""
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
