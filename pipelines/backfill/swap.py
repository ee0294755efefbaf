"""Commits of a swap of a backfill run: each replaces data files of one live table (docs/design, decision 22)."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.transaction import AddAction, RemoveAction

from kiln.pipelines.delta.delta_rs import commit_replacement
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake


def has_mark(table: DeltaTable, mark: Transaction) -> bool:
    """Return true if the step that `mark` identifies was committed to the table."""
    newest = table.transaction_version(mark.app_id)
    return newest is not None and newest >= mark.version


class FileSwap:
    """Writer of commits that replace data files of live tables, without conflicts with appends of streaming queries."""

    def __init__(self, lake: Lake, *, durable: bool = False) -> None:
        """Create the writer. `durable`: true to sync each commit to disk before `commit` returns."""
        self._lake = lake
        self._durable = durable

    def commit(
        self, table: str, opened: DeltaTable, removed: Collection[str], files: Sequence[DataFile], mark: Transaction
    ) -> bool:
        """Replace data files of a table in one commit.

        Args:
            opened: The table at the version for which the step was planned. Rows that were appended later stay.
            removed: Paths of the files to remove, as in the log.
            mark: Identifies the step, so that it is committed once (Delta's PROTOCOL.md, Transaction Identifiers).

        Returns:
            False if another writer has removed one of the files, or has committed the step. Nothing is committed then.

        Raises:
            SchemaChangedError: Another program has changed the table's columns.
        """
        if self._durable:
            self._lake.folder(table).sync()
        now = int(time.time() * 1000)  # a vacuum keeps removed files for a time from here
        actions: list[AddAction | RemoveAction] = [RemoveAction(path, True, now) for path in removed]
        actions += [AddAction(file.name, file.size, {}, now, True, file.stats) for file in files]
        properties = CommitProperties(app_transactions=[mark], max_commit_retries=0)
        followed = opened.version()
        if not commit_replacement(self._lake, table, opened, actions, properties):
            return False
        if self._durable:
            self._lake.sync_commits(table, followed + 1, opened.version())
        return True
