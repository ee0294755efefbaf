"""Search for damage by a power cut in the logs of tables: commits that are empty or truncated, or whose files are lost.

Only `restore_version` changes a table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import LAST_CHECKPOINT, Lake
from kiln.pipelines.delta.table_history import read_commit

_INSPECTED_COMMITS = 50
"""Number of newest commits that are inspected. Older ones were certainly on disk before the power cut."""


@dataclass
class TableLog:
    """State of the newest commits of a table. A commit is torn if it cannot be read, or if a file that it adds is
    missing or truncated."""

    newest: int = -1
    torn: list[int] = field(default_factory=list)
    """torn commits at the end of the log, newest first"""
    within: list[int] = field(default_factory=list)
    """torn commits with an intact commit after them"""
    files: list[str] = field(default_factory=list)
    """missing or truncated files of the torn commits"""
    checkpoints: list[Path] = field(default_factory=list)
    """unreadable checkpoints that can be rebuilt from the rest of the log"""


def inspect_log(lake: Lake, table: str) -> TableLog:
    """Find damage in the newest commits of a table. In an object store there is none, because an object is complete or
    absent."""
    location = lake.folder(table)
    folder = location.folder
    if folder is None:
        return TableLog(lake.open(table).version())
    versions = sorted(int(path.stem) for path in (folder / "_delta_log").glob("*.json") if path.stem.isdigit())
    log = TableLog(max(versions, default=-1))
    removed: set[str] = set()
    whole_follows = False
    for version in reversed(versions[-_INSPECTED_COMMITS:]):
        actions = read_commit(location, version)
        adds = [add for add in _select_actions(actions, "add") if add["path"] not in removed]
        damaged = [str(add["path"]) for add in adds if not _is_intact(folder, add)]
        is_good = bool(actions) and not damaged
        log.files += damaged
        removed |= {str(remove["path"]) for remove in _select_actions(actions, "remove")}
        if not is_good:
            (log.within if whole_follows else log.torn).append(version)
        whole_follows = whole_follows or is_good
    log.checkpoints = _list_torn_checkpoints(folder / "_delta_log", versions)
    return log


def adds_any(actions: Sequence[Mapping[str, Mapping[str, object]]], files: Sequence[DataFile]) -> bool:
    """Return true if a commit adds one of these files to its table."""
    names = {file.name for file in files}
    return any(action["add"]["path"] in names for action in actions if "add" in action)


def find_newest_write(lake: Lake, table: str, query_id: str, log: TableLog) -> int:
    """Find the newest micro-batch of a query in the intact commits of a table; -1 if there is none."""
    location = lake.folder(table)
    if location.folder is not None:  # delta-rs cannot open a torn log
        last = log.newest - len(log.torn)
        for version in range(last, max(-1, last - _INSPECTED_COMMITS), -1):
            batches = _list_batches(read_commit(location, version), query_id, table)
            if batches:
                return max(batches)
        if log.torn or last < _INSPECTED_COMMITS:
            return -1
    opened = lake.open(table)
    wrote = (opened.transaction_version(WriteId(query_id, 0, name).app_id(table)) for name in ("append", "received"))
    return max((version for version in wrote if version is not None), default=-1)


def _list_batches(actions: list[dict[str, dict[str, object]]], query_id: str, table: str) -> list[int]:
    txns = _select_actions(actions, "txn")
    return [int(str(txn["version"])) for txn in txns if str(txn["appId"]).startswith(f"{query_id}:{table}:")]


def restore_version(lake: Lake, table: str, version: int) -> None:
    """Restore a table to a version, with a new commit."""
    opened = lake.open(table)
    if opened.version() == version:
        return
    opened.restore(version)
    newest = lake.open(table).version()
    lake.sync_commits(table, newest, newest)


def _select_actions(actions: list[dict[str, dict[str, object]]], kind: str) -> list[dict[str, object]]:
    return [action[kind] for action in actions if kind in action]


def _is_intact(folder: Path, add: dict[str, object]) -> bool:
    path = folder / str(add["path"])
    return path.is_file() and path.stat().st_size == add["size"]


def _list_torn_checkpoints(log: Path, versions: list[int]) -> list[Path]:
    """List the unreadable checkpoints that can be rebuilt, because the log is complete from its first commit, or from a
    readable checkpoint. `_last_checkpoint` is listed too if it names one of them, or one that does not exist."""
    torn = [path for path in log.glob("*.checkpoint*.parquet") if not _is_readable(path)]
    if not _is_complete(versions, [path for path in log.glob("*.checkpoint.parquet") if path not in torn]):
        return []
    pointer = log / LAST_CHECKPOINT
    try:
        last = json.loads(pointer.read_bytes())
        named = list(log.glob(f"{last['version']:020}.checkpoint*")) if last else []
        is_valid = bool(named) and not any(path in torn for path in named)
    except FileNotFoundError:
        return torn
    except ValueError:
        is_valid = False
    return torn if is_valid else [*torn, pointer]


def _is_complete(versions: list[int], checkpoints: list[Path]) -> bool:
    if not versions or versions[-1] - versions[0] >= len(versions):
        return False
    return versions[0] == 0 or any(int(path.name.partition(".")[0]) >= versions[0] - 1 for path in checkpoints)


def _is_readable(path: Path) -> bool:
    try:
        pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError):
        return False
    return True
