"""Files that commits have added to a table since a version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import unquote

from deltalake import DeltaTable

from kiln.pipelines.delta.lake import Lake, locate_commit


class NewFiles(NamedTuple):
    """Files of new rows."""

    files: tuple[str, ...]
    committed: datetime | None
    """commit time of the newest file"""
    must_reread: bool = False
    """true if rows were removed, so that all rows must be read again"""


def find_new_files(lake: Lake, name: str, table: DeltaTable, since: int | None) -> NewFiles:
    """Find the files of rows that are not in version `since` of a table, or all files if that is `None`.

    A commit that only rearranges rows (OPTIMIZE) adds none.
    """
    if since is None:
        return _list_all_files(lake, name, table)
    if since == table.version():
        return NewFiles((), None)
    added: dict[str, int] = {}
    folder = lake.folder(name)
    for version in range(since + 1, table.version() + 1):
        try:
            lines = locate_commit(folder, version).read().splitlines()
        except FileNotFoundError:  # cleaned up, or the table was re-created
            return _list_all_files(lake, name, table)._replace(must_reread=True)
        for line in lines:
            action = json.loads(line)
            match action:
                case {"add": {"path": str(path), "dataChange": True, "modificationTime": int(at)}}:
                    added[unquote(path)] = at
                case {"remove": {"dataChange": True}}:
                    return _list_all_files(lake, name, table)._replace(must_reread=True)
    if since > table.version() or not all((folder / path).exists() for path in added):
        return _list_all_files(lake, name, table)._replace(must_reread=True)
    return _build_new_files({f"{folder}/{path}": at for path, at in added.items()})


def _list_all_files(lake: Lake, name: str, table: DeltaTable) -> NewFiles:
    adds = table.get_add_actions(flatten=False)
    paths = adds["path"].to_pylist()
    times = adds["modification_time"].to_pylist()
    return _build_new_files({f"{lake.table(name)}/{unquote(path)}": at for path, at in zip(paths, times, strict=True)})


def _build_new_files(files: Mapping[str, object]) -> NewFiles:
    """Build the result from paths and their commit times (a datetime, or ms since the epoch)."""
    times = [
        at if isinstance(at, datetime) else datetime.fromtimestamp(int(str(at)) / 1000, UTC) for at in files.values()
    ]
    return NewFiles(tuple(files), max(times, default=None))
