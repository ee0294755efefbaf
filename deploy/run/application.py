"""Main loop of `kiln run` and `kiln job`: starts, supervises and stops broker, bridge, Spark and queries."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from kiln.conf.process.backoff import pause_after
from kiln.conf.process.extras import read_version
from kiln.conf.process.logs import ProblemLog, log_event
from kiln.conf.process.state_folder import claim_state_folder, lock_state
from kiln.conf.process.stop_signal import StopSignal, keep_handlers, stop_on_signals
from kiln.conf.settings.durations import duration_text
from kiln.conf.settings.model import JobName, Settings
from kiln.deploy.ops.run_monitor import Monitor
from kiln.deploy.ops.snapshot_builder import SnapshotBuilder, TopicWatch
from kiln.deploy.run.children import MaintenanceProcess, PeriodicProcess, QualityChecks
from kiln.deploy.run.network import LiveNetwork, Source
from kiln.deploy.run.screen import View
from kiln.deploy.stack.kafka_broker import LaunchedBroker, launch_broker
from kiln.deploy.stack.spark import check_jvm, spark_session
from kiln.pipelines.app.supervisor import RestartsExhaustedError, Supervisor, build_damage_location
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.recovery import repair
from kiln.pipelines.runtime.passed_versions import read_committed, save_caught_up
from kiln.pipelines.runtime.topics import Ends, TopicEnds
from kiln.schemas.delta.tables import TABLES
from kiln.schemas.kafka.topics import TOPICS

_MODES: Mapping[Source, str] = {"demo": "demo network", "network": "live", "none": "no network"}
_LOG = logging.getLogger("kiln.deploy.run")
_CHECK_EVERY = 0.25  # s
_SHOW_EVERY = 1.0
_JVM_ERRORS = (Py4JError, ConnectionError)
"""Exceptions that calls to Spark's JVM raise if the JVM has ended."""
_DYING = 5.0
"""Seconds to wait for the end of a JVM that does not answer."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # s between the end of the JVM and the next start
_CATCH_UP_TRIGGER = timedelta(seconds=2)
"""Longest trigger interval of `kiln run --catch-up`."""


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run, for its summary."""

    seconds: float = 0.0
    first_batch: float | None = None
    """seconds from the start of the command to the first batch in `kiln.batches`"""
    batches: int = 0
    late_p50: float | None = None
    """batch delay in seconds, median; `None` without live batches"""
    late_p99: float | None = None
    error: str = ""
    unread: Mapping[str, int | None] = field(default_factory=dict)
    """number of records that each query left unread when `run.drain` was over; `None` if not known"""
    warnings: Sequence[str] = ()


def run_application(
    settings: Settings,
    view: View,
    *,
    names: Sequence[JobName] | None = None,
    duration: timedelta | None = None,
    catch_up: bool = False,
    source: Source = "none",
    maintain: bool = False,
) -> RunOutcome:
    """Run the queries until `duration` is over, all records are read (`catch_up`), or SIGINT or SIGTERM arrives.

    After `duration`, the bridge captures no more frames, and the queries read the remaining records for at most
    `run.drain`.

    Args:
        view: Shows the progress.
        names: Queries to run, by default those of the settings.
        duration: Time to capture frames; `None` for no limit.
        catch_up: True to stop once the queries have read all records.
        source: Source of frames.
        maintain: True to also run table maintenance and quality checks, at the intervals of the settings.

    Raises:
        KilnError: A problem that the user can fix.
    """
    started = time.monotonic()
    names = names or settings.queries
    if catch_up:
        settings = shorten_triggers(settings, names)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        claim_state_folder(settings.state)
        for name in names:
            stack.enter_context(lock_state(settings.state, name))
        for words in repair(build_damage_location(settings), names):
            view.say(words)
        broker = stack.enter_context(launch_broker(settings, view.say))
        live = LiveNetwork(settings, source)
        stack.callback(live.stop)
        live.launch()
        view.say("starting Spark")
        sessions = stack.enter_context(ExitStack())

        def start_spark() -> SparkSession:
            sessions.close()
            with keep_handlers():  # PySpark's raises KeyboardInterrupt on the first Ctrl-C
                return sessions.enter_context(spark_session(settings))

        spark = start_spark()
        broker.await_ready()
        broker.check_topics()  # before the bridge writes to them
        lake = Lake.from_location(settings.lake_root)
        lake.create(TABLES)
        live.start()
        endpoint = settings.monitor
        monitor = stack.enter_context(Monitor(endpoint.host_and_port, lake, read_version(), endpoint.hosts))
        children = (MaintenanceProcess(settings), QualityChecks(settings)) if maintain else ()
        run = _Run(
            settings, view, spark, start_spark, names, duration, catch_up, broker, live, monitor, children, started
        )
        return run.execute(stop)


def shorten_triggers(settings: Settings, names: Sequence[JobName]) -> Settings:
    """Shorten the trigger intervals of queries for `kiln run --catch-up`, so that the run ends sooner.

    The intervals of `archive` and `sink` are long, so that a live run writes few files. In a backlog they do not
    matter, because each micro-batch takes longer. But the last micro-batches would wait for them.
    """
    jobs = {name: settings.jobs.of(name) for name in names}
    shortened = {
        name: job.model_copy(update={"trigger": min(job.trigger, _CATCH_UP_TRIGGER)}) for name, job in jobs.items()
    }
    return settings.model_copy(update={"jobs": settings.jobs.model_copy(update=shortened)})


class _Run:
    """A run, from the start of its queries to the end of its bridge."""

    def __init__(
        self,
        settings: Settings,
        view: View,
        spark: SparkSession,
        start_spark: Callable[[], SparkSession],
        names: Sequence[JobName],
        duration: timedelta | None,
        catch_up: bool,
        broker: LaunchedBroker,
        live: LiveNetwork,
        monitor: Monitor,
        children: Sequence[PeriodicProcess],
        started: float,
    ) -> None:
        self._settings = settings
        self._view = view
        self._start_spark = start_spark
        self._names = names
        self._checkpoints = settings.checkpoints_root
        self._saved_at: Ends | None = None
        """end offsets of the topics when the queries last had no unread records"""
        self._duration = duration
        self._catch_up = catch_up
        self._broker = broker
        self._live = live
        self._monitor = monitor
        self._children = children
        self._started = started
        kafka = settings.broker
        self._length = duration_text(settings.batch.window)
        open_time = settings.batch.window + settings.batch.grace
        self._watch = TopicWatch(kafka.client_options(), kafka.prefix, open_time.total_seconds())
        self._ends = TopicEnds(kafka.client_options(), map(kafka.topic, TOPICS))
        self._snapshots = SnapshotBuilder(
            settings,
            names,
            self._watch,
            mode="catching up" if catch_up else _MODES[live.source],
            duration=duration,
            started=started,
        )
        self._queries = Supervisor(spark, settings, names, self._snapshots.count)
        self._jvm_ends = 0
        """number of times that Spark's JVM has ended since a query last completed a micro-batch"""
        self._problems = ProblemLog(_LOG)
        self._first_batch: float | None = None
        self._drain = settings.run.drain.total_seconds()
        self._drain_started: float | None = None
        self._ends_at_drain: Ends | None = None
        """end offsets of the topics at the first poll after the bridge stopped capturing"""
        self._unread: Mapping[str, int | None] = {}
        self._open_windows = ""
        """error if a run with `catch_up` must end although windows are open"""

    def execute(self, stop: StopSignal) -> RunOutcome:
        """Run until `stop` is set, the duration is over, the queries have caught up, or their restarts are used up."""
        self._watch.start()
        log_event(_LOG, "run started")
        try:
            error = self._run_queries(stop)
        finally:
            self._view.say("stopping")
            log_event(_LOG, "run is stopping")
            self._live.mute()
            for child in self._children:
                child.stop()
            self._stop_queries()
            self._live.stop()  # after the queries, so that their last batches are published
            self._watch.stop()
        counts = self._watch.counts
        return RunOutcome(
            seconds=time.monotonic() - self._started,
            first_batch=self._first_batch,
            batches=counts.batches,
            late_p50=counts.percentile(0.5),
            late_p99=counts.percentile(0.99),
            error=error,
            unread=self._unread,
            warnings=tuple(self._queries.warnings),
        )

    def _run_queries(self, stop: StopSignal) -> str:
        """Run the queries until the run ends. If Spark's JVM ends earlier, start another one and continue.

        Returns:
            The error of the run; empty if there is none.
        """
        while True:
            self._view.say("starting the queries")
            try:
                self._queries.start()
                for words in self._queries.warnings:
                    self._view.say(words)
                self._run_until_end(stop)
                failures = self._queries.failures
                return " ".join(f"{name}: {failures[name]}" for name in sorted(failures)[:1]) or self._open_windows
            except RestartsExhaustedError as exhausted:
                return str(exhausted)
            except _JVM_ERRORS:
                jvm_error = check_jvm(_DYING)
                if jvm_error is None:
                    raise
                if stop.is_set():  # a signal to the process group ends the JVM, too
                    return ""
                self._jvm_ends = 1 if self._queries.progress else self._jvm_ends + 1
                if self._jvm_ends > self._settings.jobs.max_restarts:
                    return str(jvm_error)
                self._restart_spark(str(jvm_error), stop)

    def _restart_spark(self, problem: str, stop: StopSignal) -> None:
        log_event(_LOG, "Spark's JVM ended and is restarted", logging.WARNING, why=problem, in_a_row=self._jvm_ends)
        self._view.say(f"{problem}. Kiln starts the JVM again")
        self._stop_queries()
        stop.wait(pause_after(self._jvm_ends, _SHORTEST_PAUSE, _LONGEST_PAUSE))
        restarts = self._queries.restarts
        self._queries = Supervisor(self._start_spark(), self._settings, self._names, self._snapshots.count)
        self._queries.restarts.update(restarts)

    def _stop_queries(self) -> None:
        """Stop the queries. Errors are ignored if the JVM has ended, because its queries have ended with it."""
        try:
            self._queries.stop()
        except _JVM_ERRORS:
            if check_jvm(_DYING) is None:
                raise

    def _run_until_end(self, stop: StopSignal) -> None:
        shown = 0.0
        while not stop.wait(_CHECK_EVERY):
            now = time.monotonic()
            if self._first_batch is None and self._watch.first_batch.is_set():
                self._first_batch = now - self._started
            if not self._ends.error:  # without a broker, the queries would use up their restarts
                self._queries.check()
            self._live.check()
            for child in self._children:
                child.check()
            if self._is_over(now) and self._drain_started is None:
                if not self._drain:
                    return
                self._start_drain(now)
            if now - shown < _SHOW_EVERY:
                continue
            shown = now
            before = self._ends.ends
            has_caught_up = self._queries.has_caught_up(before)
            is_new = has_caught_up and before != self._saved_at
            committed = read_committed(self._checkpoints, self._names) if is_new else {}
            ends = self._ends.read()
            has_caught_up = has_caught_up and before == ends and not self._ends.error
            if committed and has_caught_up:
                save_caught_up(self._checkpoints, committed)
                self._saved_at = ends
            if self._catch_up and self._queries.held_queries:
                return
            if self._catch_up and not self._ends.error and before == ends:
                self._open_windows = self._queries.describe_open_windows(ends)
                if self._open_windows:
                    return
                if has_caught_up:
                    if self._queries.leaves_windows_open:
                        self._view.say(
                            f"some windows of length {self._length} have not ended yet. The next kiln run ends them"
                        )
                    return
            if self._drain_started is not None and self._has_drained(now, before, ends, has_caught_up):
                return
            snapshot = self._snapshots.build(
                now,
                ends,
                self._queries,
                self._live.state,
                self._errors(),
                self._ends.error,
                next((child.last_check for child in self._children if isinstance(child, QualityChecks)), None),
            )
            self._monitor.see(snapshot)
            self._problems.see(snapshot.errors)
            self._view.show(snapshot)

    def _is_over(self, now: float) -> bool:
        return self._duration is not None and now - self._started >= self._duration.total_seconds()

    def _start_drain(self, now: float) -> None:
        log_event(_LOG, "capture ended; the queries read the remaining records")
        self._drain_started = now
        self._snapshots.mode = "draining"
        self._view.say(
            "draining: no new frames are captured; the queries read the remaining records, for at most "
            f"{self._drain:.0f} s"
        )
        self._live.end_input()

    def _has_drained(self, now: float, before: Ends, ends: Ends, has_caught_up: bool) -> bool:
        """Return true if all records are read, the breaker has stopped a query, or `run.drain` has passed.

        Args:
            now: Monotonic time, in seconds.
            before: End offsets of the topics at the previous poll.
            ends: End offsets now.
            has_caught_up: True if `before` equals `ends`, and the queries have read all records before `ends`.
        """
        assert self._drain_started is not None
        if self._queries.held_queries:
            return True
        if not self._ends.error and self._live.has_ended_input:
            target = self._ends_at_drain = ends if self._ends_at_drain is None else self._ends_at_drain
            if has_caught_up and self._watch.has_read(ends):
                return True
            if self._live.source == "none" and before != ends and not self._queries.count_unread(target):
                return True  # other programs keep writing, so the queries never catch up
        if now - self._drain_started < self._drain:
            return False
        self._unread = self._queries.count_unread(ends)
        return True

    def _errors(self) -> list[str]:
        children = (error for child in self._children for error in child.errors)
        errors = (self._broker.error, *self._live.errors, *children, self._monitor.error, self._ends.error)
        return [error for error in errors if error]
