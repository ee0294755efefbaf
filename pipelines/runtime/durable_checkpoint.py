"""Sync of a query's checkpoint to disk. Spark syncs none of its files, so a power cut may leave each of them empty or
truncated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kiln.conf.process.disk import to_disk

_UNFINISHED = ".tmp"
"""suffix of files that Spark renames once they are complete"""


class DurableCheckpoint:
    """Syncs new files of a checkpoint. For one thread."""

    def __init__(self, path: Path) -> None:
        """Create the synchronizer. `path`: folder of the query's checkpoint."""
        self._path = path
        self._synced: set[_FileVersion] = set()
        self._folders: set[str] = set()
        """folders whose own names are on disk"""

    def sync(self) -> None:
        """Sync every file in the checkpoint, and its name."""
        if not self._synced:  # the folders above, once
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
