"""Time series of a run's last hour, for the plots of the status page."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kiln.deploy.ops.formatting import compute_duplicate_share
from kiln.deploy.ops.snapshot import Snapshot

_EVERY: Final = 5.0  # seconds between two points
_POINTS: Final = 720  # an hour
_MIN_POINTS: Final = 60  # per plot
_WIDTH, _HEIGHT = 300.0, 60.0  # of a plot, in its own units


class HistoryPoint(NamedTuple):
    """Values at one moment, `None` if not known."""

    at: float
    """monotonic s"""
    frames_rate: float | None
    batches: int
    late_p50: float | None
    late_p99: float | None
    lag_seconds: float
    """lag of the query that is furthest behind"""
    messages: int
    copies: int
    control_entries: int


class Plot(NamedTuple):
    """A plot of one or two lines.

    Attributes:
        lines: Points of SVG polylines.
        now: Newest value of the first line.
        most: Greatest value.
        minutes: Time span of its width.
    """

    title: str
    unit: str
    lines: tuple[str, ...]
    now: float | None
    most: float
    minutes: int


class RunHistory:
    """Points, the newest last, of one writer; readers call `plots`."""

    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque(maxlen=_POINTS)

    def see(self, snapshot: Snapshot, now: float) -> None:
        """Add a snapshot, if the newest point is old enough; `now` in monotonic s."""
        if self._points and now - self._points[-1].at < _EVERY:
            return
        lags = [line.lag_seconds for line in snapshot.queries if line.lag_seconds is not None]
        self._points.append(
            HistoryPoint(
                now,
                snapshot.frames_rate,
                snapshot.batches,
                snapshot.late_p50,
                snapshot.late_p99,
                max(lags, default=0.0),
                sum(snapshot.messages.values()),
                snapshot.copies or 0,
                sum(snapshot.control_entries.values()),
            )
        )

    def plots(self) -> list[Plot]:
        """Build the plots: frames, batches, batch delay, the greatest lag, control entries, duplicates."""
        points = list(self._points)
        steps = list(pairwise(points))
        batches: list[float | None] = [
            (later.batches - earlier.batches) / (later.at - earlier.at) for earlier, later in steps
        ]
        control: list[float | None] = [
            (later.control_entries - earlier.control_entries) / (later.at - earlier.at) for earlier, later in steps
        ]
        duplicates = [
            compute_duplicate_share(later.messages - earlier.messages, later.copies - earlier.copies)
            for earlier, later in steps
        ]
        return [
            build_plot("Frames", "/s", [point.frames_rate for point in points]),
            build_plot("Batches", "/s", batches),
            build_plot("Batch delay, p50 and p99", "s", [p.late_p50 for p in points], [p.late_p99 for p in points]),
            build_plot("Lag of the slowest query", "s", [point.lag_seconds for point in points]),
            build_plot("Control entries", "/s", control),
            build_plot(
                "Duplicates among copies", "%", [None if share is None else 100 * share for share in duplicates]
            ),
        ]


def build_plot(title: str, unit: str, *series: Sequence[float | None]) -> Plot:
    """Build a plot with one scale from 0 to the greatest value, and the newest value at the right edge.

    Args:
        title: Title.
        unit: Unit of the values.
        series: Values of each line, at the interval of the history.
    """
    most = max((value for values in series for value in values if value is not None), default=0.0)
    steps = max(_MIN_POINTS, len(series[0]) - 1)
    lines = tuple(_format_points(values, most, steps) for values in series)
    known = [value for value in series[0] if value is not None]
    return Plot(title, unit, lines, known[-1] if known else None, most, round(steps * _EVERY / 60))


def _format_points(values: Sequence[float | None], most: float, steps: int) -> str:
    step = _WIDTH / steps
    first = _WIDTH - step * (len(values) - 1)
    scale = _HEIGHT / most if most > 0 else 0.0
    return " ".join(
        f"{first + step * number:.1f},{_HEIGHT - value * scale:.1f}"
        for number, value in enumerate(values)
        if value is not None
    )
