"""Commits with delta-rs, without a JVM. On an object store, a commit is a put-if-absent of its file in the log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

import msgspec
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from kiln.pipelines.delta.commits import PROGRESS_KEY, BatchProgress, WriteId, build_second_writer_error
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake, LakeError, locate_commit
from kiln.pipelines.delta.log_faults import adds_any
from kiln.pipelines.delta.table_history import read_commit

AFTER_COMMIT = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
"""Steps after a commit: a checkpoint, but no removal of old log entries. By default, delta-rs searches the whole log
for old entries after each commit, which costs more than the commit. Here table maintenance removes them."""


class DeltaRsCommits:
    """Writer of the commits of one query, for one thread. It keeps each table open, and reads only the new commits of
    its log."""

    def __init__(self, lake: Lake, *, durable: bool = False) -> None:
        """Create the writer. `durable`: sync each commit to disk before `commit` returns."""
        self._lake = lake
        self._durable = durable
        self._tables: dict[str, DeltaTable] = {}
        self._newest: dict[str, int | None] = {}
        """newest transaction that this driver has read or committed, by application id"""

    def commit(
        self, table: str, files: Sequence[DataFile], write_id: WriteId, progress: BatchProgress | None = None
    ) -> bool:
        """Append files to a table in one commit, which also stores the progress of the query.

        Returns:
            False if the table already has this write. The files are then not added to the table.

        Raises:
            SecondWriterError: Another driver runs the same query.
            LakeError: The table cannot be read.
            SchemaChangedError: Another program has changed the table's columns.
        """
        app_id = write_id.app_id(table)
        opened = self._open(table, write_id)
        newest = self._newest[app_id] = opened.transaction_version(app_id)
        if newest is not None and newest >= write_id.batch_id:
            return False
        if self._durable:
            self._lake.folder(table).sync()  # the names of the files must be on disk before a commit refers to them
        followed = opened.version()
        now = int(time.time() * 1000)  # the log tells readers when a commit was made
        adds: list[AddAction | RemoveAction] = [
            AddAction(file.name, file.size, {}, now, True, file.stats) for file in files
        ]
        carried = {} if progress is None else {PROGRESS_KEY: msgspec.json.encode(progress).decode()}
        properties = CommitProperties(
            custom_metadata=carried, app_transactions=[Transaction(app_id, write_id.batch_id, now)]
        )
        while True:
            known = opened.version()
            self._lake.check_columns(table, opened.schema().to_json())
            try:
                _write_commit(opened, adds, properties)
                break
            except CommitFailedError as error:
                opened.update_incremental()
                folder, since = self._lake.folder(table), range(known + 1, opened.version() + 1)
                if any(adds_any(read_commit(folder, version), files) for version in since):
                    break  # the commit was applied, and only the store's response was lost
                if opened.transaction_version(app_id) != newest:
                    raise build_second_writer_error(table, write_id) from error
                if not since:
                    raise
                # delta-rs refuses an append if a concurrent commit removes files or changes the table, and gives up
                # after 15 concurrent commits. An append reads nothing, so it is repeated on top of these commits.
        opened.update_incremental()
        self._newest[app_id] = write_id.batch_id
        if self._durable:
            self._lake.sync_commits(table, followed, opened.version())
        return True

    def _open(self, table: str, write_id: WriteId) -> DeltaTable:
        """Return the table that this driver keeps open. Open it again if maintenance has removed the commit of its
        version.

        Raises:
            SecondWriterError: Another driver has committed for the same query since the table was read.
        """
        opened = self._tables.get(table)
        if opened is not None and locate_commit(self._lake.folder(table), opened.version()).exists():
            return opened
        fresh = self._tables[table] = self._lake.open(table)
        app_id = write_id.app_id(table)
        was_open = opened is not None and app_id in self._newest
        if was_open and fresh.transaction_version(app_id) != self._newest[app_id]:
            del self._tables[table]
            raise build_second_writer_error(table, write_id)
        return fresh


_TRIES = 200
"""Number of times that a replacement is tried, if other writers commit at the same time"""


def commit_replacement(
    lake: Lake,
    table: str,
    opened: DeltaTable,
    actions: list[AddAction | RemoveAction],
    properties: CommitProperties,
) -> bool:
    """Replace files of a table in one commit. Files that other writers append at the same time stay.

    delta-rs accepts a commit that removes files which another commit has just removed. So delta-rs must not retry, and
    this function checks the new commits before it tries again.

    Args:
        opened: The table at a version that has the files to remove. It is updated to the version of the new commit.
        actions: The files to add and to remove.
        properties: Properties of the commit, with `max_commit_retries` 0.

    Returns:
        False if another writer removed one of the files, changed the table's metadata or protocol, or committed the
        same transaction. The table is then unchanged.

    Raises:
        LakeError: Other writers commit without pause.
        SchemaChangedError: Another program has changed the table's columns.
    """
    added = {unquote(action.path) for action in actions if isinstance(action, AddAction)}
    removed = {unquote(action.path) for action in actions if isinstance(action, RemoveAction)}
    marks = {mark.app_id for mark in properties.app_transactions or ()}
    for _ in range(_TRIES):
        lake.check_columns(table, opened.schema().to_json(), exact=bool(added and removed))
        try:
            _write_commit(opened, actions, properties)
        except CommitFailedError:
            known = opened.version()
            opened.update_incremental()
            since = [read_commit(lake.folder(table), version) for version in range(known + 1, opened.version() + 1)]
            if any(added & _list_paths(commit, "add") for commit in since):
                return True  # the commit succeeded, and a step of delta-rs after it failed
            if any(_conflicts(commit, removed, marks) for commit in since):
                return False
            continue
        opened.update_incremental()
        return True
    raise LakeError(
        f"cannot commit to table {table} in {lake.path}: another writer committed first in each of {_TRIES} "
        "tries. Try again when fewer writers commit"
    )


def _write_commit(
    opened: DeltaTable, actions: Sequence[AddAction | RemoveAction], properties: CommitProperties
) -> None:
    opened.create_write_transaction(
        list(actions),
        mode="append",
        schema=opened.schema(),
        commit_properties=properties,
        post_commithook_properties=AFTER_COMMIT,
    )


_Commit = Sequence[Mapping[str, Mapping[str, object]]]


def _conflicts(commit: _Commit, removed: set[str], marks: set[str]) -> bool:
    """Return true if another writer's commit prevents ours: the commit cannot be read, it removes one of the
    files in `removed`, has a transaction id in `marks`, or changes the schema or the features of the table."""
    changes_table = any("metaData" in action or "protocol" in action for action in commit)
    is_same = any(action["txn"]["appId"] in marks for action in commit if "txn" in action)
    return not commit or changes_table or is_same or bool(removed & _list_paths(commit, "remove"))


def _list_paths(commit: _Commit, kind: str) -> set[str]:
    return {unquote(str(action[kind]["path"])) for action in commit if kind in action}
