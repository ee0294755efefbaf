"""Swap of a backfill run: replaces the live rows in the run's time range with the run's rows (docs/design, decision
22).

Each step is one commit to one table. The steps are ordered so that readers always find the tips of each batch and the
update of each tip, even after a swap was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from deltalake import Transaction

from kiln.conf.process.errors import KilnError
from kiln.pipelines.backfill.range_comparison import RangeComparison, TableSnapshot, open_comparison
from kiln.pipelines.backfill.run_log import RUN_TABLES, BackfillRun, append_event, claim_swap
from kiln.pipelines.backfill.swap import FileSwap, has_mark
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.files import DataFile, TableFiles, delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES

STEPS: Final = (*RUN_TABLES[:-1], "updates_rest", "quarantine")
"""Steps of a swap, in order, mostly named after their table. The step `updates` keeps live updates that the run lacks,
as long as live batches or tips refer to them. The step `updates_rest` removes them."""

_TRIES: Final = 10
_ROWS_PER_BATCH: Final = 20_000
_CLAIM_STAGE: Final = "separator"
_CLAIM: Final = ("stage", "reason", "kafka_partition", "kafka_offset", "message_index")
"""Columns that identify a row of `quarantine` about a wrong separator. The column `detail` is not among them, because
the bridge and the queries word it differently."""
_ONLY_ADDED: Final = ("frames", "batch_tips")
"""Tables from which a swap removes no rows"""


class SwapError(KilnError):
    """A backfill run cannot be swapped into the live tables."""


def swap_run(
    lake: Lake,
    run: BackfillRun,
    file_swap: FileSwap,
    now: Callable[[], int],
    say: Callable[[str], None],
    *,
    replace: bool = False,
    by: str = "",
    take_over: bool = False,
) -> dict[str, int] | None:
    """Replace the live rows in a backfill run's time range with the run's rows, or resume an interrupted swap.

    Args:
        file_swap: Commits the steps.
        now: Returns the time, µs.
        say: Receives a line of text for each step.
        replace: True to swap even if the live tables contain messages that the run lacks.
        by: As for `claim_swap`.
        take_over: As for `claim_swap`.

    Returns:
        The version of each live table after the swap, or `None` if the run was swapped before.

    Raises:
        SwapClaimedError: Another process is swapping a run of this lake.
        SwapError: The run is not done, the live tables contain messages that the run lacks, a table is older than the
            run, or other writers prevented a commit.
    """
    if run.had("swapped"):
        return None
    _check_done(run)
    _check_ages(lake, run)
    with open_comparison(lake, run) as comparison:
        if not run.is_swapping:
            _check_late_frames(comparison, run)
            if not replace:
                _check_coverage(comparison, run)
        before = run.swap_versions or {table: lake.open(table).version() for table in RUN_TABLES}
        claim_swap(lake, run, by, now(), before, take_over=take_over)
        run_swap = _RunSwap(comparison, run, before, file_swap, say)
        for step in STEPS:
            run_swap.commit_step(step)
    after = {table: lake.open(table).version() for table in RUN_TABLES}
    append_event(lake, run.name, "swapped", now(), range_from=run.range_from, range_to=run.range_to, details=after)
    return after


def add_frames(lake: Lake, run: BackfillRun, file_swap: FileSwap, say: Callable[[str], None]) -> bool:
    """Add the frames of a backfill run that the live table `frames` lacks, and change no other table.

    Returns:
        False if the live table already contains all these frames.

    Raises:
        SwapError: The run is not done or has no frames of its own, a table is older than the run, or other writers
            prevented the commit.
    """
    _check_done(run)
    if run.details.get("source") == "frames":
        raise SwapError(
            f"backfill run {run.name} read its frames from the live table, so it has no frames to add. Omit "
            "--only-frames"
        )
    _check_ages(lake, run)
    with open_comparison(lake, run) as comparison:
        return _RunSwap(comparison, run, {}, file_swap, say).commit_step("frames")


def _check_done(run: BackfillRun) -> None:
    if not run.is_done:
        raise SwapError(
            f"backfill run {run.name} is not done, so a swap would leave the rest of its time range empty. To complete "
            "the run, repeat its command: kiln backfill run … --run NAME, with the same options"
        )


def _check_ages(lake: Lake, run: BackfillRun) -> None:
    """Raise SwapError if a table of the lake or of the run is older than when the run used it, as after a restore from
    a backup. Rows would be missing."""
    for tables, versions in ((lake, run.begun_versions), (lake.locate_run(run.name), run.own_versions)):
        for table in filter(versions.__contains__, RUN_TABLES):
            newest = tables.open(table).version() if tables.has(table) else -1
            if newest < versions[table]:
                end = "is missing" if newest < 0 else f"ends with version {newest}"
                raise SwapError(
                    f"the table {table} in {tables.path} is older than backfill run {run.name}: the table {end}, and "
                    f"had version {versions[table]} when the run used it. Restore the newest backup of the table, or "
                    "drop the run and begin it again"
                )


def _check_coverage(comparison: RangeComparison, run: BackfillRun) -> None:
    """Raise SwapError if the swap would remove live messages or copies that the run does not have."""
    source = run.details.get("source")
    if source == "frames":
        return
    missing = {}
    for table in ("messages", "copies"):
        comparison.create_views(table)
        key = ", ".join(comparison.extents[table].key)
        if count := comparison.count(f"live_{table} ANTI JOIN run_{table} USING ({key})"):
            missing[table] = f"{count:,} {table}"
    if not missing:
        return
    source_lacks = "Kafka did not have" if source == "kafka" else "the files do not have"
    raise SwapError(
        f"cannot swap backfill run {run.name}: in its time range, the live tables have "
        f"{' and '.join(missing.values())} that {source_lacks}, and the swap would remove them. To keep them and the "
        f"rows of the run: (1) kiln backfill swap {run.name} --only-frames, which adds the run's frames to the live "
        f"frames, (2) make a new run of the range with --source frames, (3) swap the new run. To keep only "
        f"the rows of the run: kiln backfill swap {run.name} --replace"
    )


def _check_late_frames(comparison: RangeComparison, run: BackfillRun) -> None:
    """Raise SwapError if frames of the time range were added to the live table after the run began.

    The run may lack these frames.
    """
    now, then = (
        comparison.open_version("frames", version)
        for version in (comparison.lake.open("frames").version(), run.begun_versions.get("frames"))
    )
    if run.details.get("source") != "frames" or now is None or then is None:
        return
    inside = comparison.range_condition("frames")
    late = comparison.count(f"({now.select()}) WHERE {inside}") - comparison.count(f"({then.select()}) WHERE {inside}")
    if late > 0:
        raise SwapError(
            f"cannot swap backfill run {run.name}: {late:,} frames of its time range were added to the table frames "
            "after the run began, so the run may lack them. Drop the run, and begin it again when Kiln has caught up"
        )


class _RunSwap:
    """Planner and executor of the steps of a swap.

    Only live rows that were in the run's time range when the swap began are removed.
    """

    def __init__(
        self,
        comparison: RangeComparison,
        run: BackfillRun,
        before: Mapping[str, int],
        file_swap: FileSwap,
        say: Callable[[str], None],
    ) -> None:
        self._comparison, self._run, self._before = comparison, run, before
        self._file_swap, self._say = file_swap, say

    def commit_step(self, step: str) -> bool:
        """Plan and commit one step. If another writer removes files of the table meanwhile, try again.

        Returns:
            False if the step was committed before, or changes nothing.
        """
        table = step.removesuffix("_rest")
        # the version distinguishes the run from a later run of the same name
        mark = Transaction(f"swap:{self._run.name}:{step}", self._run.events[0].happened_at)
        if not self._comparison.run_lake.has(table):
            return False  # a run of an earlier Kiln has no table that was added since
        for _ in range(_TRIES):
            snapshot = self._comparison.open(self._comparison.lake, table)
            if has_mark(snapshot.table, mark):
                return False
            self._say(f"{'adding rows to' if table in _ONLY_ADDED else 'replacing rows of'} table {table}")
            self._comparison.create_views(table)
            removed, queries = self._plan(step, table, snapshot)
            files = [file for rows in queries for file in self._write_rows(table, rows)]
            if not removed and not files:
                return False
            if self._file_swap.commit(table, snapshot.table, removed, files, mark):
                return True
            delete_files(self._comparison.lake, files)
        raise SwapError(
            f"cannot swap backfill run {self._run.name}: {_TRIES} tries to change the table {table} failed, because "
            "other commits removed files from the table meanwhile. Nothing is lost. Try again: kiln backfill "
            f"swap {self._run.name}"
        )

    def _plan(self, step: str, table: str, snapshot: TableSnapshot) -> tuple[Collection[str], list[str]]:
        """Plan a step.

        Returns:
            The files to remove, and SQL queries for the rows to add. These include the rows of removed files that stay.
        """
        key = ", ".join(TABLES[table].key)
        all_rows = snapshot.select(snapshot.all_files)
        if table in _ONLY_ADDED:
            rows = f"SELECT DISTINCT ON ({key}) r.* FROM run_{table} AS r ANTI JOIN ({all_rows}) AS l USING ({key})"
            return (), [rows]
        files, condition = self._select_removed(table, snapshot)
        added = [f"FROM run_{table}"]
        if table == "updates":
            only_live = f"({snapshot.select(files)}) AS l ANTI JOIN run_updates AS same USING ({key})"
            if step == "updates":  # batches and tips still refer to live updates that the run lacks
                of_tip = "ANTI JOIN run_updates AS same_tip USING (network, stream, tip)"
                added.append(f"FROM {only_live} {of_tip} WHERE {condition}")
            else:
                rest = f"SELECT ({key}) FROM {only_live} WHERE {condition}"
                condition, added = f"({key}) IN ({rest})", []
                files = [file for file in files if self._has_rows(f"({snapshot.select([file])}) WHERE {condition}")]
        elif table == "quarantine":  # rows about claims that a genesis contradicts are only added
            run_rows = self._comparison.open(self._comparison.run_lake, table).select()
            same = " AND ".join(f"l.{name} IS NOT DISTINCT FROM r.{name}" for name in _CLAIM)
            claims = f"FROM ({run_rows}) AS r ANTI JOIN ({all_rows}) AS l ON {same}"
            added.append(f"{claims} WHERE r.stage = '{_CLAIM_STAGE}'")
        return files, [f"FROM ({snapshot.select(files)}) WHERE ({condition}) IS NOT TRUE", *added]

    def _select_removed(self, table: str, snapshot: TableSnapshot) -> tuple[Collection[str], str]:
        """Select the live rows that were in the run's time range when the swap began.

        Returns:
            The files that may have such rows, and the SQL condition that selects these rows in the files.
        """
        inside = self._comparison.range_condition(table)
        then = self._comparison.open_version(table, self._before.get(table))
        if then is None or set(snapshot.all_files).issuperset(then.files):
            return (then or snapshot).files, inside
        # compaction has rewritten files since, so they also hold later rows
        columns = ", ".join(column.name for column in TABLES[table].columns)
        identity = f"({', '.join(TABLES[table].key)})" if TABLES[table].key else f"hash(row({columns}))"
        rows = f"SELECT {identity} FROM ({then.select()}) WHERE {inside}"
        return snapshot.files, f"({inside} AND {identity} IN ({rows}))"

    def _has_rows(self, rows: str) -> bool:
        return bool(self._comparison.connection.execute(f"FROM {rows} LIMIT 1").fetchall())

    def _write_rows(self, table: str, rows: str) -> list[DataFile]:
        files = TableFiles(self._comparison.lake, table)
        columns = ", ".join(column.name for column in TABLES[table].columns)
        schema = build_arrow_schema(TABLES[table].columns)
        for batch in self._comparison.connection.sql(f"SELECT {columns} FROM ({rows})").to_arrow_reader(
            _ROWS_PER_BATCH
        ):
            files.add_batch(batch.cast(schema))
        return files.close()
