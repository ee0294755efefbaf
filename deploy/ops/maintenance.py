"""Maintenance of the lake's tables by the settings, in one process per state folder at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kiln.conf.process.errors import KilnError
from kiln.conf.process.locks import lock_state
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.pipelines.backfill.run_log import BackfillRun, read_runs
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.maintenance.plan import MaintenancePolicy
from kiln.pipelines.maintenance.steps import MaintenanceResult, ReportStep, maintain_table, predict_result

LOCK = "maintain"
_USUAL_PAUSE = 600.0  # s, if the settings turn maintenance by `kiln run` off


@dataclass(frozen=True)
class TableMaintenance:
    """Result of the maintenance of one table; `error` is empty if it completed."""

    result: MaintenanceResult
    seconds: float
    error: str = ""


class Maintenance:
    """A context manager that holds the maintenance lock of a state folder.

    Raises:
        StateInUseError: Another process holds the lock.
    """

    def __init__(self, settings: Settings, say: ReportStep) -> None:
        """Create the context manager; `say` is called with a description of each step as it begins."""
        self._settings = settings
        self._say = say
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as lock:
            lock.enter_context(lock_state(self._settings.state, LOCK))
            self._lock = lock.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def run(self) -> list[TableMaintenance]:
        """Maintain each table. An error with one table does not stop the others."""
        durable = self._settings.durability == "power"
        return _maintain_tables(
            self._settings,
            lambda lake, name, rules: maintain_table(lake, name, rules, _read_clock(), self._say, durable=durable),
        )

    def wait(self) -> None:
        """Sleep until the next run."""
        time.sleep(self._settings.maintenance.interval.total_seconds() or _USUAL_PAUSE)


def preview_maintenance(settings: Settings) -> list[TableMaintenance]:
    """Predict the maintenance of each table, without changes and without the lock."""
    return _maintain_tables(settings, lambda lake, name, rules: predict_result(lake, name, rules, _read_clock()))


def build_policy(settings: Settings, table: str, runs: Iterable[BackfillRun] = ()) -> MaintenancePolicy:
    """Build the policy of a table from the settings and from the versions that unfinished backfill runs need."""
    options, retention = settings.maintenance, settings.lake.retention.get(table)
    pinned = min((run.live_versions[table] for run in runs if table in run.live_versions), default=None)
    retention_micros = None if retention is None else micros(retention)
    return MaintenancePolicy(
        options.target_file_bytes, micros(options.history_retention), retention=retention_micros, pinned=pinned
    )


def _maintain_tables(
    settings: Settings, maintain: Callable[[Lake, str, MaintenancePolicy], MaintenanceResult]
) -> list[TableMaintenance]:
    lake = Lake.from_location(settings.lake_root)
    runs = read_runs(lake)
    results = []
    for name in lake.tables():
        started = time.monotonic()
        try:
            result, problem = maintain(lake, name, build_policy(settings, name, runs)), ""
        except KilnError as error:
            result, problem = MaintenanceResult(name), str(error)
        results.append(TableMaintenance(result, time.monotonic() - started, problem))
    return results


def _read_clock() -> int:
    return time.time_ns() // 1_000
