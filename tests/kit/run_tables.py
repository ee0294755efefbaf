"""Live Delta tables and those of a backfill run. Tests give only the columns that matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count

from kiln.pipelines.backfill.run_log import BackfillRun, append_event, find_run
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES

Row = Mapping[str, object]

FROM, TO = 1_767_225_600_000_000, 1_767_312_000_000_000
"""time range of the runs in Unix µs: the first day of 2026"""

LIVE_TABLES = ("frames", "messages", "updates", "batches", "streams")
"""live tables that a run reads"""

RUN_TABLES = (
    "copies",
    "subscriptions",
    "controls",
    "messages",
    "updates",
    "batches",
    "batch_tips",
    "tips",
    "quarantine",
)

_NOTHING: Mapping[str, object] = {
    "string": "a",
    "binary": b"",
    "timestamp": FROM,
    "int": 0,
    "bigint": 0,
    "boolean": False,
}
_numbers = count()


def row(table: str, **named: object) -> Row:
    """Build a row with the columns `named`, and null or an arbitrary value in the others."""
    columns = TABLES[table].columns
    assert set(named) <= {column.name for column in columns}
    plain = {column.name: None if column.nullable else _NOTHING[column.type] for column in columns}
    return {**plain, **named}


def append(lake: Lake, table: str, rows: Iterable[Row], *, query: str | None = None) -> None:
    """Append rows to a table in one file and one commit, as a micro-batch does."""
    if not lake.has(table):
        lake.create([table])
    files = TableFiles(lake, table)
    for each in rows:
        files.add(tuple(each[column.name] for column in TABLES[table].columns))
    number = next(_numbers)
    assert DeltaRsCommits(lake).commit(table, files.close(), WriteId(query or f"query{number}", number))


def update(number: int, at: int, *, separator: str = "model/k1", **named: object) -> Row:
    """Build the row of update `number`, received at `at`."""
    key, value = separator.split("/")
    said: dict[str, object] = {
        "network": "n",
        "origin": "LIVE",
        "message_id": f"m{number}",
        "from_peer": "p",
        "separator_key": key,
        "separator_value": value,
        "separator_source": "topic",
        "stream": f"s{number}",
        "tip": f"t{number}",
        "observed_at": at,
        "log_time": at + 1_000,
        "log_offset": number,
    }
    return row("updates", **{**said, **named})


def tip(number: int, at: int, **named: object) -> Row:
    """Build the row in `tips` of update `number`."""
    said: dict[str, object] = {"network": "n", "stream": f"s{number}", "tip": f"t{number}", "observed_at": at}
    return row("tips", **{**said, "source": "update", **named})


def message(number: int, at: int, **named: object) -> Row:
    """Build the row in `messages` of update `number`."""
    said: dict[str, object] = {
        "message_id": f"m{number}",
        "network": "n",
        "origin": "LIVE",
        "topic": "/ceramic/n/sep/model/k1",
        "type": "UPDATE",
        "from_peer": "p",
        "stream": f"s{number}",
        "tip": f"t{number}",
        "data": b"%d" % number,
        "observed_at": at,
        "kafka_offset": number,
    }
    return row("messages", **{**said, **named})


def copy(number: int, at: int, **named: object) -> Row:
    """Build the row of a copy of message `number`."""
    said: dict[str, object] = {"network": "n", "message_id": f"m{number}", "observed_at": at, "kafka_offset": number}
    return row("copies", **{**said, **named})


def subscription(number: int, at: int, **named: object) -> Row:
    """Build the row of a SUBSCRIBE in frame `number`."""
    said: dict[str, object] = {"network": "n", "topic": "t", "observed_at": at, "kafka_offset": number}
    return row("subscriptions", **{**said, "subscribe": True, **named})


def control(number: int, at: int, **named: object) -> Row:
    """Build the row of an IHAVE with the id of message `number`."""
    said: dict[str, object] = {"network": "n", "topic": "t", "observed_at": at, "kafka_offset": number}
    ids = {"message_ids": [f"m{number}"], "message_id_count": 1}
    return row("controls", **{**said, "kind": "IHAVE", **ids, **named})


def batch(cid: str, at: int, numbers: Iterable[int], *, separator: str = "model/k1") -> dict[str, list[Row]]:
    """Build the rows in `batches` and `batch_tips` of a batch with the tips of these updates."""
    key, value = separator.split("/")
    held = list(numbers)
    of_batch = row(
        "batches",
        batch_cid=cid,
        network="n",
        origin="LIVE",
        separator_key=key,
        separator_value=value,
        opened_at=at,
        closed_at=at + 1_000_000,
        emitted_at=at + 1_500_000,
        stream_count=len(held),
        tip_count=len(held),
        block=cid.encode(),
    )
    tips = [row("batch_tips", batch_cid=cid, stream=f"s{number}", tip=f"t{number}") for number in held]
    return {"batches": [of_batch], "batch_tips": tips}


def history(numbers: Iterable[int], *, name: str = "b", at: int = FROM) -> dict[str, list[Row]]:
    """Build the rows, by table, of these updates, which are a second apart. Each batch has ten updates."""
    held = list(numbers)
    times = {number: at + number * 1_000_000 for number in held}
    tables: dict[str, list[Row]] = {
        "copies": [copy(each, times[each]) for each in held],
        "subscriptions": [subscription(each, times[each]) for each in held],
        "controls": [control(each, times[each]) for each in held],
        "messages": [message(each, times[each]) for each in held],
        "updates": [update(each, times[each]) for each in held],
        "tips": [tip(each, times[each]) for each in held],
        "batches": [],
        "batch_tips": [],
        "quarantine": [
            row("quarantine", stage="message", reason="bad_tip", data=b"x%d" % each, observed_at=times[each])
            for each in held[::10]
        ],
    }
    for first in range(0, len(held), 10):
        ten = held[first : first + 10]
        for table, rows in batch(f"{name}{ten[0]}-{ten[-1]}-{len(ten)}", times[ten[0]], ten).items():
            tables[table] += rows
    return tables


def fill(lake: Lake, tables: Mapping[str, Iterable[Row]]) -> None:
    """Append rows to several tables."""
    for table, rows in tables.items():
        append(lake, table, rows)


def begin(lake: Lake, name: str = "r", *, at: int = TO, done: bool = True, **details: object) -> BackfillRun:
    """Create the empty tables of a backfill run with the source `frames`, and record its events in `backfill_runs`."""
    lake.locate_run(name).create(RUN_TABLES)
    live = {table: lake.open(table).version() for table in LIVE_TABLES if lake.has(table)}
    said = {"source": "frames", "network": None, "inputs": {"live": live}, **details}
    append_event(lake, name, "begun", at, range_from=FROM, range_to=TO, details=said)
    if done:
        append_event(lake, name, "done", at + 1, range_from=FROM, range_to=TO)
    run = find_run(lake, name)
    assert run is not None
    return run
