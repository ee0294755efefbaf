"""Execution of table maintenance, which `kiln.pipelines.maintenance.plan` plans, while queries append to the table.

Each change of a table is one commit on top of the version that was read, and is tried again after a concurrent append.
Kiln does not leave this to delta-rs, which would accept a removal of files that another commit has just removed. If the
process is killed, the table is as before or after a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import FileEntry, Location
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.commits import MAINTENANCE_PREFIX
from kiln.pipelines.delta.delta_rs import commit_replacement
from kiln.pipelines.delta.files import DataFile, TableFiles, delete_files
from kiln.pipelines.delta.lake import Lake, locate_log
from kiln.pipelines.maintenance import plan
from kiln.pipelines.maintenance.plan import MaintenancePolicy, RewriteFiles, TableFile
from kiln.pipelines.maintenance.state import TableState, describe_unsupported, read_removed_files, read_state
from kiln.schemas.delta.layout import LAYOUTS, Layout
from kiln.schemas.delta.tables import TABLES

ReportStep = Callable[[str], None]
"""callback that receives a line of text before each step"""

_VERSION_DIGITS = 20


class MaintenanceError(KilnError):
    """Maintenance of a table failed. Steps that were committed earlier remain."""


@dataclass(frozen=True)
class MaintenancePlan:
    """Maintenance steps that a table needs."""

    expired: tuple[TableFile, ...] = ()
    """files whose rows have all expired, which one commit removes"""
    rewrites: tuple[RewriteFiles, ...] = ()
    log_start: int | None = None
    """version at which the trimmed log will begin; `None` if the log is not trimmed"""
    garbage: tuple[FileEntry, ...] = ()
    """files to delete from the disk"""


@dataclass(frozen=True)
class MaintenanceResult:
    """Actual or predicted result of a table's maintenance."""

    table: str
    files: tuple[int, int] = (0, 0)
    """number of files, before and after"""
    size: tuple[int, int] = (0, 0)
    """bytes of these files, before and after"""
    entries: tuple[int, int] = (0, 0)
    """number of commits in the log, before and after"""
    rewritten: int = 0
    """bytes of the files that were rewritten"""
    expired_rows: int = 0
    """number of rows removed by retention"""
    garbage: tuple[int, int] = (0, 0)
    """number of files deleted from the disk, and their bytes"""
    left_alone: str = ""
    """reason why the table was skipped"""
    words: tuple[str, ...] = ()
    """description of each step"""
    seconds: float = 0.0
    error: str = ""
    """reason why maintenance failed; empty if it did not"""


def plan_table(lake: Lake, table: str, rules: MaintenancePolicy, now: int) -> tuple[TableState, MaintenancePlan]:
    """Read the state of a table, and plan its maintenance."""
    state = read_state(lake, table)
    expired = plan.plan_expiry(state.files, rules, now)
    rewrites = plan.plan_trims(state.files, rules, now)
    planned = {file.path for files in (expired, *(step.files for step in rewrites)) for file in files}
    rewrites += plan.plan_compaction((file for file in state.files if file.path not in planned), rules, now)
    log_start = plan.choose_log_start(state.entries, state.checkpoints, rules, now)
    garbage: tuple[FileEntry, ...] = ()
    if log_start is not None or plan.select_abandoned(state.strays, rules, state.newest_append, now):
        removed = read_removed_files(lake.folder(table), state.entries, log_start)
        garbage = plan.select_garbage(state.strays, removed, rules, state.newest_append, now)
    return state, MaintenancePlan(expired, tuple(rewrites), log_start, garbage)


def predict_result(lake: Lake, table: str, rules: MaintenancePolicy, now: int) -> MaintenanceResult:
    """Predict the result of a table's maintenance, without changing the table."""
    reason = describe_unsupported(lake, table, lake.open(table))
    if reason is not None:
        return MaintenanceResult(table, left_alone=reason)
    state, steps = plan_table(lake, table, rules, now)
    rewritten = [file for step in steps.rewrites for file in step.files]
    files, size = len(state.files), plan.total_size(state.files)
    first = state.entries[0].version if state.entries else 0
    entries = len(state.entries) if steps.log_start is None else len(state.entries) - (steps.log_start - first)
    return MaintenanceResult(
        table,
        (files, files - len(steps.expired) - len(rewritten) + len(steps.rewrites)),
        (size, size - plan.total_size(steps.expired)),
        (len(state.entries), entries),
        plan.total_size(rewritten),
        sum(file.rows for file in steps.expired),
        (len(steps.garbage), plan.total_size(steps.garbage)),
        words=tuple(_describe_steps(steps)),
    )


def maintain_table(
    lake: Lake, table: str, rules: MaintenancePolicy, now: int, report: ReportStep, *, durable: bool = False
) -> MaintenanceResult:
    """Execute the maintenance of a table: expire rows, compact files, vacuum, and trim the log.

    Args:
        now: The time, µs.
        report: Receives a line of text before each step.
        durable: True to sync each commit to disk before the next step.

    Raises:
        LakeError: The table cannot be read.
        MaintenanceError: A step failed.
    """
    reason = describe_unsupported(lake, table, lake.open(table))
    if reason is not None:
        return MaintenanceResult(table, left_alone=reason)
    state, steps = plan_table(lake, table, rules, now)
    try:
        return _TableMaintenance(lake, state, rules, report, durable).execute(steps)
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise MaintenanceError(
            f"maintenance of table {table} in {lake.path} failed: {str(error).splitlines()[0]}. Fix the cause, and run "
            "kiln maintain again"
        ) from error


class _TableMaintenance:
    def __init__(
        self, lake: Lake, state: TableState, rules: MaintenancePolicy, report: ReportStep, durable: bool
    ) -> None:
        self._lake = lake
        self._state = state
        self._rules = rules
        self._report = report
        self._durable = durable
        self._folder = lake.folder(state.name)

    def execute(self, steps: MaintenancePlan) -> MaintenanceResult:
        name, opened = self._state.name, self._state.opened
        changed = False
        rewritten = expired = 0
        if steps.expired:
            description = f"{_describe_count(steps.expired)} of expired rows"
            self._report(f"{name}: removing {description}")
            if self._commit(steps.expired, (), description, removes_rows=True):
                changed = True
                expired = sum(file.rows for file in steps.expired)
        for number, step in enumerate(steps.rewrites, 1):
            size = plan.total_size(step.files)
            self._report(
                f"{name}: rewrite {number} of {len(steps.rewrites)}: {_describe_count(step.files)}, {size:,} bytes"
            )
            removed_rows = self._rewrite(step)
            if removed_rows is not None:
                changed = True
                rewritten += size
                expired += removed_rows
        if changed:
            opened.update_incremental()
            opened.create_checkpoint()  # so that readers need not replay the removals
        if steps.log_start is not None:
            self._sync_checkpoint(steps.log_start)
        removed = self._remove_files(steps.garbage)  # before the log entries that name these files are removed
        if steps.log_start is not None:
            self._report(f"{name}: trimming the table's log, which has {len(self._state.entries):,} commits")
            self._trim_log(steps.log_start)
        self._remove_partial_commits()
        after = read_state(self._lake, name)
        before = self._state
        return MaintenanceResult(
            name,
            (len(before.files), len(after.files)),
            (plan.total_size(before.files), plan.total_size(after.files)),
            (len(before.entries), len(after.entries)),
            rewritten,
            expired,
            removed,
            words=tuple(_describe_steps(steps)),
        )

    def _rewrite(self, step: RewriteFiles) -> int | None:
        """Rewrite files in one commit.

        Returns:
            Number of expired rows that the rewrite dropped, or `None` if another writer has removed one of the files.
        """
        paths = [file.path for file in step.files]
        try:
            files = rewrite_files(self._lake, self._state.name, paths, step.before, 2 * self._rules.target)
        except FileNotFoundError as error:
            self._state.opened.update_incremental()
            active = set(self._state.opened.get_add_actions()["path"].to_pylist())
            if active.issuperset(paths):
                missing = next((path for path in paths if not (self._folder / path).exists()), "")
                raise MaintenanceError(
                    f"cannot compact table {self._state.name}: its file {self._folder / missing} is missing. Run kiln "
                    "recover, which lists the repairs"
                ) from error
            return None
        rows = sum(file.rows for file in step.files) - sum(file.rows for file in files)
        if rows and step.before is None and all(file.rows for file in step.files):
            delete_files(self._lake, files)
            raise MaintenanceError(
                f"cannot compact table {self._state.name}: rewriting {', '.join(paths[:3])} would lose {rows:,} rows. "
                "The table is unchanged. Report this as a bug in Kiln"
            )
        description = f"{_describe_count(step.files)} into {len(files)}"
        if self._commit(step.files, files, description, removes_rows=step.before is not None):
            return rows if step.before is not None else 0
        delete_files(self._lake, files)
        return None

    def _commit(
        self, old: Sequence[TableFile], new: Sequence[DataFile], description: str, *, removes_rows: bool
    ) -> bool:
        if self._durable:
            self._folder.sync()
        opened = self._state.opened
        if not replace_files(self._lake, self._state.name, opened, old, new, description, removes_rows=removes_rows):
            return False
        if self._durable:
            self._lake.sync_commits(self._state.name, opened.version(), opened.version())
        return True

    def _remove_files(self, garbage: Iterable[FileEntry]) -> tuple[int, int]:
        count = size = 0
        for stray in garbage:
            (self._folder / stray.name).remove()
            count, size = count + 1, size + stray.size
        return count, size

    def _sync_checkpoint(self, version: int) -> None:
        """Check that the Delta checkpoint of a version is intact, and sync it to disk.

        Raises:
            ArrowInvalid: The checkpoint is not intact.
        """
        log = locate_log(self._folder)
        checkpoint = log / f"{version:0{_VERSION_DIGITS}}.checkpoint.parquet"
        with checkpoint.open() as opened:
            pq.read_metadata(opened)
        checkpoint.sync()
        log.sync()

    def _trim_log(self, start: int) -> None:
        log = locate_log(self._folder)
        for version, name in sorted(_list_versioned_files(log)):  # the oldest ones first
            if version < start:
                (log / name).remove()

    def _remove_partial_commits(self) -> None:
        """Delete the temporary files of commits that were interrupted because the process was killed."""
        bound = (self._state.newest_append or 0) - self._rules.unnamed
        log = locate_log(self._folder)
        for file in log.files():
            if file.name.startswith("_commit_") and file.name.endswith(".tmp") and file.modified < bound:
                (log / file.name).remove()


def replace_files(
    lake: Lake,
    table: str,
    opened: DeltaTable,
    old: Sequence[TableFile],
    new: Sequence[DataFile],
    description: str,
    *,
    removes_rows: bool,
) -> bool:
    """Replace data files of a table in one commit.

    Args:
        opened: The table at a version with the old files. Afterwards, it is at the version of the new commit.
        old: Files to remove from the table.
        new: Files to add.
        description: Description of the change, for the commit's `userMetadata`.
        removes_rows: True if the new files lack rows of the old files. The commit then has `dataChange` set.

    Returns:
        False if another writer removed one of the files, or changed the table's metadata. Nothing is committed then.

    Raises:
        LakeError: Other writers commit without pause.
        SchemaChangedError: Another program has changed the table's columns.
    """
    now = int(time.time() * 1_000)  # time at which the files are removed, for the log
    added_at = max((file.modified for file in old), default=0) // 1_000
    actions: list[AddAction | RemoveAction] = [
        AddAction(file.name, file.size, {}, added_at, removes_rows, file.stats) for file in new
    ]
    actions += [RemoveAction(file.path, removes_rows, now, file.size, {}) for file in old]
    properties = CommitProperties({"userMetadata": f"{MAINTENANCE_PREFIX}: {description}"}, max_commit_retries=0)
    return commit_replacement(lake, table, opened, actions, properties)


def _list_versioned_files(log: Location) -> Iterator[tuple[int, str]]:
    """List the files in a table's log that belong to one version: commits, checkpoints and checksums."""
    for file in log.files():
        version = file.name.removeprefix(".")[:_VERSION_DIGITS]
        if len(version) == _VERSION_DIGITS and version.isdigit():
            yield int(version), file.name


def _describe_steps(steps: MaintenancePlan) -> Iterator[str]:
    if steps.expired:
        yield f"remove {_describe_count(steps.expired)} whose rows have all expired"
    for step in steps.rewrites:
        action = "rewrite without expired rows" if step.before is not None else "compact"
        yield f"{action}: {_describe_count(step.files)}, {plan.total_size(step.files):,} bytes"
    if steps.garbage:
        yield f"vacuum {_describe_count(steps.garbage)}, {plan.total_size(steps.garbage):,} bytes"
    if steps.log_start is not None:
        yield f"trim the table's log, so that it begins at version {steps.log_start}"


def _describe_count(files: Sequence[TableFile | FileEntry]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files):,} files"


_SORTED_BYTES = 32 << 20
"""bytes of rows that are sorted together, to limit memory. So a file consists of several sorted runs, and a reader that
skips row groups reads one or two groups of each run."""
_GROUP_ROWS = 20_000
"""rows of a row group, the unit that a reader can skip"""
_GROUP_BYTES = 16 << 20


def rewrite_files(lake: Lake, table: str, names: Sequence[str], before: int | None, target: int) -> list[DataFile]:
    """Rewrite data files of a table into new, sorted files, which are not committed yet.

    Args:
        names: Files to rewrite.
        before: Rows older than this time (µs) are dropped; `None` to drop none.
        target: Approximate size of a new file, bytes.

    Raises:
        FileNotFoundError: Another process removed one of the files.
    """
    layout = LAYOUTS.get(table, Layout())
    out = TableFiles(lake, table, file_bytes=target)
    rows = _drop_expired(_read_files(lake, table, names), layout.age, before)
    limits = (_SORTED_BYTES, None) if layout.order else (_GROUP_BYTES, _GROUP_ROWS)
    try:
        for run in _gather_tables(rows, *limits):
            ordered = run.sort_by([(column, "ascending") for column in layout.order]) if layout.order else run
            rows_per_group = _estimate_rows(_GROUP_BYTES, ordered.nbytes, ordered.num_rows)
            for batch in ordered.combine_chunks().to_batches(max_chunksize=rows_per_group):
                out.add_batch(batch)
            del run, ordered, batch  # before the next run is read
    except BaseException:  # whatever it is: raised again
        delete_files(lake, out.close())
        raise
    return out.close()


def _read_files(lake: Lake, table: str, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
    schema = build_arrow_schema(TABLES[table].columns, strict=True)
    for name in names:
        with (lake.folder(table) / name).open() as opened, pq.ParquetFile(opened) as file:
            metadata = file.metadata
            size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
            rows = _estimate_rows(_GROUP_BYTES, size, metadata.num_rows)
            for batch in file.iter_batches(rows, columns=schema.names):
                yield pa.RecordBatch.from_arrays(
                    [batch.column(field.name).cast(field.type) for field in schema], schema=schema
                )


def _drop_expired(batches: Iterable[pa.RecordBatch], age: str | None, before: int | None) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if before is None or age is None:
            yield batch
            continue
        unexpired = pc.greater_equal(batch.column(age).cast(pa.int64()), before)
        yield batch.filter(pc.fill_null(unexpired, True))


def _gather_tables(batches: Iterable[pa.RecordBatch], size: int, rows: int | None) -> Iterator[pa.Table]:
    """Merge record batches into Arrow tables, each of about `size` bytes or `rows` rows, whichever is reached first."""
    waiting: list[pa.RecordBatch] = []
    gathered_size = gathered_rows = 0
    for batch in batches:
        waiting.append(batch)
        gathered_size += batch.nbytes
        gathered_rows += batch.num_rows
        if gathered_size >= size or (rows is not None and gathered_rows >= rows):
            gathered = pa.Table.from_batches(waiting)
            waiting, gathered_size, gathered_rows = [], 0, 0
            del batch
            yield gathered
            del gathered
    if gathered_rows:
        yield pa.Table.from_batches(waiting)


def _estimate_rows(size: int, total_bytes: int, rows: int) -> int:
    return max(1, min(_GROUP_ROWS, size * rows // max(1, total_bytes)))
