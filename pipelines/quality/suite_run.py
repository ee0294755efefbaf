"""Run of data quality checks over a lake. Each check covers the rows of the commits since its last success.

The newest commits are left for the next run, because queries may still derive rows from them.

A JSON file stores, for each check, the version of each table up to which the check has covered it. A failed check of
level `error` covers the same commits again until the table is repaired, and a failed check of level `warn` for a day.
If rows were removed from a table, the checks that read the table cover all rows again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

import duckdb
import msgspec
from deltalake import DeltaTable

from kiln.conf.process.location import parse_location
from kiln.pipelines.delta.duckdb_tables import build_columns_query, register_store, require_columns
from kiln.pipelines.delta.lake import Lake, LakeError, locate_commit
from kiln.pipelines.delta.table_history import find_commit_at
from kiln.pipelines.quality.column_checks import ColumnChecks, QualityError, check_table_columns, to_json_value
from kiln.pipelines.quality.results import SHOWN, CheckResult
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.pipelines.quality.windows import CheckContext, create_windows
from kiln.schemas.delta.tables import DUCKDB_TYPES, TABLES, TIMES

if TYPE_CHECKING:
    from kiln.pipelines.quality.expectations import RowValidator

MEMORY: Final = "2GiB"
"""Maximum memory of DuckDB in a check run. If it needs more, it writes to disk."""

_WARNING: Final = timedelta(days=1)
"""Time for which a failed check of level `warn` covers the same rows again."""


class CheckPosition(msgspec.Struct):
    """Versions up to which a check has covered each table, and the time of the check run in s since the epoch."""

    versions: dict[str, int]
    at: float


class SuiteRun:
    """A run of checks. It reads the tables in the versions that they have at its start."""

    def __init__(
        self,
        lake: Lake,
        context: CheckContext,
        validator: RowValidator,
        state_file: Path | None,
        since: datetime | None = None,
        *,
        limits: Mapping[str, int] | None = None,
        recent: bool = False,
    ) -> None:
        """Open the tables, and read the progress of the checks.

        Args:
            state_file: File with the progress of each check (`CheckPosition`). Without it, the checks cover all rows,
                and store no progress.
            since: Cover only rows from this time on, by the table's time column.
            limits: By table name, the newest version whose rows all queries have processed; by default the table's
                newest version.
            recent: First compare new rows only with the rows of the last day, which is faster. Compare them with all
                rows only if that finds faults.

        Raises:
            QualityError: The state file cannot be read.
        """
        self._context, self._lake, self._validator = context, lake, validator
        self._state_file, self._since, self._recent = state_file, since, recent
        self._tables: dict[str, DeltaTable] = {}
        self._passed: dict[str, DeltaTable] = {}
        self._columns = {name: {c.name: DUCKDB_TYPES[c.type] for c in table.columns} for name, table in TABLES.items()}
        self._unreadable: dict[str, str] = {}
        """reason why a table cannot be read, by table name"""
        for name in TABLES.keys() & set(lake.tables()):
            try:
                opened = lake.open(name)
                self._columns[name] = require_columns(lake, name, opened)
                self._tables[name] = opened
                limit = (limits or {}).get(name, opened.version())
                self._passed[name] = opened if limit >= opened.version() else lake.open(name, max(limit, 0))
            except LakeError as error:
                self._unreadable[name] = str(error)
        self._positions = self._read_positions()
        self._views: dict[str, str] = {}
        self._db = duckdb.connect()
        register_store(self._db, lake)
        self._db.execute("SET TimeZone = 'UTC'")
        self._db.execute("SET enable_progress_bar = false")
        self._db.execute("SET preserve_insertion_order = false")
        self._db.execute(f"SET memory_limit = '{MEMORY}'")
        if state_file is not None:
            self._db.execute(
                f"SET temp_directory = '{str(state_file.parent / 'spilled').replace(chr(39), chr(39) * 2)}'"
            )

    def close(self) -> None:
        self._db.close()

    def run_checks(self, checks: Sequence[SuiteCheck]) -> list[CheckResult]:
        """Run the checks of tables that exist. Return the results in the order of the checks.

        If a table cannot be read, one of its checks fails and gives the reason. Its other checks have no result.

        Raises:
            QualityError: A check cannot run.
        """
        runnable = [check for check in checks if check.table in self._tables or check.table in self._unreadable]
        results: dict[str, CheckResult] = {}
        row_checks: dict[tuple[str, int | None], list[SuiteCheck]] = {}
        for check in runnable:
            if not check.sql and check.table in self._tables:
                version = self._get_versions(check).get(check.table)
                row_checks.setdefault((check.table, version), []).append(check)
        for (table, version), group in row_checks.items():
            try:
                for result in self._check_rows(table, version, group):
                    results[result.check.id] = result
            except (duckdb.Error, OSError) as error:
                reason = str(error).split("\n")[0]
                self._unreadable[table] = f"cannot read table {table} in {self._lake.path}: {reason}"
        for check in runnable:
            if check.sql and not self._describe_obstacle(check):
                results[check.id] = self._check_sql(check)
        for check in self._select_unjudged(runnable, results):
            results[check.id] = CheckResult(check, False, self._describe_obstacle(check))
        return [results[check.id] for check in runnable if check.id in results]

    def save(self, checks: Iterable[SuiteCheck]) -> None:
        """Save the progress of these checks. All other checks begin again in their next run."""
        if self._state_file is not None:
            known = {check.id for check in checks}
            kept = {check_id: position for check_id, position in self._positions.items() if check_id in known}
            parse_location(self._state_file).write([msgspec.json.encode(kept)])

    def _describe_obstacle(self, check: SuiteCheck) -> str:
        """Return the reason why a table that the check reads cannot be read; empty if all can be read."""
        names = (check.table, *sorted(check.tables))
        return next((self._unreadable[name] for name in names if name in self._unreadable), "")

    def _select_unjudged(self, checks: Iterable[SuiteCheck], judged: Collection[str]) -> Iterable[SuiteCheck]:
        """Select the checks that report unreadable tables: for each such table one of its checks, of level `error` if
        there is one, and all checks of other tables that read it."""
        reported: set[str] = set()
        for check in sorted(checks, key=lambda check: check.level != "error"):
            if check.id not in judged and check.table not in reported:
                yield check
                if check.table in self._unreadable:
                    reported.add(check.table)

    # ---------------------------------------------------------------- rows

    def _check_rows(self, table: str, since: int | None, checks: list[SuiteCheck]) -> list[CheckResult]:
        opened = self._passed[table]
        self._create_view(
            f"new_{table}",
            table,
            find_new_files(self._lake, table, opened, self._find_since(table, since, opened)).files,
            new=True,
        )
        on_rows = [check for check in checks if check.expectation != "expect_table_to_have_its_columns"]
        results = {
            check.id: check_table_columns(check, self._columns[table]) for check in checks if check not in on_rows
        }
        columns = ColumnChecks(self._db, self._validator, table, self._columns[table])
        results |= {checked.check.id: checked for checked in columns.run(on_rows)}
        for check in checks:
            self._advance(results[check.id], {table: opened.version()})
        return [results[check.id] for check in checks]

    # ---------------------------------------------------------------- whole tables

    def _check_sql(self, check: SuiteCheck) -> CheckResult:
        try:
            return self._run_sql(check)
        except duckdb.Error as error:
            raise QualityError(f"{check.location}: cannot run this check: {error}") from error

    def _run_sql(self, check: SuiteCheck) -> CheckResult:
        names = sorted(name for name in check.tables if name in self._tables)
        passed = {name: self._find_settled(check, name) for name in names}
        position = self._get_versions(check)
        since = {name: self._find_since(name, position.get(name), passed[name]) for name in names}
        new = {name: find_new_files(self._lake, name, passed[name], since[name]) for name in names}
        begins_again = not position or any(files.is_all and name in position for name, files in new.items())
        if begins_again:
            new = {name: list_all_files(self._lake, name, passed[name]) for name in names}
        for name in check.tables:
            self._create_view(f"new_{name}", name, new[name].files if name in new else {}, new=True)
        recent = self._recent and not begins_again
        count, first, last, keys, words = self._find_faults(check, new, passed, recent=recent)
        if count and recent:  # a row that seems to be missing may be older
            count, first, last, keys, words = self._find_faults(check, new, passed, recent=False)
        observed = "nothing" if not count else words[0] if count == 1 else f"{count:,} keys: {words[0]}, …"
        waiting = self._count_waiting(check, passed)
        result = CheckResult(check, not count, observed, count, keys, words, waiting, (first, last))
        self._advance(result, {name: passed[name].version() for name in names})
        return result

    def _find_since(self, name: str, since: int | None, passed: DeltaTable) -> int | None:
        """Return the version after which the rows of the table `name` count as new: the older of `since` and that of
        `passed`, or `since` if the table was re-created. None: all rows are new."""
        if since is None or since > self._tables[name].version():  # the table was re-created
            return since
        return min(since, passed.version())

    def _find_settled(self, check: SuiteCheck, name: str) -> DeltaTable:
        """Open a table at the newest version that the check covers: all its commits are older than `check.after`."""
        table = self._passed[name]
        if not check.after or name not in check.new_tables:
            return table
        until = self._context.now - check.after
        commit = find_commit_at(self._lake.folder(name), round(until.timestamp() * 1000))
        if commit is None or commit.version >= table.version():
            return table if commit is not None else self._lake.open(name, 0)
        return self._lake.open(name, commit.version)

    def _find_faults(
        self, check: SuiteCheck, new: Mapping[str, NewFiles], passed: Mapping[str, DeltaTable], *, recent: bool
    ) -> tuple[int, datetime | None, datetime | None, list[dict[str, object]], list[str]]:
        """Run a check in SQL. Return number of faults, times of the first and the last, and keys and descriptions."""
        context = self._context
        self._db.execute(
            f"CREATE OR REPLACE VIEW context AS SELECT TIMESTAMPTZ '{context.now.isoformat()}' AS now, "
            f"{str(context.running).lower()} AS bridge_runs, {context.window}::BIGINT AS window_us, "
            f"{context.grace}::BIGINT AS grace_us"
        )
        horizon = round((context.now - check.history).timestamp() * 1000)
        oldest = min([horizon, *(at for files in new.values() for at in files.files.values())]) if recent else 0
        for name in check.tables:
            self._create_view(name, name, self._list_rows(name, oldest))
        if "windows" in check.sql:
            if "updates" in passed:
                self._create_view("updates", "updates", list_all_files(self._lake, "updates", passed["updates"]).files)
            create_windows(self._db, context, all_new="updates" in new and new["updates"].is_all and not self._since)
            if "updates" in passed:
                self._create_view("updates", "updates", self._list_rows("updates", 0))
        conditions = ["seen_at IS NULL OR seen_at >= ?"] * bool(self._since)
        expiry = context.find_expiry(check.expires)
        conditions += ["seen_at >= ?"] * bool(expiry)
        times = [at for at in (self._since, expiry) if at]
        self._db.execute(f"CREATE OR REPLACE TEMP TABLE faults AS FROM ({check.sql})")
        names = [str(row[0]) for row in self._db.execute("DESCRIBE faults").fetchall()]
        if "seen_at" not in names:
            self._db.execute("ALTER TABLE faults ADD COLUMN seen_at TIMESTAMPTZ")
        where = " WHERE " + " AND ".join(f"({condition})" for condition in conditions) if conditions else ""
        ((count, first, last),) = self._db.execute(
            f"SELECT count(*), min(seen_at), max(seen_at) FROM faults{where}", times
        ).fetchall()
        shown = self._db.execute(f"FROM faults{where} ORDER BY seen_at LIMIT {SHOWN}", times)
        columns = [column[0] for column in shown.description or ()]
        rows = [dict(zip(columns, row, strict=True)) for row in shown.fetchall()]
        keys = [
            {name: to_json_value(row[name]) for name in columns if name not in ("seen_at", "words")} for row in rows
        ]
        words = [str(row["words"]) if "words" in names else check.grain for row in rows]
        return count, first, last, keys, words

    def _list_rows(self, name: str, oldest: int) -> Mapping[str, int]:
        """List the files of a table that were committed since a time in ms, with the time of the commit in ms."""
        if name not in self._tables:
            return {}
        files = list_all_files(self._lake, name, self._tables[name]).files
        return {file: at for file, at in files.items() if at >= oldest}

    def _create_view(self, view: str, name: str, files: Mapping[str, int], *, new: bool = False) -> None:
        time = TIMES.get(name)
        since = f" WHERE {time} >= TIMESTAMPTZ '{self._since.isoformat()}'" if new and time and self._since else ""
        query = f"FROM ({build_columns_query(self._columns[name], list(files))}){since}"
        if self._views.get(view) != query:  # DuckDB opens the files for each new view
            self._db.execute(f"CREATE OR REPLACE VIEW {view} AS {query}")
            self._views[view] = query

    def _count_waiting(self, check: SuiteCheck, passed: Mapping[str, DeltaTable]) -> int:
        """Count the newest rows of the check's table that this run leaves out."""
        newest, judged = self._tables[check.table], passed.get(check.table)
        if judged is None or judged.version() == newest.version():
            return 0
        files = list(find_new_files(self._lake, check.table, newest, judged.version()).files)
        rows = build_columns_query(self._columns[check.table], files)
        ((count,),) = self._db.execute(f"SELECT count(*) FROM ({rows})").fetchall()
        return int(count)

    # ---------------------------------------------------------------- state

    def _read_positions(self) -> dict[str, CheckPosition]:
        if self._state_file is None or not self._state_file.exists():
            return {}
        try:
            return msgspec.json.decode(self._state_file.read_bytes(), type=dict[str, CheckPosition])
        except (OSError, msgspec.DecodeError) as error:
            raise QualityError(
                f"cannot read the progress of the quality checks in {self._state_file} ({error}). Delete the file: the "
                "next check then covers all rows again"
            ) from error

    def _get_versions(self, check: SuiteCheck) -> Mapping[str, int]:
        """Return the version up to which a check has covered each table. It is empty before the first check run."""
        return self._positions[check.id].versions if check.id in self._positions else {}

    def _advance(self, result: CheckResult, versions: dict[str, int]) -> None:
        """Store the versions that a check has covered, unless the next run must report its faults again.

        Checks of a share or mean of the rows always advance, because only the new rows count for them.
        """
        check, now = result.check, self._context.now.timestamp()
        of_newest = not check.sql and (result.count == 0 or "mostly" in check.arguments)
        known = self._positions.get(check.id)
        if not result.success and not of_newest:
            is_over = check.level == "warn" and known is not None and now > known.at + _WARNING.total_seconds()
            if not is_over:
                self._positions.setdefault(check.id, CheckPosition({}, now))
                return
        self._positions[check.id] = CheckPosition(versions, now)


class NewFiles(NamedTuple):
    """Data files of a table, with the time of each file's commit in ms since the epoch."""

    files: Mapping[str, int]
    is_all: bool = False
    """true if these are all files of the table, for a first check or because rows were removed"""


def find_new_files(lake: Lake, name: str, table: DeltaTable, since: int | None) -> NewFiles:
    """Find the data files with rows that were added to a table after its version `since`.

    Files of commits that only rearrange rows (OPTIMIZE) are left out. All files of the table are returned if `since` is
    `None`, if a commit after it has removed rows, or if its successors are no longer in the log.

    Args:
        table: The table, opened at the last version to include.
        since: Version whose rows are not new.
    """
    if since is None or since > table.version():
        return list_all_files(lake, name, table)
    added: dict[str, int] = {}
    folder = lake.folder(name)
    for version in range(since + 1, table.version() + 1):
        try:
            lines = locate_commit(folder, version).read().splitlines()
        except FileNotFoundError:  # cleaned up, or the table was re-created
            return list_all_files(lake, name, table)
        for line in lines:
            action = json.loads(line)
            match action:
                case {"add": {"path": str(path), "dataChange": True, "modificationTime": int(at)}}:
                    added[unquote(path)] = at
                case {"remove": {"dataChange": True}}:
                    return list_all_files(lake, name, table)
    if not all((folder / path).exists() for path in added):
        return list_all_files(lake, name, table)
    return NewFiles({f"{lake.table(name)}/{path}": at for path, at in added.items()})


def list_all_files(lake: Lake, name: str, table: DeltaTable) -> NewFiles:
    """List all data files of a table at its opened version."""
    adds = table.get_add_actions(flatten=False)
    paths, times = adds["path"].to_pylist(), adds["modification_time"].to_pylist()
    files = {f"{lake.table(name)}/{unquote(path)}": _to_millis(at) for path, at in zip(paths, times, strict=True)}
    return NewFiles(files, is_all=True)


def _to_millis(at: object) -> int:
    return round(at.timestamp() * 1000) if isinstance(at, datetime) else int(str(at))
