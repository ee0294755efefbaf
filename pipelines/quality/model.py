"""Check of the table `batches` against a model of the batches of the table `updates` (docs/design, decision 1).

The model rebuilds the windows by a simple rule, independent of the code that builds the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

import msgspec

from kiln.pipelines.quality.table_checks import CheckInputs, format_interval, format_timestamp
from kiln.schemas.wire.batch_block import BlockError, read_block, write_blocks
from kiln.schemas.wire.cid import USUAL_TEXT, CidError, cid_bytes, cid_text
from kiln.schemas.wire.streamid import stream_text

Owner = tuple[str, str, str, str]
"""network, origin, separator key, separator value"""

_OWNER_SQL: Final = "to_json([network, origin, separator_key, separator_value])::VARCHAR"
"""SQL expression of an owner as text, equal to `_format_owner`."""

_PAGE: Final = 50_000
"""rows of `updates` in a page"""


class BatchedUpdate(NamedTuple):
    """A row of `updates` that goes into a batch; times in µs."""

    owner: Owner
    stream: str
    tip: bytes
    observed_at: int
    log_time: int


class ModelWindow(msgspec.Struct, array_like=True):
    """An open window: event time and log time of its first update, and its tips."""

    opened_at: int
    log_time: int
    tips: dict[str, set[bytes]]
    is_stored: bool = False
    """true if its batch is stored already: ticks close windows too, and `updates` has none"""


OpenWindows = dict[Owner, ModelWindow]


def close_windows(
    updates: Iterable[BatchedUpdate], open_: OpenWindows, length: int, grace: int
) -> Iterator[tuple[Owner, ModelWindow]]:
    """Yield the windows that later updates close, in the order of log time, and maintain the open windows."""
    for owner, stream, tip, observed_at, log_time in updates:
        event_time = min(observed_at, log_time)
        window = open_.get(owner)
        if window and (event_time >= window.opened_at + length or log_time >= window.log_time + length + grace):
            yield owner, window
            window = None
        if window is None:
            window = open_[owner] = ModelWindow(event_time, log_time, {})
        window.tips.setdefault(stream, set()).add(tip)


class UnmatchedBatch(NamedTuple):
    """A stored batch without a window, or a window without its batch."""

    owner: str
    opened_at: int
    length: int
    batch_cid: str
    is_stored: bool
    excused: bool
    is_due: bool = True


def select_faults(unmatched: Iterable[UnmatchedBatch]) -> Iterator[UnmatchedBatch]:
    """Select the due faults, except those in a chain of overlapping windows with an excused one. An additional or
    missing update shifts the windows after it, until there is a pause. Faults that are not due yet are part of the
    chains. Otherwise a fault would disappear once they are due.
    """
    for _, of_owner in groupby(sorted(unmatched), key=lambda each: each.owner):
        run: list[UnmatchedBatch] = []
        end = 0
        for each in of_owner:
            if run and each.opened_at >= end:
                yield from _filter_excused(run)
                run = []
            run.append(each)
            end = max(end if len(run) > 1 else 0, each.opened_at + each.length)
        yield from _filter_excused(run)


def _filter_excused(run: list[UnmatchedBatch]) -> list[UnmatchedBatch]:
    return [] if any(each.excused for each in run) else [each for each in run if each.is_due]


def check_batches_follow(inputs: CheckInputs) -> str:
    """Find the faults of `expect_batches_to_follow_from_updates`."""
    db, context = inputs.db, inputs.context
    open_table = inputs.create_state("open", "kept BLOB")
    updates_table = inputs.create_state("have", "h UBIGINT, read_at TIMESTAMPTZ")
    matched = inputs.create_state("made", "h UBIGINT, read_at TIMESTAMPTZ")
    pending = inputs.create_state("owes", "owner VARCHAR, opened_at BIGINT, batch_cid VARCHAR, since TIMESTAMPTZ")
    unexplained = inputs.create_state(
        "odd", "owner VARCHAR, opened_at BIGINT, length BIGINT, batch_cid VARCHAR, block BLOB, since TIMESTAMPTZ"
    )

    saved = db.execute(f"SELECT kept FROM {open_table}").fetchall()
    windows = _decode_windows(saved[0][0]) if saved else {}
    closed: list[ExpectedBatch] = []
    for owner, window in close_windows(_read_new_updates(inputs), windows, context.window, context.grace):
        if not window.is_stored:
            closed += _build_expected(owner, window, context.block_limit)
    open_now = [
        (owner, each)
        for owner, window in windows.items()
        if not window.is_stored
        for each in _build_expected(owner, window, context.block_limit)
    ]
    _remember_updates(inputs, updates_table)

    key, now = "hash(owner, opened_at, batch_cid)", inputs.now
    _load_expected(inputs, "closed", closed)
    _load_expected(inputs, "open_now", [each for _, each in open_now])
    # Another expectation reports batches that are stored twice.
    db.execute(
        f"CREATE OR REPLACE TEMP TABLE fresh AS SELECT * FROM (SELECT DISTINCT {_OWNER_SQL} AS owner, "
        f"epoch_us(opened_at) AS opened_at, batch_cid FROM new_batches) WHERE {key} NOT IN (SELECT h FROM {matched})"
    )
    for theirs in ("fresh", unexplained):
        for ours in ("closed", pending, "open_now"):
            db.execute(
                f"INSERT INTO {matched} SELECT DISTINCT {key}, {now} FROM {ours} "
                f"SEMI JOIN {theirs} USING (owner, opened_at, batch_cid)"
            )
    for (index,) in db.execute(
        f"SELECT DISTINCT index FROM open_now WHERE {key} IN (SELECT h FROM {matched} WHERE read_at = {now})"
    ).fetchall():
        windows[open_now[index][0]].is_stored = True
    for table in (unexplained, pending):
        db.execute(f"DELETE FROM {table} WHERE {key} IN (SELECT h FROM {matched})")
    if "updates" in inputs.committed:
        db.execute(
            f"INSERT INTO {pending} "
            f"SELECT owner, opened_at, batch_cid, {format_timestamp(inputs.committed['updates'])} FROM closed "
            f"WHERE {key} NOT IN (SELECT h FROM {matched})"
        )
    db.execute(f"DELETE FROM fresh WHERE {key} IN (SELECT h FROM {matched})")
    if db.execute("SELECT 1 FROM fresh LIMIT 1").fetchone():
        db.execute(
            f"INSERT INTO {unexplained} "
            f"SELECT * FROM (SELECT DISTINCT {_OWNER_SQL} AS owner, epoch_us(opened_at) AS opened_at, "
            "epoch_us(closed_at) - epoch_us(opened_at), batch_cid, block, "
            f"{format_timestamp(inputs.committed['batches'])} FROM new_batches "
            "WHERE batch_cid IN (SELECT batch_cid FROM fresh)) SEMI JOIN fresh USING (owner, opened_at, batch_cid)"
        )
    for table in (updates_table, matched):
        inputs.delete_old(table)
    db.execute(f"DELETE FROM {open_table}")
    db.execute(f"INSERT INTO {open_table} VALUES (?)", [_encode_windows(windows)])

    faults = inputs.create_state("found", "key JSON, seen_at TIMESTAMPTZ, words VARCHAR")
    db.execute(f"DELETE FROM {faults}")
    due = f"since + {format_interval(inputs.duration('settle'))} <= {inputs.now}"
    unmatched = [
        # Another expectation reports tips without an update, and a window of another length is of other settings.
        UnmatchedBatch(
            owner,
            opened_at,
            length,
            cid,
            True,
            length != context.window or not _has_all_updates(inputs, updates_table, owner, block),
            is_due,
        )
        for owner, opened_at, length, cid, block, is_due in db.execute(
            f"SELECT owner, opened_at, length, batch_cid, block, {due} FROM {unexplained}"
        ).fetchall()
    ]
    is_cut = _find_cut_windows(inputs)
    missing = db.execute(f"SELECT owner, opened_at, batch_cid, {due} FROM {pending}").fetchall()
    unmatched += [
        UnmatchedBatch(owner, opened_at, context.window, cid, False, is_cut(opened_at), is_due)
        for owner, opened_at, cid, is_due in missing
    ]
    inputs.pending["rows"] += sum(not each.is_due for each in unmatched)
    # A window that is still open may be shifted too, and so be the link between two windows.
    unmatched += [
        UnmatchedBatch(each.owner, each.opened_at, context.window, each.batch_cid, False, is_cut(each.opened_at), False)
        for owner, each in open_now
        if not windows[owner].is_stored
    ]
    # A reported fault stays until a row explains it, even if its updates have expired from the state.
    reported = inputs.create_state("told", "owner VARCHAR, opened_at BIGINT, batch_cid VARCHAR")
    known = set(db.execute(f"SELECT owner, opened_at, batch_cid FROM {reported}").fetchall())
    due_faults = {
        each
        for each in unmatched
        if (each.owner, each.opened_at, each.batch_cid) in known and (each.is_stored or not each.excused)
    }
    due_faults.update(select_faults(unmatched))
    db.execute(f"DELETE FROM {reported}")
    for each in sorted(due_faults):
        db.execute(f"INSERT INTO {reported} VALUES (?, ?, ?)", [each.owner, each.opened_at, each.batch_cid])
        _report_fault(inputs, faults, each)
    return f"SELECT key, seen_at, words FROM {faults}"


def _find_cut_windows(inputs: CheckInputs) -> Callable[[int], bool]:
    """Return a function of a window's start, µs, which returns true if updates or batches of the window may be missing.

    A run replaces the updates of its range. Where a window was open at the start of the range, its first updates and
    its batch are outside.
    """
    context = inputs.context
    swaps, length = inputs.read_swaps(), context.window + context.grace
    expiry = context.find_expiry(("updates", "batches"))
    expired = None if expiry is None else int(expiry.timestamp() * 1_000_000) + length
    return lambda at: (
        (expired is not None and at < expired) or any(swap.low <= at < swap.low + length for swap in swaps)
    )


def _read_new_updates(inputs: CheckInputs) -> Iterator[BatchedUpdate]:
    """Read the new rows of `updates` in the order of log time, page by page.

    Run no other query between two rows: the connection is streaming the result.
    """
    owners: list[Owner] = inputs.db.execute(
        "CREATE OR REPLACE TEMP TABLE owners AS SELECT row_number() OVER () - 1 AS index, * FROM (SELECT DISTINCT "
        "network, origin, separator_key, separator_value FROM new_updates WHERE separator_key IS NOT NULL); "
        "SELECT network, origin, separator_key, separator_value FROM owners ORDER BY index"
    ).fetchall()
    pages = inputs.db.sql(
        "SELECT o.index, stream, tip, epoch_us(observed_at), epoch_us(log_time) "
        f"FROM ({_build_query(inputs)}) u JOIN owners o ON u.network = o.network AND u.origin = o.origin AND "
        "u.separator_key = o.separator_key AND u.separator_value IS NOT DISTINCT FROM o.separator_value "
        "ORDER BY log_time, log_partition, log_offset"
    ).to_arrow_reader(_PAGE)
    for page in pages:
        for index, stream, tip, observed_at, log_time in zip(
            *(column.to_pylist() for column in page.columns), strict=True
        ):
            try:
                stream, tip = stream_text(stream), cid_bytes(tip)
            except ValueError:
                continue  # other expectations report malformed CIDs and StreamIDs
            yield BatchedUpdate(owners[index], stream, tip, observed_at, log_time)


def _build_query(inputs: CheckInputs) -> str:
    """Build the query for the new updates that go into batches."""
    context = inputs.context
    authors = ", ".join("'" + each.replace("'", "''") + "'" for each in sorted(context.authors or ())) or "NULL"
    return (
        "FROM new_updates WHERE separator_key IS NOT NULL"
        + ("" if context.authors is None else f" AND from_peer IN ({authors})")
        + (" AND separator_source = 'genesis'" if context.only_verified else "")
    )


def _remember_updates(inputs: CheckInputs, updates_table: str) -> None:
    """Add the new updates to the state, as hashes of owner, stream and tip in canonical form."""
    key = f"hash({_OWNER_SQL}, stream, tip)"
    inputs.db.execute(f"INSERT INTO {updates_table} SELECT DISTINCT {key}, {inputs.now} FROM ({_build_query(inputs)})")
    unusual = inputs.db.execute(
        f"SELECT DISTINCT {_OWNER_SQL}, stream, tip FROM ({_build_query(inputs)}) "
        f"WHERE NOT regexp_full_match(tip, '{USUAL_TEXT}')"
    ).fetchall()
    for owner, stream, tip in unusual:
        with suppress(CidError):
            inputs.db.execute(
                f"INSERT INTO {updates_table} SELECT hash(?, ?, ?), {inputs.now}",
                [owner, stream, cid_text(cid_bytes(tip))],
            )


class ExpectedBatch(NamedTuple):
    """The batch of a window."""

    owner: str
    opened_at: int
    batch_cid: str


def _build_expected(owner: Owner, window: ModelWindow, limit: int) -> list[ExpectedBatch]:
    text = _format_owner(owner)
    return [ExpectedBatch(text, window.opened_at, block.cid) for block in write_blocks(window.tips, limit)]


def _load_expected(inputs: CheckInputs, name: str, expected: list[ExpectedBatch]) -> None:
    """Create a table of expected batches with their indexes in the list."""
    import pyarrow as pa

    columns = zip(*expected, strict=True) if expected else ((), (), ())
    owners, opened, cids = (list(each) for each in columns)
    table = pa.table(
        {
            "owner": pa.array(owners, pa.string()),
            "opened_at": pa.array(opened, pa.int64()),
            "batch_cid": pa.array(cids, pa.string()),
            "index": pa.array(range(len(expected)), pa.int64()),
        }
    )
    inputs.db.register("expected", table)
    inputs.db.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS FROM expected")
    inputs.db.unregister("expected")


def _has_all_updates(inputs: CheckInputs, updates_table: str, owner: str, block: bytes) -> bool:
    try:
        tips = read_block(block)
    except BlockError:
        return False
    pairs = [(stream, tip) for stream, links in tips.items() for tip in links]
    row = inputs.db.execute(
        f"SELECT count(*) FROM (SELECT DISTINCT hash(?, stream, tip) AS h FROM "
        f"(SELECT unnest(?::VARCHAR[]) AS stream, unnest(?::VARCHAR[]) AS tip)) "
        f"WHERE h IN (SELECT h FROM {updates_table})",
        [owner, [stream for stream, _ in pairs], [tip for _, tip in pairs]],
    ).fetchone()
    return row is not None and row[0] == len(pairs)


def _report_fault(inputs: CheckInputs, table: str, each: UnmatchedBatch) -> None:
    network, origin, key, value = msgspec.json.decode(each.owner, type=Owner)
    words = "no window of the updates makes this batch" if each.is_stored else "the batch of this window is missing"
    inputs.db.execute(
        f"INSERT INTO {table} SELECT json_object('network', ?, 'origin', ?, 'separator_key', ?, 'separator_value', ?, "
        "'opened_at', strftime(make_timestamp(?), '%Y-%m-%dT%H:%M:%S.%fZ'), 'batch_cid', ?), make_timestamptz(?), ?",
        [network, origin, key, value, each.opened_at, each.batch_cid, each.opened_at, words],
    )


@lru_cache(maxsize=65536)
def _format_owner(owner: Owner) -> str:
    return msgspec.json.encode(owner).decode()


def _encode_windows(windows: OpenWindows) -> bytes:
    return msgspec.msgpack.encode(list(windows.items()))


def _decode_windows(saved: bytes) -> OpenWindows:
    return dict(msgspec.msgpack.decode(saved, type=list[tuple[Owner, ModelWindow]]))
