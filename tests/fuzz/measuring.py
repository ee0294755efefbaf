"""CPU cost of a target per byte: the worst of the corpus and of what repeats parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from fuzz.targets import Target
from kit.cpu_time import cpu_clock

KEPT = Path(__file__).parent / "corpus"
LONGEST = 32 * 1024
"""bytes of an input that is made"""
MOST_PER_BYTE = 50  # steps of `kit.cpu_time`
MOST = 2_500_000  # steps, of one input that is not longer than LONGEST
_REPEATED = 256 * 1024
_COUNTS = 512  # bytes from which on the cost per byte says more than what a call costs


class Cost(NamedTuple):
    """Cost of the worst input in seconds per byte, and the longest time in seconds of an input up to LONGEST."""

    per_byte: float
    worst: bytes
    longest: float


def corpus(*folders: Path) -> list[bytes]:
    """The inputs in the folders, in order of their names."""
    return [path.read_bytes() for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


class _Run(NamedTuple):
    """A run on the variant `number` of an input (`_repeats`)."""

    seconds: float
    size: int
    data: bytes
    number: int


def cost(function: Target, inputs: Iterable[bytes], cuts: int, clock: Callable[[], float] = cpu_clock) -> Cost:
    """Run each input, each one repeated up to two sizes, and with a part of it repeated, `cuts` parts."""

    def measure(data: bytes) -> float:
        began = clock()
        function(data)
        return clock() - began

    def find_most(found: Iterable[_Run], weigh: Callable[[float, int], float]) -> tuple[float, bytes]:
        """Find the run with the highest cost. What seems highest is measured again: load may have added to it."""
        most, worst = 0.0, b""
        for run in sorted(found, key=lambda run: weigh(run.seconds, run.size), reverse=True):
            if weigh(run.seconds, run.size) <= most:
                break
            variant = next(islice(_repeats(run.data, cuts), run.number, None))
            seconds = min(run.seconds, *(measure(variant) for _ in range(3)))
            if weigh(seconds, run.size) > most:
                most, worst = weigh(seconds, run.size), variant
        return most, worst

    runs = [
        _Run(measure(variant), len(variant), data, number)
        for data in inputs
        for number, variant in enumerate(_repeats(data, cuts))
    ]
    per_byte, worst = find_most((run for run in runs if run.size >= _COUNTS), lambda seconds, size: seconds / size)
    longest, _ = find_most((run for run in runs if run.size <= LONGEST), lambda seconds, _: seconds)
    return Cost(per_byte, worst, longest)


def _repeats(data: bytes, cuts: int) -> Iterator[bytes]:
    yield data
    for size in (LONGEST, _REPEATED):
        if 0 < len(data) <= size // 2:
            yield data * (size // len(data))
    random = Random(len(data))
    for _ in range(cuts if 0 < len(data) < LONGEST else 0):  # what is between stays well-formed, often
        at = random.randrange(len(data))
        end = at + random.randint(1, 24)
        yield data[:at] + data[at:end] * ((LONGEST - len(data)) // len(data[at:end])) + data[end:]
