"""Cares for each table of the lake as the settings say, one process of a state folder at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kiln.conf.process.errors import KilnError
from kiln.conf.process.locks import locked
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.pipelines.backfill.run_log import BackfillRun, read_runs
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.maintenance.plan import MaintenancePolicy
from kiln.pipelines.maintenance.steps import MaintenanceResult, Say, maintain_table, predict_result

LOCK = "maintain"
_USUAL_PAUSE = 600.0  # s, where `kiln run` does not care for tables


@dataclass(frozen=True)
class TableMaintenance:
    """How it went with one table."""

    cared: MaintenanceResult
    seconds: float
    error: str = ""
    """why care did not come to its end; empty: it did"""


class Maintenance:
    """A context manager that keeps others from caring for the same lake. StateInUseError: somebody does."""

    def __init__(self, settings: Settings, say: Say) -> None:
        """`say` hears each step as it begins."""
        self._settings = settings
        self._say = say
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as lock:
            lock.enter_context(locked(self._settings.state, LOCK))
            self._lock = lock.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def once(self) -> list[TableMaintenance]:
        """Cares for each table. What goes wrong with one does not keep the others from care."""
        durable = self._settings.durability == "power"
        return _maintain_tables(
            self._settings,
            lambda lake, name, rules: maintain_table(lake, name, rules, _read_clock(), self._say, durable=durable),
        )

    def wait(self) -> None:
        """Until it is time again."""
        time.sleep(self._settings.maintain.every.total_seconds() or _USUAL_PAUSE)


def preview_maintenance(settings: Settings) -> list[TableMaintenance]:
    """What care would do with each table. Changes nothing, and needs no lock."""
    return _maintain_tables(settings, lambda lake, name, rules: predict_result(lake, name, rules, _read_clock()))


def build_policy(settings: Settings, table: str, begun: Iterable[BackfillRun] = ()) -> MaintenancePolicy:
    """What the settings say of one table, and what runs need of it that have `begun`."""
    told, kept = settings.maintain, settings.lake.retention.get(table)
    pinned = min((run.live_versions[table] for run in begun if table in run.live_versions), default=None)
    retention = None if kept is None else micros(kept)
    return MaintenancePolicy(told.file_bytes, micros(told.keep), retention=retention, pinned=pinned)


def _maintain_tables(
    settings: Settings, care: Callable[[Lake, str, MaintenancePolicy], MaintenanceResult]
) -> list[TableMaintenance]:
    lake = Lake.from_location(settings.lake_root)
    return list(_each(settings, lake, lake.tables(), care))


def _each(
    settings: Settings,
    lake: Lake,
    names: Iterable[str],
    care: Callable[[Lake, str, MaintenancePolicy], MaintenanceResult],
) -> Iterable[TableMaintenance]:
    begun = read_runs(lake)
    for name in names:
        started = time.monotonic()
        try:
            cared, error = care(lake, name, build_policy(settings, name, begun)), ""
        except KilnError as failed:
            cared, error = MaintenanceResult(name), str(failed)
        yield TableMaintenance(cared, time.monotonic() - started, error)


def _read_clock() -> int:
    return time.time_ns() // 1_000
