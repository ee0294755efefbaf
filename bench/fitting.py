"""A cost as a sum of parts, each in proportion to a count: the parts that come nearest to what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

Counts = Mapping[str, float]
"""How many there were of each thing: {"micro-batch": 1, "frame": 20_000}."""


@dataclass(frozen=True)
class CostSample:
    """What so many of each took."""

    counts: Counts
    took: float


@dataclass(frozen=True)
class Cost:
    """What one of each takes, in the unit of the points."""

    each: Counts

    def of(self, counts: Counts) -> float:
        """What so many of each take. KeyError: a thing that the cost knows nothing of."""
        return sum(self.each[name] * count for name, count in counts.items())


def fit(points: Sequence[CostSample]) -> Cost:
    """The cost with no part below 0 that has the least squares of relative errors.

    ValueError: there are fewer points than parts, or a point took nothing.
    """
    names = list(points[0].counts) if points else []
    if len(points) < len(names) or not names:
        raise ValueError(f"{len(points)} points cannot say what each of {len(names)} parts takes")
    if any(point.took <= 0 for point in points):
        raise ValueError("a point took nothing")
    rows = np.array([[point.counts[name] / point.took for name in names] for point in points])
    best, nearest = dict.fromkeys(names, 0.0), float("inf")
    # Parts are few, so every choice of those that are above 0 is tried: the best of these is the answer.
    for many in range(1, len(names) + 1):
        for chosen in combinations(range(len(names)), many):
            part = rows[:, chosen]
            scale = np.abs(part).max(axis=0)
            if not scale.all():
                continue
            found, *_ = np.linalg.lstsq(part / scale, np.ones(len(points)), rcond=None)
            found = found / scale
            error = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < nearest:
                nearest = error
                best = dict.fromkeys(names, 0.0) | {
                    names[place]: float(value) for place, value in zip(chosen, found, strict=True)
                }
    return Cost(best)
