"""Files of a checkpoint that a power cut left empty or cut off, and where the checkpoint still ends well. Nothing is
written here."""

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
_HEAD = struct.Struct(">4sI")  # of Hadoop's files of check sums: "crc\0", and of how many bytes each CRC-32 is


@dataclass(frozen=True, order=True)
class LastGoodBatch:
    """The newest micro-batch of a checkpoint; -1: none was begun. `done`: Spark has noted it as finished."""

    batch: int
    done: bool

    @property
    def next(self) -> int:
        """The micro-batch that the query runs next."""
        return self.batch + 1 if self.done else self.batch


def is_whole(path: Path) -> bool:
    """Report if a file exists, holds bytes, and agrees with the checksums that Hadoop keeps next to it."""
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
    parts = (data[place : place + size] for place in range(0, len(data), size or 1))
    return bool(data) and size > 0 and sums[_HEAD.size :] == b"".join(zlib.crc32(part).to_bytes(4) for part in parts)


def find_claimed_end(checkpoint: Path) -> LastGoodBatch:
    """Where the checkpoint ends by the names of its files, which is where Spark would go on."""
    newest = max(_numbers(checkpoint / "offsets"), default=-1)
    return LastGoodBatch(newest, newest in _numbers(checkpoint / "commits"))


def find_sound_end(checkpoint: Path, before: float | None = None) -> LastGoodBatch | None:
    """Where the checkpoint ends by what is whole: the newest micro-batch that can be taken as done, or done again.

    None: there is none. `before`: of those alone that were noted as done before this time, unix s.
    """
    batches = sorted(_numbers(checkpoint / "offsets"), reverse=True)
    for batch in batches:
        before_it = checkpoint / "commits" / str(batch - 1)
        if not _offsets_are_whole(checkpoint / "offsets" / str(batch)) or (
            before_it.exists() and not is_whole(before_it)
        ):
            continue
        done = checkpoint / "commits" / str(batch)
        if is_whole(done) and _state_is_whole(checkpoint, batch + 1):
            if before is None or done.stat().st_mtime < before:
                return LastGoodBatch(batch, True)
        elif before is None and _state_is_whole(checkpoint, batch):
            return LastGoodBatch(batch, False)
    return None if batches or before is not None else LastGoodBatch(-1, True)


def list_torn_files(checkpoint: Path, ending: LastGoodBatch | None) -> list[Path]:
    """List the damaged files of the newest micro-batches, for messages. `ending`: the sound one."""
    least = -1 if ending is None else ending.batch
    logs = [checkpoint / folder / str(n) for folder in ("offsets", "commits") for n in _numbers(checkpoint / folder)]
    state = [path for path, version in _state_files(checkpoint) if version > least]
    metadata = [checkpoint / "metadata"] if (checkpoint / "metadata").exists() else []
    return [path for path in (*metadata, *(p for p in logs if int(p.name) >= least), *state) if not is_whole(path)]


def list_files_after(checkpoint: Path, ending: LastGoodBatch) -> list[Path]:
    """The files of what comes after an ending: without them, Spark goes on there."""
    keep = ending.batch + 1 if ending.done else ending.batch
    found = [checkpoint / "offsets" / str(n) for n in _numbers(checkpoint / "offsets") if n > ending.batch]
    found += [checkpoint / "commits" / str(n) for n in _numbers(checkpoint / "commits") if n >= ending.next]
    found += [path for path, version in _state_files(checkpoint) if version > keep]
    sums = [path.with_name(f".{path.name}.crc") for path in found]
    return found + [path for path in sums if path.exists()]


def read_newest_commit_time(checkpoint: Path, ending: LastGoodBatch) -> float | None:
    """When the newest micro-batch that an ending leaves as done was noted as done, unix s; None: none is."""
    done = [n for n in _numbers(checkpoint / "commits") if n < ending.next]
    return (checkpoint / "commits" / str(max(done))).stat().st_mtime if done else None


def _offsets_are_whole(path: Path) -> bool:
    """Version, metadata, and the offsets of the one source that each query has."""
    if not is_whole(path):
        return False
    try:
        version, *lines = path.read_text(encoding="utf-8").splitlines()
        return version == "v1" and len(lines) >= 2 and all(isinstance(json.loads(line), dict) for line in lines[:2])
    except ValueError:
        return False


def _state_is_whole(checkpoint: Path, version: int) -> bool:
    """Report if each partition of the state can be read as of a version: from a snapshot, and the changes since."""
    return all(_partition_is_whole(folder, version) for folder in _partitions(checkpoint))


def _partition_is_whole(folder: Path, version: int) -> bool:
    for at in range(version, 0, -1):
        if (folder / f"{at}.zip").exists():
            return _snapshot_is_whole(folder / f"{at}.zip")
        if not is_whole(folder / f"{at}.changelog"):
            return False
    return True


def _snapshot_is_whole(path: Path) -> bool:
    if not is_whole(path):
        return False
    try:
        with zipfile.ZipFile(path) as packed:
            names = _SST.findall(packed.read("metadata").decode())
    except (zipfile.BadZipFile, KeyError, ValueError):
        return False
    tables = [path.parent / "SSTs" / name for name in names]
    return all(table.is_file() and table.stat().st_size for table in tables)


def _state_files(checkpoint: Path) -> Iterator[tuple[Path, int]]:
    for folder in _partitions(checkpoint):
        for path in folder.glob("[0-9]*.*"):
            if path.suffix in (".changelog", ".zip", ".delta", ".snapshot") and path.name.split(".")[0].isdigit():
                yield path, int(path.name.split(".")[0])


def _partitions(checkpoint: Path) -> list[Path]:
    return [path for path in sorted((checkpoint / "state").glob("[0-9]*/[0-9]*")) if path.is_dir()]


def _numbers(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()}
