"""Execution of the steps of `kiln.pipelines.maintenance.plan`, while queries append and others read.

Each change of a table is one commit on top of the version that was examined: delta-rs accepts a commit that removes
files which another commit has just removed. After an append in between, the commit is tried again. A kill at any moment
leaves the table as it was before or after a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from kiln.conf.process.errors import KilnError
from kiln.conf.process.location import Location
from kiln.pipelines.delta.commits import MAINTENANCE_PREFIX
from kiln.pipelines.delta.delta_rs import AFTER_COMMIT
from kiln.pipelines.delta.files import DataFile, delete_files
from kiln.pipelines.delta.lake import Lake, locate_log
from kiln.pipelines.delta.log_faults import adds_any, read_commit
from kiln.pipelines.maintenance import plan
from kiln.pipelines.maintenance.plan import ExpireFiles, MaintenancePolicy, RewriteFiles, TableFile, UntrackedFile
from kiln.pipelines.maintenance.rewriting import rewrite_files
from kiln.pipelines.maintenance.state import TableState, describe_unsupported, read_removed_files, read_state

Say = Callable[[str], None]

_TRIES = 200
"""commits in a row between which somebody else may commit"""
_VERSION_DIGITS = 20


class MaintenanceError(KilnError):
    """Maintenance of a table failed. Steps that were committed before stay."""


@dataclass(frozen=True)
class MaintenancePlan:
    """Steps that a table needs. `begins` is the checkpoint at which the log is to begin, if it is to be shortened."""

    expire: ExpireFiles | None = None
    rewrites: tuple[RewriteFiles, ...] = ()
    begins: int | None = None
    garbage: tuple[UntrackedFile, ...] = ()


@dataclass(frozen=True)
class MaintenanceResult:
    """Result of the maintenance of a table, or the prediction of one."""

    table: str
    files: tuple[int, int] = (0, 0)
    """before and after"""
    size: tuple[int, int] = (0, 0)
    """bytes of the rows, before and after"""
    entries: tuple[int, int] = (0, 0)
    """commits in the log, before and after"""
    rewritten: int = 0
    """bytes that were rewritten"""
    expired_rows: int = 0
    """rows removed by retention"""
    garbage: tuple[int, int] = (0, 0)
    """files removed from the disk, and their bytes"""
    left_alone: str = ""
    """why the table was not touched"""
    words: tuple[str, ...] = ()
    """description of each step"""


def plan_table(lake: Lake, table: str, rules: MaintenancePolicy, now: int) -> tuple[TableState, MaintenancePlan]:
    """Read the state of a table, and plan its maintenance."""
    state = read_state(lake, table)
    expire = plan.plan_expiry(state.files, rules, now)
    rewrites = plan.plan_trims(state.files, rules, now)
    taken = {file.path for step in (expire, *rewrites) if step is not None for file in step.files}
    rewrites += plan.plan_compaction((file for file in state.files if file.path not in taken), rules, now)
    begins = plan.choose_log_start(state.entries, state.checkpoints, rules, now)
    garbage: tuple[UntrackedFile, ...] = ()
    if begins is not None or plan.select_untracked(state.strays, rules, state.newest_append, now):
        named = read_removed_files(lake.folder(table), state.entries, begins)
        garbage = plan.select_garbage(state.strays, named, rules, state.newest_append, now)
    return state, MaintenancePlan(expire, tuple(rewrites), begins, garbage)


def predict_result(lake: Lake, table: str, rules: MaintenancePolicy, now: int) -> MaintenanceResult:
    """Predict the result of maintenance, without changes."""
    why = describe_unsupported(lake, table, lake.open(table))
    if why is not None:
        return MaintenanceResult(table, left_alone=why)
    state, steps = plan_table(lake, table, rules, now)
    gone = steps.expire.files if steps.expire else ()
    merged = [file for step in steps.rewrites for file in step.files]
    files, size = len(state.files), plan.total_size(state.files)
    begins = state.entries[0].version if state.entries else 0
    left = len(state.entries) if steps.begins is None else len(state.entries) - (steps.begins - begins)
    return MaintenanceResult(
        table,
        (files, files - len(gone) - len(merged) + len(steps.rewrites)),
        (size, size - plan.total_size(gone)),
        (len(state.entries), left),
        plan.total_size(merged),
        sum(file.rows for file in gone),
        (len(steps.garbage), plan.total_size(steps.garbage)),
        words=tuple(_describe_steps(steps)),
    )


def maintain_table(
    lake: Lake, table: str, rules: MaintenancePolicy, now: int, say: Say, *, durable: bool = False
) -> MaintenanceResult:
    """Execute the maintenance of a table.

    Args:
        durable: Sync each commit to disk before the next step.

    Raises:
        LakeError: The table cannot be read.
        MaintenanceError: A step failed.
    """
    why = describe_unsupported(lake, table, lake.open(table))
    if why is not None:
        return MaintenanceResult(table, left_alone=why)
    state, steps = plan_table(lake, table, rules, now)
    try:
        return _TableMaintenance(lake, state, rules, say, durable).execute(steps)
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise MaintenanceError(f"{table}: {str(error).splitlines()[0]}") from error


class _TableMaintenance:
    """Maintenance of one table."""

    def __init__(self, lake: Lake, state: TableState, rules: MaintenancePolicy, say: Say, durable: bool) -> None:
        self._lake = lake
        self._state = state
        self._rules = rules
        self._say = say
        self._durable = durable
        self._folder = lake.folder(state.name)

    def execute(self, steps: MaintenancePlan) -> MaintenanceResult:
        name, opened = self._state.name, self._state.opened
        changed = False
        rewritten = expired = 0
        if steps.expire is not None:
            self._say(f"{name}: {_describe_count(steps.expire.files)} of old rows")
            if self._commit(steps.expire.files, (), f"{_describe_count(steps.expire.files)} of old rows", rows_go=True):
                changed = True
                expired = sum(file.rows for file in steps.expire.files)
        for number, step in enumerate(steps.rewrites, 1):
            size = plan.total_size(step.files)
            self._say(f"{name}: {number} of {len(steps.rewrites)}, {_describe_count(step.files)} of {size:,} bytes")
            rows_gone = self._rewrite(step)
            if rows_gone is not None:
                changed = True
                rewritten += size
                expired += rows_gone
        if changed:
            opened.update_incremental()
            opened.create_checkpoint()  # so that readers need not replay the removals
        if steps.begins is not None:
            self._secure(steps.begins)
        removed = self._remove(steps.garbage)  # before the entries go that name these files
        if steps.begins is not None:
            self._say(f"{name}: {len(self._state.entries)} log entries")
            self._shorten(steps.begins)
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
        """Rewrite files, and return the number of expired rows, or `None` if another writer removed one of them."""
        paths = [file.path for file in step.files]
        try:
            files = rewrite_files(self._lake, self._state.name, paths, step.before, 2 * self._rules.target)
        except FileNotFoundError as error:
            self._state.opened.update_incremental()
            active = set(self._state.opened.get_add_actions()["path"].to_pylist())
            if active.issuperset(paths):
                gone = next((path for path in paths if not (self._folder / path).exists()), "")
                raise MaintenanceError(
                    f"{self._state.name} names a file that is not there: {self._folder / gone}"
                ) from error
            return None
        rows = sum(file.rows for file in step.files) - sum(file.rows for file in files)
        if rows and step.before is None and all(file.rows for file in step.files):
            delete_files(self._lake, files)
            raise MaintenanceError(f"{self._state.name}: {rows:,} rows too few came out of {', '.join(paths[:3])}")
        what = f"{_describe_count(step.files)} into {len(files)}"
        if self._commit(step.files, files, what, rows_go=step.before is not None):
            return rows if step.before is not None else 0
        delete_files(self._lake, files)
        return None

    def _commit(self, old: Sequence[TableFile], new: Sequence[DataFile], what: str, *, rows_go: bool) -> bool:
        for file in new:
            # Recovery after a power cut finds the files of a lost commit by their modification time.
            (self._folder / file.name).touch()
        if self._durable:
            self._folder.sync()
        opened = self._state.opened
        if not replace_files(self._lake, self._state.name, opened, old, new, what, rows_go=rows_go):
            return False
        if self._durable:
            self._lake.sync_commits(self._state.name, opened.version(), opened.version())
        return True

    def _remove(self, garbage: Iterable[UntrackedFile]) -> tuple[int, int]:
        count = size = 0
        for stray in garbage:
            (self._folder / stray.name).remove()
            count, size = count + 1, size + stray.size
        return count, size

    def _secure(self, begins: int) -> None:
        """Verify a checkpoint and sync it to disk.

        Raises:
            ArrowInvalid: The checkpoint is not intact.
        """
        log = locate_log(self._folder)
        checkpoint = log / f"{begins:0{_VERSION_DIGITS}}.checkpoint.parquet"
        with checkpoint.open() as opened:
            pq.read_metadata(opened)
        checkpoint.sync()
        log.sync()

    def _shorten(self, begins: int) -> None:
        """Remove log files before a checkpoint, oldest first."""
        log = locate_log(self._folder)
        for version, name in sorted(_list_versioned_files(log)):
            if version < begins:
                (log / name).remove()

    def _remove_partial_commits(self) -> None:
        """Remove temporary files of commits in which delta-rs was killed."""
        bound = (self._state.newest_append or 0) - self._rules.unnamed
        log = locate_log(self._folder)
        for found in log.files():
            if found.name.startswith("_commit_") and found.name.endswith(".tmp") and found.modified < bound:
                (log / found.name).remove()


def replace_files(
    lake: Lake,
    table: str,
    opened: DeltaTable,
    old: Sequence[TableFile],
    new: Sequence[DataFile],
    what: str,
    *,
    rows_go: bool,
) -> bool:
    """Replace files of a table by one commit.

    Args:
        opened: Version with the old files. It is at the new commit afterwards.
        rows_go: True if the new files lack rows of the old ones, which the commit tells streaming readers.

    Returns:
        False if another writer removed one of the files or changed the table. Nothing is changed then.

    Raises:
        MaintenanceError: Other writers commit without pause.
    """
    now = int(time.time() * 1_000)  # the log tells readers when a file was taken out
    came = max((file.modified for file in old), default=0) // 1_000
    actions: list[AddAction | RemoveAction] = [
        AddAction(file.name, file.size, {}, came, rows_go, file.stats) for file in new
    ]
    actions += [RemoveAction(file.path, rows_go, now, file.size, {}) for file in old]
    for _ in range(_TRIES):
        try:
            opened.create_write_transaction(
                actions,
                mode="append",
                schema=opened.schema(),
                commit_properties=CommitProperties(
                    {"userMetadata": f"{MAINTENANCE_PREFIX}: {what}"}, max_commit_retries=0
                ),
                post_commithook_properties=AFTER_COMMIT,
            )
        except CommitFailedError:
            known = opened.version()
            opened.update_incremental()
            since = [read_commit(lake.folder(table), each) for each in range(known + 1, opened.version() + 1)]
            if any(adds_any(actions, new) for actions in since):
                return True  # the commit succeeded, and a step of delta-rs after it failed
            if not all(_keeps_files(actions, old) for actions in since):
                return False
            continue
        opened.update_incremental()
        return True
    raise MaintenanceError(f"{table}: others commit so often that a commit did not come through in {_TRIES} tries")


def _keeps_files(actions: Sequence[Mapping[str, Mapping[str, object]]], files: Sequence[TableFile]) -> bool:
    """Return true if a commit is readable, removes none of these files, and changes neither schema nor features."""
    paths = {file.path for file in files}
    taken = any(unquote(str(action["remove"]["path"])) in paths for action in actions if "remove" in action)
    return bool(actions) and not taken and not any("metaData" in action or "protocol" in action for action in actions)


def _list_versioned_files(log: Location) -> Iterator[tuple[int, str]]:
    """List the log files of single versions: commits, checkpoints and checksums."""
    for found in log.files():
        version = found.name.removeprefix(".")[:_VERSION_DIGITS]
        if len(version) == _VERSION_DIGITS and version.isdigit():
            yield int(version), found.name


def _describe_steps(steps: MaintenancePlan) -> Iterator[str]:
    if steps.expire is not None:
        yield f"take out {_describe_count(steps.expire.files)} of rows that are all too old"
    for step in steps.rewrites:
        what = "write without rows that are too old" if step.before is not None else "make one"
        yield f"{what}: {_describe_count(step.files)}, {plan.total_size(step.files):,} bytes"
    if steps.garbage:
        yield f"remove {_describe_count(steps.garbage)} that no version needs, {plan.total_size(steps.garbage):,} bytes"
    if steps.begins is not None:
        yield f"let the log begin at the version {steps.begins}"


def _describe_count(files: Sequence[TableFile | UntrackedFile]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files):,} files"
