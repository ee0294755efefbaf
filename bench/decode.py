"""Speed of the queries `archive` and `updates`, with the native core and in Python, compared with a raw copy of the
same frames by Spark. The difference is the time for all that Kiln does with a frame."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import psutil
from pyspark.sql import functions as F

from bench.catch_up import catch_up, in_micro_batches
from bench.frames import GENERATED, append, generated, live_options, stamped_anew
from bench.ground import Ground
from bench.processes import Usage
from bench.report import Aim, Finding, Ratio, Series
from bench.runs import BenchError, Extent, Side, in_turn
from kiln.conf.settings.model import JobName, Settings
from kiln.pipelines.app import launch
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.native.library import find_engine

FRAMES = 300_000
AIMS = {"archive": Aim(least=0.70), "updates": Aim(least=0.55)}
QUERIES: tuple[JobName, ...] = ("archive", "updates")
# Spark's Kafka source requests the end offsets after each poll, and the broker answers in order: by default, this takes
# half a second if there are no new records
_SOURCE = {
    "kafka.max.partition.fetch.bytes": str(16 << 20),
    "kafka.fetch.max.wait.ms": "1",
    "kafka.isolation.level": "read_committed",
}


@contextmanager
def _in_python() -> Iterator[None]:
    """Make queries that start in this context decode in Python, without the native core."""
    read = launch.decode_config

    def decode_config(settings: Settings, *, remember: bool = False) -> DecodeConfig:
        return replace(read(settings, remember=remember), native_core=False)

    with patch.object(launch, "decode_config", decode_config):
        yield


def measure(ground: Ground, extent: Extent) -> Finding:
    """Measure the queries `archive` and `updates`, and a raw copy by Spark.

    In each run, a query has a new checkpoint and new tables, and reads all frames in one micro-batch. Only the time of
    this micro-batch counts. The copy is a Spark batch job. So no startup is measured.
    """
    engine = find_engine()
    if not engine.is_native:
        raise BenchError(f"there is no native core to measure: {engine.reason}")
    settings = in_micro_batches(ground.plot("decode"), 0, *QUERIES)
    count = extent.of(FRAMES)
    ground.say(f"writing {count:,} frames")
    ends = append(ground, settings, stamped_anew(generated(extent.of(GENERATED), live_options()), count))
    broker = ground.broker(settings)
    usage = Usage(psutil.Process())
    rows: dict[str, int] = {}
    cpu: dict[str, list[float]] = {}

    def catch_up_with(query: JobName, name: str, run: int) -> float:
        with ground.fresh(settings, "updates", "quarantine") as fresh:
            before = _processor_time(usage)
            seconds = sum(micro_batch.seconds for micro_batch in catch_up(ground.spark, fresh, query, {"frames": ends}))
            if run:
                cpu.setdefault(name, []).append(1e6 * (_processor_time(usage) - before) / count)
            for table in ("frames", "copies", "messages") if query == "archive" else ():
                rows[table] = ground.spark.read.format("delta").load((fresh.lake_root / table).uri).count()
        return count / seconds

    def catch_up_in_python(query: JobName, name: str, run: int) -> float:
        with _in_python():
            return catch_up_with(query, name, run)

    def copy(run: int) -> float:
        records = ground.spark.read.format("kafka").options(**_SOURCE, **broker.options)
        frames = records.option("subscribe", broker.topic("frames")).load()
        started = time.perf_counter()
        path = (settings.lake_root / "raw").uri
        stamp = F.unix_micros("timestamp").alias("stamp")
        frames.select("partition", "offset", stamp, "value").write.format("delta").mode("append").save(path)
        return count / (time.perf_counter() - started)

    sides: dict[str, Side] = {"raw copy → Delta": copy}
    for query in QUERIES:
        sides[query] = partial(catch_up_with, query, query)
        sides[f"{query} in Python"] = partial(catch_up_in_python, query, f"{query} in Python")
    ground.say("warming up")
    for side in sides.values():
        side(0)
    series = {one_series.name: one_series for one_series in in_turn(sides, extent.runs, "frames/s", ground.say)}
    settings.lake_root.remove_all()
    both = {
        name: Series(
            f"CPU of both queries{name}",
            "µs/frame",
            tuple(map(sum, zip(*(cpu[query + name] for query in QUERIES), strict=True))),
        )
        for name in ("", " in Python")
    }
    copying = series["raw copy → Delta"]
    return Finding(
        "decode",
        "the queries archive and updates, compared with a raw copy of the same frames from Kafka to Delta",
        (*series.values(), *both.values()),
        (
            *(Ratio(f"{query} over raw copy", series[query], copying, AIMS[query]) for query in QUERIES),
            *(
                Ratio(f"{query} over itself in Python", series[query], series[f"{query} in Python"])
                for query in QUERIES
            ),
            Ratio("CPU of both queries in Python over the native core", both[" in Python"], both[""]),
        ),
        {"frames": count, **rows, "master": settings.spark.master},
    )


def _processor_time(usage: Usage) -> float:
    """Return the CPU time of all processes of the bench so far, without the broker, s."""
    return sum(seconds for kind, seconds in usage.look().items() if kind != "broker")
