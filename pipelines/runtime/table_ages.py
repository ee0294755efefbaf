"""Detection of tables that are older than the checkpoint of their query, such as after a backup was restored.

For each query that writes a Delta table, the table's log has the number of the newest micro-batch that it holds
(decision 7). A file of Kiln's in the query's checkpoint names the two newest micro-batches that the query has committed
to its tables. If Spark has recorded one of these as done, and the table lacks it, the table is too old (decision 19).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import Location
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.schemas.queries import QUERIES

TABLES_FILE: Final = "tables.json"
"""Kiln's file in a checkpoint: the two newest micro-batches that were committed, by Delta's application id"""


class OlderTableError(KilnError):
    """A table is older than the checkpoint of the query that writes it."""


def read_table_writes(checkpoint: Location) -> Mapping[str, Sequence[int]]:
    """Read the two newest micro-batches that a query has committed, by Delta's application id.

    Returns:
        An empty mapping if the query has written nothing.
    """
    path = checkpoint / TABLES_FILE
    return msgspec.json.decode(path.read(), type=dict[str, list[int]]) if path.exists() else {}


class TableWrite(NamedTuple):
    """The newest finished micro-batch that a query has committed to a table under a Delta application id."""

    table: str
    app_id: str
    batch_id: int


def list_done_writes(checkpoint: Checkpoint, done: int) -> Iterator[TableWrite]:
    """List the writes that a query's tables must contain.

    Args:
        done: Number of the newest finished micro-batch. Spark repeats a later one, so a table may lack it.
    """
    for app_id, batches in read_table_writes(checkpoint.path).items():
        query_id, table, _ = app_id.split(":")
        done_batches = [batch_id for batch_id in batches if batch_id <= done]
        if done_batches and query_id == checkpoint.query_id:
            yield TableWrite(table, app_id, done_batches[-1])


def find_older_table(lake: Lake, query: str, checkpoint: Checkpoint, done: int, torn: Collection[str] = ()) -> str:
    """Find a table that is older than its query's checkpoint. The query may run meanwhile.

    Tables that cannot be opened are skipped: their readers report the error.

    Args:
        done: Number of the newest finished micro-batch.
        torn: Tables to skip, because a power cut has damaged their newest commits.

    Returns:
        A description of the first such table; empty if there is none.
    """
    for table, app_id, batch_id in list_done_writes(checkpoint, done):
        if table in torn:
            continue
        try:
            newest = lake.open(table).transaction_version(app_id) if lake.has(table) else None
        except LakeError:
            continue
        if newest is None or newest < batch_id:
            end = "has no micro-batch of this query" if newest is None else f"ends with micro-batch {newest}"
            return (
                f"the table {table} in {lake.path} is older than the checkpoint of {query} in {checkpoint.path}: the "
                f"table {end}, but {query} had written micro-batch {batch_id} to it. The rows in between would stay "
                "missing"
            )
    return ""


OLDER_TABLE_REMEDY: Final = (
    "Restore the newest backup of the table, or a backup of the whole state folder, or stop Kiln and run kiln recover, "
    "which lists the repairs"
)


def find_older_tables(lake: Lake, checkpoints: Location) -> list[str]:
    """Find tables that are older than their query's checkpoint.

    Args:
        checkpoints: Folder of the queries' checkpoints. A query without checkpoint is skipped.

    Returns:
        A description of at most one table for each query.
    """
    existing = ((query, Checkpoint(checkpoints / query)) for query in QUERIES)
    problems = (
        find_older_table(lake, query, checkpoint, checkpoint.committed)
        for query, checkpoint in existing
        if checkpoint.exists
    )
    return [problem for problem in problems if problem]


def check_tables(lake: Lake, checkpoints: Location) -> None:
    """Check that no table is older than its query's checkpoint.

    Raises:
        OlderTableError: A table is older than its query's checkpoint.
    """
    for problem in find_older_tables(lake, checkpoints):
        raise OlderTableError(f"{problem}. {OLDER_TABLE_REMEDY}")
