"""A backfill run out of the table `frames` beside a plain Spark read and write of the same table."""

from __future__ import annotations

import shutil
import time

from bench.frames import GENERATED, generated, live_options, stamped_anew
from bench.ground import Ground
from bench.report import Aim, Finding, Ratio
from bench.runs import Extent, in_turn
from pipelines.backfill import Request, backfill, terms_of
from pipelines.lake.commits import Write
from pipelines.lake.delta_rs import DeltaRsCommits
from pipelines.lake.files import TableFiles
from pipelines.lake.lake import Lake
from pipelines.lake.tables import read_table
from pipelines.transforms.archive import frame_row
from schemas.proto.kiln.frame_pb2 import Frame

FRAMES = 300_000
AIM = Aim(least=0.5)

_FILE = 50_000  # frames


def measure(ground: Ground, extent: Extent) -> Finding:
    """Each run has tables of its own. History was never live, so the run stamps each update itself."""
    settings = ground.plot("backfill")
    count = extent.of(FRAMES)
    lake = Lake.at(settings.lake_root)
    ground.say(f"writing {count:,} frames")
    low, high = _write(lake, count, extent)
    rows: dict[str, int] = {}

    def history(run: int) -> float:
        started = time.perf_counter()
        request = Request(f"run-{run}", low, high)
        outcome = backfill(ground.spark, settings, terms_of(settings, request), lambda: False, lambda _: None)
        seconds = time.perf_counter() - started
        rows.update(outcome.rows)
        shutil.rmtree(lake.run(request.name).path)
        return count / seconds

    def copy(run: int) -> float:
        started = time.perf_counter()
        path = f"{settings.state}/copy"
        read_table(ground.spark, lake, "frames").write.format("delta").mode("overwrite").save(path)
        return count / (time.perf_counter() - started)

    sides = {"backfill": history, "Spark read and write": copy}
    ground.say("warming up")
    for side in sides.values():
        side(0)
    running, copying = in_turn(sides, extent.runs, "frames/s", ground.say)
    settings.lake_root.remove_all()
    return Finding(
        "backfill",
        "frames of the lake to all tables of a run, over a Spark read and write of the table frames",
        (running, copying),
        (Ratio("backfill over read and write", running, copying, AIM),),
        {"frames": count, **rows, "master": settings.spark.master},
    )


def _write(lake: Lake, count: int, extent: Extent) -> tuple[int, int]:
    """Fills the table `frames`; returns the range in which the frames were heard, µs."""
    lake.create(("frames",))
    commits, files = DeltaRsCommits(lake), TableFiles(lake, "frames")
    some = generated(min(count, extent.of(GENERATED)), live_options())
    times = [Frame.FromString(value).observed_at for _, value in (some[0], some[-1])]
    span = times[1] - times[0] + 1_000_000_000
    for offset, (_, value) in enumerate(stamped_anew(some, count)):
        frame = Frame.FromString(value)
        frame.observed_at += offset // len(some) * span  # one repeat after the other
        files.add(frame_row(0, offset, frame.observed_at // 1000, frame), len(value))
        if offset % _FILE == _FILE - 1:
            commits.commit("frames", files.close(), Write("bench", offset))
            files = TableFiles(lake, "frames")
    commits.commit("frames", files.close(), Write("bench", count))
    return times[0] // 1000 - 1, (times[0] + (count // len(some) + 1) * span) // 1000
