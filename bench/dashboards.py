"""Draw the Grafana dashboards for a time range without Grafana. The data comes from a Prometheus server.

    python -m bench.dashboards http://127.0.0.1:9090 BEGIN END FOLDER

BEGIN and END are Unix seconds. A PNG for each dashboard is written to FOLDER, with the rows, panels and legends of the
dashboard's JSON. In Grafana itself, the dashboards look different.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import httpx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

_FOLDER: Final = Path(__file__).resolve().parent.parent / "deploy/packaging/grafana/json"
_STEP: Final = 15.0  # s between two points
_RATE: Final = "1m"
_WIDE, _PLOT_HIGH, _FIGURE_HIGH, _TITLE_HIGH = 14.0, 2.3, 1.1, 0.3  # inches
_MOST_IN_LEGEND: Final = 8


class PanelQuery(NamedTuple):
    """A query of a panel. `legend` is a template with names of labels in braces, such as `{{query}}`."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A panel of a dashboard. `unit` is Grafana's id of a unit, such as `percentunit`."""

    row: str
    """title of the row of panels"""
    top: int
    width: int
    """width in columns, of which a row has 24"""
    title: str
    unit: str
    lines: Sequence[PanelQuery]
    stacked: bool
    figure: bool
    """true if the panel shows the latest value as a large number; else it is a plot"""
    bad_from: float | None
    """threshold from which a number is red"""


class Range(NamedTuple):
    """URL of a Prometheus server, and the time range to draw in Unix seconds."""

    prometheus: str
    begin: float
    end: float


class Curve(NamedTuple):
    """A series of values. `at` has the time of each in minutes after the start of the range."""

    legend: str
    at: Sequence[float]
    values: Sequence[float]


def read_panels(path: Path) -> list[Panel]:
    panels, row = [], ""
    for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        defaults = panel["fieldConfig"]["defaults"]
        lines = [PanelQuery(target["expr"], target["legendFormat"]) for target in panel["targets"]]
        bad_from = defaults["thresholds"]["steps"][-1]["value"] if "thresholds" in defaults else None
        at, figure, stacked = panel["gridPos"], panel["type"] == "stat", "stacking" in defaults.get("custom", {})
        panels.append(Panel(row, at["y"], at["w"], panel["title"], defaults["unit"], lines, stacked, figure, bad_from))
    return panels


def asked(line: PanelQuery) -> str:
    """Return the expression with the values that Grafana would insert for variables."""
    return line.expression.replace("$instance", ".*").replace("$__rate_interval", _RATE)


def legend(template: str, labels: Mapping[str, str]) -> str:
    """Format the name of a series, as Grafana does from labels in braces."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def in_words(value: float, unit: str) -> str:
    """Format a value with its unit, an id of Grafana."""
    match unit:
        case "percentunit":
            return f"{100 * value:.3g} %"
        case "s":
            return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"
        case "bytes":
            size, names = value, iter(("B", "KiB", "MiB", "GiB"))
            name = next(names)
            while abs(size) >= 1024 and (larger := next(names, "")):
                size, name = size / 1024, larger
            return f"{size:.3g} {name}"
        case "cps":
            return f"{value:,.3g}/s"
    return f"{value:,.0f}" if value == round(value) else f"{value:,.3g}"


def curves(line: PanelQuery, over: Range) -> list[Curve]:
    """Query the series of a panel's expression.

    Raises:
        httpx.HTTPError: Prometheus does not answer, or rejects the query.
    """
    what = {"query": asked(line), "start": str(over.begin), "end": str(over.end), "step": str(_STEP)}
    answer = httpx.get(f"{over.prometheus}/api/v1/query_range", params=what, timeout=60).raise_for_status().json()
    return [
        Curve(
            legend(line.legend, result["metric"]),
            [(float(at) - over.begin) / 60 for at, _ in result["values"]],
            [float(value) for _, value in result["values"]],
        )
        for result in answer["data"]["result"]
    ]


def draw(name: str, over: Range) -> Figure:
    """Draw the picture of a dashboard."""
    lines = [list(panels) for _, panels in groupby(read_panels(_FOLDER / f"{name}.json"), lambda panel: panel.top)]
    heights = [_FIGURE_HIGH if all(panel.figure for panel in panels) else _PLOT_HIGH for panels in lines]
    high = sum(heights) + _TITLE_HIGH * (len(lines) + 1)
    figure = Figure(figsize=(_WIDE, high), layout="constrained")
    figure.suptitle(f"Kiln: {name}", x=0.01, ha="left", fontsize=12, weight="bold")
    parts = figure.subfigures(len(lines), 1, height_ratios=[height + _TITLE_HIGH for height in heights], squeeze=False)
    before = ""
    for part, panels in zip(parts.flat, lines, strict=True):
        if panels[0].row != before:
            part.suptitle(panels[0].row, x=0.01, ha="left", fontsize=10, color="#555555")
        before = panels[0].row
        places = part.subplots(1, 24 // panels[0].width, squeeze=False)[0]
        for number, axes in enumerate(places):
            if number < len(panels):
                _panel(axes, panels[number], over)
            else:
                axes.set_axis_off()
    return figure


def _panel(axes: Axes, panel: Panel, over: Range) -> None:
    panel_curves = [curve for line in panel.lines for curve in curves(line, over)]
    axes.set_title(panel.title, fontsize=8, loc="left")
    if panel.figure:
        axes.set_axis_off()
        value = panel_curves[0].values[-1] if panel_curves else None
        bad = value is not None and panel.bad_from is not None and value >= panel.bad_from
        words = "no data" if value is None else in_words(value, panel.unit)
        axes.text(0.5, 0.4, words, ha="center", va="center", fontsize=18, color="#c4162a" if bad else "#37872d")
        return
    axes.tick_params(labelsize=6)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_words(value, panel.unit)))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} min"))
    axes.grid(visible=True, color="#eeeeee")
    axes.set_xlim(0, (over.end - over.begin) / 60)
    if not panel_curves:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes, fontsize=8, color="#888888")
        return
    below: dict[float, float] = {}
    for number, curve in enumerate(sorted(panel_curves, key=lambda curve: -max(curve.values))):
        heights = list(curve.values)
        if panel.stacked:
            heights = [below.get(at, 0.0) + value for at, value in zip(curve.at, heights, strict=True)]
            axes.fill_between(curve.at, [below.get(at, 0.0) for at in curve.at], heights, alpha=0.3)
            below.update(zip(curve.at, heights, strict=True))
        axes.plot(curve.at, heights, linewidth=1, label=curve.legend if number < _MOST_IN_LEGEND else None)
    axes.set_ylim(bottom=0)
    if any(curve.legend for curve in panel_curves):
        axes.legend(fontsize=5.5, loc="upper left", framealpha=0.6)


def main(prometheus: str, begin: str, end: str, folder: str) -> None:
    """Write a picture of each dashboard."""
    for path in _FOLDER.iterdir():
        draw(path.stem, Range(prometheus, float(begin), float(end))).savefig(Path(folder) / f"{path.stem}.png", dpi=72)


if __name__ == "__main__":
    main(*sys.argv[1:])
