"""Speed of a backfill run that reads the table `frames`, compared with a plain Spark read and write of that table. Also
the time per frame of runs over few and many frames."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from bench.frames import GENERATED, generated, live_options, stamped_anew
from bench.ground import Ground
from bench.processes import Usage
from bench.report import Aim, Finding, Note, Ratio, Series
from bench.runs import Extent, Side, in_turn
from kiln.conf.settings.model import Settings
from kiln.pipelines.app.backfill_run import Engine, backfill, build_terms
from kiln.pipelines.backfill.run import RunOutcome, RunProgress
from kiln.pipelines.backfill.terms import RunTerms
from kiln.pipelines.decode.frame_row import build_frame_row
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.tables import read_table
from kiln.schemas.proto.kiln.frame_pb2 import Frame

FRAMES = 300_000
AIM = Aim(least=0.28)
SIZES = (200_000, 2_000_000, 10_000_000)
GROWTH_AIM = Aim(least=0.85, most=1.15)

_FILE = 50_000  # frames


@dataclass(frozen=True)
class _History:
    """Capture times of the written frames, which are the same generated frames several times, one repeat after another.

    All times are in µs.
    """

    low: int
    """a time just before the first frame"""
    repeat: int
    """number of frames in a repeat"""
    takes: int
    """time from the start of a repeat to the start of the next one"""

    def until(self, frames: int) -> int:
        """Return the end of the repeat that contains the last of the first `frames` frames."""
        return self.low + -(-frames // self.repeat) * self.takes


def measure(ground: Ground, extent: Extent) -> Finding:
    """Measure a backfill run with the native core and in Python, and a copy of the table by Spark, in frames/s.

    Each backfill run writes tables of its own.
    """
    settings = ground.plot("backfill")
    count = extent.of(FRAMES)
    lake = Lake.from_location(settings.lake_root)
    ground.say(f"writing {count:,} frames")
    history = _write(lake, count, extent)
    rows: dict[str, int] = {}

    def decoded_by(engine: Engine) -> Side:
        def run_of_all(run: int) -> float:
            terms = build_terms(settings, f"{engine}-{run}", history.low, history.until(count), engine=engine)
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


def measure_growth(ground: Ground, extent: Extent) -> Finding:
    """Measure the time per frame of backfill runs over few and over many frames of one lake, in turn.

    The memory of each kind of process is read before each step of a run.
    """
    settings = ground.plot("backfill-growth")
    lake = Lake.from_location(settings.lake_root)
    some = extent.of(GENERATED)
    sizes = [max(1, extent.of(size) // some) * some for size in SIZES]  # whole repeats
    ground.say(f"writing {max(sizes):,} frames")
    history = _write(lake, max(sizes), extent)
    usage = Usage(psutil.Process())
    memory: dict[int, dict[str, list[float]]] = {size: {} for size in sizes}

    def side(size: int) -> Callable[[int], float]:
        def read_memory(_: RunProgress) -> None:
            for kind, mb in usage.memory().items():
                memory[size].setdefault(kind, []).append(mb)

        def cost(run: int) -> float:
            terms = build_terms(settings, f"{size}-{run}", history.low, history.until(size))
            return 1e6 * _run(ground, settings, terms, read_memory)[0] / size

        return cost

    sides = {f"{size:,} frames": side(size) for size in sizes}
    ground.say("warming up")
    next(iter(sides.values()))(0)
    memory[min(sizes)].clear()
    least, *larger = found = in_turn(sides, extent.runs, "µs/frame", ground.say)
    settings.lake_root.remove_all()
    notes: dict[str, Note] = {"master": settings.spark.master, "frames a chunk": settings.backfill.frames_per_chunk}
    for size, kinds in memory.items():
        notes |= {f"{kind}, {size:,} frames, MB": f"{min(mb):.0f} to {max(mb):.0f}" for kind, mb in kinds.items()}
    last = memory[max(sizes)]
    series = (Series(f"{kind}, {max(sizes):,} frames, by step", "MB", tuple(mb)) for kind, mb in last.items())
    ratios = tuple(Ratio(f"{each.name} over {least.name}", each, least, GROWTH_AIM) for each in larger)
    return Finding(
        "backfill-growth", "time per frame of a backfill run, by number of frames", (*found, *series), ratios, notes
    )


def _run(
    ground: Ground, settings: Settings, terms: RunTerms, report: Callable[[RunProgress], None] = lambda _: None
) -> tuple[float, RunOutcome]:
    """Make a backfill run, and delete its tables. Return the duration of the run in seconds, and its outcome."""
    started = time.perf_counter()
    outcome = backfill(ground.spark, settings, terms, lambda: False, report)
    seconds = time.perf_counter() - started
    shutil.rmtree(Lake.from_location(settings.lake_root).locate_run(terms.name).path)
    return seconds, outcome


def _write(lake: Lake, count: int, extent: Extent) -> _History:
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
    return _History(times[0] // 1000 - 1, len(some), span // 1000)
