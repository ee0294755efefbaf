"""What a table needs, as a list of steps: a pure function of what is known of the table's files and of its log
(docs/design/24-table-care.md). Times are µs since the epoch, sizes bytes.

Small files are gathered as a log-structured merge tree gathers them. Sizes fall into tiers, each eight times the one
before. A file is written anew only together with as many others of its tier, so a row is written a few times in all,
however often the table is cared for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

MICROS = 1_000_000
_HOUR = 3_600 * MICROS
_DAY = 24 * _HOUR
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_SMALLEST_TIER = 64 << 10
_TIER = 8
_FILES_PER_REWRITE = 8
"""files of a tier that are worth writing anew, while more are to come"""
_FILES_PER_REWRITE_AT_REST = 2
"""the same, where few more are to come"""
_FULL_FRACTION = 0.5
"""of the target: a file of this size stays as it is, and any two smaller ones fit into one"""

_MIN_ENTRIES = 100
"""log entries, the newest, that stay however old they are: a start after a power cut looks at them (decision 19)"""
_MAX_ENTRIES = 5_000
"""log entries that stay, those that `Rules.readers` need aside: each commit lists them all"""
_MIN_TRIMMED_ENTRIES = 25
"""log entries that are worth a look at the whole log"""


@dataclass(frozen=True)
class MaintenancePolicy:
    """What holds for one table. `target`: the size of a compacted file. `keep`: how long a version of the table can be
    read after the next one came, µs. `readers`: the same where commits are so many that `keep` would bury the log.
    `unnamed`: how old a file is that no commit names before it counts as garbage, µs. `retention`: how old a row may
    get, µs; None: rows stay. `pinned`: the oldest version that stays readable however old it is; None: no such."""

    target: int
    keep: int
    readers: int = _HOUR
    unnamed: int = _DAY
    retention: int | None = None
    pinned: int | None = None


@dataclass(frozen=True)
class TableFile:
    """A file of the newest version. `least`, `greatest`: of the column that is a row's age; None: not known. Where the
    table has no such column, both are `modified`: when the rows came into the table."""

    path: str
    size: int
    rows: int
    modified: int
    least: int | None = None
    greatest: int | None = None


@dataclass(frozen=True)
class LogEntry:
    """A commit in the log, and when it was made."""

    version: int
    at: int


@dataclass(frozen=True)
class UntrackedFile:
    """A Parquet file in the table's folder that is no part of the newest version."""

    name: str
    size: int
    modified: int


@dataclass(frozen=True)
class RemovedFiles:
    """The files that log entries take out of the table: `past` those that were out of it when the log is to begin,
    `kept` the others."""

    past: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ExpireFiles:
    """Files all of whose rows are too old: one commit takes them out."""

    files: tuple[TableFile, ...]
    before: int


@dataclass(frozen=True)
class RewriteFiles:
    """Files that become new ones, in one commit. `before`: older rows stay behind; None: all rows go along."""

    files: tuple[TableFile, ...]
    before: int | None = None


def plan_expiry(files: Iterable[TableFile], rules: MaintenancePolicy, now: int) -> ExpireFiles | None:
    """The files whose rows are all too old; None: there are none."""
    if rules.retention is None:
        return None
    before = now - rules.retention
    old = tuple(file for file in files if file.greatest is not None and file.greatest < before)
    return ExpireFiles(old, before) if old else None


def plan_trims(files: Iterable[TableFile], rules: MaintenancePolicy, now: int) -> list[RewriteFiles]:
    """The files that hold rows which were too old a day ago, beside rows that are not."""
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
    """The small files that are worth being one, by the time of their rows, none for longer than `rules` let rows get
    old together."""
    periods: dict[int, list[TableFile]] = {}
    for file in files:
        if file.size < rules.target * _FULL_FRACTION:
            periods.setdefault(_period_of(_time_of(file), rules), []).append(file)
    current = _period_of(now, rules)
    found: list[RewriteFiles] = []
    for period, small in sorted(periods.items()):
        taken = _select_worthwhile(small, _FILES_PER_REWRITE if period >= current else _FILES_PER_REWRITE_AT_REST)
        found += [RewriteFiles(tuple(each)) for each in _pack_bins(sorted(taken, key=_time_of), rules.target) if len(each) > 1]
    return found


def choose_log_start(
    entries: Sequence[LogEntry], checkpoints: Collection[int], rules: MaintenancePolicy, now: int
) -> int | None:
    """The checkpoint that becomes the beginning of the log: what is before goes. None: nothing is worth going.

    `entries` by version. Every version that the log still tells of after that can be read.
    """
    older = 0  # how many entries may go
    for each in entries[: max(0, len(entries) - _MIN_ENTRIES)]:
        beyond = len(entries) - older > _MAX_ENTRIES and each.at < now - rules.readers
        if each.at >= now - rules.keep and not beyond:
            break
        if rules.pinned is not None and each.version >= rules.pinned:
            break
        older += 1
    if older < _MIN_TRIMMED_ENTRIES:
        return None
    bound = entries[older].version
    begins = max((each for each in checkpoints if each <= bound), default=None)
    if begins is None or begins - entries[0].version < max(_MIN_TRIMMED_ENTRIES, len(entries) // 10):
        return None
    return begins


def select_untracked(
    strays: Iterable[UntrackedFile], rules: MaintenancePolicy, newest_append: int | None, now: int
) -> list[UntrackedFile]:
    """Those that no task can be about to name: older than `rules.unnamed`, also when the newest rows came.

    A query writes its files and then names them, and begins the next ones after that. So a file that a query has still
    to name is younger than what the query named last, however long the micro-batch, or the sleep of the machine, takes.
    """
    if newest_append is None:
        return []
    bound = min(now, newest_append) - rules.unnamed
    return [each for each in strays if each.modified < bound]


def select_garbage(
    strays: Iterable[UntrackedFile], named: RemovedFiles, rules: MaintenancePolicy, newest_append: int | None, now: int
) -> tuple[UntrackedFile, ...]:
    """The files that no version needs which the log still tells of, and that nobody is about to name."""
    free = [each for each in strays if each.name not in named.kept]
    unnamed = {each.name for each in select_untracked(free, rules, newest_append, now)}
    return tuple(each for each in free if each.name in named.past or each.name in unnamed)


def total_size(files: Iterable[TableFile | UntrackedFile]) -> int:
    """The bytes of files together."""
    return sum(each.size for each in files)


def _time_of(file: TableFile) -> int:
    return file.modified if file.greatest is None else file.greatest


def _period_of(at: int, rules: MaintenancePolicy) -> int:
    """Files of one period become one. A day where rows go by age, so that whole files can go; else a month."""
    if rules.retention is not None:
        return at // _DAY
    try:
        day = _EPOCH + timedelta(microseconds=at)
    except OverflowError:  # a time of a clock that is far off
        return 12 * (1970 + (1 if at > 0 else -1) * 10_000)
    return day.year * 12 + day.month


def _tier_of(size: int) -> int:
    tier, bound = 0, _SMALLEST_TIER
    while size >= bound:
        tier, bound = tier + 1, bound * _TIER
    return tier


def _select_worthwhile(files: Sequence[TableFile], together: int) -> list[TableFile]:
    """The files up to the highest tier that has enough of them, where what comes of the tiers below counts as one."""
    tiers = [_tier_of(file.size) for file in files]
    highest = -1
    for tier in sorted(set(tiers)):
        below = sum(file.size for file, its in zip(files, tiers, strict=True) if its < tier)
        joins = highest >= 0 and _tier_of(below) >= tier
        if tiers.count(tier) + joins >= together:
            highest = tier
    return [file for file, its in zip(files, tiers, strict=True) if its <= highest]


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
