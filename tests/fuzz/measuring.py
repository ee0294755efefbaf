"""What a target costs: CPU time per byte, worst of what the corpus holds and of what repeats it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from fuzz.targets import Target

KEPT = Path(__file__).parent / "corpus"
LONGEST = 32 * 1024
"""bytes of an input that is made"""
MOST_PER_BYTE = 2.0  # µs
MOST = 0.1  # s, of one input that is not longer than LONGEST
_REPEATED = 256 * 1024
_COUNTS = 512  # bytes from which on the cost per byte says more than what a call costs


class Cost(NamedTuple):
    """Of the worst input: µs per byte, and the longest time in s of an input up to LONGEST."""

    per_byte: float
    worst: bytes
    longest: float


def corpus(*folders: Path) -> list[bytes]:
    """The inputs in the folders, in order of their names."""
    return [path.read_bytes() for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


def cost(function: Target, inputs: Iterable[bytes], cuts: int) -> Cost:
    """Runs each input, each one repeated up to two sizes, and with a part of it repeated, `cuts` parts."""
    found = Cost(0.0, b"", 0.0)
    for data in inputs:
        for each in _repeats(data, cuts):
            seconds = _seconds(function, each)
            if len(each) >= _COUNTS and seconds * 1e6 / len(each) > found.per_byte:
                seconds = min(seconds, *(_seconds(function, each) for _ in range(3)))
                if seconds * 1e6 / len(each) > found.per_byte:
                    found = found._replace(per_byte=seconds * 1e6 / len(each), worst=each)
            if len(each) <= LONGEST and seconds > found.longest:
                seconds = min(seconds, *(_seconds(function, each) for _ in range(2)))
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


def _seconds(function: Target, data: bytes) -> float:
    began = time.thread_time()
    function(data)
    return time.thread_time() - began
