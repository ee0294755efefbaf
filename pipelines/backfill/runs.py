"""Management of the backfill runs of a lake: list, find, lock and drop them."""

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
    append_event,
    check_name,
    describe_unfinished_drop,
    group_events,
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
"""Name of the lock that a swap holds, because two swaps of overlapping time ranges would undo each other"""


class NoRunError(KilnError):
    """There is no backfill run of this name, or it is dropped."""


@dataclass(frozen=True)
class RunSummary:
    """A backfill run, as `kiln backfill list` shows it."""

    run: BackfillRun
    state: State
    rows: dict[str, int]
    """number of rows by table; empty if the run is dropped"""


def list_runs(lake: Lake, state: Path) -> list[RunSummary]:
    """List all backfill runs in the order of their start, including dropped ones.

    Raises:
        LakeError: There is no lake.
    """
    if not lake.root.exists():
        raise LakeError(
            f"there is no lake at {lake.path}, so there are no backfill runs. If your lake is in another state folder, "
            "pass that folder with --state"
        )
    summaries = []
    for run in group_events(read_events(lake)):
        run_state = _derive_state(state, run)
        rows = {} if "drop" in run_state else _count_rows(lake.locate_run(run.name))
        summaries.append(RunSummary(run, run_state, rows))
    return summaries


def get_run(lake: Lake, name: str) -> BackfillRun:
    """Get the backfill run of a name.

    Raises:
        NoRunError: There is no such run, or it is dropped.
    """
    run = get_newest_run(lake, name)
    if run.had("dropped"):
        raise NoRunError(
            f"backfill run {name} was dropped, and its tables are gone. To see all runs: kiln backfill list"
        )
    if run.had("dropping"):
        raise NoRunError(describe_unfinished_drop(name))
    return run


def get_newest_run(lake: Lake, name: str) -> BackfillRun:
    """Get the newest backfill run of a name, even if it is dropped.

    Raises:
        NoRunError: No such run was ever begun.
    """
    check_name(name)
    runs = [run for run in group_events(read_events(lake)) if run.name == name]
    if not runs:
        raise NoRunError(f"there is no backfill run {name} in {lake.path}. To see all runs: kiln backfill list")
    return runs[-1]


@contextmanager
def lock_run(state: Path, name: str, *, swap: bool = False) -> Iterator[None]:
    """Lock a backfill run, so that no other process executes, swaps or drops it.

    Args:
        state: The state folder, which has the locks.
        swap: True to lock also against swaps of other runs.

    Raises:
        StateInUseError: Another process has the lock.
    """
    with lock_state(state, _name_lock(name)), lock_state(state, _SWAP) if swap else nullcontext():
        yield


def drop_run(lake: Lake, name: str, now: Callable[[], int]) -> bool:
    """Delete the tables of a backfill run, and append this to the log of runs. The caller holds the run's lock.

    Args:
        now: Returns the time, µs.

    Returns:
        False if the run was dropped before.

    Raises:
        NoRunError: There is no such run.
        KilnError: A swap of the run was interrupted.
    """
    run = get_newest_run(lake, name)
    if run.had("dropped"):
        return False
    if run.is_swapping:
        raise KilnError(
            f"cannot drop backfill run {name}: its swap was interrupted, so the live tables lack the rest of its rows. "
            f"First complete it: kiln backfill swap {name}"
        )
    if not run.had("dropping"):  # logged first, so that no command uses what is left of the tables
        append_event(lake, name, "dropping", now(), range_from=run.range_from, range_to=run.range_to)
    lake.locate_run(name).root.remove_all()
    append_event(lake, name, "dropped", now(), range_from=run.range_from, range_to=run.range_to)
    return True


def _derive_state(state: Path, run: BackfillRun) -> State:
    if run.had("dropped"):
        return "dropped"
    busy = read_lock_holder(state / "locks" / _name_lock(run.name)) is not None
    if run.had("dropping"):
        return "dropping" if busy else "drop interrupted"
    if run.had("swapped"):
        return "swapped"
    if run.is_swapping:
        return "swapping" if busy else "swap interrupted"
    if run.is_done:
        return "done"
    return "running" if busy else "interrupted"


def _name_lock(run: str) -> str:
    return f"backfill-{run}"


def _count_rows(lake: Lake) -> dict[str, int]:
    counts = {table: pa.table(lake.open(table).get_add_actions(flatten=True)) for table in lake.tables()}
    return {table: pc.sum(files["num_records"]).as_py() or 0 for table, files in counts.items()}
