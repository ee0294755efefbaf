"""Maintenance of the lake's tables according to the settings, in one process per state folder at a time.

`python -m kiln.deploy.ops.maintenance` maintains the tables once. `kiln run` starts it as a child process, so that
maintenance takes no memory between two runs. The child has the lowest priority: no query waits for it
(docs/design/24-table-maintenance.md).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

import pyarrow as pa

from kiln.conf.process.errors import KilnError
from kiln.conf.process.state_folder import lock_state
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.conf.settings.reading import load
from kiln.pipelines.backfill.run_log import BackfillRun, read_runs
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.maintenance.plan import MaintenancePolicy
from kiln.pipelines.maintenance.steps import MaintenanceResult, ReportStep, maintain_table, predict_result

LOCK = "maintain"
"""lock of the state folder, which maintenance holds"""
_LOWEST_PRIORITY = 19


def maintain_tables(settings: Settings, say: ReportStep) -> list[MaintenanceResult]:
    """Maintain each table, under the lock `LOCK`. An error with one table does not stop the others.

    Args:
        settings: The settings.
        say: Called with a description of each step as it begins.
    """
    durable = settings.durability == "power"
    return _visit_tables(
        settings, lambda lake, name, policy: maintain_table(lake, name, policy, _read_clock(), say, durable=durable)
    )


def preview_maintenance(settings: Settings) -> list[MaintenanceResult]:
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
) -> list[MaintenanceResult]:
    lake = Lake.from_location(settings.lake_root)
    runs = read_runs(lake)
    results = []
    for name in lake.tables():
        started = time.monotonic()
        try:
            result = maintain(lake, name, build_policy(settings, name, runs))
        except KilnError as error:
            result = MaintenanceResult(name, error=str(error))
        results.append(replace(result, seconds=time.monotonic() - started))
    return results


def encode_maintenance(result: MaintenanceResult) -> dict[str, object]:
    """Encode the result of one table as a JSON object."""
    fields = asdict(result)
    record: dict[str, object] = {"table": result.table}
    for name in ("files", "size", "entries"):
        record |= {f"{name}_before": fields[name][0], f"{name}_after": fields[name][1]}
    return record | {
        "rewritten_bytes": result.rewritten,
        "expired_rows": result.expired_rows,
        "removed_files": result.garbage[0],
        "removed_bytes": result.garbage[1],
        "steps": list(result.words),
        "left_alone": result.left_alone,
        "seconds": round(result.seconds, 3),
        "error": result.error,
    }


def _read_clock() -> int:
    return time.time_ns() // 1_000


def main() -> int:
    """Maintain all tables once, with the settings of the environment, and print a line of JSON per table.

    Returns:
        The exit code: 1 if the maintenance of a table failed, which the last line explains, else 0.
    """
    os.nice(_LOWEST_PRIORITY)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    try:
        settings = load().settings
        with lock_state(settings.state, LOCK):
            tables = maintain_tables(settings, lambda _: None)
    except KilnError as error:
        print(error)
        return 1
    for table in tables:
        print(json.dumps(encode_maintenance(table)))
    errors = [table.error for table in tables if table.error]
    if errors:
        print(errors[-1])
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
