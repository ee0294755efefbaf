"""Plots of findings as SVG, from the JSON that `bench/report.py` writes.

    python -m bench.plots FILE FOLDER

A plot has a line for each quantity: its median by size or load, with bars from the least to the greatest value.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple, TypedDict

from bench.report import Note, number

PLOTS = {"growth": "cost-by-size.svg", "load": "lateness-by-load.svg", "hour": "memory-over-time.svg"}
"""File names of plots, by name of the finding. The names of its series must have the form "<quantity>, <x> <unit of
x>", such as "archive, 1,000 frames"."""

WIDTH, HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 150, 50, 70
_COLORS = ("#0b6e99", "#b4540a", "#4c7a34", "#8a3f8f", "#6b6b6b", "#b02a4c", "#7a6a00", "#1f7a6d")
_EVEN = ("minutes",)
"""Units of x for which the axis is linear. For other units, such as frames, the axis is logarithmic."""
_MOST_TICKS = 12


class SeriesJson(TypedDict):
    """A series, as `report.as_json` writes it."""

    name: str
    unit: str
    median: float
    min: float
    max: float


class FindingJson(TypedDict):
    """Fields of a finding that a plot shows."""

    name: str
    title: str
    series: Sequence[SeriesJson]


class Content(TypedDict):
    """Content of a file that `make bench` writes."""

    circumstances: Mapping[str, Note]
    findings: Sequence[FindingJson]


class PlotPoint(NamedTuple):
    """A value of x, and the least, median and greatest value of the runs."""

    x: float
    low: float
    median: float
    high: float


def draw(content: Content, folder: Path) -> list[Path]:
    """Write a plot for each finding in PLOTS, and return the files."""
    seen = content["circumstances"]
    caption = ", ".join(f"{name} {seen[name]}" for name in ("runs", "scale", "cores", "machine", "at") if name in seen)
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for finding in content["findings"]:
        if finding["name"] in PLOTS:
            written.append(folder / PLOTS[finding["name"]])
            written[-1].write_text(plot(finding, caption), encoding="utf-8")
    return written


def plot(finding: FindingJson, caption: str) -> str:
    """Draw a finding as SVG, with `caption` below.

    Raises:
        ValueError: The name of a series does not have the form that PLOTS describes.
    """
    lines: dict[str, list[PlotPoint]] = {}
    for entry in finding["series"]:
        quantity, _, rest = entry["name"].partition(", ")
        size, _, unit_of_x = rest.partition(" ")
        x = float(size.replace(",", ""))
        lines.setdefault(quantity, []).append(PlotPoint(x, entry["min"], entry["median"], entry["max"]))
    points = [point for line in lines.values() for point in line]
    xs = sorted({point.x for point in points})
    top = _rounded(max(point.high for point in points))

    def right(x: float) -> float:
        if len(xs) == 1:
            share = 0.5
        elif unit_of_x in _EVEN:
            share = (x - xs[0]) / (xs[-1] - xs[0])
        else:
            share = math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def down(y: float) -> float:
        return round(HEIGHT - _BOTTOM - y / top * (HEIGHT - _TOP - _BOTTOM), 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 20, finding["title"], size=15),
        _text(_LEFT, 38, finding["series"][0]["unit"]),
        _text(_LEFT, HEIGHT - 12, caption),
        _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 34, unit_of_x, "middle"),
    ]
    for y in (top * step / 4 for step in range(5)):
        out.append(f'<path d="M{_LEFT} {down(y)}H{WIDTH - _RIGHT}" stroke="#ddd"/>')
        out.append(_text(_LEFT - 6, down(y) + 4, number(y), "end"))
    out += [_text(right(x), HEIGHT - _BOTTOM + 18, f"{x:,.0f}", "middle") for x in xs[:: 1 + len(xs) // _MOST_TICKS]]
    beside = _apart({quantity: down(line[-1].median) for quantity, line in lines.items()})
    for place, (quantity, line) in enumerate(lines.items()):
        color = _COLORS[place % len(_COLORS)]
        path = "L".join(f"{right(point.x)} {down(point.median)}" for point in line)
        out.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, low, median, high in line:
            out.append(f'<path d="M{right(x)} {down(low)}V{down(high)}" stroke="{color}"/>')
            out.append(f'<circle cx="{right(x)}" cy="{down(median)}" r="3.5" fill="{color}"/>')
        out.append(_text(right(line[-1].x) + 10, beside[quantity] + 4, quantity, color=color))
    return "\n".join([*out, "</svg>", ""])


def _rounded(value: float) -> float:
    """Round up to 1, 2, 4 or 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)


def _apart(heights: Mapping[str, float]) -> dict[str, float]:
    placed: dict[str, float] = {}
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        placed[name] = max([height, *(other + 15 for other in placed.values())])
    return placed


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12, color: str = "#333") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(text)}</text>'


def main(file: str, folder: str) -> None:
    """Draw the plots of a file, and print their paths."""
    for path in draw(json.loads(Path(file).read_text(encoding="utf-8")), Path(folder)):
        print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
