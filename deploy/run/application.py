"""What `kiln run` and `kiln job` do: broker, topics, tables and queries brought up, watched, and brought down again."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError
from pyspark.sql import SparkSession

from bridge.status import BridgeStatus, OverlayStatus
from conf.locks import locked
from conf.settings.model import JobName, Settings
from deploy.kafka.broker import LaunchedBroker, launched_broker
from deploy.observe.snapshot import (
    BridgeLine,
    FetchLine,
    OverlayLine,
    PeerLine,
    QueryLine,
    QueryPhase,
    Snapshot,
)
from deploy.observe.watch import Watch
from deploy.run.network import LiveNetwork, Source
from deploy.run.spark import spark_session
from deploy.show.views import View
from pipelines.lake.lake import Lake
from pipelines.spark.progress import QueryProgress
from pipelines.supervisor import GaveUpError, Supervisor
from schemas.log import TOPICS
from schemas.queries import QUERIES
from schemas.tables import TABLES

_MODES: Mapping[Source, str] = {"demo": "demo network", "network": "live", "none": "no network"}
_LOOK_EVERY = 0.25  # s
_SHOW_EVERY = 1.0
_PATIENCE_MS = 1_000  # ms that the broker has to answer: the bridge and the queries are looked after meanwhile


@dataclass
class Outcome:
    """How a run went, for the summary at its end."""

    seconds: float = 0.0
    first_batch: float | None = None
    """s from the start of the command to the first batch in `kiln.batches`"""
    frames: int = 0
    messages: Mapping[str, int] = field(default_factory=dict)
    batches: int = 0
    late_p50: float | None = None
    late_p99: float | None = None
    quarantine: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


def run_application(
    settings: Settings,
    view: View,
    *,
    names: Sequence[JobName] | None = None,
    duration: timedelta | None = None,
    catch_up: bool = False,
    source: Source = "none",
) -> Outcome:
    """Runs the queries until `duration` is over, all is caught up, or Ctrl-C or SIGTERM asks for the end.

    `names`: the queries, by default those of the settings; `source`: of frames. Raises KilnError for what a user can
    mend.
    """
    started = time.monotonic()
    stop = threading.Event()
    with ExitStack() as stack:
        stack.enter_context(_signals(stop))
        for name in names or settings.jobs.run:
            stack.enter_context(locked(settings.state, name))
        broker = stack.enter_context(launched_broker(settings, view.say))
        live = LiveNetwork(settings, source)
        stack.callback(live.stop)
        live.launch()
        view.say("starting Spark")
        spark = stack.enter_context(spark_session(settings))
        broker.ready()
        Lake(str(settings.lake)).create(TABLES)
        live.start()
        run = _Run(settings, view, spark, names or settings.jobs.run, duration, catch_up, broker, live, started)
        return run.go(stop)


class _Run:
    def __init__(
        self,
        settings: Settings,
        view: View,
        spark: SparkSession,
        names: Sequence[JobName],
        duration: timedelta | None,
        catch_up: bool,
        broker: LaunchedBroker,
        live: LiveNetwork,
        started: float,
    ) -> None:
        self._settings = settings
        self._view = view
        self._names = names
        self._duration = duration
        self._catch_up = catch_up
        self._started = started
        self._messages: dict[str, int] = {}
        self._counting = threading.Lock()
        open_for = settings.batch.window + settings.batch.grace
        self._watch = Watch(settings.kafka.client_options(), settings.kafka.prefix, open_for.total_seconds())
        self._application = Supervisor(spark, settings, names, self._count)
        self._broker = broker
        self._live = live
        self._ends: dict[str, dict[int, int]] = {}
        self._first_end: int | None = None
        self._shown: tuple[float, int] = (started, 0)
        self._rate: float | None = None
        self._outcome = Outcome()

    def _count(self, query: str, counts: Mapping[str, int]) -> None:
        if query == "messages":
            with self._counting:
                for name, number in counts.items():
                    if name.isupper():  # types; reasons are counted from the topic `quarantine`
                        self._messages[name] = self._messages.get(name, 0) + number

    def go(self, stop: threading.Event) -> Outcome:
        offsets = _Ends(self._settings)
        self._watch.start()
        self._view.say("starting the queries")
        try:
            self._application.start()
            self._until_the_end(stop, offsets)
        except GaveUpError as error:
            self._outcome.error = str(error)
        finally:
            self._view.say("stopping")
            self._live.hush()
            self._application.stop()
            self._live.stop()  # last, so that what the queries gave out in the end is published
            self._watch.stop()
            offsets.close()
        seen = self._watch.seen
        self._outcome.seconds = time.monotonic() - self._started
        self._outcome.messages = dict(self._messages)
        self._outcome.batches = seen.batches
        self._outcome.late_p50, self._outcome.late_p99 = seen.percentile(0.5), seen.percentile(0.99)
        self._outcome.quarantine = dict(seen.quarantine)
        return self._outcome

    def _until_the_end(self, stop: threading.Event, offsets: _Ends) -> None:
        shown = 0.0
        while not stop.wait(_LOOK_EVERY):
            now = time.monotonic()
            if self._outcome.first_batch is None and self._watch.first_batch.is_set():
                self._outcome.first_batch = now - self._started
            if offsets.error is None:  # else queries fail for no reason of their own, and would use up their restarts
                self._application.check()
            self._live.check()
            if self._duration is not None and now - self._started >= self._duration.total_seconds():
                return
            if now - shown < _SHOW_EVERY:
                continue
            shown = now
            before, self._ends = self._ends, offsets.read()
            known = offsets.error is None and before == self._ends
            if self._catch_up and known and self._application.caught_up(self._ends):
                return
            self._view.show(self._snapshot(now, offsets.error))

    def _snapshot(self, now: float, broker_error: str | None) -> Snapshot:
        frames = sum(self._ends.get(self._settings.kafka.topic("frames"), {}).values())
        if self._first_end is None:
            self._first_end = frames
        then, before = self._shown
        if before and now > then:
            self._rate = (frames - before) / (now - then)
        self._shown = (now, frames)
        self._outcome.frames = frames - self._first_end
        progress = self._application.progress
        errors = [f"{name}: {text}" for name, text in self._application.errors.items()]
        errors += [text for text in (self._broker.error, broker_error, *self._live.errors) if text]
        seen = self._watch.seen
        with self._counting:
            messages = dict(self._messages)
        decoded = progress.get("messages")
        return Snapshot(
            network=self._settings.network,
            mode="catching up" if self._catch_up else _MODES[self._live.source],
            elapsed=timedelta(seconds=now - self._started),
            duration=self._duration,
            frames=self._outcome.frames,
            frames_rate=self._rate,
            messages=messages,
            copies=sum(messages.values()) + decoded.duplicates if decoded else None,
            open_separators=len(self._watch.open),
            batches=seen.batches,
            newest_batches=tuple(seen.newest),
            window=self._settings.batch.window,
            late_p50=seen.percentile(0.5),
            late_p99=seen.percentile(0.99),
            quarantine=dict(seen.quarantine),
            queries=[self._line(name, progress.get(name)) for name in self._names],
            bridge=_bridge_line(self._live),
            errors=errors,
        )

    def _line(self, name: JobName, progress: QueryProgress | None) -> QueryLine:
        error = self._application.errors.get(name, "")
        restarts = self._application.restarts.get(name, 0)
        if progress is None or not (progress.read or progress.idle):
            return QueryLine(name, "restarting" if error else "starting", restarts=restarts, error=error)
        topics = {full: self._ends.get(full, {}) for full in map(self._settings.kafka.topic, QUERIES[name].reads)}
        phase: QueryPhase = "restarting" if error else "running" if progress.input_rate else "idle"
        return QueryLine(
            name,
            phase,
            batch=progress.batch_id,
            lag=progress.lag(topics),
            took=progress.batch_ms / 1000,
            input_rate=progress.input_rate,
            process_rate=progress.processed_rate,
            restarts=restarts,
            error=error,
        )


def _bridge_line(live: LiveNetwork) -> BridgeLine | None:
    if live.source == "none":
        return None
    status = live.status
    if status is None:
        return BridgeLine("starting")
    return BridgeLine(
        state="reading has stopped: the spool is full" if status.spool.full else "listening",
        address=status.addresses[0] if status.addresses else "",
        peers=tuple(PeerLine(each.peer, each.agent, each.protocol, each.outbound) for each in status.peers),
        topics=len(status.topics),
        mesh=tuple(sorted(status.mesh.items())),
        frames_in=status.frames_in,
        frames_out=status.frames_out,
        spooled=status.spool.disk_bytes,
        published=status.publisher.published,
        publishing=status.publisher.state,
        heard=live.heard_batches,
        overlay=_overlay_line(status.bep50),
        fetch=_fetch_line(status),
    )


def _fetch_line(status: BridgeStatus) -> FetchLine | None:
    fetcher = status.fetcher
    if fetcher is None or fetcher.state.startswith("off"):
        return None
    counts = fetcher.counts
    return FetchLine(
        node=status.ipfs,
        waiting=fetcher.waiting,
        fetching=fetcher.fetching,
        blocks=counts.get("blocks", 0),
        released=counts.get("released", 0),
        given_up=counts.get("quarantined", 0),
    )


def _overlay_line(status: OverlayStatus | None) -> OverlayLine | None:
    if status is None:
        return None
    return OverlayLine(
        topics=status.joined,
        contacts=status.contacts,
        published=status.publisher.published,
        items=status.items,
        dropped=sum(status.dropped.values()),
        publishing=status.publisher.state,
    )


class _Ends:
    """End offsets of all topics. While the broker is away the last known ones stand, and `error` says so."""

    def __init__(self, settings: Settings) -> None:
        self._consumer = KafkaConsumer(**settings.kafka.client_options(), reconnect_backoff_max_ms=1_000)
        self._parts = [
            TopicPartition(topic, partition)
            for topic in map(settings.kafka.topic, TOPICS)
            for partition in self._consumer.partitions_for_topic(topic) or ()
        ]
        self._known: dict[str, dict[int, int]] = {}
        self.error: str | None = None

    def read(self) -> dict[str, dict[int, int]]:
        try:
            found: dict[str, dict[int, int]] = {}
            for part, end in self._consumer.end_offsets(self._parts, timeout_ms=_PATIENCE_MS).items():
                found.setdefault(part.topic, {})[part.partition] = end
            self._known = found
            self.error = None
        except KafkaError as error:
            self.error = f"the broker does not answer: {error}"
        return self._known

    def close(self) -> None:
        self._consumer.close()


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask for the end; a second Ctrl-C does not wait for it."""

    def asked(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
