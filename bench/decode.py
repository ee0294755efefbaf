"""The query `archive` beside a raw copy of the same frames by Spark: what all that Kiln makes of a frame costs."""

from __future__ import annotations

import time

from pyspark.sql import DataFrame

from bench.catch_up import catch_up, in_micro_batches
from bench.frames import GENERATED, append, generated, live_options, stamped_anew
from bench.ground import Ground
from bench.report import Aim, Finding, Ratio
from bench.runs import Extent, in_turn
from kiln.pipelines.runtime.kafka import read_topics

FRAMES = 300_000
AIM = Aim(least=0.33)


def measure(ground: Ground, extent: Extent) -> Finding:
    """The query has a fresh checkpoint and fresh tables in each run. Its time is that of its one micro-batch; the copy
    is a batch job, so that neither pays for a start."""
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

    sides = {"archive": archive, "raw copy → Delta": copy}
    ground.say("warming up")
    for side in sides.values():
        side(0)
    archiving, copying = in_turn(sides, extent.runs, "frames/s", ground.say)
    settings.lake_root.remove_all()
    return Finding(
        "decode",
        "frames from Kafka to frames, copies, messages (first copies) and quarantine, over a raw copy into Delta",
        (archiving, copying),
        (Ratio("archive over raw copy", archiving, copying, AIM),),
        {"frames": count, **rows, "master": settings.spark.master},
    )
