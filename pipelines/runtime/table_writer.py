"""Commits of a query to its tables (decision 19)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kiln.conf.process.location import Location
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.table_ages import TABLES_FILE, read_table_writes

_NEWEST: Final = 2
"""saved micro-batches of a write: the newest one is not done yet when the file is written"""


class TableWriter:
    """Writer of the tables of one query. For one thread."""

    def __init__(self, lake: Lake, commits: DeltaRsCommits, checkpoint: Location) -> None:
        """Create the writer. `checkpoint`: folder of the query's checkpoint."""
        self._lake = lake
        self._commits = commits
        self._path = checkpoint / TABLES_FILE
        self._saved = read_table_writes(checkpoint)
        self._committed = dict(self._saved)

    def commit(self, table: str, files: Sequence[DataFile], write: WriteId) -> None:
        """Commit the files of a write to a table. If the table has the write already, the files are deleted."""
        if not files:
            return
        if not self._commits.commit(table, files, write):
            delete_files(self._lake, files)
        app_id = write.app_id(table)
        batches = {*self._committed.get(app_id, ()), write.batch_id}
        self._committed[app_id] = sorted(batches)[-_NEWEST:]

    def save(self, query_id: str) -> None:
        """Save which micro-batches the tables have. Call it after the last commit of a micro-batch, and before Spark
        records the micro-batch as done."""
        self._committed = {
            app_id: batches for app_id, batches in self._committed.items() if app_id.startswith(f"{query_id}:")
        }
        if self._committed != self._saved:
            self._path.write([msgspec.json.encode(self._committed)])
            self._saved = dict(self._committed)
