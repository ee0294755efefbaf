"""What is new in a table since a version of it: the files that commits have added."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import unquote

from deltalake import DeltaTable

from kiln.pipelines.delta.lake import Lake, log_entry


class NewFiles(NamedTuple):
    """The files of new rows, as paths; when the newest of them was committed; and whether all rows of the table are to
    be read anew, since rows were taken out of the table."""

    files: tuple[str, ...]
    committed: datetime | None
    anew: bool = False


def news_of(lake: Lake, name: str, table: DeltaTable, since: int | None) -> NewFiles:
    """The rows of `table` that are not in its version `since`; None: all of its rows.

    A commit that only arranges rows anew (OPTIMIZE) brings no new row.
    """
    if since is None:
        return _all(lake, name, table)
    if since == table.version():
        return NewFiles((), None)
    added: dict[str, int] = {}
    folder = lake.folder(name)
    for version in range(since + 1, table.version() + 1):
        try:
            lines = log_entry(folder, version).read().splitlines()
        except FileNotFoundError:  # cleaned away, or the table was made anew
            return _all(lake, name, table)._replace(anew=True)
        for line in lines:
            action = json.loads(line)
            match action:
                case {"add": {"path": str(path), "dataChange": True, "modificationTime": int(at)}}:
                    added[unquote(path)] = at
                case {"remove": {"dataChange": True}}:
                    return _all(lake, name, table)._replace(anew=True)
    if since > table.version() or not all((folder / path).exists() for path in added):
        return _all(lake, name, table)._replace(anew=True)
    return _news({f"{folder}/{path}": at for path, at in added.items()})


def _all(lake: Lake, name: str, table: DeltaTable) -> NewFiles:
    adds = table.get_add_actions(flatten=False)
    paths = adds["path"].to_pylist()
    times = adds["modification_time"].to_pylist()
    return _news({f"{lake.table(name)}/{unquote(path)}": at for path, at in zip(paths, times, strict=True)})


def _news(files: Mapping[str, object]) -> NewFiles:
    """`files`: paths, and when they were committed: ms since the epoch, or a time."""
    times = [
        at if isinstance(at, datetime) else datetime.fromtimestamp(int(str(at)) / 1000, UTC) for at in files.values()
    ]
    return NewFiles(tuple(files), max(times, default=None))
