"""What each stage costs, by the number of its records, tasks and micro-batches: the figures of docs/scaling.md.

Each query runs alone, from a fresh checkpoint, over the same log in small and in large micro-batches, on few and on
many partitions, over few and over many separators. `fitting` makes a cost out of these points. Points that no cost was
fitted to say whether the costs hold: a micro-batch of twice the largest size, on another number of partitions or
separators. Costs are CPU, which what else the machine does disturbs least.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, NamedTuple

import psutil
import pyarrow as pa
from pyspark.sql.streaming.listener import StreamingQueryProgress

from bench import held_state
from bench.batcher import write_log
from bench.capacity import FRAME_IN, MICRO_BATCH, TASK, WINDOWS, cost_name, read_name
from bench.catch_up import in_micro_batches
from bench.fitting import CostSample, Counts, fit
from bench.frames import GENERATED, Keyed, append, generated, live_options, stamped_anew
from bench.ground import Ground
from bench.processes import Usage
from bench.report import Aim, Finding, Note, Ratio, Series
from bench.runs import BenchError, Extent
from kiln.conf.settings.model import JobName, Kafka, Settings
from kiln.pipelines.app.launch import launch
from kiln.pipelines.app.supervisor import describe_failure
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.dedup_store import read_dedup_state
from kiln.pipelines.runtime.progress import ProgressListener
from kiln.schemas.queries import QUERIES

SMALL, LARGE = 2_000, 40_000
"""records of a micro-batch"""
AFAR: Final = 80_000
"""the same, of a point that no cost is fitted to"""
MICRO_BATCHES: Final = {SMALL: 4, LARGE: 2, AFAR: 2}
"""how many of each size count; one more comes before them, which pays for the start"""
FEW, MANY, BETWEEN = 2, 8, 4
"""partitions; no cost is fitted to the last"""
SEPARATORS: Final = {"few": 200, "many": 20_000, "between": 4_000}
AIM = Aim(least=0.8, most=1.2)

THING: Final[Mapping[str, str]] = {"frames": "frame", "updates": "update", "batches": "batch"}
"""What a record of a topic is."""
BROKER: Final = "broker"
"""As `bench.processes` names the process."""

_PATIENCE: Final = 240.0  # s for the micro-batches of a size
_WITH_TASKS: Final = ("archive", "updates")
_PLACES: Final[Mapping[JobName, str]] = {
    "archive": "frames",
    "updates": "frames",
    "batch": "updates",
    "sink": "updates",
}
"""What a query reads, in the order in which the queries are measured: `sink` reads what `batch` has made."""
_EMPTIED: Final[Mapping[JobName, Sequence[str]]] = {
    "archive": ("quarantine",),
    "updates": ("updates", "wanted", "quarantine"),
    "batch": (),  # `sink` reads them
    "sink": (),
}


class MicroBatchCost(NamedTuple):
    """A micro-batch: records by topic, rows that it wrote into Kafka, time, and CPU by kind of process (s)."""

    records: Mapping[str, int]
    out: int
    seconds: float
    cpu: Mapping[str, float]
    stateful: float
    """s in the stateful operators, the sum of their tasks"""


@dataclass(frozen=True)
class BatchSizeCost:
    """Micro-batches of one size: means of one. Times in s."""

    counts: Counts
    spark: float
    """CPU of driver, JVM and workers"""
    broker: float
    """CPU"""
    seconds: float
    """of the clock"""
    stateful: float
    read: float
    """records"""

    @property
    def point(self) -> CostSample:
        return CostSample(self.counts, self.spark)


def stretch(ran: Sequence[MicroBatchCost], tasks: int | None = None, made: str | None = None) -> BatchSizeCost:
    """The means of micro-batches.

    `tasks`: of each, where their number differs between the points of a cost. `made`: what a row is that is written
    into Kafka, where such rows are a part of the cost.
    """
    counts = {MICRO_BATCH: 1.0}
    if tasks is not None:
        counts[TASK] = float(tasks)
    for topic, thing in THING.items():
        if any(topic in each.records for each in ran):
            counts[thing] = fmean(each.records.get(topic, 0) for each in ran)
    if made is not None:
        counts[made] = fmean(each.out for each in ran)
    return BatchSizeCost(
        counts,
        fmean(sum(taken for kind, taken in each.cpu.items() if kind != BROKER) for each in ran),
        fmean(each.cpu.get(BROKER, 0.0) for each in ran),
        fmean(each.seconds for each in ran),
        fmean(each.stateful for each in ran),
        fmean(sum(each.records.values()) for each in ran),
    )


def measure(ground: Ground, extent: Extent) -> Finding:
    """The costs, fitted in each run anew, and what they foretell beside what was measured."""
    plots = _Plots(ground, extent)
    found = ScalingFindings()
    for run in range(1, extent.runs + 1):
        ground.say(f"run {run} of {extent.runs}")
        for name, places in _PLACES.items():
            _stage(ground, found, name, plots.of(places))
    found.see(cost_name("broker", FRAME_IN), "µs", plots.broker_cpu / plots.frames * 1e6, extent.runs)
    for thing, size in plots.sizes().items():
        found.see(f"Kafka: each {thing}", "bytes", size, extent.runs)
    notes = held_state.measure(Extent(1, 0.05), lambda _: None).notes
    for thing, note in (("open window", "bytes a window"), ("known stream", "bytes a stream")):
        found.see(f"state: each {thing}", "bytes", float(notes[note]), extent.runs)
    return found.finding(
        {
            "records of a micro-batch": f"{extent.of(SMALL):,} to {extent.of(LARGE):,}, and {extent.of(AFAR):,}",
            "partitions": f"{FEW}, {MANY}, and {BETWEEN}",
            "separators": ", ".join(f"{extent.of(many, least=10):,}" for many in SEPARATORS.values()),
            "master": plots.of_frames[0].settings.spark.master,
        }
    )


class ScalingFindings:
    """Values by name, one a run, and what was foretold beside what was measured."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[str, list[float]]] = {}
        self._checked: dict[str, tuple[str, list[float], list[float]]] = {}

    def see(self, name: str, unit: str, value: float, times: int = 1) -> None:
        self._values.setdefault(name, (unit, []))[1].extend([value] * times)

    def check(self, name: str, unit: str, foretold: float, measured: float) -> None:
        _, before, after = self._checked.setdefault(name, (unit, [], []))
        before.append(foretold)
        after.append(measured)

    def finding(self, notes: Mapping[str, Note]) -> Finding:
        series = [Series(name, unit, tuple(values)) for name, (unit, values) in self._values.items()]
        ratios = []
        for name, (unit, foretold, measured) in self._checked.items():
            before = Series(f"{name}, foretold", unit, tuple(foretold))
            after = Series(f"{name}, measured", unit, tuple(measured))
            series += [before, after]
            ratios.append(Ratio(f"{name}: foretold over measured", before, after, AIM))
        return Finding("scaling", "what each stage costs", tuple(series), tuple(ratios), notes)


# ---------------------------------------------------------------- what is read


class _QueryUnderTest(NamedTuple):
    """Where a query is measured. `sizes`: records of a micro-batch, and how many micro-batches of that size count."""

    settings: Settings
    partitions: int
    sizes: Mapping[int, int]
    afar: bool = False


class _Plots:
    """Frames on few, many and some partitions; updates of few, many and some separators; all written once."""

    def __init__(self, ground: Ground, extent: Extent) -> None:
        self._ground = ground
        self._extent = extent
        self.broker_cpu = 0.0  # s, for the frames that were written
        self.frames = 0
        self._usage = Usage(psutil.Process())
        made = generated(extent.of(GENERATED, least=1_000), live_options())
        self.of_frames = [
            _QueryUnderTest(self._frames(FEW, made, LARGE), FEW, self._sizes(SMALL, LARGE)),
            _QueryUnderTest(self._frames(MANY, made, LARGE), MANY, self._sizes(SMALL, LARGE)),
            _QueryUnderTest(self._frames(BETWEEN, made, AFAR), BETWEEN, self._sizes(AFAR), afar=True),
        ]
        self.of_updates = [
            _QueryUnderTest(self._updates("few", LARGE), FEW, self._sizes(SMALL, LARGE)),
            _QueryUnderTest(self._updates("many", LARGE), FEW, self._sizes(SMALL, LARGE)),
            _QueryUnderTest(self._updates("between", AFAR), FEW, self._sizes(AFAR), afar=True),
        ]

    def of(self, topic: str) -> Sequence[_QueryUnderTest]:
        """Where a query of this topic is measured."""
        return self.of_frames if topic == "frames" else self.of_updates

    def sizes(self) -> dict[str, float]:
        """Bytes on the broker's disk: of a frame, of an update, and of the two parts of a batch."""
        frames, few, many = (place.settings for place in (self.of_frames[0], *self.of_updates[:2]))
        parts = [
            CostSample(
                {"batch": self._records(each, "batches"), "update in a batch": self._records(each, "updates")},
                self._bytes(each, "batches"),
            )
            for each in (few, many)
        ]
        return {
            "frame": self._bytes(frames, "frames") / self._records(frames, "frames"),
            "update": self._bytes(few, "updates") / self._records(few, "updates"),
            **fit(parts).each,
        }

    def _records(self, settings: Settings, topic: str) -> float:
        return float(sum(self._ground.ends(settings, topic).values()))

    def _bytes(self, settings: Settings, topic: str) -> float:
        folders = self._ground.broker_data.glob(f"{settings.kafka.topic(topic)}-[0-9]*")
        return float(sum(file.stat().st_size for folder in folders for file in folder.glob("*.log")))

    def _sizes(self, *sizes: int) -> dict[int, int]:
        return {self._extent.of(size, least=100): MICRO_BATCHES[size] for size in sizes}

    def _count(self, size: int) -> int:
        return self._extent.of((MICRO_BATCHES[size] + 1) * size, least=1_000)

    def _frames(self, partitions: int, made: Sequence[Keyed], size: int) -> Settings:
        settings, count = self._plot(f"scaling-{partitions}", partitions), self._count(size)
        self._ground.say(f"writing {count:,} frames on {partitions} partitions")
        before = self._usage.look().get(BROKER, 0.0)
        append(self._ground, settings, stamped_anew(made, count))
        self.broker_cpu += self._usage.look().get(BROKER, 0.0) - before
        self.frames += count
        return settings

    def _updates(self, name: str, size: int) -> Settings:
        settings = self._plot(f"scaling-{name}", FEW)
        separators, count = self._extent.of(SEPARATORS[name], least=10), self._count(size)
        self._ground.say(f"writing {count:,} updates over {separators:,} separators")
        write_log(self._ground, settings, count, separators)
        return settings

    def _plot(self, name: str, partitions: int) -> Settings:
        settings = self._ground.plot(name, partitions)
        spark = settings.spark.model_copy(update={"shuffle_partitions": partitions})
        return settings.model_copy(update={"spark": spark})


# ---------------------------------------------------------------- a stage alone


def _stage(ground: Ground, found: ScalingFindings, name: JobName, places: Sequence[_QueryUnderTest]) -> None:
    """Measures a query at all places, fits its cost to those that are not afar, and holds it against the others."""
    near: list[BatchSizeCost] = []
    afar: list[BatchSizeCost] = []
    in_lake: list[CostSample] = []
    for place in places:
        for size, count in place.sizes.items():
            if name == "batch":  # so that `sink` finds each batch once
                ground.empty(place.settings, "batches")
            before = sum(ground.ends(place.settings, "updates").values())
            with ground.fresh(place.settings, *_EMPTIED[name]) as fresh:
                # the last one of `batch` has the ticks, which close what windows are open
                ran = _run(ground, fresh, name, size, count + (name == "batch"))
                if name == "archive" and place.afar:
                    _see_archive(found, fresh)
                if name == "sink" and size == max(place.sizes) and not place.afar:
                    in_lake.append(_of_sink(fresh))
                if name == "updates" and place.afar:
                    made = sum(ground.ends(place.settings, "updates").values()) - before
                    found.see("updates, each frame", "updates", made / sum(each.records["frames"] for each in ran))
            tasks = place.partitions if name in _WITH_TASKS else None
            one = stretch(ran[1:], tasks, "batch" if name == "batch" else None)
            (afar if place.afar else near).append(one)
            ground.say(
                f"{name}, {place.partitions} partitions, {one.read:,.0f} records: {one.seconds:.2f} s, "
                f"CPU {one.spark:.2f} s, broker {one.broker:.2f} s"
            )
    cost = fit([each.point for each in near])
    for thing, seconds in cost.each.items():
        found.see(cost_name(name, thing), "µs", seconds * 1e6)
    largest = max(near, key=lambda each: each.read)
    found.see(read_name(name), "µs", largest.broker / largest.read * 1e6)
    found.see(f"{name}: time of a small micro-batch", "s", near[0].seconds)
    found.see(f"{name}: records a second in large micro-batches", "records/s", largest.read / largest.seconds)
    if name == "batch":
        one_task = (largest.stateful or largest.seconds) / largest.counts["update"] * 1e6
        found.see(WINDOWS, "µs", one_task)
    if in_lake:
        for thing, size_of in fit(in_lake).each.items():
            found.see(f"lake: each {thing}", "bytes", size_of)
    for each in afar:
        found.check(f"{name}, a micro-batch afar", "s of CPU", cost.of(each.counts), each.spark)


def _see_archive(found: ScalingFindings, fresh: Settings) -> None:
    lake = Lake.from_location(fresh.lake_root)
    rows = {table: _rows_and_bytes(lake, table) for table in ("frames", "copies", "messages")}
    frames, messages = rows["frames"][0], rows["messages"][0]
    found.see("lake: each frame", "bytes", sum(size for _, size in rows.values()) / frames)
    found.see("lake: rows, each frame", "rows", sum(many for many, _ in rows.values()) / frames)
    found.see("messages, each frame", "messages", messages / frames)
    remembered = read_dedup_state((fresh.checkpoints_root / "archive").folder)
    found.see("state: each message remembered", "bytes", remembered.size / messages)


def _of_sink(fresh: Settings) -> CostSample:
    """Bytes in the tables of `sink`, by updates and batches."""
    lake = Lake.from_location(fresh.lake_root)
    size = {table: _rows_and_bytes(lake, table) for table in ("updates", "tips", "batch_tips", "batches")}
    return CostSample(
        {"update": float(size["updates"][0]), "batch": float(size["batches"][0])},
        float(sum(b for _, b in size.values())),
    )


def _rows_and_bytes(lake: Lake, table: str) -> tuple[int, int]:
    added = pa.table(lake.open(table).get_add_actions(flatten=True))
    if not added.num_rows:  # and no column of records
        return 0, 0
    return sum(added["num_records"].to_pylist()), sum(added["size_bytes"].to_pylist())


def _run(ground: Ground, settings: Settings, name: JobName, size: int, count: int) -> list[MicroBatchCost]:
    """`count` micro-batches of a query, after a first one. BenchError."""
    settings = in_micro_batches(settings, size, name)
    watch = _Watch(settings.kafka, count + 1)
    query = launch(name, ground.spark, settings, watch)
    try:
        if not watch.enough.wait(_PATIENCE):
            said = describe_failure(query.exception()) if not query.isActive else f"{len(watch.ran)} micro-batches"
            raise BenchError(f"{name}, {size:,} records each, within {_PATIENCE:g} s: {said}")
    finally:
        query.stop()
    return watch.ran[: count + 1]


class _Watch(ProgressListener):
    """Keeps what each micro-batch did."""

    def __init__(self, kafka: Kafka, wanted: int) -> None:
        super().__init__()
        self._topics = {
            kafka.topic(topic): topic for topic in {topic for query in QUERIES.values() for topic in query.reads}
        }
        self._wanted = wanted
        self._read: dict[str, int] = {}
        self._usage = Usage(psutil.Process())
        self._cpu = dict(self._usage.look())
        self.ran: list[MicroBatchCost] = []
        self.enough = threading.Event()

    def record(self, progress: StreamingQueryProgress) -> None:
        super().record(progress)
        known = self.snapshot().get(progress.name or "")
        if known is None:
            return
        # Spark counts a record anew each time a micro-batch looks at it; the offsets count it once
        read = {self._topics[topic]: sum(parts.values()) for topic, parts in known.read.items()}
        records = {topic: end - self._read.get(topic, 0) for topic, end in read.items()}
        if not any(records.values()):
            return
        now = dict(self._usage.look())
        self.ran.append(
            MicroBatchCost(
                records,
                max(0, progress.sink.numOutputRows),
                progress.durationMs.get("triggerExecution", 0) / 1000,
                {kind: seconds - self._cpu.get(kind, 0.0) for kind, seconds in now.items()},
                sum(each.allUpdatesTimeMs + each.commitTimeMs for each in progress.stateOperators) / 1000,
            )
        )
        self._read, self._cpu = read, now
        if len(self.ran) >= self._wanted:
            self.enough.set()
