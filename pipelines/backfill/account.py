"""The account of backfill runs: the table `runs` of the live lake, a row for each event of a run. By delta-rs alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Final, Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError

from kiln.conf.process.errors import KilnError
from kiln.pipelines.delta.arrow_rows import arrow_schema, columns_of
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.rows import read_rows
from kiln.schemas.delta.tables import TABLES

Event = Literal["begun", "chunk", "done", "swapping", "swapped", "published", "dropping", "dropped"]

RUN_TABLES: Final = ("frames", "copies", "messages", "updates", "batch_tips", "batches", "tips", "quarantine")
"""Tables of a run, beside the live ones. `frames` has rows only where the run did not read the live table."""

_RUNS = columns_of(TABLES["runs"])
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ClaimedError(KilnError):
    """Somebody elsewhere swaps a run of the same lake."""


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
    """A run that was begun and not dropped. Times are µs; `details`: those of `begun`."""

    name: str
    range_from: int
    range_to: int
    details: Mapping[str, object]
    events: tuple[RunEvent, ...] = field(default=(), repr=False)
    """all since `begun`, in order"""

    @property
    def done(self) -> bool:
        """Whether the run's tables hold all of its range."""
        return any(each.event == "done" for each in self.events)

    @property
    def published(self) -> bool:
        """Whether its batches were handed to the bridge."""
        return any(each.event == "published" for each in self.events)

    @property
    def leaving(self) -> bool:
        """Whether a drop was begun: tables of the run may be gone."""
        return any(each.event == "dropping" for each in self.events)

    @property
    def reads(self) -> Mapping[str, int]:
        """The versions of live tables that the run reads until it is done."""
        inputs = self.details.get("inputs")
        live = inputs.get("live") if isinstance(inputs, dict) else None
        return live if isinstance(live, dict) and not self.done else {}

    @property
    def chunks(self) -> list[RunEvent]:
        """The parts that are in the run's tables."""
        return [each for each in self.events if each.event == "chunk"]


def check_name(name: str) -> str:
    """The name. RunNameError: no run can have it."""
    if not _NAME.fullmatch(name):
        raise RunNameError(f"{name!r} names no run: take a to z, 0 to 9 and -, at most 63, and not - first")
    return name


def leaving_in_words(name: str) -> str:
    """Of a run that is `leaving`: what to do."""
    return f"run {name} is being dropped, and some of its tables are gone. Type kiln backfill drop {name} once more"


def told(lake: Lake) -> list[RunEvent]:
    """All events of all runs, in order."""
    return _events(lake.open("runs")) if lake.has("runs") else []


def _events(account: DeltaTable) -> list[RunEvent]:
    rows = [row for batch in read_rows(account, [column.name for column in _RUNS]) for row in batch.to_pylist()]
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


def runs(lake: Lake) -> list[BackfillRun]:
    """The runs that were begun and not dropped, in the order in which they were begun."""
    events: dict[str, list[RunEvent]] = {}
    for each in told(lake):
        if each.event == "dropped":
            events.pop(each.run, None)
        else:
            events.setdefault(each.run, []).append(each)
    found = []
    for name, of_run in events.items():
        begun = next((each for each in of_run if each.event == "begun"), None)
        if begun is not None and begun.range_from is not None and begun.range_to is not None:
            found.append(BackfillRun(name, begun.range_from, begun.range_to, begun.details, tuple(of_run)))
    return found


def find_run(lake: Lake, name: str) -> BackfillRun | None:
    """The run of this name; None: it was never begun, or is dropped."""
    return next((each for each in runs(lake) if each.name == name), None)


def tell(
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
    """Adds an event to the account; it is on the disk when this returns. Times are µs.

    `claim`: the account as it was read. CommitFailedError: somebody has told another claim since.
    """
    lake.create(("runs",))
    schema = arrow_schema(_RUNS)
    row = (run, event, happened_at, range_from, range_to, rows, json.dumps(details or {}, sort_keys=True))
    columns = [pa.array([value], each.type) for value, each in zip(row, schema, strict=True)]
    opened = lake.open("runs") if claim is None else claim
    before = opened.version()
    number = (opened.transaction_version(_CLAIM) or 0) + 1
    properties = None if claim is None else CommitProperties(app_transactions=[Transaction(_CLAIM, number)])
    write_deltalake(opened, pa.table(columns, schema=schema), mode="append", commit_properties=properties)
    lake.sync_files("runs")
    lake.keep("runs", before + 1, lake.open("runs").version())


def claim_swap(
    lake: Lake, run: BackfillRun, by: str, happened_at: int, versions: Mapping[str, int], *, take_over: bool = False
) -> None:
    """Tells that `by` swaps a run from now on. Of two that claim at once, one comes through.

    `by`: a machine and a state folder there, whose locks keep two processes apart. `take_over`: also where somebody
    else has begun a swap and not ended it. ClaimedError.
    """
    account = lake.open("runs")
    claimed: dict[str, str] = {}  # by run that is being swapped: by whom
    for each in _events(account):
        if each.event == "swapping":
            claimed[each.run] = str(each.details.get("by", by))
        elif each.event in ("swapped", "dropped"):
            claimed.pop(each.run, None)
    others = {name: other for name, other in claimed.items() if other != by}
    if others and not take_over:
        name, other = next(iter(others.items()))
        raise ClaimedError(
            f"run {name} is being swapped by {other}. Where that swap was cut short, type kiln backfill swap {name} "
            "there once more, or, where that machine is gone, kiln backfill swap --take-over here"
        )
    if claimed.get(run.name) == by:
        return
    details = {**versions, "by": by}
    try:
        low, high = run.range_from, run.range_to
        tell(lake, run.name, "swapping", happened_at, range_from=low, range_to=high, details=details, claim=account)
    except CommitFailedError as error:
        raise ClaimedError("somebody else has begun to swap a run of this lake at this moment") from error


_CLAIM: Final = "swap"
"""The application of Delta's transaction that tells a claim."""


def _micros(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)
