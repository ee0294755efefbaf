"""Files that commits have added to a table since a version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple
from urllib.parse import unquote

from deltalake import DeltaTable

from kiln.pipelines.delta.lake import Lake, locate_commit


class NewFiles(NamedTuple):
    """Files of rows, with the time of their commits, ms since the epoch."""

    files: Mapping[str, int]
    is_all: bool = False
    """true if these are all files: for a first check, or because rows were removed"""


def find_new_files(lake: Lake, name: str, table: DeltaTable, since: int | None) -> NewFiles:
    """Find the files of rows that an open table has and its version `since` has not, or all files if that is `None`.

    A commit that only rearranges rows (OPTIMIZE) adds none. After a commit that removed rows, all files are new.
    """
    if since is None or since > table.version():
        return list_all_files(lake, name, table)
    added: dict[str, int] = {}
    folder = lake.folder(name)
    for version in range(since + 1, table.version() + 1):
        try:
            lines = locate_commit(folder, version).read().splitlines()
        except FileNotFoundError:  # cleaned up, or the table was re-created
            return list_all_files(lake, name, table)
        for line in lines:
            action = json.loads(line)
            match action:
                case {"add": {"path": str(path), "dataChange": True, "modificationTime": int(at)}}:
                    added[unquote(path)] = at
                case {"remove": {"dataChange": True}}:
                    return list_all_files(lake, name, table)
    if not all((folder / path).exists() for path in added):
        return list_all_files(lake, name, table)
    return NewFiles({f"{lake.table(name)}/{path}": at for path, at in added.items()})


def list_all_files(lake: Lake, name: str, table: DeltaTable) -> NewFiles:
    """List all files of an open table."""
    adds = table.get_add_actions(flatten=False)
    paths, times = adds["path"].to_pylist(), adds["modification_time"].to_pylist()
    files = {f"{lake.table(name)}/{unquote(path)}": _to_millis(at) for path, at in zip(paths, times, strict=True)}
    return NewFiles(files, is_all=True)


def _to_millis(at: object) -> int:
    return round(at.timestamp() * 1000) if isinstance(at, datetime) else int(str(at))
