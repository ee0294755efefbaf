"""Blocks that could not be fetched (stage `fetch` of quarantine), for another request in `kiln.wanted`."""

from __future__ import annotations

from typing import Final, NamedTuple

import duckdb
from msgspec import structs

from kiln.pipelines.delta.duckdb_tables import create_newest_views
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.kafka.records import UNREADABLE, Epoch, WantedRecord, decode_wanted

RETRY: Final = "retry"
"""writer of the epochs of requests that are made again"""


class UnfetchedBlocks(NamedTuple):
    """Requests for blocks that the fetcher gave up for a reason."""

    missing: list[WantedRecord]
    """requests for blocks that have not arrived since, in the order of the first request"""
    unreadable: int
    """number of rows of `quarantine` whose data is not a WantedRecord of this version"""


def find_unfetched_blocks(lake: Lake, reason: str) -> UnfetchedBlocks | None:
    """Find the blocks that the fetcher gave up for a reason.

    A waiting update keeps its origin, LIVE or REPLAY, because no topic has had the update yet.

    Returns:
        The blocks, or `None` if the stage `fetch` has no row with this reason.

    Raises:
        LakeError: A table cannot be read.
    """
    there = lake.tables()
    if "quarantine" not in there:
        return None
    with duckdb.connect() as connection:
        create_newest_views(connection, lake, [name for name in ("quarantine", "updates", "tips") if name in there])
        rows = connection.execute(
            "SELECT DISTINCT data FROM quarantine WHERE stage = 'fetch' AND reason = ?", [reason]
        ).fetchall()
        if not rows:
            return None
        records: list[WantedRecord] = []
        unreadable = 0
        for (data,) in rows:
            try:
                records.append(decode_wanted(data))
            except UNREADABLE:
                unreadable += 1
        updates = _query_rows(connection, there, "updates", "SELECT network, message_id FROM updates")
        batches = _query_rows(
            connection, there, "tips", "SELECT DISTINCT network, batch_cid FROM tips WHERE source = 'batch'"
        )
    missing = [
        record
        for record in sorted(records, key=lambda record: record.observed_at)
        if (record.network, record.cid) not in batches
        and (record.update is None or (record.network, record.update.message_id) not in updates)
    ]
    return UnfetchedBlocks(missing, unreadable)


def build_retry(record: WantedRecord, number: int) -> WantedRecord:
    """Build another request for a block. Its update gets the epoch `number` of a writer of its own, so that the fetcher
    does not take it for a repeat of the first request (decision 7)."""
    if record.update is None:
        return record
    return structs.replace(record, update=structs.replace(record.update, epoch=Epoch(RETRY, number)))


def _query_rows(
    connection: duckdb.DuckDBPyConnection, there: tuple[str, ...], table: str, query: str
) -> set[tuple[object, ...]]:
    return {tuple(row) for row in connection.execute(query).fetchall()} if table in there else set()
