"""A second computation of the batches' windows, to check the table `batches`; and the context of all checks.

The windows follow from the table `updates` by the rule of decision 1, without the code of the query `batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import duckdb
import msgspec
import pyarrow as pa

from kiln.schemas.wire.batch_block import encode_stream_key, write_leaves
from kiln.schemas.wire.cid import cid_bytes

_REPEATS: Final = timedelta(days=2)
"""Maximum time between a row and an older row to which it refers: more than `dedupe.signed_ttl`."""


@dataclass(frozen=True)
class CheckContext:
    """Settings on which checks depend, and the time of the check run."""

    now: datetime
    running: bool = False
    """true if a bridge runs"""
    window: int = 1_000_000
    """`batch.window` in µs"""
    grace: int = 0
    """`batch.grace` in µs"""
    block_limit: int = 1_000_000
    """`batch.max_block_bytes`"""
    authors: frozenset[str] | None = None
    """peer ids in `batch.authors`; `None` for all authors"""
    only_verified: bool = False
    retention: Mapping[str, timedelta] = field(default_factory=dict)
    """age at which maintenance removes rows, by table name"""

    def find_expiry(self, tables: Sequence[str]) -> datetime | None:
        """Return the time before which rows cannot be checked, or `None` if the tables keep all rows.

        Retention may have removed rows of `tables` to which rows from before that time refer.
        """
        ages = [self.retention[table] for table in tables if table in self.retention]
        return self.now - min(ages) + _REPEATS if ages else None


Owner = tuple[str, str, str, str]
"""Network, origin, separator key and separator value, to which a window belongs."""

_PAGE: Final = 50_000
"""Number of rows that are processed at a time."""
_COLUMNS: Final = ("network", "origin", "separator_key", "separator_value", "opened_at", "batch_cid", "is_closed")
_WARM_UP: Final = 60_000_000
"""Minimum length of log time, in µs, that is read before the first new update, to find where its window starts."""


class BatchedUpdate(NamedTuple):
    """A row of `updates` that belongs in a batch. Times are in µs since the epoch."""

    owner: Owner
    leaf: bytes
    """stream and tip, as for `kiln.schemas.wire.batch_block.write_leaves`"""
    observed_at: int
    log_time: int


class ModelWindow(msgspec.Struct):
    """A window: event time and log time of its first update, in µs, and the leaves of its updates."""

    opened_at: int
    log_time: int
    leaves: set[bytes]


def close_windows(
    updates: Iterable[BatchedUpdate], open_: dict[Owner, ModelWindow], length: int, grace: int
) -> Iterator[tuple[Owner, ModelWindow]]:
    """Sort updates into windows. Yield each window with its owner when a later update closes it.

    Args:
        updates: Updates in the order of log time.
        open_: The open windows, which are updated. Windows that no update closes stay in it.
        length: Length T of a window in µs.
        grace: Grace G in µs.
    """
    for owner, leaf, observed_at, log_time in updates:
        event_time = min(observed_at, log_time)
        window = open_.get(owner)
        if window and (event_time >= window.opened_at + length or log_time >= window.log_time + length + grace):
            yield owner, window
            window = None
        if window is None:
            window = open_[owner] = ModelWindow(event_time, log_time, set())
        window.leaves.add(leaf)


def create_windows(db: duckdb.DuckDBPyConnection, context: CheckContext, *, all_new: bool) -> None:
    """Create the table `windows`, with the windows that are open at the first new update and all later windows.

    Args:
        db: A connection with the views `updates`, `new_updates` and `batches`.
        context: Settings on which windows depend.
        all_new: True if all updates are new. Then the first update of each separator opens a window.
    """
    span = context.window + context.grace
    ((first, newest),) = db.execute(
        "SELECT (SELECT min(epoch_us(log_time)) FROM new_updates), (SELECT max(epoch_us(log_time)) FROM updates)"
    ).fetchall()
    start = 0 if all_new else (first or newest or 0) - max(_WARM_UP, 4 * span)
    db.execute(
        "CREATE OR REPLACE TEMP TABLE windows (network VARCHAR, origin VARCHAR, separator_key VARCHAR, "
        "separator_value VARCHAR, opened_at TIMESTAMPTZ, batch_cid VARCHAR, is_closed BOOLEAN)"
    )
    reader = db.cursor()
    updates = _read_updates(reader, context, start)
    if start:
        updates = _skip_unknown(reader.cursor(), updates, start, span)
    open_ = dict[Owner, ModelWindow]()
    rows = list[tuple[object, ...]]()
    for owner, window in close_windows(updates, open_, context.window, context.grace):
        rows += _build_rows(owner, window, context.block_limit, is_closed=True)
        if len(rows) >= _PAGE:
            _insert(db, rows)
            rows.clear()
    for owner, window in open_.items():
        rows += _build_rows(owner, window, context.block_limit, is_closed=False)
    _insert(db, rows)


def _build_rows(owner: Owner, window: ModelWindow, limit: int, *, is_closed: bool) -> Iterator[tuple[object, ...]]:
    for block in write_leaves(window.leaves, limit):
        yield (*owner, window.opened_at, block.cid, is_closed)


def _insert(db: duckdb.DuckDBPyConnection, rows: list[tuple[object, ...]]) -> None:
    if not rows:
        return
    table = pa.table([pa.array(values) for values in zip(*rows, strict=True)], names=list(_COLUMNS))
    db.register("window_rows", table)
    db.execute("INSERT INTO windows SELECT * REPLACE (make_timestamptz(opened_at) AS opened_at) FROM window_rows")
    db.unregister("window_rows")


def _read_updates(reader: duckdb.DuckDBPyConnection, context: CheckContext, start: int) -> Iterator[BatchedUpdate]:
    """Read the updates that belong in batches, in the order of log time, from the log time `start` (µs) on."""
    authors = ", ".join("'" + author.replace("'", "''") + "'" for author in sorted(context.authors or ())) or "NULL"
    where = (
        f"separator_key IS NOT NULL AND epoch_us(log_time) >= {start}"
        + ("" if context.authors is None else f" AND from_peer IN ({authors})")
        + (" AND separator_source = 'genesis'" if context.only_verified else "")
    )
    pages = reader.sql(
        "SELECT network, origin, separator_key, separator_value, stream, tip, epoch_us(observed_at), "
        f"epoch_us(log_time) FROM updates WHERE {where} ORDER BY log_time, log_partition, log_offset"
    ).to_arrow_reader(_PAGE)
    for page in pages:
        columns = [column.to_pylist() for column in page.columns]
        for *owner, stream, tip, observed_at, log_time in zip(*columns, strict=True):
            try:
                leaf = encode_stream_key(stream) + cid_bytes(tip)
            except ValueError:
                continue  # other expectations report malformed CIDs and StreamIDs
            network, origin, key, value = owner
            yield BatchedUpdate((network, origin, key, value), leaf, observed_at, log_time)


def _skip_unknown(
    reader: duckdb.DuckDBPyConnection, updates: Iterator[BatchedUpdate], start: int, span: int
) -> Iterator[BatchedUpdate]:
    """Skip the updates of each separator before the first that certainly opens a window, because it follows a pause
    longer than any window, or because a stored batch begins at its event time."""
    stored = {
        (*owner, opened_at)
        for *owner, opened_at in reader.execute(
            "SELECT network, origin, separator_key, separator_value, epoch_us(opened_at) FROM batches "
            f"WHERE emitted_at >= make_timestamptz({start})"
        ).fetchall()
    }
    known, last = set[Owner](), dict[Owner, int]()
    for update in updates:
        if update.owner not in known:
            is_first = update.log_time >= last.get(update.owner, start) + span
            last[update.owner] = update.log_time
            if not is_first and (*update.owner, min(update.observed_at, update.log_time)) not in stored:
                continue
            known.add(update.owner)
        yield update
