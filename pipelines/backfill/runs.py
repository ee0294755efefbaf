"""The runs of a lake: listed, found, dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from kiln.conf.process.errors import KilnError
from kiln.conf.process.locks import StateInUseError, locked
from kiln.pipelines.backfill.account import BackfillRun, RunEvent, check_name, find_run, leaving_in_words, tell, told
from kiln.pipelines.delta.lake import Lake, LakeError

State = Literal[
    "running",
    "interrupted",
    "done",
    "swapping",
    "swap interrupted",
    "swapped",
    "dropping",
    "drop interrupted",
    "dropped",
]

_SWAP: Final = "swap"
"""The lock of whoever swaps: two swaps of ranges that overlap would undo each other."""


class NoRunError(KilnError):
    """There is no such run."""


@dataclass(frozen=True)
class RunSummary:
    """A run as `kiln backfill list` has it. Times are µs."""

    name: str
    range_from: int | None
    range_to: int | None
    source: str
    state: State
    rows: dict[str, int]
    """by table; nothing of a run that was dropped"""
    begun_at: int
    last_at: int
    """when the account last told of the run"""


def listed(lake: Lake, state: Path) -> list[RunSummary]:
    """All runs that the account knows, in the order in which they were begun. LakeError: there is no lake."""
    if not lake.root.exists():
        raise LakeError(f"there is no lake at {lake.path}: nothing has been written yet. --state names the folder")
    runs: list[list[RunEvent]] = []
    open_: dict[str, list[RunEvent]] = {}
    for each in told(lake):
        if each.run not in open_:
            open_[each.run] = []
            runs.append(open_[each.run])
        open_[each.run].append(each)
        if each.event == "dropped":
            del open_[each.run]
    return [_listed(lake, state, events) for events in runs]


def the_run(lake: Lake, name: str) -> BackfillRun:
    """The run of this name. NoRunError: there was never one, or it is dropped."""
    run = the_run_if_left(lake, name)
    if run is None:
        raise NoRunError(
            f"run {name} was dropped, and its tables are gone. To see what is there, type kiln backfill list"
        )
    if run.leaving:
        raise NoRunError(leaving_in_words(name))
    return run


def the_run_if_left(lake: Lake, name: str) -> BackfillRun | None:
    """The run of this name; None: it is dropped. NoRunError: there was never one."""
    run = find_run(lake, check_name(name))
    if run is None and not any(each.run == name for each in told(lake)):
        raise NoRunError(f"there is no run {name} in {lake.path}. To see what is there, type kiln backfill list")
    return run


@contextmanager
def held(state: Path, name: str, *, swap: bool = False) -> Iterator[None]:
    """Keeps everybody else from running, swapping and dropping a run; with `swap`, from swapping any run.

    StateInUseError: somebody does.
    """
    with locked(state, lock_of(name)):
        if swap:
            with locked(state, _SWAP):
                yield
        else:
            yield


def lock_of(name: str) -> str:
    """The lock of a run in the folder `locks` of the state folder."""
    return f"backfill-{name}"


def drop(lake: Lake, name: str, now: Callable[[], int]) -> bool:
    """Removes the tables of a run, and says so in the account. False: the run was dropped before. `now`: µs.

    NoRunError: there was no such run. KilnError: a swap of it was cut short. To be called under the run's lock.
    """
    run = the_run_if_left(lake, name)
    if run is None:
        return False
    events = {each.event for each in run.events}
    if "swapping" in events and "swapped" not in events:
        raise KilnError(
            f"a swap of run {name} was cut short: live's tables need the rest of the run. Type kiln backfill swap "
            f"{name} first"
        )
    if not run.leaving:  # from here on nobody takes what is left of the tables for the run
        tell(lake, name, "dropping", now(), range_from=run.range_from, range_to=run.range_to)
    lake.run(name).root.remove_all()
    tell(lake, name, "dropped", now(), range_from=run.range_from, range_to=run.range_to)
    return True


def _listed(lake: Lake, state: Path, events: list[RunEvent]) -> RunSummary:
    begun, last = events[0], events[-1]
    found = _state(state, begun.run, {each.event for each in events})
    return RunSummary(
        begun.run,
        begun.range_from,
        begun.range_to,
        str(begun.details.get("source", "")),
        found,
        {} if "drop" in found else _rows(lake.run(begun.run)),
        begun.happened_at,
        last.happened_at,
    )


def _state(state: Path, name: str, events: set[str]) -> State:
    if "dropped" in events:
        return "dropped"
    if "swapped" in events and "dropping" not in events:
        return "swapped"
    busy = _busy(state, name)
    if "dropping" in events:
        return "dropping" if busy else "drop interrupted"
    if "swapping" in events:
        return "swapping" if busy else "swap interrupted"
    if "done" in events:
        return "done"
    return "running" if busy else "interrupted"


def _busy(state: Path, name: str) -> bool:
    try:
        with locked(state, lock_of(name)):
            return False
    except StateInUseError:
        return True


def _rows(lake: Lake) -> dict[str, int]:
    counts = {table: pa.table(lake.open(table).get_add_actions(flatten=True)) for table in lake.tables()}
    return {table: pc.sum(files["num_records"]).as_py() or 0 for table, files in counts.items()}
