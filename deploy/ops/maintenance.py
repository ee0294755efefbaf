"""Maintenance of the lake's tables according to the settings, in one process per state folder at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from kiln.conf.process.errors import KilnError
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.pipelines.backfill.run_log import BackfillRun, read_runs
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.maintenance.plan import MaintenancePolicy
from kiln.pipelines.maintenance.steps import MaintenanceResult, ReportStep, maintain_table, predict_result

LOCK = "maintain"
"""lock of the state folder, which maintenance holds"""


@dataclass(frozen=True)
class TableMaintenance:
    """Result of the maintenance of one table; `error` is empty if it completed."""

    result: MaintenanceResult
    seconds: float
    error: str = ""


def maintain_tables(settings: Settings, say: ReportStep) -> list[TableMaintenance]:
    """Maintain each table, under the lock `LOCK`. An error with one table does not stop the others.

    Args:
        settings: The settings.
        say: Called with a description of each step as it begins.
    """
    durable = settings.durability == "power"
    return _visit_tables(
        settings, lambda lake, name, policy: maintain_table(lake, name, policy, _read_clock(), say, durable=durable)
    )


def preview_maintenance(settings: Settings) -> list[TableMaintenance]:
    """Predict the maintenance of each table, without changes and without the lock."""
    return _visit_tables(settings, lambda lake, name, policy: predict_result(lake, name, policy, _read_clock()))


def build_policy(settings: Settings, table: str, runs: Iterable[BackfillRun] = ()) -> MaintenancePolicy:
    """Build the policy of a table from the settings and from the versions that unfinished backfill runs need."""
    options, retention = settings.maintenance, settings.lake.retention.get(table)
    pinned = min((run.live_versions[table] for run in runs if table in run.live_versions), default=None)
    retention_micros = None if retention is None else micros(retention)
    return MaintenancePolicy(
        options.target_file_bytes, micros(options.history_retention), retention=retention_micros, pinned=pinned
    )


def _visit_tables(
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


def encode_maintenance(maintained: TableMaintenance) -> dict[str, object]:
    """Encode the result of one table as a JSON object."""
    result = asdict(maintained.result)
    record: dict[str, object] = {"table": result["table"]}
    for name in ("files", "size", "entries"):
        record |= {f"{name}_before": result[name][0], f"{name}_after": result[name][1]}
    return record | {
        "rewritten_bytes": result["rewritten"],
        "expired_rows": result["expired_rows"],
        "removed_files": result["garbage"][0],
        "removed_bytes": result["garbage"][1],
        "steps": list(result["words"]),
        "left_alone": result["left_alone"],
        "seconds": round(maintained.seconds, 3),
        "error": maintained.error,
    }


def _read_clock() -> int:
    return time.time_ns() // 1_000
