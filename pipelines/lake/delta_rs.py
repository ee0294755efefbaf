"""Commits by delta-rs. No JVM takes part, and on an object store a commit is a put-if-absent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from conf.disk import to_disk
from pipelines.lake.commits import Write, second_writer
from pipelines.lake.files import DataFile
from pipelines.lake.lake import Lake

_CONCURRENT = "Concurrent transaction"
"""How delta-rs says that a commit under the same application id came in between."""

_FILES_GONE = "deleted data this operation read"
"""How delta-rs says that a commit in between took files out of the table: a compaction, or the swap of a run."""


class DeltaRsCommits:
    """`Commits` by delta-rs. Each table is read once, and from then on its log is followed."""

    def __init__(self, lake: Lake, *, durable: bool = False) -> None:
        """`durable`: a commit is on the disk before `commit` returns."""
        self._lake = lake
        self._durable = durable
        self._tables: dict[str, DeltaTable] = {}

    def commit(self, table: str, files: Sequence[DataFile], write: Write) -> bool:
        """As `Commits.commit`."""
        opened = self._tables.get(table)
        if opened is None:
            opened = self._tables[table] = self._lake.open(table)
        app_id = write.app_id(table)
        newest = opened.transaction_version(app_id)
        if newest is not None and newest >= write.batch_id:
            return False
        if self._durable:
            to_disk(Path(self._lake.table(table)))  # the files are named before a commit names them
        now = int(time.time() * 1000)  # the log tells readers when a commit was made
        adds: list[AddAction | RemoveAction] = [
            AddAction(each.name, each.size, {}, now, True, each.stats) for each in files
        ]
        while True:
            try:
                opened.create_write_transaction(
                    adds,
                    mode="append",
                    schema=opened.schema(),
                    commit_properties=CommitProperties(app_transactions=[Transaction(app_id, write.batch_id, now)]),
                )
                break
            except CommitFailedError as error:
                if _FILES_GONE in str(error):  # an append has read none of them
                    opened.update_incremental()
                    if opened.transaction_version(app_id) == newest:
                        continue
                    raise second_writer(table, write) from error
                del self._tables[table]
                if _CONCURRENT in str(error):
                    raise second_writer(table, write) from error
                raise
        known = opened.version()
        opened.update_incremental()
        if self._durable:
            self._lake.keep(table, known, opened.version())
        return True
