"""Syncing of a query's checkpoint to disk. Spark syncs none of its files, so a power cut may leave each of them empty
or truncated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kiln.conf.process.disk import to_disk

_UNFINISHED = ".tmp"
"""Spark gives such a file its name once it is written."""


class DurableCheckpoint:
    """Syncs new files of a checkpoint. For one thread."""

    def __init__(self, path: Path) -> None:
        """`path`: the query's checkpoint, a folder."""
        self._path = path
        self._synced: set[_FileVersion] = set()
        self._folders: set[str] = set()
        """whose own names are on the disk"""

    def sync(self) -> None:
        """Sync every file that is in the checkpoint now, and its name."""
        if not self._synced:  # the way to the folder, once
            for folder in (self._path.parent.parent, self._path.parent):
                to_disk(folder)
        files = set(_files(str(self._path)))
        new = files - self._synced
        folders = {os.path.dirname(name) for name, _, _ in new}
        above = {
            str(each)
            for name in folders - self._folders
            for each in Path(name).parents
            if each.is_relative_to(self._path)
        }
        for name in (*(name for name, _, _ in new), *sorted(folders | above)):
            with suppress(FileNotFoundError):  # Spark removes what has grown old
                to_disk(Path(name))
        self._folders |= folders
        self._synced = files


_FileVersion = tuple[str, int, int]
"""Path, inode, and when it was changed, ns."""


def _files(folder: str) -> Iterator[_FileVersion]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif not entry.name.endswith(_UNFINISHED):
                with suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    yield entry.path, stat.st_ino, stat.st_mtime_ns
