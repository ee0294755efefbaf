"""Planning of table maintenance, as pure functions of a Delta table's files and log. Times are µs, sizes bytes.

Small files are compacted as in a log-structured merge tree: file sizes form tiers, each eight times as large as the
previous one, and a file is rewritten only together with enough other files of its tier. So a row is rewritten only a
few times, however often maintenance runs. Source: docs/design/24-table-maintenance.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from kiln.conf.process.location import FileEntry

MICROS = 1_000_000
_HOUR = 3_600 * MICROS
_DAY = 24 * _HOUR
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_SMALLEST_TIER = 64 << 10
_TIER = 8
_FILES_PER_REWRITE = 8
"""minimum number of files of one tier for a rewrite, in the current day or month"""
_FILES_PER_REWRITE_AT_REST = 2
"""minimum number of files of one tier for a rewrite, in past days or months"""
_FULL_FRACTION = 0.5
"""fraction of the target size from which a file is not rewritten; any two smaller files fit into one file"""

_MIN_ENTRIES = 100
"""number of newest log entries that always stay: recovery after a power cut reads them (decision 19)"""
_MAX_ENTRIES = 5_000
"""number of log entries above which old ones are removed before `MaintenancePolicy.keep` is over, because each commit
lists the whole log"""
_MIN_TRIMMED_ENTRIES = 25
"""minimum number of removable log entries for which the log is trimmed"""


@dataclass(frozen=True)
class MaintenancePolicy:
    """Maintenance policy of one table. Times are µs."""

    target: int
    """size of a compacted file, bytes"""
    keep: int
    """time for which a version stays readable after the next version was committed"""
    readers: int = _HOUR
    """time for which a version stays readable if the log has too many entries"""
    unnamed: int = _DAY
    """age from which a file that no commit contains is deleted"""
    retention: int | None = None
    """maximum age of a row, or `None` for no limit"""
    pinned: int | None = None
    """oldest version that stays readable at any age"""


@dataclass(frozen=True)
class TableFile:
    """A data file of a table's newest version."""

    path: str
    size: int
    rows: int
    modified: int
    """time of the file's commit"""
    least: int | None = None
    """oldest time in the column by which rows expire, or `None` if it is not known; `modified` if there is no such
    column"""
    greatest: int | None = None
    """newest time in the column by which rows expire; `None` or `modified` as for `least`"""


@dataclass(frozen=True)
class LogEntry:
    """A commit in a table's log, and its time (µs)."""

    version: int
    at: int


@dataclass(frozen=True)
class RemovedFiles:
    """Data files that commits in a table's log remove from the table."""

    before_start: frozenset[str] = frozenset()
    """files removed up to the version at which the trimmed log will begin; no readable version needs them"""
    after_start: frozenset[str] = frozenset()
    """files removed after the start of the trimmed log, which readable versions still need"""


@dataclass(frozen=True)
class RewriteFiles:
    """Files to rewrite in one commit. If `before` (µs) is set, the rewrite drops older rows."""

    files: tuple[TableFile, ...]
    before: int | None = None


def plan_expiry(files: Iterable[TableFile], rules: MaintenancePolicy, now: int) -> tuple[TableFile, ...]:
    """Select the files whose rows have all expired."""
    if rules.retention is None:
        return ()
    before = now - rules.retention
    return tuple(file for file in files if file.greatest is not None and file.greatest < before)


def plan_trims(files: Iterable[TableFile], rules: MaintenancePolicy, now: int) -> list[RewriteFiles]:
    """Plan the rewrite of files that contain unexpired rows, and rows that expired at least a day ago."""
    if rules.retention is None:
        return []
    before = now - rules.retention
    return [
        RewriteFiles((file,), before)
        for file in files
        if file.least is not None
        and file.greatest is not None
        and file.least < before - _DAY
        and file.greatest >= before
    ]


def plan_compaction(files: Iterable[TableFile], rules: MaintenancePolicy, now: int) -> list[RewriteFiles]:
    """Plan the compaction of small files.

    Files of different days or months are not merged, so that retention can still remove whole files.
    """
    periods: dict[int, list[TableFile]] = {}
    for file in files:
        if file.size < rules.target * _FULL_FRACTION:
            periods.setdefault(_compute_period(_get_newest_time(file), rules), []).append(file)
    current = _compute_period(now, rules)
    rewrites: list[RewriteFiles] = []
    for period, small in sorted(periods.items()):
        selected = _select_worthwhile(small, _FILES_PER_REWRITE if period >= current else _FILES_PER_REWRITE_AT_REST)
        rewrites += [
            RewriteFiles(tuple(files))
            for files in _pack_bins(sorted(selected, key=_get_newest_time), rules.target)
            if len(files) > 1
        ]
    return rewrites


def choose_log_start(
    entries: Sequence[LogEntry], checkpoints: Collection[int], rules: MaintenancePolicy, now: int
) -> int | None:
    """Choose the version at which a table's log will begin after trimming. It and later versions stay readable.

    Args:
        entries: Commits in the log, sorted by version.
        checkpoints: Versions with a checkpoint, one of which is chosen.
        now: The time, µs.

    Returns:
        None if trimming would remove too few entries.
    """
    removable = 0
    for entry in entries[: max(0, len(entries) - _MIN_ENTRIES)]:
        beyond = len(entries) - removable > _MAX_ENTRIES and entry.at < now - rules.readers
        if entry.at >= now - rules.keep and not beyond:
            break
        if rules.pinned is not None and entry.version >= rules.pinned:
            break
        removable += 1
    if removable < _MIN_TRIMMED_ENTRIES:
        return None
    bound = entries[removable].version
    start = max((checkpoint for checkpoint in checkpoints if checkpoint <= bound), default=None)
    if start is None or start - entries[0].version < max(_MIN_TRIMMED_ENTRIES, len(entries) // 10):
        return None
    return start


def select_abandoned(
    strays: Iterable[FileEntry], rules: MaintenancePolicy, newest_append: int | None, now: int
) -> list[FileEntry]:
    """Select data files that are in no version of the table, and that no task will commit any more.

    Such a file is older than the newest append by `rules.unnamed` or more. A query commits its files before it begins
    further files, so a file that it will still commit is newer than its last commit. This holds even if a micro-batch
    takes long, or the machine sleeps.
    """
    if newest_append is None:
        return []
    bound = min(now, newest_append) - rules.unnamed
    return [stray for stray in strays if stray.modified < bound]


def select_garbage(
    strays: Iterable[FileEntry],
    removed: RemovedFiles,
    rules: MaintenancePolicy,
    newest_append: int | None,
    now: int,
) -> tuple[FileEntry, ...]:
    """Select the data files to delete: no readable version of the table needs them, and no task will commit them."""
    unneeded = [stray for stray in strays if stray.name not in removed.after_start]
    uncommitted = {stray.name for stray in select_abandoned(unneeded, rules, newest_append, now)}
    return tuple(stray for stray in unneeded if stray.name in removed.before_start or stray.name in uncommitted)


def total_size(files: Iterable[TableFile | FileEntry]) -> int:
    """Sum the bytes of files."""
    return sum(file.size for file in files)


def _get_newest_time(file: TableFile) -> int:
    return file.modified if file.greatest is None else file.greatest


def _compute_period(at: int, rules: MaintenancePolicy) -> int:
    """Return the number of the day that contains a time if the table has retention, else of the month.

    Only files of the same day or month are merged.
    """
    if rules.retention is not None:
        return at // _DAY
    try:
        day = _EPOCH + timedelta(microseconds=at)
    except OverflowError:  # from a clock that is far off
        return 12 * (1970 + (1 if at > 0 else -1) * 10_000)
    return day.year * 12 + day.month


def _compute_tier(size: int) -> int:
    tier, bound = 0, _SMALLEST_TIER
    while size >= bound:
        tier, bound = tier + 1, bound * _TIER
    return tier


def _select_worthwhile(files: Sequence[TableFile], minimum: int) -> list[TableFile]:
    """Select the small files that are worth a rewrite.

    Finds the highest tier with at least `minimum` files, and selects the files of this tier and of all lower tiers.
    Files of lower tiers that are to be rewritten count as one more file of a tier if together they reach its size.
    """
    tiers = [_compute_tier(file.size) for file in files]
    highest = -1
    for tier in sorted(set(tiers)):
        below = sum(file.size for file, file_tier in zip(files, tiers, strict=True) if file_tier < tier)
        joins = highest >= 0 and _compute_tier(below) >= tier
        if tiers.count(tier) + joins >= minimum:
            highest = tier
    return [file for file, file_tier in zip(files, tiers, strict=True) if file_tier <= highest]


def _pack_bins(files: Iterable[TableFile], target: int) -> list[list[TableFile]]:
    bins: list[list[TableFile]] = []
    size = target
    for file in files:
        if size + file.size > target:
            bins.append([])
            size = 0
        bins[-1].append(file)
        size += file.size
    return bins
