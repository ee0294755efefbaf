"""The batches that the table `updates` says must be there (docs/design, decision 1), held against the table
`batches`.

The windows are made anew by a plain rule, and not by the code that makes the batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

import msgspec

from kiln.pipelines.quality.table_checks import CheckInputs, span, stamp
from kiln.schemas.wire.batch_block import BlockError, read_block, stream_key, write_leaves
from kiln.schemas.wire.cid import USUAL_TEXT, CidError, cid_bytes, cid_text

Owner = tuple[str, str, str, str]
"""network, origin, separator key, separator value"""

_OWNER: Final = "to_json([network, origin, separator_key, separator_value])::VARCHAR"
"""An owner as text, in SQL: what `_text` makes."""

_PAGE: Final = 50_000
"""rows of `updates` at once"""


class BatchedUpdate(NamedTuple):
    """A row of `updates` that goes into a batch; times in µs."""

    partition: int
    owner: Owner
    leaf: bytes
    heard: int
    clock: int


class ModelWindow(msgspec.Struct, array_like=True):
    """A window that is open: when its first update was heard, where the clock stood, and its tips."""

    opened_at: int
    clock: int
    leaves: set[bytes]
    made: bool = False
    """whether its batch is there already: ticks end windows, and `updates` has none"""


Open = dict[tuple[int, Owner], ModelWindow]


def closed_windows(
    updates: Iterable[BatchedUpdate], open_: Open, length: int, grace: int
) -> Iterator[tuple[Owner, ModelWindow]]:
    """The windows that later updates end, in a partition's order. `open_` has those that are open, before and after."""
    for partition, owner, leaf, observed, clock in updates:
        heard = min(observed, clock)
        window = open_.get((partition, owner))
        if window and (heard >= window.opened_at + length or clock >= window.clock + length + grace):
            yield owner, window
            window = None
        if window is None:
            window = open_[partition, owner] = ModelWindow(heard, clock, set())
        window.leaves.add(leaf)


class UnmatchedBatch(NamedTuple):
    """A batch that no window makes (`there`), or a window whose batch is not there."""

    owner: str
    opened_at: int
    length: int
    cid: str
    there: bool
    excused: bool


def to_blame(unmatched: Iterable[UnmatchedBatch]) -> Iterator[UnmatchedBatch]:
    """Those that do not overlap, one after another, with what is excused: one update more or less moves the windows
    after it, until there is a pause."""
    for _, of_owner in groupby(sorted(unmatched), key=lambda each: each.owner):
        run: list[UnmatchedBatch] = []
        end = 0
        for each in of_owner:
            if run and each.opened_at >= end:
                yield from _blamed(run)
                run = []
            run.append(each)
            end = max(end if len(run) > 1 else 0, each.opened_at + each.length)
        yield from _blamed(run)


def _blamed(run: list[UnmatchedBatch]) -> list[UnmatchedBatch]:
    return [] if any(each.excused for each in run) else run


def batches_follow(look: CheckInputs) -> str:
    """The finder of `expect_batches_to_follow_from_updates`."""
    db, facts = look.db, look.facts
    opened = look.keep("open", "kept BLOB")
    have = look.keep("have", "h UBIGINT, read_at TIMESTAMPTZ")
    made = look.keep("made", "h UBIGINT, read_at TIMESTAMPTZ")
    owes = look.keep("owes", "owner VARCHAR, opened_at BIGINT, cid VARCHAR, since TIMESTAMPTZ")
    odd = look.keep("odd", "owner VARCHAR, opened_at BIGINT, length BIGINT, cid VARCHAR, block BLOB, since TIMESTAMPTZ")

    kept = db.execute(f"SELECT kept FROM {opened}").fetchall()
    windows = _decode(kept[0][0]) if kept else {}
    owed: list[ExpectedBatch] = []
    for owner, window in closed_windows(_new_updates(look), windows, facts.window, facts.grace):
        if not window.made:
            owed += _expected(owner, window, facts.block_limit)
    open_now = [
        (key, each)
        for key, window in windows.items()
        if not window.made
        for each in _expected(key[1], window, facts.block_limit)
    ]
    _remember_updates(look, have)

    name, now = "hash(owner, opened_at, cid)", look.now
    _lay(look, "owed", owed)
    _lay(look, "open_now", [each for _, each in open_now])
    # A batch that is there twice was right once: that it is there twice is for another expectation.
    db.execute(
        f"CREATE OR REPLACE TEMP TABLE fresh AS SELECT * FROM (SELECT DISTINCT {_OWNER} AS owner, "
        f"epoch_us(opened_at) AS opened_at, cid FROM new_batches) WHERE {name} NOT IN (SELECT h FROM {made})"
    )
    for theirs in ("fresh", odd):
        for ours in ("owed", owes, "open_now"):
            db.execute(
                f"INSERT INTO {made} SELECT DISTINCT {name}, {now} FROM {ours} "
                f"SEMI JOIN {theirs} USING (owner, opened_at, cid)"
            )
    for (place,) in db.execute(
        f"SELECT DISTINCT place FROM open_now WHERE {name} IN (SELECT h FROM {made} WHERE read_at = {now})"
    ).fetchall():
        windows[open_now[place][0]].made = True
    for table in (odd, owes):
        db.execute(f"DELETE FROM {table} WHERE {name} IN (SELECT h FROM {made})")
    if "updates" in look.committed:
        db.execute(
            f"INSERT INTO {owes} SELECT owner, opened_at, cid, {stamp(look.committed['updates'])} FROM owed "
            f"WHERE {name} NOT IN (SELECT h FROM {made})"
        )
    db.execute(f"DELETE FROM fresh WHERE {name} IN (SELECT h FROM {made})")
    if db.execute("SELECT 1 FROM fresh LIMIT 1").fetchone():
        db.execute(
            f"INSERT INTO {odd} SELECT * FROM (SELECT DISTINCT {_OWNER} AS owner, epoch_us(opened_at) AS opened_at, "
            "epoch_us(closed_at) - epoch_us(opened_at), cid, block, "
            f"{stamp(look.committed['batches'])} FROM new_batches WHERE cid IN (SELECT cid FROM fresh)) "
            "SEMI JOIN fresh USING (owner, opened_at, cid)"
        )
    for table in (have, made):
        look.forget(table)
    db.execute(f"DELETE FROM {opened}")
    db.execute(f"INSERT INTO {opened} VALUES (?)", [_encode(windows)])

    found = look.keep("found", "key JSON, seen_at TIMESTAMPTZ, words VARCHAR")
    db.execute(f"DELETE FROM {found}")
    due = f"since + {span(look.duration('settle'))} <= {look.now}"
    odds = db.execute(f"SELECT owner, opened_at, length, cid, block FROM {odd} WHERE {due}").fetchall()
    unmatched = [
        # Of tips that are no updates another expectation speaks, and a batch of another T is of other settings.
        UnmatchedBatch(owner, at, length, cid, True, length != facts.window or not _all_heard(look, have, owner, block))
        for owner, at, length, cid, block in odds
    ]
    missing = db.execute(f"SELECT owner, opened_at, cid FROM {owes} WHERE {due}").fetchall()
    unmatched += [UnmatchedBatch(owner, at, facts.window, cid, False, False) for owner, at, cid in missing]
    for each in to_blame(unmatched):
        _say(look, found, each)
    return f"SELECT key, seen_at, words FROM {found}"


def _new_updates(look: CheckInputs) -> Iterator[BatchedUpdate]:
    """The new rows of `updates`, in the order of the log, and none of them twice in memory. Between two of them, nobody
    may ask the database anything: it is in the middle of the answer."""
    owners: list[Owner] = look.db.execute(
        "CREATE OR REPLACE TEMP TABLE owners AS SELECT row_number() OVER () - 1 AS place, * FROM (SELECT DISTINCT "
        "network, origin, separator_key, separator_value FROM new_updates WHERE separator_key IS NOT NULL); "
        "SELECT network, origin, separator_key, separator_value FROM owners ORDER BY place"
    ).fetchall()
    read = look.db.sql(
        "SELECT log_partition, place, stream, tip, epoch_us(observed_at), epoch_us(updated_at) "
        f"FROM ({_asked(look)}) u JOIN owners o ON u.network = o.network AND u.origin = o.origin AND "
        "u.separator_key = o.separator_key AND u.separator_value IS NOT DISTINCT FROM o.separator_value "
        "ORDER BY log_partition, log_offset"
    ).to_arrow_reader(_PAGE)
    for page in read:
        for partition, place, stream, tip, heard, clock in zip(
            *(column.to_pylist() for column in page.columns), strict=True
        ):
            try:
                leaf = stream_key(stream) + cid_bytes(tip)
            except (KeyError, IndexError, ValueError):
                continue  # what is no CID or StreamID, the expectations on these columns say
            yield BatchedUpdate(partition, owners[place], leaf, heard, clock)


def _asked(look: CheckInputs) -> str:
    """A SELECT of the new updates that go into batches."""
    facts = look.facts
    authors = ", ".join("'" + each.replace("'", "''") + "'" for each in sorted(facts.authors or ())) or "NULL"
    return (
        "FROM new_updates WHERE separator_key IS NOT NULL"
        + ("" if facts.authors is None else f" AND from_peer IN ({authors})")
        + (" AND separator_source = 'genesis'" if facts.only_verified else "")
    )


def _remember_updates(look: CheckInputs, have: str) -> None:
    """Takes what has been heard into the memory: owners with streams and tips, in their usual texts."""
    names = f"hash({_OWNER}, stream, tip)"
    look.db.execute(f"INSERT INTO {have} SELECT DISTINCT {names}, {look.now} FROM ({_asked(look)})")
    rest = look.db.execute(
        f"SELECT DISTINCT {_OWNER}, stream, tip FROM ({_asked(look)}) WHERE NOT regexp_full_match(tip, '{USUAL_TEXT}')"
    ).fetchall()
    for owner, stream, tip in rest:
        with suppress(CidError):
            look.db.execute(
                f"INSERT INTO {have} SELECT hash(?, ?, ?), {look.now}", [owner, stream, cid_text(cid_bytes(tip))]
            )


class ExpectedBatch(NamedTuple):
    """A batch that a window makes."""

    owner: str
    opened_at: int
    cid: str


def _expected(owner: Owner, window: ModelWindow, limit: int) -> list[ExpectedBatch]:
    text = _text(owner)
    return [ExpectedBatch(text, window.opened_at, block.cid) for block in write_leaves(window.leaves, limit)]


def _lay(look: CheckInputs, name: str, expected: list[ExpectedBatch]) -> None:
    """Makes a table of batches that windows make, with their places in the list."""
    import pyarrow as pa

    columns = zip(*expected, strict=True) if expected else ((), (), ())
    owners, opened, cids = (list(each) for each in columns)
    told = pa.table(
        {
            "owner": pa.array(owners, pa.string()),
            "opened_at": pa.array(opened, pa.int64()),
            "cid": pa.array(cids, pa.string()),
            "place": pa.array(range(len(expected)), pa.int64()),
        }
    )
    look.db.register("told", told)
    look.db.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS FROM told")
    look.db.unregister("told")


def _all_heard(look: CheckInputs, have: str, owner: str, block: bytes) -> bool:
    try:
        tips = read_block(block)
    except BlockError:
        return False
    pairs = [(stream, tip) for stream, links in tips.items() for tip in links]
    row = look.db.execute(
        f"SELECT count(*) FROM (SELECT DISTINCT hash(?, stream, tip) AS h FROM "
        f"(SELECT unnest(?::VARCHAR[]) AS stream, unnest(?::VARCHAR[]) AS tip)) WHERE h IN (SELECT h FROM {have})",
        [owner, [stream for stream, _ in pairs], [tip for _, tip in pairs]],
    ).fetchone()
    return row is not None and row[0] == len(pairs)


def _say(look: CheckInputs, found: str, each: UnmatchedBatch) -> None:
    network, origin, key, value = msgspec.json.decode(each.owner, type=Owner)
    words = "no window of the updates makes this batch" if each.there else "the batch of this window is missing"
    look.db.execute(
        f"INSERT INTO {found} SELECT json_object('network', ?, 'origin', ?, 'separator_key', ?, 'separator_value', ?, "
        "'opened_at', strftime(make_timestamp(?), '%Y-%m-%dT%H:%M:%S.%fZ'), 'cid', ?), make_timestamptz(?), ?",
        [network, origin, key, value, each.opened_at, each.cid, each.opened_at, words],
    )


@lru_cache(maxsize=65536)
def _text(owner: Owner) -> str:
    return msgspec.json.encode(owner).decode()


def _encode(windows: Open) -> bytes:
    return msgspec.msgpack.encode([(partition, owner, window) for (partition, owner), window in windows.items()])


def _decode(kept: bytes) -> Open:
    found = msgspec.msgpack.decode(kept, type=list[tuple[int, Owner, ModelWindow]])
    return {(partition, owner): window for partition, owner, window in found}
