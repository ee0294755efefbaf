"""Time per frame of the queries `archive` and `updates` when they catch up with topics of few and of many frames."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from bench.catch_up import MicroBatch, catch_up, in_micro_batches
from bench.frames import GENERATED, append, generated, live_options, stamped_anew
from bench.ground import Ends, Ground
from bench.report import Aim, Finding, Ratio, Series, number
from bench.runs import Extent
from kiln.conf.settings.model import JobName, Settings

SIZES = (100_000, 1_000_000, 5_000_000)
MICRO_BATCH = 100_000
"""records of a micro-batch, the same for all sizes, so that each commit has equally many frames"""
QUERIES: tuple[JobName, ...] = ("archive", "updates")
AIM = Aim(least=0.85, most=1.15)

_Ran = Mapping[JobName, list[MicroBatch]]


def measure(ground: Ground, extent: Extent) -> Finding:
    """Measure `archive` and `updates` one after the other, each from a new checkpoint. Only their micro-batches count.

    The first micro-batch reads additional frames and does not count, because it includes the start of the query.
    """
    micro_batch = extent.of(MICRO_BATCH, least=10_000)
    frames = generated(extent.of(GENERATED), live_options())
    plots: dict[int, tuple[Settings, Ends]] = {}
    for size in (extent.of(size) for size in SIZES):
        settings = in_micro_batches(ground.plot(f"growth-{size}"), micro_batch, *QUERIES)
        ground.say(f"writing {size:,} frames, and {micro_batch:,} for the first micro-batch")
        plots[size] = settings, append(ground, settings, stamped_anew(frames, size + micro_batch))
    ground.say("warming up")
    _catch_up(ground, *plots[min(plots)])
    runs_by_size: dict[int, list[_Ran]] = {size: [] for size in plots}
    for run in range(1, extent.runs + 1):
        for size, (settings, ends) in plots.items():
            ran = _catch_up(ground, settings, ends)
            runs_by_size[size].append(ran)
            shown = ", ".join(f"{name} {number(cost(ran[name]))}" for name in QUERIES)
            ground.say(f"run {run} of {extent.runs}: {size:,} frames: {shown} µs a frame")
    return _finding(runs_by_size, micro_batch, plots[min(plots)][0].spark.master)


def cost(micro_batches: list[MicroBatch]) -> float:
    """Return the time per frame of all micro-batches except the first, µs."""
    counted = micro_batches[1:]
    return (
        1e6 * sum(micro_batch.seconds for micro_batch in counted) / sum(micro_batch.records for micro_batch in counted)
    )


def _catch_up(ground: Ground, settings: Settings, ends: Ends) -> _Ran:
    with ground.fresh(settings, "updates", "quarantine") as fresh:
        return {name: catch_up(ground.spark, fresh, name, {"frames": ends}) for name in QUERIES}


def _finding(runs_by_size: Mapping[int, list[_Ran]], micro_batch: int, master: str) -> Finding:
    series = {
        (size, name): Series(f"{name}, {size:,} frames", "µs/frame", tuple(cost(ran[name]) for ran in runs))
        for size, runs in runs_by_size.items()
        for name in QUERIES
    }
    whole = {
        size: Series(
            f"both, {size:,} frames", "µs/frame", tuple(sum(cost(ran[name]) for name in QUERIES) for ran in runs)
        )
        for size, runs in runs_by_size.items()
    }
    least, *larger = runs_by_size
    ratios = [
        Ratio(f"{name}, {size:,} over {least:,} frames", series[size, name], series[least, name])
        for size in larger
        for name in QUERIES
    ]
    ratios += [Ratio(f"all, {size:,} over {least:,} frames", whole[size], whole[least], AIM) for size in larger]
    starts = [ran[name][0].seconds for runs in runs_by_size.values() for ran in runs for name in QUERIES]
    return Finding(
        "growth",
        "time per frame, by number of frames in the topic",
        (*series.values(), *whole.values()),
        tuple(ratios),
        {"frames a micro-batch": micro_batch, "s of the first": round(median(starts), 1), "master": master},
    )
