"""The runs of a lake: list, find, lock and drop them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from kiln.conf.process.errors import KilnError
from kiln.conf.process.state_folder import lock_state, read_lock_holder
from kiln.pipelines.backfill.run_log import (
    BackfillRun,
    RunEvent,
    append_event,
    check_name,
    describe_unfinished_drop,
    find_run,
    read_events,
)
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
"""Lock of a swap: two swaps of overlapping ranges would undo each other."""


class NoRunError(KilnError):
    """No run has this name."""


@dataclass(frozen=True)
class RunSummary:
    """A run as shown by `kiln backfill list`. Times are µs."""

    name: str
    range_from: int | None
    range_to: int | None
    source: str
    state: State
    rows: dict[str, int]
    """row count by table; empty for a run that was dropped"""
    begun_at: int
    last_at: int
    """time of the last event"""


def list_runs(lake: Lake, state: Path) -> list[RunSummary]:
    """List all runs in the order of their start, including dropped ones.

    Raises:
        LakeError: There is no lake.
    """
    if not lake.root.exists():
        raise LakeError(f"there is no lake at {lake.path}: nothing has been written yet. --state names the folder")
    runs: list[list[RunEvent]] = []
    open_: dict[str, list[RunEvent]] = {}
    for event in read_events(lake):
        if event.run not in open_:
            open_[event.run] = []
            runs.append(open_[event.run])
        open_[event.run].append(event)
        if event.event == "dropped":
            del open_[event.run]
    return [_summarize_run(lake, state, events) for events in runs]


def get_run(lake: Lake, name: str) -> BackfillRun:
    """Get the run of this name.

    Raises:
        NoRunError: No such run was ever begun, or it is dropped.
    """
    run = get_run_unless_dropped(lake, name)
    if run is None:
        raise NoRunError(
            f"run {name} was dropped, and its tables are gone. To see what is there, type kiln backfill list"
        )
    if run.is_dropping:
        raise NoRunError(describe_unfinished_drop(name))
    return run


def get_run_unless_dropped(lake: Lake, name: str) -> BackfillRun | None:
    """Get the run of this name, or `None` if it is dropped.

    Raises:
        NoRunError: No such run was ever begun.
    """
    run = find_run(lake, check_name(name))
    if run is None and not any(event.run == name for event in read_events(lake)):
        raise NoRunError(f"there is no run {name} in {lake.path}. To see what is there, type kiln backfill list")
    return run


@contextmanager
def lock_run(state: Path, name: str, *, swap: bool = False) -> Iterator[None]:
    """Lock a run against other processes that run, swap or drop it; with `swap`, also against swaps of any run.

    Raises:
        StateInUseError: Another process has the lock.
    """
    with lock_state(state, _name_lock(name)), lock_state(state, _SWAP) if swap else nullcontext():
        yield


def drop_run(lake: Lake, name: str, now: Callable[[], int]) -> bool:
    """Remove the tables of a run, and log it. The caller holds the run's lock.

    Args:
        now: Returns the time, µs.

    Returns:
        False if the run was dropped before.

    Raises:
        NoRunError: There was no such run.
        KilnError: A swap of the run was interrupted.
    """
    run = get_run_unless_dropped(lake, name)
    if run is None:
        return False
    events = {event.event for event in run.events}
    if "swapping" in events and "swapped" not in events:
        raise KilnError(
            f"a swap of run {name} was interrupted: the live tables lack the rest of the run. Type kiln backfill swap "
            f"{name} first"
        )
    if not run.is_dropping:  # logged first, so that no command uses what is left of the tables
        append_event(lake, name, "dropping", now(), range_from=run.range_from, range_to=run.range_to)
    lake.locate_run(name).root.remove_all()
    append_event(lake, name, "dropped", now(), range_from=run.range_from, range_to=run.range_to)
    return True


def _summarize_run(lake: Lake, state: Path, events: list[RunEvent]) -> RunSummary:
    begun, last = events[0], events[-1]
    run_state = _derive_state(state, begun.run, {event.event for event in events})
    return RunSummary(
        begun.run,
        begun.range_from,
        begun.range_to,
        str(begun.details.get("source", "")),
        run_state,
        {} if "drop" in run_state else _count_rows(lake.locate_run(begun.run)),
        begun.happened_at,
        last.happened_at,
    )


def _derive_state(state: Path, name: str, events: set[str]) -> State:
    if "dropped" in events:
        return "dropped"
    if "swapped" in events and "dropping" not in events:
        return "swapped"
    busy = read_lock_holder(state / "locks" / _name_lock(name)) is not None
    if "dropping" in events:
        return "dropping" if busy else "drop interrupted"
    if "swapping" in events:
        return "swapping" if busy else "swap interrupted"
    if "done" in events:
        return "done"
    return "running" if busy else "interrupted"


def _name_lock(run: str) -> str:
    return f"backfill-{run}"


def _count_rows(lake: Lake) -> dict[str, int]:
    counts = {table: pa.table(lake.open(table).get_add_actions(flatten=True)) for table in lake.tables()}
    return {table: pc.sum(files["num_records"]).as_py() or 0 for table, files in counts.items()}
