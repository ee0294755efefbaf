"""`kiln backfill run`: a backfill run as a Spark application of its own, next to a running Kiln."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from kiln.conf.settings.model import Settings
from kiln.deploy.stack.kafka_broker import start_broker
from kiln.deploy.stack.spark import spark_session
from kiln.pipelines.app.backfill_run import (
    BackfillRequest,
    backfill,
    build_terms,
    cancel_on_signal,
    check_files,
    save_request_streams,
)
from kiln.pipelines.backfill.run import RunOutcome, RunProgress, count_rows, find_matching_run, merge_outside
from kiln.pipelines.backfill.run_log import check_name
from kiln.pipelines.backfill.runs import lock_run
from kiln.pipelines.backfill.sources import delete_streams
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.table_ages import check_tables


def run_backfill(
    settings: Settings, request: BackfillRequest, say: Callable[[str], None], report: Callable[[RunProgress], None]
) -> RunOutcome:
    """Execute a run, or the rest of an interrupted run of that name, in one process at a time.

    Args:
        settings: The settings.
        request: The run.
        say: Called with progress messages.
        report: Called with the progress of the run.

    Raises:
        KilnError: A problem that the user can fix, or a signal.
    """
    with ExitStack() as stack:
        stack.enter_context(lock_run(settings.state, check_name(request.name)))
        request = save_request_streams(settings, request)
        terms = build_terms(settings, request)
        run = find_matching_run(terms, Lake.from_location(settings.lake_root))
        if run is not None and run.is_done:
            delete_streams(settings.state / "backfill" / run.name)
            return RunOutcome(
                run.name, count_rows(run.chunks), 0, 0, outside=merge_outside(run.chunks), is_repeated=True
            )
        check_tables(Lake.from_location(settings.lake_root), settings.checkpoints_root)
        if run is None and terms.files:
            check_files(settings, terms, say)
        if request.source == "kafka":
            stack.enter_context(start_broker(settings, say))
        say("starting Spark")
        spark = stack.enter_context(spark_session(settings, "backfill"))
        stopped = stack.enter_context(cancel_on_signal(spark))
        return backfill(spark, settings, terms, stopped, report)
