"""Maintenance of the Delta tables: compaction, log trimming, vacuum and retention, according to the settings.

`python -m kiln.deploy.ops.maintenance` maintains the tables once. `kiln run` starts this program every
`maintenance.interval`, so that maintenance takes no memory in between. The program has the lowest CPU priority, so that
it does not delay the queries (docs/design/24-table-maintenance.md).
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
"""Name of the lock in the state folder that maintenance holds."""
_LOWEST_PRIORITY = 19


def maintain_tables(settings: Settings, say: ReportStep) -> list[MaintenanceResult]:
    """Maintain each table. An error with one table does not stop the others. The caller holds the lock `LOCK`.

    Args:
        say: Called with a description of each step as it begins.
    """
    durable = settings.durability == "power"
    return _visit_tables(
        settings, lambda lake, name, policy: maintain_table(lake, name, policy, _read_clock(), say, durable=durable)
    )


def preview_maintenance(settings: Settings) -> list[MaintenanceResult]:
    """Predict what `maintain_tables` would do, without changing anything. The lock is not needed."""
    return _visit_tables(settings, lambda lake, name, policy: predict_result(lake, name, policy, _read_clock()))


def build_policy(settings: Settings, table: str, runs: Iterable[BackfillRun] = ()) -> MaintenancePolicy:
    """Build the maintenance policy of a table, which keeps the versions that unfinished backfill runs still read."""
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
    """Encode the result of a table as a JSON object."""
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
    """Maintain all tables once, and print a line of JSON for each. The environment names the settings.

    Returns:
        The exit code: 0, or 1 if maintenance failed. If it is 1, the last line is the error.
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
