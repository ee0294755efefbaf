"""Windows that follow from the updates by the rule of decision 1, computed independently of the code that builds the
batches; and the context of the checks: settings and time."""

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
"""maximum age of an update or a message to which a new row may refer: more than `dedupe.signed_ttl`"""


@dataclass(frozen=True)
class CheckContext:
    """Settings and time of a check."""

    now: datetime
    running: bool = False
    """true if the status of the bridge is recent"""
    window: int = 1_000_000
    grace: int = 0
    block_limit: int = 1_000_000
    authors: frozenset[str] | None = None
    only_verified: bool = False
    retention: Mapping[str, timedelta] = field(default_factory=dict)
    """age from which maintenance removes rows, by table"""

    def find_expiry(self, tables: Sequence[str]) -> datetime | None:
        """Find the time of the newest rows whose counterpart in one of the tables may have expired."""
        ages = [self.retention[table] for table in tables if table in self.retention]
        return self.now - min(ages) + _REPEATS if ages else None


Owner = tuple[str, str, str, str]
"""network, origin, separator key, separator value"""

_PAGE: Final = 50_000
"""rows of `updates` in a page"""
_COLUMNS: Final = ("network", "origin", "separator_key", "separator_value", "opened_at", "batch_cid", "is_closed")
_WARM_UP: Final = 60_000_000
"""minimum log time, µs, that is read before the first new update, to find the start of a window"""


class BatchedUpdate(NamedTuple):
    """A row of `updates` that goes into a batch; times in µs."""

    owner: Owner
    leaf: bytes
    observed_at: int
    log_time: int


class ModelWindow(msgspec.Struct):
    """An open window: event time and log time of its first update, and its tips."""

    opened_at: int
    log_time: int
    leaves: set[bytes]


def close_windows(
    updates: Iterable[BatchedUpdate], open_: dict[Owner, ModelWindow], length: int, grace: int
) -> Iterator[tuple[Owner, ModelWindow]]:
    """Yield the windows that later updates close, in the order of log time, and update the open windows."""
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
    """Create the table `windows` of the windows that are open at the first new update, and of all later windows.

    Args:
        db: A connection with the views `updates`, `new_updates` and `batches`.
        context: Settings of the windows.
        all_new: True if all updates are new, so that the first update of each separator opens a window.
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
    """Read the updates that go into batches, in the order of log time from `start` on, page by page."""
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
    """Skip the updates of each separator before the first one that certainly opens a window: it follows a pause that
    ends every window, or a stored batch begins with it."""
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
