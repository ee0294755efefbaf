"""One step of a swap: replaces files of a live table in one commit (docs/design, decision 22)."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake

_TRIES = 100
"""attempts to commit while other writers commit"""


class OvertakenError(KilnError):
    """Another writer removed files of the table, so the step must be planned again. Nothing was committed."""


class FileSwap:
    """Commits that replace files of live tables. They do not conflict with the appends of streaming queries."""

    def __init__(self, lake: Lake, *, durable: bool = False) -> None:
        """Prepare the commits.

        Args:
            durable: Sync each commit to disk before `commit` returns.
        """
        self._lake = lake
        self._durable = durable

    def has_step(self, table: str, mark: Transaction) -> bool:
        """Return true if the step with this mark was committed to the table."""
        return _has_transaction(self._lake.open(table), mark)

    def commit(
        self, table: str, opened: DeltaTable, removed: Collection[str], files: Sequence[DataFile], mark: Transaction
    ) -> None:
        """Replace files of a table.

        Args:
            table: Name of the table.
            opened: Version that the step was planned on. Later appends stay.
            removed: Paths of the files to remove, as in the log.
            files: Files to add.
            mark: Identifies the step, so that it is committed once (PROTOCOL.md, Transaction Identifiers).

        Raises:
            OvertakenError: Another writer removed one of the files.
            SchemaChangedError: Another program has changed the table's columns.
        """
        if self._durable:
            self._lake.folder(table).sync()
        now = int(time.time() * 1000)  # a vacuum keeps removed files for a time from here
        actions: list[AddAction | RemoveAction] = [RemoveAction(path, True, now) for path in removed]
        actions += [AddAction(file.name, file.size, {}, now, True, file.stats) for file in files]
        # delta-rs sees no conflict in a compaction that removed the same files. So it must not retry on its own, and
        # the loop below checks the files.
        properties = CommitProperties(app_transactions=[mark], max_commit_retries=0)
        for _ in range(_TRIES):
            known = opened.version()
            self._lake.check_columns(table, opened.schema().to_json(), exact=bool(removed))
            try:
                opened.create_write_transaction(
                    actions, mode="append", schema=opened.schema(), commit_properties=properties
                )
                break
            except CommitFailedError:
                opened.update_incremental()
                if _has_transaction(opened, mark):  # another swap of this run, or the object store's answer was lost
                    raise OvertakenError(
                        f"{mark.app_id} is already committed to {table} in {self._lake.path}"
                    ) from None
                if not set(map(str, opened.get_add_actions()["path"].to_pylist())).issuperset(removed):
                    raise OvertakenError(f"table {table} in {self._lake.path} was changed by another writer") from None
        else:
            raise OvertakenError(f"other writers keep committing to table {table} in {self._lake.path}. Try again")
        opened.update_incremental()
        if self._durable:
            self._lake.sync_commits(table, known + 1, opened.version())


def _has_transaction(opened: DeltaTable, mark: Transaction) -> bool:
    newest = opened.transaction_version(mark.app_id)
    return newest is not None and newest >= mark.version
