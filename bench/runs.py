"""Runs in turn: what is compared is measured side by side, so that what disturbs the machine strikes both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.report import Series, number

Say = Callable[[str], None]
Side = Callable[[int], float]
"""Measures once; takes the number of the run, from 1."""


class BenchError(RuntimeError):
    """A measurement could not be made; the text says why."""


@dataclass(frozen=True)
class Extent:
    """How much is measured: `runs` of each side, and sizes times `scale`. ValueError unless both are above 0."""

    runs: int = 5
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.runs < 1 or not self.scale > 0:
            raise ValueError(f"{self.runs} runs at scale {self.scale:g}: both must be above 0")

    def of(self, size: int, least: int = 1) -> int:
        """A size that is `size` at scale 1, and never under `least`."""
        return max(least, round(size * self.scale))


def in_turn(sides: Mapping[str, Side], runs: int, unit: str, say: Say) -> tuple[Series, ...]:
    """One run of each side, then the next of each, `runs` times. A series for each, in the order of `sides`."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(1, runs + 1):
        for name, side in sides.items():
            value = side(run)
            values[name].append(value)
            say(f"run {run} of {runs}: {name}: {number(value)} {unit}")
    return tuple(Series(name, unit, tuple(found)) for name, found in values.items())
