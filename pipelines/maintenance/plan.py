"""Maintenance steps of a table, as pure functions of its files and its log (docs/design/24-table-maintenance.md).

Times are µs since the epoch, sizes bytes.

Small files are compacted as in a log-structured merge tree. Sizes fall into tiers, each eight times the previous one. A
file is rewritten only together with enough others of its tier, so a row is written only a few times, however often
maintenance runs.
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
"""number of files of a tier that are worth a rewrite while the period still gets new files"""
_FILES_PER_REWRITE_AT_REST = 2
"""number of files of a tier that are worth a rewrite in past periods"""
_FULL_FRACTION = 0.5
"""fraction of the target size from which a file is not rewritten; any two smaller files fit into one file"""

_MIN_ENTRIES = 100
"""number of newest log entries that always stay: recovery after a power cut reads them (decision 19)"""
_MAX_ENTRIES = 5_000
"""maximum number of log entries, besides the entries that `MaintenancePolicy.readers` protects, because each commit
lists the whole log"""
_MIN_TRIMMED_ENTRIES = 25
"""number of removable log entries from which shortening the log is worthwhile"""


@dataclass(frozen=True)
class MaintenancePolicy:
    """Maintenance policy of one table. Times are µs."""

    target: int
    """size of a compacted file"""
    keep: int
    """time for which a version stays readable after the next version was committed"""
    readers: int = _HOUR
    """time for which a version stays readable if `keep` would make the log too long"""
    unnamed: int = _DAY
    """age from which a file that no commit names is garbage"""
    retention: int | None = None
    """maximum age of a row, or `None` for no limit"""
    pinned: int | None = None
    """oldest version that stays readable at any age"""


@dataclass(frozen=True)
class TableFile:
    """A file of the newest version.

    `least` and `greatest` are the bounds of the age column, or `None` if they are not known. In a table without age
    column, both equal `modified`, the time of the commit.
    """

    path: str
    size: int
    rows: int
    modified: int
    least: int | None = None
    greatest: int | None = None


@dataclass(frozen=True)
class LogEntry:
    """A commit in the log, and its time."""

    version: int
    at: int


@dataclass(frozen=True)
class RemovedFiles:
    """Files that log entries remove."""

    before_start: frozenset[str] = frozenset()
    """files removed before the new start of the log"""
    after_start: frozenset[str] = frozenset()
    """files removed later, which versions in the log still need"""


@dataclass(frozen=True)
class ExpireFiles:
    """Files whose rows are all expired; one commit removes them."""

    files: tuple[TableFile, ...]
    before: int


@dataclass(frozen=True)
class RewriteFiles:
    """Files to rewrite in one commit. If `before` is set, the rewrite drops rows older than this time."""

    files: tuple[TableFile, ...]
    before: int | None = None


def plan_expiry(files: Iterable[TableFile], rules: MaintenancePolicy, now: int) -> ExpireFiles | None:
    """Plan the removal of files whose rows are all expired; None if there are no such files."""
    if rules.retention is None:
        return None
    before = now - rules.retention
    old = tuple(file for file in files if file.greatest is not None and file.greatest < before)
    return ExpireFiles(old, before) if old else None


def plan_trims(files: Iterable[TableFile], rules: MaintenancePolicy, now: int) -> list[RewriteFiles]:
    """Plan the rewrite of files in which some rows expired at least a day ago."""
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
    """Plan the compaction of small files, separately by period so that retention can still remove whole files."""
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
    """Choose the checkpoint at which the log is to begin, or `None` if shortening is not worthwhile.

    `entries` are sorted by version. All versions from the checkpoint on stay readable.
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
    """Select the untracked files that no task will commit any more: older than `rules.unnamed` at the newest append.

    A query commits its files before it begins further files. So a file that is yet to be committed is younger than the
    last commit, however long the micro-batch takes or the machine sleeps.
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
    """Select the files that no version in the log needs and no task can still commit."""
    unneeded = [stray for stray in strays if stray.name not in removed.after_start]
    uncommitted = {stray.name for stray in select_abandoned(unneeded, rules, newest_append, now)}
    return tuple(stray for stray in unneeded if stray.name in removed.before_start or stray.name in uncommitted)


def total_size(files: Iterable[TableFile | FileEntry]) -> int:
    """Sum the bytes of files."""
    return sum(file.size for file in files)


def _get_newest_time(file: TableFile) -> int:
    return file.modified if file.greatest is None else file.greatest


def _compute_period(at: int, rules: MaintenancePolicy) -> int:
    """Return the compaction period of a time: a day if the table has retention, so that files expire; else a month."""
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
    """Select the files of the highest tier that has at least `minimum` files, and of all lower tiers.

    The files of all lower tiers together count as one file of a tier if their total size is large enough for this tier.
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
