"""Data quality check of a lake: run the checks of all suites, and store the results in the table `quality_results`.

`kiln quality` runs it, without a Spark session.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pyarrow as pa
from deltalake import write_deltalake
from deltalake.exceptions import DeltaError

from kiln.conf.process.bridge_status import read_status
from kiln.conf.process.location import shorten_error
from kiln.conf.process.state_folder import lock_state
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Settings
from kiln.pipelines.delta.arrow_rows import build_arrow_schema
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.pipelines.quality.results import CheckResult, build_rows
from kiln.pipelines.quality.suite_run import SuiteRun
from kiln.pipelines.quality.suites import SuiteCheck
from kiln.pipelines.quality.windows import CheckContext
from kiln.pipelines.runtime.passed_versions import find_passed_versions
from kiln.pipelines.runtime.table_ages import check_tables
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.queries import QUERIES
from kiln.schemas.wire.identity import peer_bytes, peer_text

if TYPE_CHECKING:
    from kiln.pipelines.quality.expectations import RowValidator

_CERAMIC_TABLES: Final = frozenset(QUERIES["sink"].tables) - {"quarantine"}
"""Tables that only fill up on a Ceramic network, because their rows come from updates and batches."""

_MAX_STATUS_AGE = timedelta(seconds=10)
"""Age of the bridge's status file above which the bridge counts as stopped."""


def build_context(settings: Settings, now: datetime) -> CheckContext:
    """Build the settings and facts on which data quality checks depend."""
    status = read_status(settings.bridge_dir / "status.json")
    batch = settings.batch
    return CheckContext(
        now,
        running=status is not None and now.timestamp() - status.at < _MAX_STATUS_AGE.total_seconds(),
        window=micros(batch.window),
        grace=micros(batch.grace),
        block_limit=batch.max_block_bytes,
        authors=None if "*" in batch.authors else frozenset(peer_text(peer_bytes(text)) for text in batch.authors),
        only_verified=batch.only_verified,
        retention=settings.lake.retention,
    )


def check_lake(
    settings: Settings,
    lake: Lake,
    every: Sequence[SuiteCheck],
    validator: RowValidator,
    now: datetime,
    *,
    tables: Sequence[str] = (),
    since: timedelta | None = None,
    recent: bool = False,
) -> list[CheckResult]:
    """Run checks on a lake, and append their results to the table `quality_results`.

    If the network is not Ceramic's, checks that read a table of Ceramic's data are left out.

    Args:
        every: Checks of all suites.
        tables: Names of tables, to run only the checks of these tables.
        since: Maximum age of the rows to check. If set, earlier check runs do not matter.
        recent: First compare new rows only with the rows of the last day, which is faster. Compare them with all rows
            only if that finds faults.

    Raises:
        StateInUseError: Another check is running.
        OlderTableError: A table is older than the checkpoint of its query.
        LakeError: The results cannot be appended.
        QualityError: A check cannot run.
    """
    filled = [check for check in every if settings.is_ceramic or _CERAMIC_TABLES.isdisjoint(check.tables)]
    checks = [check for check in filled if not tables or check.table in tables]
    check_tables(lake, settings.checkpoints_root)
    with lock_state(settings.state, "quality"):
        state_file = settings.quality_dir / "positions.json"
        state_file.parent.mkdir(parents=True, exist_ok=True)
        limit = settings.jobs.of("sink").max_offsets_per_trigger
        suite_run = SuiteRun(
            lake,
            build_context(settings, now),
            validator,
            None if since else state_file,
            now - since if since else None,
            limits=find_passed_versions(lake, settings.checkpoints_root, limit),
            recent=recent,
        )
        try:
            results = suite_run.run_checks(checks)
            suite_run.save(every)
        finally:
            suite_run.close()
        if results:
            lake.create(["quality_results"])
            rows = build_rows(results, uuid4().hex, now)
            schema = build_arrow_schema(TABLES["quality_results"].columns, strict=True)
            try:
                write_deltalake(
                    lake.table("quality_results"),
                    pa.Table.from_pylist(rows, schema=schema),
                    mode="append",
                    storage_options=lake.storage_options,
                )
            except DeltaError as error:
                raise LakeError(
                    f"cannot append to table quality_results in {lake.path}: {shorten_error(error)}"
                ) from error
    return results
