"""The batches that the table `updates` says must be there (docs/design, decision 1), held against the table
`batches`.

The windows are made anew by a plain rule, and not by the code that makes the batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

import msgspec

from deploy.quality.spanning import Look, span, stamp
from schemas.batch import BlockError, read_block, stream_key, write_leaves
from schemas.cid import cid_bytes

Owner = tuple[str, str, str, str]
"""network, origin, separator key, separator value"""

_PAGE: Final = 50_000
"""rows of `updates` at once"""


class Update(NamedTuple):
    """A row of `updates` that goes into a batch; times in µs."""

    partition: int
    owner: Owner
    leaf: bytes
    heard: int
    clock: int


class Window(msgspec.Struct, array_like=True):
    """A window that is open: when its first update was heard, where the clock stood, and its tips."""

    opened_at: int
    clock: int
    leaves: set[bytes]
    made: bool = False
    """whether its batch is there already: ticks end windows, and `updates` has none"""


Open = dict[tuple[int, Owner], Window]


def closed_windows(updates: Iterable[Update], open_: Open, length: int, grace: int) -> Iterator[tuple[Owner, Window]]:
    """The windows that later updates end, in a partition's order. `open_` has those that are open, before and after."""
    for partition, owner, leaf, observed, clock in updates:
        heard = min(observed, clock)
        window = open_.get((partition, owner))
        if window and (heard >= window.opened_at + length or clock >= window.clock + length + grace):
            yield owner, window
            window = None
        if window is None:
            window = open_[partition, owner] = Window(heard, clock, set())
        window.leaves.add(leaf)


class Unmatched(NamedTuple):
    """A batch that no window makes (`there`), or a window whose batch is not there."""

    owner: str
    opened_at: int
    length: int
    cid: str
    there: bool
    excused: bool


def to_blame(unmatched: Iterable[Unmatched]) -> Iterator[Unmatched]:
    """Those that do not overlap, one after another, with what is excused: one update more or less moves the windows
    after it, until there is a pause."""
    for _, of_owner in groupby(sorted(unmatched), key=lambda each: each.owner):
        run: list[Unmatched] = []
        end = 0
        for each in of_owner:
            if run and each.opened_at >= end:
                yield from _blamed(run)
                run = []
            run.append(each)
            end = max(end if len(run) > 1 else 0, each.opened_at + each.length)
        yield from _blamed(run)


def _blamed(run: list[Unmatched]) -> list[Unmatched]:
    return [] if any(each.excused for each in run) else run


def batches_follow(look: Look) -> str:
    """The finder of `expect_batches_to_follow_from_updates`."""
    db, facts = look.db, look.facts
    opened = look.keep("open", "kept BLOB")
    have = look.keep("have", "h UBIGINT, read_at TIMESTAMPTZ")
    made = look.keep("made", "h UBIGINT, read_at TIMESTAMPTZ")
    owes = look.keep("owes", "owner VARCHAR, opened_at BIGINT, cid VARCHAR, since TIMESTAMPTZ")
    odd = look.keep("odd", "owner VARCHAR, opened_at BIGINT, length BIGINT, cid VARCHAR, block BLOB, since TIMESTAMPTZ")

    kept = db.execute(f"SELECT kept FROM {opened}").fetchall()
    windows = _decode(kept[0][0]) if kept else {}
    owed: list[tuple[str, int, str]] = []
    for owner, window in closed_windows(_new_updates(look), windows, facts.window, facts.grace):
        if not window.made:
            owed += [(_text(owner), window.opened_at, cid) for cid in _cids(window, facts.block_limit)]
    if "updates" in look.committed:
        _insert(look, owes, owed, stamp(look.committed["updates"]))
    if "batches" in look.committed:
        db.execute(
            f"INSERT INTO {odd} SELECT DISTINCT to_json([network, origin, separator_key, separator_value])::VARCHAR, "
            f"epoch_us(opened_at), epoch_us(closed_at) - epoch_us(opened_at), cid, block, "
            f"{stamp(look.committed['batches'])} FROM new_batches"
        )
    name = "hash(owner, opened_at, cid)"
    # A batch that is there twice was right once: that it is there twice is for another expectation.
    db.execute(f"DELETE FROM {odd} WHERE {name} IN (SELECT h FROM {made})")
    db.execute(
        f"INSERT INTO {made} SELECT DISTINCT {name}, {look.now} FROM {odd} JOIN {owes} USING (owner, opened_at, cid)"
    )
    early = [
        (key, cid)
        for key, window in windows.items()
        if not window.made
        for cid in _cids(window, facts.block_limit)
        if db.execute(
            f"SELECT 1 FROM {odd} WHERE owner = ? AND opened_at = ? AND cid = ?", [_text(key[1]), window.opened_at, cid]
        ).fetchone()
    ]
    for key, cid in early:
        windows[key].made = True
        db.execute(
            f"INSERT INTO {made} SELECT hash(?, ?::BIGINT, ?), {look.now}",
            [_text(key[1]), windows[key].opened_at, cid],
        )
    for table in (odd, owes):
        db.execute(f"DELETE FROM {table} WHERE {name} IN (SELECT h FROM {made})")
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
        Unmatched(owner, at, length, cid, True, length != facts.window or not _all_heard(look, have, owner, block))
        for owner, at, length, cid, block in odds
    ]
    missing = db.execute(f"SELECT owner, opened_at, cid FROM {owes} WHERE {due}").fetchall()
    unmatched += [Unmatched(owner, at, facts.window, cid, False, False) for owner, at, cid in missing]
    for each in to_blame(unmatched):
        _say(look, found, each)
    return f"SELECT key, seen_at, words FROM {found}"


def _new_updates(look: Look) -> Iterator[Update]:
    """The new rows of `updates`, in the order of the log, and none of them twice in memory. Between two of them, nobody
    may ask the database anything: it is in the middle of the answer."""
    import pyarrow as pa

    facts, have = look.facts, f"{look.memory}_have"
    read = look.db.sql(
        "SELECT log_partition, network, origin, separator_key, separator_value, stream, tip, from_peer, "
        "separator_source, epoch_us(observed_at), epoch_us(updated_at) FROM new_updates "
        "WHERE separator_key IS NOT NULL ORDER BY log_partition, log_offset"
    ).to_arrow_reader(_PAGE)
    told: list[pa.RecordBatch] = []
    for page in read:
        owners, leaves = list[str](), list[bytes]()
        rows = zip(*(column.to_pylist() for column in page.columns), strict=True)
        for partition, network, origin, key, value, stream, tip, author, source, heard, clock in rows:
            if facts.authors is not None and author not in facts.authors:
                continue
            if facts.only_verified and source != "genesis":
                continue
            try:
                leaf = stream_key(stream) + cid_bytes(tip)
            except (KeyError, IndexError, ValueError):
                continue  # what is no CID or StreamID, the expectations on these columns say
            owner = (network, origin, key, value)
            owners.append(_text(owner))
            leaves.append(leaf)
            yield Update(partition, owner, leaf, heard, clock)
        told.append(pa.record_batch({"owner": pa.array(owners, pa.string()), "leaf": pa.array(leaves, pa.binary())}))
    for each in told:
        look.db.register("told", pa.Table.from_batches([each]))
        look.db.execute(f"INSERT INTO {have} SELECT DISTINCT hash(owner, leaf), {look.now} FROM told")
        look.db.unregister("told")


def _cids(window: Window, limit: int) -> list[str]:
    return [block.cid for block in write_leaves(window.leaves, limit)]


def _all_heard(look: Look, have: str, owner: str, block: bytes) -> bool:
    try:
        tips = read_block(block)
    except BlockError:
        return False
    leaves = [stream_key(stream) + cid_bytes(tip) for stream, links in tips.items() for tip in links]
    row = look.db.execute(
        f"SELECT count(*) FROM (SELECT DISTINCT hash(?, leaf) AS h FROM unnest(?::BLOB[]) AS told(leaf)) "
        f"WHERE h IN (SELECT h FROM {have})",
        [owner, leaves],
    ).fetchone()
    return row is not None and row[0] == len(leaves)


def _say(look: Look, found: str, each: Unmatched) -> None:
    network, origin, key, value = msgspec.json.decode(each.owner, type=Owner)
    words = "no window of the updates makes this batch" if each.there else "the batch of this window is missing"
    look.db.execute(
        f"INSERT INTO {found} SELECT json_object('network', ?, 'origin', ?, 'separator_key', ?, 'separator_value', ?, "
        "'opened_at', strftime(make_timestamp(?), '%Y-%m-%dT%H:%M:%S.%fZ'), 'cid', ?), make_timestamptz(?), ?",
        [network, origin, key, value, each.opened_at, each.cid, each.opened_at, words],
    )


def _insert(look: Look, table: str, owed: list[tuple[str, int, str]], since: str) -> None:
    if not owed:
        return
    import pyarrow as pa

    columns = dict(zip(("owner", "opened_at", "cid"), (list(each) for each in zip(*owed, strict=True)), strict=True))
    look.db.register("owed", pa.table(columns))
    look.db.execute(f"INSERT INTO {table} SELECT owner, opened_at, cid, {since} FROM owed")
    look.db.unregister("owed")


def _text(owner: Owner) -> str:
    return msgspec.json.encode(owner).decode()


def _encode(windows: Open) -> bytes:
    return msgspec.msgpack.encode([(partition, owner, window) for (partition, owner), window in windows.items()])


def _decode(kept: bytes) -> Open:
    found = msgspec.msgpack.decode(kept, type=list[tuple[int, Owner, Window]])
    return {(partition, owner): window for partition, owner, window in found}
