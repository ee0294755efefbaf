"""Results of measurements: medians, ranges, and ratios with their aims, to be shown as tables or written as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from rich.table import Table

Note = str | int | float


@dataclass(frozen=True)
class Series:
    """Values of one quantity, one per run.

    Raises:
        ValueError: There is no value.
    """

    name: str
    unit: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"{self.name}: there were no runs, so nothing was measured")

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True)
class Aim:
    """Range that a ratio should be in: at least `least`, at most `most`."""

    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        if self.least is None:
            return "any" if self.most is None else f"≤ {self.most:g}"
        return f"≥ {self.least:g}" if self.most is None else f"{self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Ratio:
    """The series `of` divided by the series `to` of the same runs.

    Raises:
        ValueError: The numbers of runs differ, or a divisor is 0.
    """

    name: str
    of: Series
    to: Series
    aim: Aim | None = None

    def __post_init__(self) -> None:
        if len(self.of.values) != len(self.to.values):
            runs = f"{len(self.of.values)} and {len(self.to.values)} runs"
            raise ValueError(f"{self.name}: {runs} cannot be compared run by run")
        if not all(self.to.values):
            raise ValueError(f"{self.name}: {self.to.name} is 0 in a run, so there is no ratio")

    @property
    def value(self) -> float:
        """Quotient of the medians."""
        return self.of.median / self.to.median

    @property
    def by_run(self) -> tuple[float, ...]:
        """Quotient within each run. Other load affects it least, because both values were measured in a row."""
        return tuple(of / to for of, to in zip(self.of.values, self.to.values, strict=True))

    @property
    def met(self) -> bool | None:
        """True if the ratio meets its aim; `None` without an aim."""
        return None if self.aim is None else self.aim.met(self.value)


@dataclass(frozen=True)
class Finding:
    """Result of one measurement. `notes` has sizes, settings and other values, by name."""

    name: str
    title: str
    series: tuple[Series, ...]
    ratios: tuple[Ratio, ...] = ()
    notes: Mapping[str, Note] = field(default_factory=dict)


def number(value: float) -> str:
    """Format a value with three significant digits, or from 1,000 on as a whole number such as `12,345`."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def table(finding: Finding) -> Table:
    """Build a table of a finding, with a line for each series and each ratio."""
    notes = ", ".join(f"{name} {_shown(note)}" for name, note in finding.notes.items())
    shown = Table(title=f"{finding.name}: {finding.title}", caption=notes or None, title_justify="left")
    for column in ("", "median", "min – max", ""):
        shown.add_column(column, justify="right" if column else "left")
    for series in finding.series:
        shown.add_row(series.name, number(series.median), f"{number(series.low)} – {number(series.high)}", series.unit)
    if finding.ratios:
        shown.add_section()
    for ratio in finding.ratios:
        span = f"{min(ratio.by_run):.2f} – {max(ratio.by_run):.2f}"
        shown.add_row(ratio.name, f"{ratio.value:.2f}", span, _verdict(ratio))
    return shown


def _verdict(ratio: Ratio) -> str:
    if ratio.aim is None:
        return ""
    return f"[green]aim {ratio.aim}[/]" if ratio.met else f"[red]aim {ratio.aim}: missed[/]"


def _shown(note: Note) -> str:
    return note if isinstance(note, str) else f"{note:,}"


def as_json(findings: Iterable[Finding], circumstances: Mapping[str, Note]) -> dict[str, object]:
    """Convert findings to JSON types, with the values of all runs."""
    return {"circumstances": dict(circumstances), "findings": [_finding_json(finding) for finding in findings]}


def _finding_json(finding: Finding) -> dict[str, object]:
    return {
        "name": finding.name,
        "title": finding.title,
        "notes": dict(finding.notes),
        "series": [
            {
                "name": series.name,
                "unit": series.unit,
                "median": series.median,
                "min": series.low,
                "max": series.high,
                "values": list(series.values),
            }
            for series in finding.series
        ],
        "ratios": [
            {
                "name": ratio.name,
                "of": ratio.of.name,
                "to": ratio.to.name,
                "value": ratio.value,
                "by_run": list(ratio.by_run),
                "aim": None if ratio.aim is None else {"least": ratio.aim.least, "most": ratio.aim.most},
                "met": ratio.met,
            }
            for ratio in finding.ratios
        ],
    }
