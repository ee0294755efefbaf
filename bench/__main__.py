"""`python -m bench [NAME…]`, or `make bench ARGS="NAME…"`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from bench import (
    backfill,
    batcher,
    bep50,
    bitswap,
    decode,
    dedup_store,
    growth,
    held_state,
    hot_path,
    instead,
    lateness,
    live,
    network,
    plots,
    quality,
    views,
    week,
)
from bench.ground import Ground, prepared
from bench.report import Finding, Note, as_json, table
from bench.runs import BenchError, Extent, Say
from kiln.conf.process.errors import KilnError
from kiln.pipelines.app.supervisor import RestartsExhaustedError

ALONE: Mapping[str, Callable[[Extent, Say], Finding]] = {
    "hot-path": hot_path.measure,
    "network": network.measure,
    "live": live.measure,
    "bep50": bep50.measure,
    "bitswap": bitswap.measure,
    "held": held_state.measure,
    "week": week.measure,
    "views": views.measure,
    "quality": quality.measure,
    "hour": live.measure_an_hour,
}
ON_GROUND: Mapping[str, Callable[[Ground, Extent], Finding]] = {
    "decode": decode.measure,
    "instead": instead.measure,
    "lateness": lateness.measure,
    "load": lateness.measure_by_load,
    "batcher": batcher.measure,
    "dedup": dedup_store.measure,
    "growth": growth.measure,
    "backfill": backfill.measure,
}
NAMES = (*ALONE, *ON_GROUND)

_ENOUGH_RUNS = 5
_IDLE = 0.5  # load a core
# Errors whose text alone is shown, without a traceback.
_SAID = (
    BenchError,
    RestartsExhaustedError,
    KilnError,
)


class Bench:
    """Runs measurements and shows their findings.

    After each measurement, all findings so far are written to `file`, and as plots to the folder `plotted`.
    """

    def __init__(self, console: Console, extent: Extent, file: Path | None, plotted: Path | None = None) -> None:
        self._console = console
        self._extent = extent
        self._file = file
        self._plotted = plotted
        self._circumstances: dict[str, Note] = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "runs": extent.runs,
            "scale": extent.scale,
            "cores": os.cpu_count() or 0,
            "load at the start": round(os.getloadavg()[0], 2),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        self._started = time.monotonic()
        self._busy = os.getloadavg()[0] > _IDLE * (os.cpu_count() or 1)
        self._findings: list[Finding] = []
        self._failed: list[str] = []

    def say(self, text: str) -> None:
        """Print a line of progress."""
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        self._console.print(f"[dim]{minutes:3}:{seconds:02}[/]  {text}", highlight=False, soft_wrap=True)

    def measure(self, name: str, measurement: Callable[[], Finding]) -> None:
        """Make one measurement. If it fails, show the error and return, so that other measurements can follow."""
        self._console.rule(name, align="left")
        try:
            finding = measurement()
        except _SAID as error:
            self.fail(name, error)
            return
        self._findings.append(finding)
        self._console.print(table(finding))
        content = json.dumps(as_json(self._findings, self._circumstances), indent=1, ensure_ascii=False)
        if self._file is not None:
            self._file.write_text(content + "\n", encoding="utf-8")
        if self._plotted is not None:
            plots.draw(json.loads(content), self._plotted)

    def fail(self, name: str, error: Exception) -> None:
        self._failed.append(name)
        self._console.print(f"{name}: {error}", style="red", markup=False)

    def summary(self) -> int:
        """Show all findings again, and return the exit status: 1 if a measurement failed, else 0."""
        if len(self._findings) > 1:
            self._console.rule("all results", align="left")
            for finding in self._findings:
                self._console.print(table(finding))
        if self._busy:
            self._console.print(
                "The machine was busy at the start, so the results are too slow. Measure again when it is idle.",
                style="yellow",
            )
        if self._extent.runs < _ENOUGH_RUNS:
            self._console.print(
                f"Medians of fewer than {_ENOUGH_RUNS} runs vary widely. Pass --runs {_ENOUGH_RUNS} or more.",
                style="yellow",
            )
        if self._failed:
            self._console.print(f"Not measured: {', '.join(self._failed)}", style="red")
        return 1 if self._failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the measurements. Return 0 if all were made, even if they miss their aims; 1 if one failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        extent = Extent(options.runs, options.scale)
    except ValueError as error:
        parser.error(str(error))
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: there is no such folder. Create it")
    names = [name for name in NAMES if not options.names or name in options.names]
    bench = Bench(Console(), extent, options.json, options.plots)
    for name in names:
        if name in ALONE:
            bench.measure(name, partial(ALONE[name], extent, bench.say))
    if on_ground := [name for name in names if name in ON_GROUND]:
        try:
            with (
                tempfile.TemporaryDirectory(prefix="kiln-bench-", dir=options.folder) as folder,
                prepared(Path(folder), bench.say) as ground,
            ):
                for name in on_ground:
                    bench.measure(name, partial(ON_GROUND[name], ground, extent))
                bench.say("stopping")
        except _SAID as error:
            bench.fail("broker and Spark", error)
    return bench.summary()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure the speed of Kiln and of alternatives on this machine.",
        epilog="All measurements take four hours and 20 GB of disk. For a quick try, pass --scale 0.02 --runs 1.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", type=_name, help=f"measurements: {', '.join(NAMES)} (default: all)"
    )
    parser.add_argument(
        "--runs", type=int, default=_ENOUGH_RUNS, help="runs of each measurement (default: %(default)s)"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all sizes (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the values of all runs, as JSON")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help=f"folder for plots of {' and '.join(plots.PLOTS)}, as SVG"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="folder for data during the runs (default: a temporary one)"
    )
    return parser


def _name(text: str) -> str:
    if text not in NAMES:  # `choices` would not let the list be empty
        raise argparse.ArgumentTypeError(f"{text!r} is not a measurement. Pass some of {', '.join(NAMES)}")
    return text


def _asked_to_end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _asked_to_end)
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
