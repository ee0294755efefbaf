"""Metrics, health, readiness and status page of `kiln run`, for the HTTP exporter.

The page has the values of the terminal screen, and plots of the last hour. It is HTML that reloads itself, without
scripts or external resources.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Final, NamedTuple, Self

from jinja2 import Environment, PackageLoader, StrictUndefined
from prometheus_client.metrics_core import Metric

from kiln.conf.process.exporter import Exporter
from kiln.deploy.ops.formatting import (
    compute_copies_per_message,
    compute_duplicate_share,
    format_clock,
    format_count,
    format_range,
    format_rate,
    format_seconds,
    take_top,
)
from kiln.deploy.ops.metric_families import MonitorInputs, build_families, why_dead, why_not_ready
from kiln.deploy.ops.snapshot import CONTROL_KINDS, QUALITY_RESULTS, QualityInRun, Snapshot, sum_by_reason
from kiln.deploy.ops.status import TableStatus, read_lake_status
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.printable import printable

_TABLES_EVERY: Final = 15.0  # seconds


class Monitor(Exporter):
    """HTTP exporter that serves the newest snapshot. The main loop of the run passes each snapshot to `see`."""

    def __init__(self, listen: tuple[str, int] | None, lake: Lake, version: str, hosts: Iterable[str] = ()) -> None:
        """Create the monitor of a run; `listen` and `hosts` are as for `Exporter`."""
        self._lake = lake
        self._version = version
        self._newest: tuple[Snapshot, float] | None = None
        self._tables: tuple[TableStatus, ...] = ()
        self._history = RunHistory()
        self._stop = threading.Event()
        super().__init__(listen, self, hosts)

    def __enter__(self) -> Self:
        super().__enter__()
        if self.address:
            threading.Thread(target=self._follow_tables, name="monitor-lake", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        super().__exit__()

    def see(self, snapshot: Snapshot) -> None:
        """Serve this snapshot from now on, and add it to the plots."""
        self._newest = snapshot, time.time()
        self._history.see(snapshot, time.monotonic())

    def metrics(self) -> Iterator[Metric]:
        """Build the metric families; there are none before the first snapshot."""
        facts = self._facts()
        return build_families(facts) if facts is not None else iter(())

    def why_dead(self) -> list[str]:
        return why_dead(self._facts())

    def why_not_ready(self) -> list[str]:
        return why_not_ready(self._facts())

    def page(self) -> str:
        """Render the status page."""
        return render_page(self._facts(), self._history.plots())

    def _facts(self) -> MonitorInputs | None:
        newest = self._newest
        return None if newest is None else MonitorInputs(*newest, time.time(), self._version, self._tables)

    def _follow_tables(self) -> None:
        while not self._stop.wait(_TABLES_EVERY if self._tables else 1.0):
            self._tables = read_lake_status(self._lake)


_REASONS: Final = 8
_PEERS: Final = 12
_HEAD: Final = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>Kiln</title>"""

_TEMPLATES: Final = Environment(
    loader=PackageLoader("kiln.deploy.ops", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


def render_page(facts: MonitorInputs | None, plots: Sequence[Plot]) -> str:
    """Render the status page; `facts` is `None` before the first snapshot."""
    if facts is None:
        return f"{_HEAD}<p>Kiln is starting."
    snapshot = facts.snapshot
    bridge = snapshot.bridge.status if snapshot.bridge is not None else None
    return _TEMPLATES.get_template("status_page.html").render(
        facts=facts,
        snapshot=snapshot,
        bridge=bridge,
        received=snapshot.bridge.received if snapshot.bridge is not None else {},
        fetched=snapshot.bridge.fetched if snapshot.bridge is not None else {},
        peers=sorted(bridge.peers, key=lambda peer: -peer.frames_in)[:_PEERS] if bridge is not None else (),
        problems=[*dict.fromkeys([*snapshot.errors, *why_not_ready(facts)])],
        elapsed=format_clock(snapshot.elapsed),
        copies=compute_copies_per_message(snapshot),
        duplicates=compute_duplicate_share(sum(snapshot.messages.values()), snapshot.copies),
        control_kinds=[*CONTROL_KINDS, *sorted(snapshot.control_entries.keys() - {*CONTROL_KINDS})],
        quarantine=take_top(sum_by_reason(snapshot.quarantine), _REASONS),
        plots=[plot for plot in plots if snapshot.is_ceramic or not plot.title.startswith("Batch")],
        quality=_group_by_table(snapshot.quality),
        checked=format_clock(timedelta(seconds=facts.read_at - snapshot.quality.at))
        if snapshot.quality is not None
        else "",
        ages={
            table.name: format_clock(timedelta(seconds=facts.read_at - table.committed_at.timestamp()))
            for table in facts.tables
            if table.committed_at is not None
        },
    )


def _group_by_table(check: QualityInRun | None) -> list[tuple[str, list[int]]]:
    """Return for each table the numbers of its expectations that passed, failed as warnings, and failed as errors."""
    counts = check.counts if check is not None else {}
    tables = dict.fromkeys(table for table, _ in counts)
    return [(table, [counts.get((table, result), 0) for result in QUALITY_RESULTS]) for table in tables]


_TEMPLATES.filters |= {
    "count": format_count,
    "range": format_range,
    "rate": format_rate,
    "seconds": format_seconds,
    "printable": printable,
}


_EVERY: Final = 5.0  # seconds between two points
_POINTS: Final = 720  # those of an hour
_MIN_POINTS: Final = 60  # least number of points of a plot
_WIDTH, _HEIGHT = 300.0, 60.0  # size of a plot, in its own units


class HistoryPoint(NamedTuple):
    """Values of a run at one moment; `None` if not known."""

    at: float
    """monotonic time, in seconds"""
    frames_rate: float | None
    batches: int
    late_p50: float | None
    late_p99: float | None
    lag_seconds: float
    """lag of the slowest query"""
    messages: int
    copies: int
    control_entries: int


class Plot(NamedTuple):
    """A plot of one or two lines over time.

    Attributes:
        lines: The `points` attribute of each SVG polyline.
        now: Newest value of the first line.
        most: Greatest value of all lines.
        minutes: Time span of the plot, in minutes.
    """

    title: str
    unit: str
    lines: tuple[str, ...]
    now: float | None
    most: float
    minutes: int


class RunHistory:
    """Values of the last hour, for the plots. One thread calls `see`; any thread may call `plots`."""

    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque(maxlen=_POINTS)

    def see(self, snapshot: Snapshot, now: float) -> None:
        """Add the values of a snapshot if the last values are at least five seconds old. `now` is monotonic time."""
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
        """Build the plots of the status page."""
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
        unit: Unit of the values.
        series: Values of each line, five seconds apart; `None` for a value that is not known.
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
