"""Commits of a query to its tables (decision 19)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kiln.pipelines.delta.commits import BatchProgress, WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.pipelines.runtime.table_ages import TABLES_FILE, read_table_writes
from kiln.pipelines.runtime.topics import read_topic_ids

_NEWEST: Final = 2
"""saved micro-batches of a write: the newest one is not done yet when the file is written"""


class TableOutput(NamedTuple):
    """Files of one write. `name` distinguishes two writes to one table."""

    table: str
    files: Sequence[DataFile]
    name: str = "append"


class TableWriter:
    """Writer of the tables of one query. For one thread."""

    def __init__(self, lake: Lake, commits: DeltaRsCommits, checkpoint: Checkpoint) -> None:
        """Create the writer. `checkpoint`: the query's checkpoint."""
        self._lake = lake
        self._commits = commits
        self._checkpoint = checkpoint
        self._path = checkpoint.path / TABLES_FILE
        self._saved = read_table_writes(checkpoint.path)
        self._committed = dict(self._saved)

    def commit(self, query_id: str, batch_id: int, outputs: Sequence[TableOutput]) -> None:
        """Commit all writes of a micro-batch, and save in the checkpoint that the tables contain them. Spark records
        the micro-batch as done afterwards.

        Each commit names all writes and carries the offsets of the micro-batch, so that `kiln recover` needs only the
        tables to find where to continue. The files of a write that a table already contains are deleted.
        """
        outputs = [output for output in outputs if output.files]
        progress = self._read_progress(query_id, batch_id, outputs) if outputs else None
        for table, files, name in outputs:
            write_id = WriteId(query_id, batch_id, name)
            if not self._commits.commit(table, files, write_id, progress):
                delete_files(self._lake, files)
            app_id = write_id.app_id(table)
            batches = {*self._committed.get(app_id, ()), batch_id}
            self._committed[app_id] = sorted(batches)[-_NEWEST:]
        self._committed = {
            app_id: batches for app_id, batches in self._committed.items() if app_id.startswith(f"{query_id}:")
        }
        if self._committed != self._saved:
            self._path.write([msgspec.json.encode(self._committed)])
            self._saved = dict(self._committed)

    def _read_progress(self, query_id: str, batch_id: int, outputs: Sequence[TableOutput]) -> BatchProgress:
        checkpoint = self._checkpoint
        return BatchProgress(
            generation=checkpoint.generation,
            query_id=query_id,
            batch=batch_id,
            writes=[f"{output.table}:{output.name}" for output in outputs],
            starts=checkpoint.starts(batch_id),
            ends=checkpoint.ends(batch_id),
            topics=read_topic_ids(checkpoint.path),
        )
