"""Log of backfill runs: the table `backfill_runs` of the live lake, with a row per event. Uses only delta-rs."""

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
"""Tables of a run. `frames` has rows only if the run did not read the live table."""

_RUNS = select_columns(TABLES["backfill_runs"])
_RESERVED: Final = ("live",)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SwapClaimedError(KilnError):
    """Another process swaps a run of the same lake."""


class RunNameError(KilnError):
    """A name that no run can have."""

    exit_code = 2


@dataclass(frozen=True)
class RunEvent:
    """One event of a run. Times are µs."""

    run: str
    event: Event
    happened_at: int
    range_from: int | None
    range_to: int | None
    rows: int | None
    details: Mapping[str, object]


@dataclass(frozen=True)
class BackfillRun:
    """A run that was begun. Times are µs."""

    name: str
    range_from: int
    range_to: int
    details: Mapping[str, object]
    """details of the event `begun`"""
    events: tuple[RunEvent, ...] = field(default=(), repr=False)
    """all events from `begun` to `dropped`, in order"""

    def had(self, event: Event) -> bool:
        """Return true if the run has an event of this kind."""
        return any(one.event == event for one in self.events)

    @property
    def is_done(self) -> bool:
        """True if the run's tables hold all of its range."""
        return self.had("done")

    @property
    def is_swapping(self) -> bool:
        """True if a swap of the run was begun and not ended."""
        return self.had("swapping") and not self.had("swapped")

    @property
    def begun_versions(self) -> Mapping[str, int]:
        """Versions of live tables that the run reads, by table: the newest ones when it began."""
        inputs = self.details.get("inputs")
        live = inputs.get("live") if isinstance(inputs, dict) else None
        return live if isinstance(live, dict) else {}

    @property
    def swap_details(self) -> Mapping[str, object]:
        """Details of the newest event `swapping`; empty if no swap was begun."""
        return next((event.details for event in reversed(self.events) if event.event == "swapping"), {})

    @property
    def swap_versions(self) -> Mapping[str, int]:
        """Versions of live tables when the swap began, by table; empty if no swap was begun."""
        return {table: version for table, version in self.swap_details.items() if isinstance(version, int)}

    @property
    def live_versions(self) -> Mapping[str, int]:
        """Versions of live tables that the run, or its unfinished swap, still reads, by table."""
        if self.is_swapping:
            return self.swap_versions
        return {} if self.is_done else self.begun_versions

    @property
    def own_versions(self) -> Mapping[str, int]:
        """Versions of the run's tables after its newest chunk, by table."""
        versions = self.chunks[-1].details.get("versions") if self.chunks else None
        return versions if isinstance(versions, dict) else {}

    @property
    def chunks(self) -> list[RunEvent]:
        """Events of the chunks that are in the run's tables."""
        return [event for event in self.events if event.event == "chunk"]


def check_name(name: str) -> str:
    """Return the name.

    Raises:
        RunNameError: No run can have the name.
    """
    if not _NAME.fullmatch(name):
        raise RunNameError(
            f"{name!r} is not a valid run name. Use a to z, 0 to 9 and -, at most 63 characters, not starting with -"
        )
    return name


def check_new_name(name: str) -> None:
    """Check the name of a run that is about to begin.

    Raises:
        RunNameError: No run can have the name, or it stands for the live tables.
    """
    if check_name(name) in _RESERVED:
        raise RunNameError(f"no run can be named {name!r}: it stands for the live tables. Choose another name")


def describe_unfinished_drop(name: str) -> str:
    """Describe a run whose drop was begun, and the remedy."""
    return f"run {name} is being dropped, and some of its tables are gone. Type kiln backfill drop {name} again"


def read_events(lake: Lake) -> list[RunEvent]:
    """Read all events of all runs, in order."""
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
    """Read the runs that were begun and not dropped, in the order of their start."""
    return [run for run in group_events(read_events(lake)) if not run.had("dropped")]


def group_events(events: Iterable[RunEvent]) -> list[BackfillRun]:
    """Group events into runs, dropped ones too, in the order of their start."""
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
    """Find the run of this name, unless it was never begun or is dropped."""
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
    """Append an event durably. Times are µs.

    Args:
        claim: The table as it was read, if the event claims the swap.

    Raises:
        CommitFailedError: Another process claimed the swap since `claim` was read.
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
    """Claim the swap of a run. Of two concurrent claims, one succeeds.

    Args:
        by: Machine and state folder; the locks in that folder exclude other processes there.
        take_over: Also claim if another machine has begun a swap and not ended it.

    Raises:
        SwapClaimedError: Another machine swaps a run of this lake.
    """
    table = lake.open("backfill_runs")
    swapping = [other for other in group_events(_read_events(table)) if other.is_swapping and not other.had("dropped")]
    claimants = {other.name: str(other.swap_details.get("by", by)) for other in swapping}
    others = {name: other for name, other in claimants.items() if other != by}
    if others and not take_over:
        name, other = next(iter(others.items()))
        raise SwapClaimedError(
            f"run {name} is being swapped by {other}. If that swap was interrupted, type kiln backfill swap {name} "
            f"there again. If that machine is gone, type kiln backfill swap --take-over {name} here"
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
            "another process has just begun to swap a run of this lake. Try again when it has ended"
        ) from error


_CLAIM_APP_ID: Final = "swap"
"""Application id of the Delta transaction of a claim."""


def _micros(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)
