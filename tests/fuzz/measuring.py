"""CPU cost of a target per byte: the worst of the corpus and of what repeats parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


def cost(function: Target, inputs: Iterable[bytes], cuts: int, clock: Callable[[], float] = cpu_clock) -> Cost:
    """Run each input, each one repeated up to two sizes, and with a part of it repeated, `cuts` parts."""

    def measure(data: bytes) -> float:
        began = clock()
        function(data)
        return clock() - began

    found = Cost(0.0, b"", 0.0)
    for data in inputs:
        for repeated in _repeats(data, cuts):
            seconds = measure(repeated)
            if len(repeated) >= _COUNTS and seconds / len(repeated) > found.per_byte:
                seconds = min(seconds, *(measure(repeated) for _ in range(3)))
                if seconds / len(repeated) > found.per_byte:
                    found = found._replace(per_byte=seconds / len(repeated), worst=repeated)
            if len(repeated) <= LONGEST and seconds > found.longest:
                seconds = min(seconds, *(measure(repeated) for _ in range(2)))
                found = found._replace(longest=max(seconds, found.longest))
    return found


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
