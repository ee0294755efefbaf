"""Log of backfill runs: the Delta table `backfill_runs`, with a row for each event of a run. Needs no Spark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Final, Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.arrow_rows import build_arrow_schema, select_columns
from kiln.pipelines.delta.lake import Lake, read_rows
from kiln.schemas.delta.tables import TABLES

Event = Literal["begun", "chunk", "done", "swapping", "swapped", "dropping", "dropped"]

RUN_TABLES: Final = (
    *("frames", "copies", "subscriptions", "controls", "messages", "updates"),
    *("batch_tips", "batches", "tips", "quarantine"),
)
"""Tables of a backfill run. Its `frames` has rows only if the run did not read the frames from the live table."""

_RUNS = select_columns(TABLES["backfill_runs"])
_RESERVED: Final = ("live",)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SwapClaimedError(KilnError):
    """Another process is swapping the rows of a backfill run into the live tables."""


class RunNameError(KilnError):
    """The name of a backfill run is invalid or reserved."""

    exit_code = 2


@dataclass(frozen=True)
class RunEvent:
    """One event of a backfill run. Times are µs."""

    run: str
    event: Event
    happened_at: int
    range_from: int | None
    range_to: int | None
    rows: int | None
    details: Mapping[str, object]


@dataclass(frozen=True)
class BackfillRun:
    """A backfill run, as its events describe it. Times are µs."""

    name: str
    range_from: int
    range_to: int
    details: Mapping[str, object]
    """details of the event `begun`"""
    events: tuple[RunEvent, ...] = field(default=(), repr=False)
    """all events from `begun` to `dropped`, in order"""

    def had(self, event: Event) -> bool:
        """Return true if the run's log has an event of this kind."""
        return any(one.event == event for one in self.events)

    @property
    def is_done(self) -> bool:
        """True if the run's tables are complete for its time range."""
        return self.had("done")

    @property
    def is_swapping(self) -> bool:
        """True if a swap of the run into the live tables was begun and has not ended."""
        return self.had("swapping") and not self.had("swapped")

    @property
    def begun_versions(self) -> Mapping[str, int]:
        """Versions, by table, of the live tables when the run began. The run reads these versions."""
        inputs = self.details.get("inputs")
        live = inputs.get("live") if isinstance(inputs, dict) else None
        return live if isinstance(live, dict) else {}

    @property
    def swap_details(self) -> Mapping[str, object]:
        """Details of the newest event `swapping`; empty if no swap was begun."""
        return next((event.details for event in reversed(self.events) if event.event == "swapping"), {})

    @property
    def swap_versions(self) -> Mapping[str, int]:
        """Versions, by table, of the live tables when the swap began; empty if no swap was begun."""
        return {table: version for table, version in self.swap_details.items() if isinstance(version, int)}

    @property
    def live_versions(self) -> Mapping[str, int]:
        """Versions, by table, of the live tables that the run or its unfinished swap will still read."""
        if self.is_swapping:
            return self.swap_versions
        return {} if self.is_done else self.begun_versions

    @property
    def own_versions(self) -> Mapping[str, int]:
        """Versions, by table, of the run's own tables after its newest chunk."""
        versions = self.chunks[-1].details.get("versions") if self.chunks else None
        return versions if isinstance(versions, dict) else {}

    @property
    def chunks(self) -> list[RunEvent]:
        """Events of the chunks that were committed to the run's tables."""
        return [event for event in self.events if event.event == "chunk"]


def check_name(name: str) -> str:
    """Check that a name is valid for a backfill run, and return it.

    Raises:
        RunNameError: The name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise RunNameError(
            f"{name!r} is not a valid name of a backfill run. Use at most 63 characters, of a to z, 0 to 9 and -, and "
            "begin with a letter or digit"
        )
    return name


def check_new_name(name: str) -> None:
    """Check the name of a backfill run that is about to begin.

    Raises:
        RunNameError: The name is invalid, or stands for the live tables.
    """
    if check_name(name) in _RESERVED:
        raise RunNameError(
            f"a backfill run cannot have the name {name!r}, which stands for the live tables. Choose another name"
        )


def describe_unfinished_drop(name: str) -> str:
    """Describe a backfill run whose drop was begun and has not ended, and what to do."""
    return (
        f"backfill run {name} is being dropped, and some of its tables are gone. If no process drops it now, repeat: "
        f"kiln backfill drop {name}"
    )


def read_events(lake: Lake) -> list[RunEvent]:
    """Read the events of all backfill runs, in order of time."""
    return _read_events(lake.open("backfill_runs")) if lake.has("backfill_runs") else []


def _read_events(table: DeltaTable) -> list[RunEvent]:
    rows = [row for batch in read_rows(table, [column.name for column in _RUNS]) for row in batch.to_pylist()]
    return [
        RunEvent(
            row["run"],
            row["event"],
            _micros(row["happened_at"]),
            None if row["range_from"] is None else _micros(row["range_from"]),
            None if row["range_to"] is None else _micros(row["range_to"]),
            row["rows"],
            json.loads(row["details"]),
        )
        for row in sorted(rows, key=itemgetter("happened_at"))
    ]


def read_runs(lake: Lake) -> list[BackfillRun]:
    """Read the backfill runs that are not dropped, in the order of their start."""
    return [run for run in group_events(read_events(lake)) if not run.had("dropped")]


def group_events(events: Iterable[RunEvent]) -> list[BackfillRun]:
    """Group events by backfill run, in the order of their start. Dropped runs are included."""
    runs: list[list[RunEvent]] = []
    newest: dict[str, list[RunEvent]] = {}  # by name
    for event in events:
        if event.event == "begun" and event.run not in newest:
            runs.append(newest.setdefault(event.run, []))
        if event.run in newest:
            newest[event.run].append(event)
        if event.event == "dropped":
            newest.pop(event.run, None)
    return [
        BackfillRun(begun.run, begun.range_from, begun.range_to, begun.details, tuple(run))
        for run in runs
        if (begun := run[0]).range_from is not None and begun.range_to is not None
    ]


def find_run(lake: Lake, name: str) -> BackfillRun | None:
    """Find the backfill run of a name; `None` if there is none or it is dropped."""
    return next((run for run in read_runs(lake) if run.name == name), None)


def append_event(
    lake: Lake,
    run: str,
    event: Event,
    happened_at: int,
    *,
    range_from: int | None = None,
    range_to: int | None = None,
    rows: int | None = None,
    details: Mapping[str, object] | None = None,
    claim: DeltaTable | None = None,
) -> None:
    """Append an event to the table `backfill_runs`, and sync it to disk. Times are µs.

    Args:
        claim: For an event that claims the right to swap: the table at a version in which no process has the right.

    Raises:
        CommitFailedError: Another process has claimed the right to swap since that version.
    """
    lake.create(("backfill_runs",))
    schema = build_arrow_schema(_RUNS)
    row = (run, event, happened_at, range_from, range_to, rows, json.dumps(details or {}, sort_keys=True))
    columns = [pa.array([value], field.type) for value, field in zip(row, schema, strict=True)]
    opened = lake.open("backfill_runs") if claim is None else claim
    before = opened.version()
    number = (opened.transaction_version(_CLAIM_APP_ID) or 0) + 1
    properties = None if claim is None else CommitProperties(app_transactions=[Transaction(_CLAIM_APP_ID, number)])
    write_deltalake(opened, pa.table(columns, schema=schema), mode="append", commit_properties=properties)
    lake.sync_files("backfill_runs")
    lake.sync_commits("backfill_runs", before + 1, lake.open("backfill_runs").version())


def claim_swap(
    lake: Lake, run: BackfillRun, by: str, happened_at: int, versions: Mapping[str, int], *, take_over: bool = False
) -> None:
    """Claim the right to swap a backfill run into the live tables. Of two concurrent claims, only one succeeds.

    Args:
        by: Machine and state folder. A lock in that folder excludes other processes that use the folder.
        happened_at: Time of the claim, µs.
        versions: Current versions of the live tables, by table.
        take_over: True to claim even if another machine has begun a swap that has not ended.

    Raises:
        SwapClaimedError: Another process is swapping a run of this lake.
    """
    table = lake.open("backfill_runs")
    swapping = [other for other in group_events(_read_events(table)) if other.is_swapping and not other.had("dropped")]
    claimants = {other.name: str(other.swap_details.get("by", by)) for other in swapping}
    others = {name: other for name, other in claimants.items() if other != by}
    if others and not take_over:
        name, other = next(iter(others.items()))
        raise SwapClaimedError(
            f"backfill run {name} is being swapped by {other}. If that swap was interrupted, repeat it on that "
            f"machine: kiln backfill swap {name}. If that machine is gone: kiln backfill swap --take-over {name}"
        )
    if claimants.get(run.name) == by:
        return
    details = {**versions, "by": by}
    try:
        low, high = run.range_from, run.range_to
        append_event(
            lake, run.name, "swapping", happened_at, range_from=low, range_to=high, details=details, claim=table
        )
    except CommitFailedError as error:
        raise SwapClaimedError(
            "another process has just begun to swap a backfill run of this lake. Try again when that swap has ended"
        ) from error


_CLAIM_APP_ID: Final = "swap"
"""Delta's application id of the commits that claim the right to swap"""


def _micros(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)
