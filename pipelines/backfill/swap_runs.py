"""Swap of a run: replaces the live rows in the run's time range with the run's rows (docs/design, decision 22).

Each step is one commit of one table. Between steps, and after an interrupted swap, readers find the tips of each batch
and the update of each tip.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import Location
from kiln.pipelines.backfill.range_comparison import RangeComparison, TableSnapshot, open_comparison
from kiln.pipelines.backfill.run_log import RUN_TABLES, BackfillRun, append_event, claim_swap
from kiln.pipelines.backfill.swap import FileSwap, OvertakenError, SwapMarker
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.files import DataFile, TableFiles, delete_files
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES

STEPS: Final = (
    "frames",
    "copies",
    "subscriptions",
    "controls",
    "messages",
    "updates",
    "batch_tips",
    "batches",
    "tips",
    "updates_rest",
    "quarantine",
)
"""Steps in order. The step `updates` keeps updates that only the live table contains, while batches or tips refer to
them."""

_TRIES: Final = 10
_ROWS_PER_BATCH: Final = 20_000
_COPY_BYTES: Final = 1 << 20  # bytes
_CLAIM_STAGE: Final = "separator"
_CLAIM: Final = ("stage", "reason", "kafka_partition", "kafka_offset", "message_index")
"""Key of a claim that a genesis contradicts: the bridge and the queries give different details."""

_REST_FILE: Final = "swap-rest.parquet"
"""File in the run's folder with the keys of the updates that `updates` keeps and `updates_rest` removes."""


class SwapError(KilnError):
    """The run cannot be swapped."""


@dataclass(frozen=True)
class _RemovedFiles:
    """Files that a step removes, as in the log, and the condition for those of their rows that are not added again."""

    files: tuple[str, ...]
    condition: str


@dataclass(frozen=True)
class SwapStep:
    """Files that a step removes and adds."""

    removed: Sequence[str]
    files: Sequence[DataFile]


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
    """Swap the run in, or resume an interrupted swap.

    Args:
        now: Returns the time, µs.
        say: Receives a line for each step.
        replace: Also swap if the live tables contain messages that the run lacks.
        by: As for `claim_swap`.
        take_over: As for `claim_swap`.

    Returns:
        The version of each table after the swap, or `None` if the run is swapped in already.

    Raises:
        SwapClaimedError: Another machine swaps a run of this lake.
        SwapError: The run is not done, the live tables contain messages that the run lacks, a table is older than the
            run, or other writers prevented a step from being committed.
    """
    events = [event.event for event in run.events]
    if "swapped" in events:
        return None
    _check_done(run)
    _check_ages(lake, run)
    tables = [table for table in TABLES if table in STEPS]
    lake.create(tables)
    if "swapping" not in events:
        with open_comparison(lake, run) as comparison:
            _check_late_frames(comparison, run)
            if not replace:
                _check_coverage(comparison, run)
        before = {table: lake.open(table).version() for table in tables}
    else:
        details = next(event.details for event in reversed(run.events) if event.event == "swapping")
        before = {table: version for table, version in details.items() if isinstance(version, int)}
    claim_swap(lake, run, by, now(), before, take_over=take_over)
    begun = run.events[0].happened_at
    with open_comparison(lake, run) as comparison:
        run_swap = _RunSwap(comparison, before)
        for name in STEPS:
            table = name.removesuffix("_rest")
            mark = SwapMarker(run.name, name, begun)
            if file_swap.has_step(table, mark) or not comparison.run_lake.has(table):
                continue  # a run of an earlier Kiln has no table that was added since
            say(f"{table}: swapping")
            run_swap.commit_step(name, table, file_swap, mark)
    after = {table: lake.open(table).version() for table in tables}
    append_event(lake, run.name, "swapped", now(), range_from=run.range_from, range_to=run.range_to, details=after)
    return after


def add_frames(lake: Lake, run: BackfillRun, file_swap: FileSwap, say: Callable[[str], None]) -> bool:
    """Add the frames of a run that the live table lacks, and change no other table. This is the first step of a swap.

    Returns:
        False if the live table already contains the frames.

    Raises:
        SwapError: The run is not done or has no frames of its own, or another reason of `swap_run` applies.
    """
    _check_done(run)
    if run.details.get("source") == "frames":
        raise SwapError(f"run {run.name} read the live table frames, and has no frames of its own")
    _check_ages(lake, run)
    lake.create(["frames"])
    mark = SwapMarker(run.name, "frames", run.events[0].happened_at)
    if file_swap.has_step("frames", mark):
        return False
    before = lake.open("frames").version()
    with open_comparison(lake, run) as comparison:
        say("frames: adding")
        _RunSwap(comparison, {}).commit_step("frames", "frames", file_swap, mark)
    return lake.open("frames").version() > before


def _check_done(run: BackfillRun) -> None:
    if not run.is_done:
        raise SwapError(
            f"run {run.name} is not done, so the rest of its range would be empty. Type kiln backfill run again, with "
            "the same options"
        )


def _check_ages(lake: Lake, run: BackfillRun) -> None:
    """Raise SwapError if a copy of a table was put back that is older than the run: rows would be missing."""
    for tables, versions in ((lake, run.begun_versions), (lake.locate_run(run.name), run.own_versions)):
        for table in RUN_TABLES:
            newest = tables.open(table).version() if tables.has(table) else -1
            if newest < versions.get(table, -1):
                end = "is missing" if newest < 0 else f"ends with version {newest}"
                raise SwapError(
                    f"the table {table} in {tables.path} is older than run {run.name}: it {end}, and had version "
                    f"{versions[table]} when the run used it. Restore the newest copy of the table, or drop the run "
                    "and begin it again"
                )


def _check_coverage(comparison: RangeComparison, run: BackfillRun) -> None:
    """Raise SwapError if the swap would remove live messages or copies that the run did not read."""
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
        f"in this range, the live tables have {' and '.join(missing.values())} that {source_lacks}, and the swap would "
        f"remove them. To keep both, type kiln backfill swap {run.name} --only-frames, make a new run of the range "
        "with --source frames, and swap that one. To keep only the rows of the run, type kiln backfill swap "
        f"{run.name} --replace"
    )


def _check_late_frames(comparison: RangeComparison, run: BackfillRun) -> None:
    """Raise SwapError if frames of the range were added to the live table after the run began, because the run may lack
    them."""
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
            f'{late:,} frames of the range reached the table "frames" after the run {run.name} began, so the run may '
            "lack them. Drop the run, and begin it again when Kiln has caught up"
        )


class _RunSwap:
    """Plans and commits the steps. Only live rows that were in the range when the swap began are removed."""

    def __init__(self, comparison: RangeComparison, before: Mapping[str, int]) -> None:
        """Prepare the steps.

        Args:
            before: Versions of the live tables when the swap began.
        """
        self._comparison = comparison
        self._before = before
        self._plans: dict[str, Callable[[str, TableSnapshot], SwapStep | None]] = {
            "frames": self._plan_append,
            "batch_tips": self._plan_append,
            "updates": self._plan_updates,
            "updates_rest": self._plan_updates_rest,
            "quarantine": self._plan_quarantine,
        }

    def commit_step(self, name: str, table: str, file_swap: FileSwap, mark: SwapMarker) -> None:
        """Commit one step, and plan it again while other writers remove files of the table."""
        plan = self._plans.get(name, self._plan_replacement)
        for _ in range(_TRIES):
            snapshot = self._comparison.open(self._comparison.lake, table)
            assert snapshot is not None, "the tables were made"
            self._comparison.create_views(table)
            step = plan(table, snapshot)
            if step is None:
                return
            try:
                file_swap.commit(table, snapshot.table, step.removed, step.files, mark)
            except OvertakenError:
                delete_files(self._comparison.lake, step.files)
                if file_swap.has_step(table, mark):
                    return
            else:
                return
        raise SwapError(
            f"table {table}: each of {_TRIES} tries of this swap failed, because other commits removed files from the "
            f"table meanwhile. Nothing is lost. Type kiln backfill swap {mark.run} again"
        )

    # -------- plans

    def _plan_replacement(self, table: str, snapshot: TableSnapshot) -> SwapStep | None:
        removed_rows = self._select_removed(table, snapshot)
        return self._build_step(
            table, removed_rows.files, self._select_kept(snapshot, removed_rows), f"FROM run_{table}"
        )

    def _plan_append(self, table: str, snapshot: TableSnapshot) -> SwapStep | None:
        """Plan to add the rows that the live table lacks, and to remove none."""
        key = ", ".join(TABLES[table].key)
        return self._build_step(
            table,
            (),
            f"SELECT DISTINCT ON ({key}) r.* FROM run_{table} AS r ANTI JOIN ({snapshot.rows}) AS l USING ({key})",
        )

    def _plan_updates(self, table: str, snapshot: TableSnapshot) -> SwapStep | None:
        """Plan a replacement that keeps live updates of tips that the run lacks, until `_plan_updates_rest`."""
        removed_rows = self._select_removed(table, snapshot)
        self._comparison.connection.execute(f"""
            CREATE OR REPLACE TEMP TABLE rest AS
            FROM ({snapshot.select(removed_rows.files)}) AS l
            ANTI JOIN run_updates AS same_tip USING (network, stream, tip)
            ANTI JOIN run_updates AS same USING ({_key_columns(table)})
            WHERE {removed_rows.condition}""")
        with tempfile.TemporaryDirectory(prefix="kiln-") as folder:
            path = f"{folder}/{_REST_FILE}"
            self._comparison.connection.execute(
                f"COPY (SELECT {_key_columns(table)} FROM rest) TO '{path}' (FORMAT parquet)"
            )
            with open(path, "rb") as file:
                self._rest_file.write(iter(partial(file.read, _COPY_BYTES), b""))
        return self._build_step(
            table, removed_rows.files, self._select_kept(snapshot, removed_rows), "FROM run_updates", "FROM rest"
        )

    def _plan_updates_rest(self, table: str, snapshot: TableSnapshot) -> SwapStep | None:
        quoted = self._rest_file.uri.replace("'", "''")
        rest = f"SELECT ({_key_columns(table)}) FROM read_parquet('{quoted}')"
        condition = f"({_key_columns(table)}) IN ({rest})"
        files = (
            [file for file in snapshot.files if self._has_rows(f"FROM ({snapshot.select([file])}) WHERE {condition}")]
            if self._has_rows(rest)
            else []
        )
        if not files:
            return None
        return self._build_step(table, files, self._select_kept(snapshot, _RemovedFiles(tuple(files), condition)))

    def _plan_quarantine(self, table: str, snapshot: TableSnapshot) -> SwapStep | None:
        """Plan a replacement that also adds contradicted claims that the live table lacks."""
        removed_rows = self._select_removed(table, snapshot)
        run_snapshot = self._comparison.open(self._comparison.run_lake, table)
        claims = (
            []
            if run_snapshot is None
            else [
                f"""
            FROM ({run_snapshot.select()}) AS r ANTI JOIN ({snapshot.rows}) AS l
            ON {" AND ".join(f"l.{name} IS NOT DISTINCT FROM r.{name}" for name in _CLAIM)}
            WHERE r.stage = '{_CLAIM_STAGE}'"""
            ]
        )
        return self._build_step(
            table, removed_rows.files, self._select_kept(snapshot, removed_rows), f"FROM run_{table}", *claims
        )

    # -------- parts of plans

    @property
    def _rest_file(self) -> Location:
        return self._comparison.run_lake.root / _REST_FILE

    def _select_removed(self, table: str, snapshot: TableSnapshot) -> _RemovedFiles:
        """Select the rows that were in the range when the swap began."""
        inside = self._comparison.range_condition(table)
        then = self._comparison.open_version(table, self._before.get(table))
        if then is None or snapshot.all_files.issuperset(then.files):
            return _RemovedFiles((then or snapshot).files, inside)
        # compaction has rewritten files since, so they also hold later rows
        rows = f"SELECT {_identity(table)} FROM ({then.select()}) WHERE {inside}"
        return _RemovedFiles(snapshot.files, f"({inside} AND {_identity(table)} IN ({rows}))")

    def _select_kept(self, snapshot: TableSnapshot, removed_rows: _RemovedFiles) -> str:
        """Select the rows to keep of the removed files."""
        return f"FROM ({snapshot.select(removed_rows.files)}) WHERE ({removed_rows.condition}) IS NOT TRUE"

    def _has_rows(self, rows: str) -> bool:
        return bool(self._comparison.connection.execute(f"{rows} LIMIT 1").fetchall())

    def _build_step(self, table: str, removed: Sequence[str], *queries: str) -> SwapStep | None:
        """Write the rows of each query to files, and return the step unless it is empty."""
        files = [file for select in queries for file in self._write_rows(table, select)]
        return SwapStep(removed, files) if removed or files else None

    def _write_rows(self, table: str, rows: str) -> list[DataFile]:
        files = TableFiles(self._comparison.lake, table)
        columns = ", ".join(column.name for column in TABLES[table].columns)
        schema = build_arrow_schema(TABLES[table].columns)
        for batch in self._comparison.connection.sql(f"SELECT {columns} FROM ({rows})").to_arrow_reader(
            _ROWS_PER_BATCH
        ):
            files.add_batch(batch.cast(schema))
        return files.close()


def _key_columns(table: str) -> str:
    return ", ".join(TABLES[table].key)


def _identity(table: str) -> str:
    """Build the SQL expression that identifies a row: the key, or a hash of all columns if there is none."""
    columns = ", ".join(column.name for column in TABLES[table].columns)
    return f"({_key_columns(table)})" if TABLES[table].key else f"hash(row({columns}))"
