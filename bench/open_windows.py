"""Time of a micro-batch of the query `batch` in Spark, with few and with many open windows."""

from __future__ import annotations

from datetime import timedelta
from statistics import median

from bench.batcher import Make, update_of, updates
from bench.catch_up import catch_up, in_micro_batches
from bench.ground import Ground
from bench.report import Aim, Finding, Ratio
from bench.runs import Extent, Side, in_turn
from kiln.pipelines.runtime.kafka import write_topic

OPEN = (200, 20_000)
"""windows"""
TOUCHED = 1_000
"""updates of a micro-batch, each for an open window"""
AIM = Aim(most=2.0)

_AT_ONCE = 100_000  # updates of a micro-batch that opens windows
_MICRO_BATCHES = 8  # per run; the first one includes the start of the query
_EVER = timedelta(days=1)  # no window ends during the measurement
_SPREAD = 7_919  # a prime: consecutive updates are for windows far apart


def measure(ground: Ground, extent: Extent) -> Finding:
    """Measure the query `batch` with few and with many open windows. Each run reads new updates."""
    few, many = (_OpenWindowsQuery(ground, extent.of(count, least=200)) for count in OPEN)
    sides: dict[str, Side] = {f"{side.count:,} open windows": side.micro_batch for side in (few, many)}
    least, most = in_turn(sides, extent.runs, "s", ground.say)
    return Finding(
        "windows",
        f"a micro-batch of {TOUCHED:,} updates of the query batch, through Spark",
        (least, most),
        (Ratio("many over few", most, least, AIM),),
        {"micro-batches a run": _MICRO_BATCHES - 1, "master": few.settings.spark.master},
    )


class _OpenWindowsQuery:
    """A query `batch` with `count` open windows, each with another separator."""

    def __init__(self, ground: Ground, count: int) -> None:
        self.count = count
        self._ground = ground
        self._written = 0
        settings = ground.plot(f"windows-{count}")
        long = settings.batch.model_copy(update={"window": _EVER})
        self.settings = settings.model_copy(update={"batch": long})
        ground.say(f"opening {count:,} windows")
        self._read(count, _AT_ONCE)

    def micro_batch(self, run: int) -> float:
        """Return the median time of a micro-batch of a run, from trigger to commit, s."""
        return median(self._read(TOUCHED * _MICRO_BATCHES, TOUCHED)[1:])

    def _read(self, updates_more: int, at_once: int) -> list[float]:
        first, self._written = self._written, self._written + updates_more
        numbers = range(first, self._written)
        ground, settings = self._ground, in_micro_batches(self.settings, at_once, "batch")
        write_topic(updates(ground.spark, _of(self.count), numbers), ground.broker(settings), "updates")
        ends = ground.ends(settings, "updates")
        return [each.seconds for each in catch_up(ground.spark, settings, "batch", {"updates": ends})]


def _of(count: int) -> Make:
    def make(number: int) -> tuple[bytes, bytes]:
        separator = number if number < count else number * _SPREAD % count
        return update_of(number, number // TOUCHED, separator, separator)

    return make
