"""Delay of batches after the end of their window: with all queries, and with the query `batch` alone on the same
updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.ground import Ends, Ground, LogRecord
from bench.report import Aim, Finding, Note, Ratio, Series
from bench.runs import BenchError, Extent
from kiln.conf.settings.durations import duration_text
from kiln.conf.settings.model import JobName, Settings
from kiln.deploy.demo.traffic.options import traffic_options
from kiln.pipelines.app.supervisor import Supervisor
from kiln.schemas.kafka.records import TICK, SeparatorRecord, decode_batch, decode_update
from kiln.schemas.queries import QUERIES
from kit.traffic_feed import Feed

WARM = 20  # s of traffic after the first batch
MEASURED = 40  # s
AIM = Aim(most=1.3)
LOADS = (50.0, 150.0, 500.0)  # messages/s

_PATIENCE = 180.0  # s until the first batch
_LOOK_EVERY = 0.25  # s
_SHARES = ((0.5, "p50"), (0.99, "p99"))


class Traffic(NamedTuple):
    """Records of a run that were read back from Kafka."""

    updates: Sequence[LogRecord]
    """updates of the whole run, sorted by timestamp"""
    batches: Sequence[LogRecord]
    """batches in the measured time"""
    since: float
    """start of the measured time, Unix ms"""
    until: float
    """end of the measured time, Unix ms"""


@dataclass(frozen=True)
class Lateness:
    """Delays of the batches of one run after the end of their windows, in ms, ascending."""

    delays: tuple[float, ...]

    def percentile(self, share: float) -> float:
        """Return the delay in ms that this share of the batches does not exceed, such as 0.99 for the p99."""
        return self.delays[min(len(self.delays) - 1, int(share * len(self.delays)))]


def lateness(batches: Sequence[LogRecord]) -> Lateness:
    """Compute the delay of each record of `kiln.batches`: its Kafka timestamp minus the end of its window.

    Raises:
        BenchError: There are no records.
    """
    if not batches:
        raise BenchError("no batch came while measuring")
    return Lateness(tuple(sorted(record.stamp - decode_batch(record.value).closed_at / 1000 for record in batches)))


def lateness_by_log(batches: Sequence[LogRecord], updates: Iterable[LogRecord]) -> Lateness:
    """Compute the delay of each batch after the first update of its window, minus the window length T.

    Both times are Kafka timestamps. So the delay before an update was in Kafka does not count. Batches whose first
    update is not in `updates` are left out.

    Raises:
        BenchError: No batch is left.
    """
    stamps: dict[tuple[SeparatorRecord | None, int], int] = {}
    for record in updates:
        update = decode_update(record.value)
        stamps.setdefault((update.separator, min(update.observed_at, record.stamp * 1000)), record.stamp)
    delays = []
    for record in batches:
        batch = decode_batch(record.value)
        opened = stamps.get((batch.separator, batch.opened_at))
        if opened is not None:
            delays.append(record.stamp - opened - (batch.closed_at - batch.opened_at) / 1000)
    if not delays:
        raise BenchError("no batch came while measuring")
    return Lateness(tuple(sorted(delays)))


def measure(ground: Ground, extent: Extent) -> Finding:
    """Measure all queries with synthetic traffic, then the query `batch` alone with the same updates, in each run."""
    whole, alone = ground.plot("lateness-all"), ground.plot("lateness-alone")
    results_by_query: dict[str, list[Lateness]] = {"all queries": [], "window query alone": []}
    for run in range(1, extent.runs + 1):
        traffic = _with_all(ground, whole, extent)
        of_all = lateness_by_log(traffic.batches, traffic.updates)
        for name, result in (("all queries", of_all), ("window query alone", _alone(ground, alone, traffic))):
            results_by_query[name].append(result)
            shown = ", ".join(f"{label} {result.percentile(share):.0f} ms" for share, label in _SHARES)
            ground.say(f"run {run} of {extent.runs}: {name}: {shown} of {len(result.delays):,} batches")
    series = {
        (name, label): Series(f"{label}, {name}", "ms", tuple(result.percentile(share) for result in results))
        for name, results in results_by_query.items()
        for share, label in _SHARES
    }
    ratios = (
        Ratio(f"{label}, all over alone", series["all queries", label], series["window query alone", label], AIM)
        for _, label in _SHARES
    )
    batch = whole.batch
    return Finding(
        "lateness",
        "delay of batches after their first update plus T, by Kafka's timestamps",
        tuple(series.values()),
        tuple(ratios),
        {
            "messages/s": whole.traffic.rate,
            "copies": whole.traffic.copies,
            "s a run": extent.of(MEASURED, least=5),
            "batches, all": sum(len(result.delays) for result in results_by_query["all queries"]),
            "batches, alone": sum(len(result.delays) for result in results_by_query["window query alone"]),
            "T": duration_text(batch.window),
            "tick": duration_text(batch.tick),
            "master": whole.spark.master,
        },
    )


def measure_by_load(ground: Ground, extent: Extent) -> Finding:
    """Measure all queries at several loads (messages per second), one after another."""
    results_by_load: dict[float, list[Lateness]] = {load: [] for load in LOADS}
    for run in range(1, extent.runs + 1):
        for load, results in results_by_load.items():
            settings = ground.plot(f"load-{load:g}-{run}")  # a new plot, so that no load has the backlog of another
            traffic = settings.traffic.model_copy(update={"rate": load})
            result = lateness(_with_all(ground, settings.model_copy(update={"traffic": traffic}), extent).batches)
            results.append(result)
            shown = ", ".join(f"{label} {result.percentile(share):.0f} ms" for share, label in _SHARES)
            ground.say(f"run {run} of {extent.runs}: {load:g} messages/s: {shown} of {len(result.delays):,} batches")
    series = tuple(
        Series(f"{label}, {load:g} messages/s", "ms", tuple(result.percentile(share) for result in results))
        for share, label in _SHARES
        for load, results in results_by_load.items()
    )
    notes: dict[str, Note] = {"s a run": extent.of(MEASURED, least=5), "T": duration_text(settings.batch.window)}
    return Finding("load", "delay of batches after the end of their window, by load", series, (), notes)


def _with_all(ground: Ground, settings: Settings, extent: Extent) -> Traffic:
    options = replace(traffic_options(settings), checked=1.0)  # with verdicts, as a live bridge writes frames
    feed = Feed(options, settings.traffic.rate, lambda: ground.producer(settings, "frames"))
    before = ground.ends(settings, "updates")
    with _Queries(ground, settings, tuple(QUERIES)) as queries:
        feed.start()
        try:
            queries.await_batch()
            queries.wait(extent.of(WARM, least=3))
            first, since = ground.ends(settings, "batches"), time.time() * 1000
            queries.wait(extent.of(MEASURED, least=5))
            last, until = ground.ends(settings, "batches"), time.time() * 1000
        finally:
            feed.stop()
    if feed.error is not None:
        raise BenchError(feed.error)
    log = ground.read(settings, "updates", before, ground.ends(settings, "updates"))
    updates = [record for record in log if record.value != TICK and record.stamp < until]
    return Traffic(updates, ground.read(settings, "batches", first, last), since, until)


def _alone(ground: Ground, settings: Settings, traffic: Traffic) -> Lateness:
    first: Ends | None = None
    before = ground.ends(settings, "updates")
    with (
        _Queries(ground, settings, ("batch",)) as queries,
        ground.producer(settings, "updates") as producer,
    ):
        ahead = time.time() * 1000 - traffic.updates[0].stamp
        for update in traffic.updates:
            queries.wait((update.stamp + ahead) / 1000 - time.time())
            if first is None and update.stamp >= traffic.since:
                first = ground.ends(settings, "batches")
            producer.send_record(update.key or b"", update.value)
        queries.wait((traffic.until + ahead) / 1000 - time.time())
        last = ground.ends(settings, "batches")
    if first is None:
        raise BenchError("no update came while measuring")
    log = ground.read(settings, "updates", before, ground.ends(settings, "updates"))
    return lateness_by_log(
        ground.read(settings, "batches", first, last), (record for record in log if record.value != TICK)
    )


class _Queries:
    """Queries that run for the duration of the context, from their checkpoints."""

    def __init__(self, ground: Ground, settings: Settings, names: Sequence[JobName]) -> None:
        self._batches: Callable[[], Ends] = lambda: ground.ends(settings, "batches")
        self._application = Supervisor(ground.spark, settings, names)

    def __enter__(self) -> _Queries:
        self._before = self._batches()
        self._application.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._application.stop()

    def wait(self, seconds: float) -> None:
        """Let the queries run for `seconds`.

        Raises:
            BenchError: A query failed, so that delays cannot be measured.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_EVERY))
            self._application.check()
            if self._application.errors:
                raise BenchError("; ".join(f"{name}: {text}" for name, text in self._application.errors.items()))

    def await_batch(self) -> None:
        """Wait for the first batch.

        Raises:
            BenchError: No batch came, or a query failed.
        """
        until = time.monotonic() + _PATIENCE
        while self._batches() == self._before:
            if time.monotonic() > until:
                raise BenchError(f"no batch within {_PATIENCE:g} s")
            self.wait(_LOOK_EVERY)
