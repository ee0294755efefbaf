"""The query `archive`, with the native core and in Python, beside a raw copy of the same frames by Spark: what all that
Kiln makes of a frame costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from pyspark.sql import DataFrame

from bench.catch_up import catch_up, in_micro_batches
from bench.frames import GENERATED, append, generated, live_options, stamped_anew
from bench.ground import Ground
from bench.report import Aim, Finding, Ratio
from bench.runs import BenchError, Extent, in_turn
from kiln.conf.settings.model import Settings
from kiln.pipelines.app import launch
from kiln.pipelines.decode.decoder import DecodeConfig
from kiln.pipelines.native.library import find_engine
from kiln.pipelines.runtime.kafka import read_topics

FRAMES = 300_000
AIM = Aim(least=0.70)


@contextmanager
def _in_python() -> Iterator[None]:
    """Start queries without the native core."""
    read = launch.decode_config

    def decode_config(settings: Settings, *, remember: bool = False) -> DecodeConfig:
        return replace(read(settings, remember=remember), native_core=False)

    with patch.object(launch, "decode_config", decode_config):
        yield


def measure(ground: Ground, extent: Extent) -> Finding:
    """The query has a fresh checkpoint and fresh tables in each run. Its time is that of its one micro-batch; the copy
    is a batch job, so that neither pays for a start."""
    engine = find_engine()
    if not engine.is_native:
        raise BenchError(f"there is no native core to measure: {engine.reason}")
    settings = in_micro_batches(ground.plot("decode"), 0, "archive")
    count = extent.of(FRAMES)
    ground.say(f"writing {count:,} frames")
    ends = append(ground, settings, stamped_anew(generated(extent.of(GENERATED), live_options()), count))
    broker = ground.broker(settings)
    rows: dict[str, int] = {}

    def archive(run: int) -> float:
        with ground.fresh(settings, "quarantine") as fresh:
            seconds = sum(each.seconds for each in catch_up(ground.spark, fresh, "archive", {"frames": ends}))
            for table in ("frames", "copies", "messages"):
                rows[table] = ground.spark.read.format("delta").load((fresh.lake_root / table).uri).count()
        return count / seconds

    def copy(run: int) -> float:
        records: DataFrame = read_topics(ground.spark, broker, ["frames"])
        started = time.perf_counter()
        path = (settings.lake_root / "raw").uri
        records.select("partition", "offset", "stamp", "value").write.format("delta").mode("append").save(path)
        return count / (time.perf_counter() - started)

    def archive_in_python(run: int) -> float:
        with _in_python():
            return archive(run)

    sides = {"archive": archive, "archive in Python": archive_in_python, "raw copy → Delta": copy}
    ground.say("warming up")
    for side in sides.values():
        side(0)
    archiving, in_python, copying = in_turn(sides, extent.runs, "frames/s", ground.say)
    settings.lake_root.remove_all()
    return Finding(
        "decode",
        "frames from Kafka to frames, copies, messages (first copies) and quarantine, over a raw copy into Delta",
        (archiving, in_python, copying),
        (
            Ratio("archive over raw copy", archiving, copying, AIM),
            Ratio("archive over itself in Python", archiving, in_python),
        ),
        {"frames": count, **rows, "master": settings.spark.master},
    )
