"""Speed of a backfill run that reads the table `frames`, compared with a plain Spark read and write of that table."""

from __future__ import annotations

import shutil
import time

from bench.frames import GENERATED, generated, live_options, stamped_anew
from bench.ground import Ground
from bench.report import Aim, Finding, Ratio
from bench.runs import Extent, Side, in_turn
from kiln.conf.settings.model import Settings
from kiln.pipelines.app.backfill_run import Engine, backfill, build_terms
from kiln.pipelines.backfill.run import RunOutcome
from kiln.pipelines.backfill.terms import RunTerms, TimeRange
from kiln.pipelines.decode.frame_row import build_frame_row
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.tables import read_table
from kiln.schemas.proto.kiln.frame_pb2 import Frame

FRAMES = 300_000
AIM = Aim(least=0.28)

_FILE = 50_000  # frames


def measure(ground: Ground, extent: Extent) -> Finding:
    """Measure a backfill run with the native core and in Python, and a copy of the table by Spark, in frames/s.

    Each backfill run writes tables of its own.
    """
    settings = ground.plot("backfill")
    count = extent.of(FRAMES)
    lake = Lake.from_location(settings.lake_root)
    ground.say(f"writing {count:,} frames")
    span = _write(lake, count, extent)
    rows: dict[str, int] = {}

    def decoded_by(engine: Engine) -> Side:
        def run_of_all(run: int) -> float:
            terms = build_terms(settings, f"{engine}-{run}", *span, engine=engine)
            seconds, outcome = _run(ground, settings, terms)
            rows.update(outcome.rows)
            return count / seconds

        return run_of_all

    def copy(run: int) -> float:
        started = time.perf_counter()
        path = f"{settings.state}/copy"
        read_table(ground.spark, lake, "frames").write.format("delta").mode("overwrite").save(path)
        return count / (time.perf_counter() - started)

    sides = {
        "backfill": decoded_by("core"),
        "backfill in Python": decoded_by("python"),
        "Spark read and write": copy,
    }
    ground.say("warming up")
    for side in sides.values():
        side(0)
    running, in_python, copying = in_turn(sides, extent.runs, "frames/s", ground.say)
    settings.lake_root.remove_all()
    return Finding(
        "backfill",
        "backfill run from the table frames, compared with a Spark read and write of that table",
        (running, in_python, copying),
        (
            Ratio("backfill over read and write", running, copying, AIM),
            Ratio("backfill over itself in Python", running, in_python),
        ),
        {"frames": count, **rows, "master": settings.spark.master},
    )


def _run(ground: Ground, settings: Settings, terms: RunTerms) -> tuple[float, RunOutcome]:
    """Make a backfill run, and delete its tables. Return the duration of the run in seconds, and its outcome."""
    started = time.perf_counter()
    outcome = backfill(ground.spark, settings, terms, lambda: False, lambda _: None)
    seconds = time.perf_counter() - started
    shutil.rmtree(Lake.from_location(settings.lake_root).locate_run(terms.name).path)
    return seconds, outcome


def _write(lake: Lake, count: int, extent: Extent) -> TimeRange:
    """Write `count` frames to the table `frames`, and return the range of their capture times.

    A part of the frames is generated. The others are repeats of this part, each with later times.
    """
    lake.create(("frames",))
    commits, files = DeltaRsCommits(lake), TableFiles(lake, "frames")
    some = generated(min(count, extent.of(GENERATED)), live_options())
    times = [Frame.FromString(value).observed_at for _, value in (some[0], some[-1])]
    span = times[1] - times[0] + 1_000_000_000
    for offset, (_, value) in enumerate(stamped_anew(some, count)):
        frame = Frame.FromString(value)
        frame.observed_at += offset // len(some) * span  # one repeat after the other
        files.add(build_frame_row(0, offset, frame.observed_at // 1000, frame), len(value))
        if offset % _FILE == _FILE - 1:
            commits.commit("frames", files.close(), WriteId("bench", offset))
            files = TableFiles(lake, "frames")
    commits.commit("frames", files.close(), WriteId("bench", count))
    low = times[0] // 1000 - 1
    return TimeRange(low, low + -(-count // len(some)) * (span // 1000))
