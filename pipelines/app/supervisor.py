"""Supervisor of the streaming queries in one Spark application, which starts, restarts and stops them."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from kafka.errors import KafkaError
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from kiln.conf.process.backoff import pause_after
from kiln.conf.process.errors import KilnError
from kiln.conf.process.kafka_topics import CHECK_EVERY, TopicIdentity, describe_replaced_topic, find_replaced_topics
from kiln.conf.process.logs import log_event
from kiln.conf.process.state_folder import claim_state_folder
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import JobName, Settings
from kiln.pipelines.app.launch import launch
from kiln.pipelines.batch.ticker import Ticker
from kiln.pipelines.decode.breaker import DecodingBrokenError
from kiln.pipelines.delta.commits import SecondWriterError
from kiln.pipelines.delta.lake import Lake, SchemaChangedError
from kiln.pipelines.recovery import DamageError, DamageLocation, repair
from kiln.pipelines.runtime.checkpoint import (
    DELETED_ADVICE,
    Checkpoint,
    DurableCheckpoint,
    describe_deleted_records,
    save_topic_ids,
)
from kiln.pipelines.runtime.dedup_store import read_dedup_state
from kiln.pipelines.runtime.driver_lease import DriverLease, SecondDriverError
from kiln.pipelines.runtime.progress import ProgressListener, QueryProgress
from kiln.pipelines.runtime.query_context import Report, ignore_report
from kiln.pipelines.runtime.topics import KafkaTopics, ProgressMarker, ProgressReport, Topics, TopicState
from kiln.schemas.kafka.topics import TOPICS
from kiln.schemas.queries import QUERIES
from kiln.schemas.wire.topic_table import BundleError

_LOG = logging.getLogger("kiln.pipelines.app.supervisor")
_BREAKER_ERROR = DecodingBrokenError.__name__
"""Name of the error with which a query fails if messages no longer decode"""
_FATAL_ERRORS = (SecondWriterError.__name__, SchemaChangedError.__name__)
"""Names of the errors after which a query must not be restarted"""
_WORKER_ERROR = "Python worker failed to connect back"
"""Text of Spark's error if a Python process takes more than 10 s to start. No setting raises this limit."""
_WORKER_RESTARTS = 4  # times as many restarts as after other failures, because the query is not at fault
_FRAMES_TOPIC = "frames"
"""Topic that the decoding queries read"""
_HOLD_PATIENCE = 10.0  # s for a query's micro-batch to end before the query is stopped because of the breaker
_STOP_PATIENCE = 45.0  # s for the micro-batches of all queries to end before the queries are stopped
_WINDOW_PATIENCE = timedelta(minutes=1)  # log time for which `kiln run --catch-up` waits for the last windows
_SYNC_EVERY = 1.0  # s between two syncs of the checkpoint of `batch`
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # s between a failure and the next start


@dataclass
class _QueryRun:
    query: StreamingQuery
    failures: int = 0
    """failures in a row, with no finished micro-batch in between"""
    batch_id: int = -1
    """number of the newest micro-batch at the last failure"""
    restart_at: float | None = None
    """time at which a failed query restarts, in s of the monotonic clock; `None` if it runs or is held"""
    held: bool = False
    """true if the query is stopped until Kiln is started again, because messages no longer decode"""
    error: str = ""
    """the last failure"""


class RestartsExhaustedError(RuntimeError):
    """A query must not continue: it failed too often in a row (`jobs.max_restarts`), or it would write wrong data."""


def build_damage_location(settings: Settings) -> DamageLocation:
    """Build the locations that `kiln.pipelines.recovery` examines, from the settings."""
    return DamageLocation(settings.state, settings.checkpoints_root, Lake.from_location(settings.lake_root))


def read_progress_report(settings: Settings) -> ProgressReport | None:
    """Read the progress that the query `updates` has committed to Kafka."""
    kafka = settings.broker
    with ProgressMarker(kafka.client_options(), kafka.topic("updates")) as marker:
        return marker.read(kafka.topic("frames"))


def read_topics(settings: Settings, topics: Topics, names: Iterable[str]) -> dict[str, dict[str, TopicState]]:
    """Read ids and offsets of the topics of queries from Kafka.

    Returns:
        By query, the states of the topics that it reads, by name with prefix. Missing topics are omitted.
    """
    reads = {name: [settings.kafka.topic(topic) for topic in QUERIES[name].reads] for name in names}
    states = topics.read_states({topic for names in reads.values() for topic in names})
    return {name: {topic: states[topic] for topic in wanted if topic in states} for name, wanted in reads.items()}


class Supervisor:
    """Supervisor of streaming queries in one Spark session.

    Call `start()`, then `check()` about every second, then `stop()`.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        names: Iterable[JobName],
        report: Report = ignore_report,
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], int] = lambda: time.time_ns() // 1000,
        topics: Topics | None = None,
    ) -> None:
        """Prepare the queries.

        Args:
            report: Receives the counts that queries report after each micro-batch.
            now: Monotonic clock, s.
            clock: Returns the time, µs.
            topics: Reader of topic ids; by default, of the broker in the settings.
        """
        self._spark = spark
        self._settings = settings
        self._names = sorted(names, key=lambda name: QUERIES[name].starts)
        self._report = report
        self._now = now
        self._clock = clock
        # Spark writes the results of `batch` itself, so no code of Kiln runs in its micro-batches.
        folder = (settings.checkpoints_root / "batch").folder
        self._batch_checkpoint = (
            DurableCheckpoint(folder) if settings.durability == "power" and folder is not None else None
        )
        self._synced_at = 0.0
        self._runs: dict[JobName, _QueryRun] = {}
        self.restarts: Counter[str] = Counter()
        """number of restarts after a failure, by query name"""
        self._listener = ProgressListener(lambda name: read_dedup_state((settings.checkpoints_root / name).folder))
        kafka = settings.broker
        # The embedded broker is in the state folder, whose locks suffice.
        self._leases = [
            DriverLease(kafka.client_options(), kafka.topic(name), kafka.topic("updates"), now)
            for name in self._names
            if kafka.bootstrap
        ]
        self._topics = KafkaTopics(kafka.client_options) if topics is None else topics
        self._reads: dict[JobName, dict[str, TopicState]] = {}
        self._ids: dict[str, TopicIdentity] = {}
        """identities of the topics that the queries read or look up, as of the start"""
        self._missing: list[str] = []
        """topics that no longer exist"""
        self._topics_at = 0.0
        self.ticker: Ticker | None = None
        self.repairs: list[str] = []
        """descriptions of the damage of a power cut that `start` has repaired"""
        self.warnings: list[str] = []
        """descriptions of the records that Kafka had deleted before a query first ran"""

    def start(self) -> None:
        """Start every query. With the query `batch`, also start the thread that sends ticks, which close its windows.

        Raises:
            RestartsExhaustedError: A query must not start.
            KafkaError: No broker answers.
            StateVersionError: The state folder has the version of an older or newer Kiln.
        """
        claim_state_folder(self._settings.state)
        try:
            with ThreadPoolExecutor(max(1, len(self._leases))) as threads:
                for _ in threads.map(DriverLease.acquire, self._leases):
                    pass
        except SecondDriverError as error:
            raise RestartsExhaustedError(str(error)) from error
        try:
            # an interrupted `kiln recover` may leave a checkpoint `updates.new` and no `updates`
            started = any(
                Checkpoint(self._settings.checkpoints_root / name).exists for name in ("updates", "updates.new")
            )
            progress = read_progress_report(self._settings) if "updates" in self._names and started else None
            reads = read_topics(self._settings, self._topics, self._names)
            self.repairs = repair(build_damage_location(self._settings), self._names, progress, reads)
        except DamageError as error:
            raise RestartsExhaustedError(str(error)) from error
        self._reads = {name: reads[name] for name in self._names}
        watched = {topic for name in self._names for topic in (*QUERIES[name].reads, *QUERIES[name].looks_up)}
        self._ids = dict(self._topics.read_identities(map(self._settings.kafka.topic, watched)))
        self._topics_at = self._now() + CHECK_EVERY
        if "batch" in self._names:
            kafka = self._settings.broker
            self.ticker = Ticker(
                kafka.client_options(),
                kafka.topic("updates"),
                interval=self._settings.batch.tick.total_seconds(),
                window=micros(self._settings.batch.window + self._settings.batch.grace),
            )
            self.ticker.start()
        for name in self._names:
            checkpoint = Checkpoint(self._settings.checkpoints_root / name)
            is_new = checkpoint.first_offsets is None
            self._runs[name] = _QueryRun(self._start(name))
            if is_new and (problem := describe_deleted_records(name, checkpoint.deleted_records)):
                self.warnings.append(f"{problem}. To prevent this, {DELETED_ADVICE}")
                log_event(
                    _LOG,
                    "Kafka had deleted records before the query first ran",
                    logging.WARNING,
                    query=name,
                    why=problem,
                )

    def _start(self, name: JobName) -> StreamingQuery:
        log_event(_LOG, "query starts", query=name)
        try:
            self._save_topic_ids(name)
            query = launch(name, self._spark, self._settings, self._listener, self._report)
            self._save_topic_ids(name)
        except (DecodingBrokenError, BundleError, KilnError) as error:
            raise RestartsExhaustedError(f"the query {name} stopped: {error}") from error
        return query

    def _save_topic_ids(self, name: JobName) -> None:
        checkpoint = Checkpoint(self._settings.checkpoints_root / name)
        if checkpoint.exists:
            save_topic_ids(checkpoint.path, {topic: state.id for topic, state in self._reads[name].items()})

    def _check_topics(self) -> None:
        """Check that no topic was deleted and created again since the start.

        Spark would continue at the old offset of the new topic, and skip the records before it.

        Raises:
            RestartsExhaustedError: A topic was created again, or its number of partitions has changed and the queries
                cannot adopt the new number while they run.
        """
        self._topics_at = self._now() + CHECK_EVERY
        try:
            current = self._topics.read_identities(self._ids)
        except (KafkaError, OSError):  # the queries fail too, or wait
            return
        self._missing = sorted(self._ids.keys() - current.keys())
        for topic in find_replaced_topics({topic: identity.id for topic, identity in self._ids.items()}, current):
            problem = describe_replaced_topic(topic, self._ids[topic].id, current[topic].id)
            raise RestartsExhaustedError(f"the queries stopped: {problem}. Run kiln recover, which lists the repairs")
        looked_up = {topic for name in self._names for topic in QUERIES[name].looks_up}
        for declared in TOPICS.values():
            topic = self._settings.kafka.topic(declared.name)
            if topic not in current or current[topic].partitions == self._ids[topic].partitions:
                continue
            problem = (
                f"the queries stopped: {topic} had {self._ids[topic].partitions} partitions, and now has "
                f"{current[topic].partitions}"
            )
            if declared.for_life:
                raise RestartsExhaustedError(
                    f"{problem}. This topic must keep its number of partitions, because open windows are stored by "
                    "partition. Use another kafka.prefix and another state folder"
                )
            if declared.name in looked_up:
                raise RestartsExhaustedError(f"{problem}. Start Kiln again to read the new partitions")

    def check(self) -> None:
        """Check leases, topics and queries, and restart failed queries from their checkpoints.

        The pause before a restart doubles with each failure in a row. If a query fails because messages no longer
        decode, all queries that decode stay stopped.

        Raises:
            RestartsExhaustedError: A query must not continue, another driver runs it, or no query is left.
        """
        try:
            for lease in self._leases:
                lease.check()
        except SecondDriverError as error:
            raise RestartsExhaustedError(str(error)) from error
        if self._now() >= self._topics_at:
            self._check_topics()
        if (
            self._batch_checkpoint is not None
            and "batch" in self._runs
            and self._now() >= self._synced_at + _SYNC_EVERY
        ):
            self._synced_at = self._now()
            self._batch_checkpoint.sync()
        for name, run in self._runs.items():
            if run.held:
                continue
            if run.restart_at is None and not run.query.isActive:
                self._handle_failure(name, run)
            elif run.restart_at is not None and self._now() >= run.restart_at:
                run.restart_at = None
                run.query = self._start(name)

    def _handle_failure(self, name: JobName, run: _QueryRun) -> None:
        self._check_topics()  # an error of this check is clearer than Spark's
        run.error = describe_failure(run.query.exception())
        progress = self._listener.snapshot().get(name)
        newest = progress.batch_id if progress else -1
        run.failures = run.failures + 1 if newest <= run.batch_id else 1
        run.batch_id = newest
        if _BREAKER_ERROR in run.error:
            self._trip(name, run.error)
            return
        restarts = self._settings.jobs.max_restarts * (_WORKER_RESTARTS if _WORKER_ERROR in run.error else 1)
        if any(fatal_error in run.error for fatal_error in _FATAL_ERRORS) or run.failures > restarts:
            raise RestartsExhaustedError(f"the query {name} stopped: {run.error}")
        log_event(
            _LOG,
            "query failed, and will be restarted",
            logging.WARNING,
            query=name,
            why=run.error,
            in_a_row=run.failures,
        )
        self.restarts[name] += 1
        run.restart_at = self._now() + pause_after(run.failures, _SHORTEST_PAUSE, _LONGEST_PAUSE)

    def _trip(self, name: JobName, error: str) -> None:
        """Stop every query that decodes frames until Kiln is started again, because messages no longer decode.

        The other queries, and the bridge, continue. Once decoding is fixed, the stopped queries continue from their
        checkpoints.

        Raises:
            RestartsExhaustedError: No query is left.
        """
        why = error.partition(f"{_BREAKER_ERROR}: ")[2] or error
        at = datetime.fromtimestamp(self._clock() / 1e6, UTC)
        problem = (
            f"the breaker tripped at {at:%Y-%m-%d %H:%M} UTC: {why}. If the messages are valid, install a "
            "version of Kiln that decodes them. If they are invalid, raise breaker.consecutive_failures. Then start "
            f"Kiln again: {name} continues from its checkpoint. See 'The breaker tripped' in docs/RUNBOOK.md"
        )
        log_event(_LOG, "breaker tripped, because messages no longer decode", logging.ERROR, query=name, why=why)
        for other, run in self._runs.items():
            if _FRAMES_TOPIC in QUERIES[other].reads:
                run.held, run.restart_at = True, None
                run.error = (
                    problem
                    if other == name
                    else f"the query {other} is stopped, because the breaker of the query {name} tripped"
                )
                self._stop(run, _HOLD_PATIENCE)
        if all(run.held for run in self._runs.values()):
            raise RestartsExhaustedError(f"the query {name} stopped: {problem}")

    @property
    def failures(self) -> dict[str, str]:
        """Last failure of each query that is stopped, or that has not recovered from a failure, by query name.

        A query has recovered once it has finished a micro-batch, or found no records to read.
        """
        progress = self._listener.snapshot()
        failures: dict[str, str] = {}
        for name, run in self._runs.items():
            at = progress.get(name)
            has_recovered = run.restart_at is None and at is not None and (at.batch_id > run.batch_id or at.idle)
            if run.held or (run.failures and not has_recovered):
                failures[name] = run.error
        return failures

    @property
    def held_queries(self) -> set[str]:
        """Names of the queries that are stopped until Kiln is started again, because messages no longer decode."""
        return {name for name, run in self._runs.items() if run.held}

    @property
    def progress(self) -> dict[str, QueryProgress]:
        """Newest progress, by query name. A query that has not reported any is missing."""
        return self._listener.snapshot()

    @property
    def errors(self) -> dict[str, str]:
        """Current problems in words: by query name, the failure of each query that does not run.

        More keys: `topics` (missing topics), `ticks` (ticks cannot be sent) and `log time` (the broker's clock is
        behind).
        """
        errors: dict[str, str] = {
            name: run.error for name, run in self._runs.items() if run.restart_at is not None or run.held
        }
        if self._missing:
            errors["topics"] = (
                f"Kafka lacks topics that the queries need: {', '.join(self._missing)}. Start Kiln again: its bridge "
                "creates them"
            )
        if self.ticker is not None and self.ticker.error:
            errors["ticks"] = self.ticker.error
        if self.ticker is not None and (clock_error := self.ticker.clock_error):
            errors["log time"] = clock_error
        return errors

    def has_caught_up(self, ends: Mapping[str, Mapping[int, int]]) -> bool:
        """Return true if all queries have read the records before `ends`, and no window waits to be closed.

        Long windows are not waited for: see `leaves_windows_open`.

        Args:
            ends: End offsets, by topic name with prefix and by partition.
        """
        return not self._may_have_open_windows(ends) and not self.count_unread(ends)

    def _may_have_open_windows(self, ends: Mapping[str, Mapping[int, int]]) -> bool:
        """Return false if the ticker found all windows closed at `ends`, or if this run does not wait for them."""
        if self.ticker is None or self.leaves_windows_open:
            return False
        return self.ticker.quiet_ends != ends.get(self._settings.kafka.topic("updates"))

    @property
    def leaves_windows_open(self) -> bool:
        """True if windows take over a minute to close (T + G). `kiln run --catch-up` then does not wait for them."""
        batch = self._settings.batch
        return "batch" in self._names and batch.window + batch.grace > _WINDOW_PATIENCE

    def describe_open_windows(self, ends: Mapping[str, Mapping[int, int]]) -> str:
        """Describe why windows stay open for long after all records before `ends` are read; empty if they do not.

        Windows close when the broker's timestamps advance. If the broker's clock is behind earlier timestamps, that may
        take days.
        """
        if self.ticker is None or self.ticker.clock_lag <= micros(_WINDOW_PATIENCE) or self.count_unread(ends):
            return ""
        clock_error = self.ticker.clock_error
        return f"the last windows stay open: {clock_error}" if clock_error else ""

    def count_unread(self, ends: Mapping[str, Mapping[int, int]]) -> dict[str, int | None]:
        """Count the records before `ends` that each query has not read.

        Args:
            ends: End offsets, by topic name with prefix and by partition.

        Returns:
            Counts by query name. `None` stands for a query that waits for its restart or has not reported any progress.
                A query that has read all records is missing.
        """
        progress, unread = self.progress, dict[str, int | None]()
        for name in self._names:
            topics = {full: ends[full] for full in map(self._settings.kafka.topic, QUERIES[name].reads) if full in ends}
            if name not in progress or self._runs[name].restart_at is not None:
                unread[name] = None
            elif lag := progress[name].lag(topics):
                unread[name] = lag
        return unread

    def stop(self) -> None:
        """Stop every query, if possible between two micro-batches.

        After 45 s, a query is stopped during a micro-batch, which it repeats at its next start. So nothing is lost.
        """
        if self.ticker is not None:
            self.ticker.stop()
        deadline = self._now() + _STOP_PATIENCE
        try:
            for run in self._runs.values():
                self._stop(run, deadline - self._now())
            if self._batch_checkpoint is not None and "batch" in self._runs:
                self._batch_checkpoint.sync()
        finally:
            for lease in self._leases:  # last: until here this driver may write
                lease.close()
            self._topics.close()

    def _stop(self, run: _QueryRun, patience: float) -> None:
        deadline = self._now() + patience
        while run.query.isActive and run.query.status["isTriggerActive"] and self._now() < deadline:
            time.sleep(0.01)
        run.query.stop()


_NO_CAUSE = re.compile(
    r"An error occurred while calling \w+\.\w+\.?$|Traceback \(most recent call last\):$|SQLSTATE: \w+$"
)
_LOST_TASK = re.compile(r".*most recent failure: Lost task \S+ in stage \S+ \(TID \d+\) \([^)]*\): ")


def _read_cause(line: str) -> str:
    """Read the error in a line of a traceback of Python, Java or Spark, such as `Caused by: KIND: message`.

    Returns:
        `KIND: message`, or the error of the failed task in a line about a Spark stage. Empty if the line has no error,
            or only introduces another error.
    """
    text, is_task = _LOST_TASK.subn("", line.removeprefix("Caused by: ").removeprefix(": "))
    kind, colon, _ = text.partition(": ")
    is_error = is_task or (colon and kind.replace(".", "").isidentifier())
    return text if is_error and not _NO_CAUSE.search(text) else ""


def describe_failure(error: BaseException | None) -> str:
    """Describe the root cause of a query's failure, in at most 300 characters.

    This is the last error in the traceback, or else the first line of Spark's message.
    """
    if error is None:
        return "the query ended without an error"
    message = str(error).partition("=== Streaming Query ===")[0]  # the rest is the id and the plan of the query
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    causes = [line for line in map(_read_cause, lines) if line]
    text = (causes or lines or [type(error).__name__])[-1 if causes else 0]
    if _WORKER_ERROR in message:
        text = f"{_WORKER_ERROR} within 10 s: this machine is too busy. Stop other programs, or run Kiln on more cores"
    return text if len(text) <= 300 else text[:299] + "…"
