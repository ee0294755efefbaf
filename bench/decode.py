"""Decoding frames into Delta beside a raw copy of the same frames: what decoding costs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from pyspark.sql import DataFrame

from bench.frames import GENERATED, append, generated, live_options, stamped_anew
from bench.ground import Ground
from bench.report import Aim, Finding, Ratio
from bench.runs import Extent, in_turn
from pipelines.lake.append import Write, append_once
from pipelines.lake.lake import Lake
from pipelines.logic.decode import Decoding
from pipelines.spark.kafka import read_topics
from pipelines.transforms.messages import decoded, good

FRAMES = 300_000
AIM = Aim(least=0.6)


def measure(ground: Ground, extent: Extent) -> Finding:
    """Both read the topic as a batch, so that neither has a checkpoint or state to pay for."""
    settings = ground.plot("decode")
    count = extent.of(FRAMES)
    ground.say(f"writing {count:,} frames")
    append(ground, settings, stamped_anew(generated(extent.of(GENERATED), live_options()), count))
    broker, lake, how = ground.broker(settings), Lake(str(settings.lake)), Decoding()

    def decode(records: DataFrame, run: int) -> None:
        append_once(good(decoded(records, how)), lake, "messages", Write("bench", run))

    def copy(records: DataFrame, run: int) -> None:
        records.select("partition", "offset", "stamp", "value").write.format("delta").mode("append").save(
            lake.table("raw")
        )

    def rate(write: Callable[[DataFrame, int], None]) -> Callable[[int], float]:
        def side(run: int) -> float:
            started = time.perf_counter()
            write(read_topics(ground.spark, broker, ["frames"]), run)
            return count / (time.perf_counter() - started)

        return side

    lake.create(["messages"])
    sides = {"decode → Delta": rate(decode), "raw copy → Delta": rate(copy)}
    ground.say("warming up")
    for side in sides.values():
        side(0)
    decoding, copying = in_turn(sides, extent.runs, "frames/s", ground.say)
    rows = ground.spark.read.format("delta").load(lake.table("messages")).count() // (extent.runs + 1)
    shutil.rmtree(settings.lake)
    return Finding(
        "decode",
        "frames from Kafka into Delta, decoded and raw",
        (decoding, copying),
        (Ratio("decode over raw copy", decoding, copying, AIM),),
        {"frames": count, "rows": rows, "master": settings.spark.master},
    )
