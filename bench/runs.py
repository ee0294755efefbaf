"""Runs in turn: the sides of a comparison alternate, so that other load on the machine affects all sides alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.report import Series, number

Say = Callable[[str], None]
Side = Callable[[int], float]
"""Function that measures once, from the number of the run, which begins with 1."""


class BenchError(RuntimeError):
    """A measurement failed."""


@dataclass(frozen=True)
class Extent:
    """Number of `runs` of each side, and `scale` as factor of sizes. ValueError: one of them is not above 0."""

    runs: int = 5
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.runs < 1 or not self.scale > 0:
            raise ValueError(f"{self.runs} runs at scale {self.scale:g}: both must be above 0")

    def of(self, size: int, least: int = 1) -> int:
        """Scale a size, to `least` or more."""
        return max(least, round(size * self.scale))


def in_turn(sides: Mapping[str, Side], runs: int, unit: str, say: Say) -> tuple[Series, ...]:
    """Run all sides in turn, `runs` times, and return a series for each side, in the order of `sides`."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(1, runs + 1):
        for name, side in sides.items():
            value = side(run)
            values[name].append(value)
            say(f"run {run} of {runs}: {name}: {number(value)} {unit}")
    return tuple(Series(name, unit, tuple(found)) for name, found in values.items())
