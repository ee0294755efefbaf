"""Runs of a comparison. Its sides, the programs to compare, run in turn, so that other load affects all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.report import Series, number

Say = Callable[[str], None]
Side = Callable[[int], float]
"""One of the programs of a comparison: a function that gets the number of the run and returns the measured value. Runs
begin with 1; run 0 warms up."""


class BenchError(RuntimeError):
    """A measurement failed."""


@dataclass(frozen=True)
class Extent:
    """Number of runs of each side, and factor for all sizes.

    Raises:
        ValueError: One of them is not greater than 0.
    """

    runs: int = 5
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.runs < 1 or not self.scale > 0:
            raise ValueError(f"{self.runs} runs at scale {self.scale:g}: both must be above 0")

    def of(self, size: int, least: int = 1) -> int:
        """Scale a size, and return at least `least`."""
        return max(least, round(size * self.scale))


def in_turn(sides: Mapping[str, Side], runs: int, unit: str, say: Say) -> tuple[Series, ...]:
    """Run all sides in turn, `runs` times, and return a series for each side, in the order of `sides`."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(1, runs + 1):
        for name, side in sides.items():
            value = side(run)
            values[name].append(value)
            say(f"run {run} of {runs}: {name}: {number(value)} {unit}")
    return tuple(Series(name, unit, tuple(side_values)) for name, side_values in values.items())
