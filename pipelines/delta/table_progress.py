"""Search for the newest micro-batch that all tables of a query have, by the progress of the query in their commits
(decision 19)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.commits import MAINTENANCE_PREFIX, PROGRESS_KEY, BatchProgress, WriteId
from kiln.pipelines.delta.lake import Lake, find_missing_files
from kiln.pipelines.delta.table_history import list_commits, read_commit

_Key = tuple[int, int]
"""Generation of the query, and number of the micro-batch"""


class RestoreError(KilnError):
    """The tables do not show at which Kafka offsets their query can continue."""


class RestorePoint(NamedTuple):
    """Versions at which all tables of a query have the same micro-batches, and the Kafka offsets at their end."""

    offsets: Mapping[str, Mapping[int, int]]
    """end offsets, by full topic name: all tables have the rows of all records before these"""
    topics: Mapping[str, str]
    """Kafka's ids of the topics in `offsets`, by full topic name"""
    versions: Mapping[str, int]
    """version to which a table must be restored, by table"""
    generation: int
    """greatest generation of the query in the logs"""


@dataclass
class _History:
    """Commits of a table, without those that a later RESTORE has undone."""

    newest: int
    is_truncated: bool
    """true if maintenance has removed older commits from the log"""
    writes: dict[_Key, dict[str, BatchProgress]] = field(default_factory=dict)
    """progress of the query, by micro-batch and by the name of the write"""
    versions: list[tuple[int, _Key | None]] = field(default_factory=list)
    """commits that add or remove rows, newest first, each with its micro-batch; None for another writer's commit"""
    generation: int = 0

    def has(self, lake: Lake, progress: BatchProgress, write: str) -> bool:
        """Return true if the table has this write of the micro-batch."""
        key = _get_key(progress)
        if write in self.writes.get(key, {}):
            return True
        if not self.is_truncated or (self.writes and key > min(self.writes)):
            return False
        if self.writes:
            return True  # older than everything in the log
        table, name = write.split(":")
        newest = lake.open(table).transaction_version(WriteId(progress.query_id, 0, name).app_id(table))
        return newest is not None and newest >= progress.batch


def find_restore_point(lake: Lake, tables: Sequence[str]) -> RestorePoint | None:
    """Find the newest micro-batch that all tables of a query have. It can be called again after an interrupted restore.

    The logs of the tables must have no damaged commit. Returns None if the tables have no rows of the query.

    Raises:
        RestoreError: The logs do not go back far enough, files are missing, or another writer has changed a table.
        LakeError: A table cannot be read.
    """
    histories = {table: _read_history(lake, table) for table in tables if lake.has(table)}
    known: dict[_Key, BatchProgress] = {}
    for history in histories.values():
        for key, writes in history.writes.items():
            known[key] = next(iter(writes.values()))
    if not known:
        full = [table for table, history in histories.items() if history.newest and lake.has_rows(table)]
        if full:
            raise RestoreError(
                f"cannot find the Kafka offsets at which the query can continue: no commit of the tables "
                f"{', '.join(full)} in {lake.path} has the progress of the query"
            )
        return None
    lacking = [
        key
        for key, progress in known.items()
        if not all(
            write.split(":")[0] in histories and histories[write.split(":")[0]].has(lake, progress, write)
            for write in progress.writes
        )
    ]
    end = min(lacking, default=None)
    newest = known[max(known) if end is None else end]
    return RestorePoint(
        newest.ends if end is None else newest.starts,
        newest.topics,
        {table: _find_version(lake, table, history, end) for table, history in histories.items()},
        max(history.generation for history in histories.values()),
    )


def _find_version(lake: Lake, table: str, history: _History, end: _Key | None) -> int:
    """Find the version of a table before the micro-batch `end`. If `end` is None, return its newest version."""
    base, others = history.newest, False
    for version, key in history.versions:
        if key is None:
            others = True
        elif end is not None and key >= end:
            if others:
                raise RestoreError(
                    f"cannot restore table {table} in {lake.path} to version {version - 1}: another writer has "
                    "committed to it since, and the rows of that commit would be lost"
                )
            base = version - 1
    failure = f"cannot restore table {table} in {lake.path} to version {base}"
    if base < history.newest and history.is_truncated and base < history.versions[-1][0]:
        raise RestoreError(f"{failure}: maintenance has removed that version from the log of the table")
    if missing := find_missing_files(lake, table, lake.open(table, base)):
        raise RestoreError(f"{failure}: its file {missing[0]} is missing")
    return base


def _read_history(lake: Lake, table: str) -> _History:
    folder = lake.folder(table)
    commits = list_commits(folder)
    history = _History(commits[-1] if commits else 0, bool(commits) and commits[0] > 0)
    until = history.newest
    for version in reversed(commits):
        actions = read_commit(folder, version)
        info = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        carried = info.get(PROGRESS_KEY)
        progress = _DECODER.decode(carried) if isinstance(carried, str) else None
        if progress is not None:
            history.generation = max(history.generation, progress.generation)
        if version > until:
            continue  # undone
        if progress is not None:
            key = _get_key(progress)
            names = {
                ":".join(str(action["txn"]["appId"]).split(":")[1:])
                for action in actions
                if "txn" in action and str(action["txn"]["appId"]).startswith(f"{progress.query_id}:")
            }
            history.writes.setdefault(key, {}).update(dict.fromkeys(names, progress))
            history.versions.append((version, key))
        elif (restored := _read_restored_version(info)) is not None:
            until = restored
        elif _changes_rows(actions) and not str(info.get("userMetadata", "")).startswith(MAINTENANCE_PREFIX):
            history.versions.append((version, None))
    return history


def _read_restored_version(info: Mapping[str, object]) -> int | None:
    """Read the version to which a commit has restored the table; None if the commit is no RESTORE."""
    parameters = info.get("operationParameters")
    version = str(parameters.get("version")) if isinstance(parameters, dict) else ""
    return int(version) if info.get("operation") == "RESTORE" and version.isdecimal() else None


def _changes_rows(actions: Sequence[Mapping[str, Mapping[str, object]]]) -> bool:
    return any("add" in action or "remove" in action or "txn" in action for action in actions)


def _get_key(progress: BatchProgress) -> _Key:
    return progress.generation, progress.batch


_DECODER = msgspec.json.Decoder(BatchProgress)
