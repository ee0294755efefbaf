"""CPU, memory and batch delay of `kiln run` with a new state folder and the demo network, as a user runs it.

The delays are read from the lake after the run, so that queries do not affect the running Kiln.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from statistics import quantiles

import psutil

from bench.processes import DEMO, Usage
from bench.report import Aim, Finding, Note, Ratio, Series
from bench.runs import BenchError, Extent, Say
from kiln.conf.process.errors import KilnError
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Network, Settings
from kiln.deploy.demo.process import DemoNetwork
from kiln.deploy.query.ask import query_lake
from kiln.deploy.query.estimate import estimate_savings, read_received_updates
from kiln.deploy.stack.ports import find_free_ports
from kiln.pipelines.delta.lake import Lake

LASTS, COUNTED = 240, 60  # s of a run, and of the counted part at its end
LOADS = {50: 40, 500: 200}
"""Number of separators by load in messages a second."""
HOUR = 3_600  # s
WINDOWS_AIM = Aim(most=1.1)

_LOOK_EVERY = 2.0  # s
_END = timedelta(seconds=10)
"""Updates younger than this at the end of a run may be in a window that is still open."""
_ENDS_IN = 180.0  # s


@dataclass(frozen=True)
class Batches:
    """Batches of one run. Delays and rate are those of the counted time at the end of the run.

    Attributes:
        delays: Seconds from `closed_at` to the Kafka timestamp of each batch, ascending.
        count: Number of batches of the run.
        ideal: Number of batches if only event time ended windows, and not log time.
        first: Seconds from the start of the command to the first batch.
        rate: Messages per second that reached the bridge.
    """

    delays: Sequence[float]
    count: int
    ideal: int
    first: float
    rate: float

    def percentile(self, hundredth: int) -> float:
        return quantiles(self.delays, n=100, method="inclusive")[hundredth - 1]

    @property
    def in_words(self) -> str:
        delays = f"batch delay p50 {self.percentile(50):.2f} s, p99 {self.percentile(99):.2f} s"
        counts = f"{self.count:,} batches, {self.ideal:,} by event time alone"
        return f"{self.rate:.0f} messages/s, {delays}, first batch after {self.first:.1f} s, {counts}"


@dataclass
class Run:
    """Measurements of a run, by kind of process."""

    folder: Path
    cores: Mapping[str, float] = field(default_factory=dict)
    """average number of busy cores in the counted time"""
    memory: list[Mapping[str, float]] = field(default_factory=list)
    """MB, at each minute"""
    taken: list[Mapping[str, float]] = field(default_factory=list)
    """seconds of CPU time since the start, at each minute"""
    started: float = 0.0
    """Unix time, s"""

    @property
    def all_cores(self) -> float:
        """Average number of busy cores of Kiln, without the demo network."""
        return sum(cores for kind, cores in self.cores.items() if kind != DEMO)

    @property
    def lake(self) -> Lake:
        return Lake(str(self.folder / "lake"))


def measure(extent: Extent, say: Say) -> Finding:
    """Measure a network without messages, and then each load (messages per second), in turn."""
    seconds = extent.of(LASTS, least=100)
    cores: dict[str, list[float]] = {}
    results_by_load: dict[int, list[Batches]] = {load: [] for load in LOADS}
    for run in range(1, extent.runs + 1):
        with tempfile.TemporaryDirectory(prefix="kiln-live-") as folder:
            silent = _silent(Path(folder), seconds)
        cores.setdefault("cores, silent network", []).append(silent.all_cores)
        say(f"run {run} of {extent.runs}: no messages: {_in_words(silent)}")
        for load in LOADS:
            with tempfile.TemporaryDirectory(prefix="kiln-live-") as folder:
                live = _loaded(Path(folder), load, seconds)
                batches = _batches(live)
            results_by_load[load].append(batches)
            for kind, taken in {"all but the demo network": live.all_cores, **live.cores}.items():
                cores.setdefault(f"cores, {load} messages/s, {kind}", []).append(taken)
            say(f"run {run} of {extent.runs}: {load} messages/s: {batches.in_words}; {_in_words(live)}")
    counts = {
        load: Series(f"batches, {load} messages/s", "", tuple(result.count for result in results_by_load[load]))
        for load in LOADS
    }
    ideal = {
        load: Series(
            f"batches by event time alone, {load} messages/s",
            "",
            tuple(result.ideal for result in results_by_load[load]),
        )
        for load in LOADS
    }
    delays = [
        Series(
            f"late, p{share}, {load} messages/s",
            "s",
            tuple(result.percentile(share) for result in results_by_load[load]),
        )
        for load in LOADS
        for share in (50, 99)
    ]
    first = Series("first batch", "s", tuple(result.first for result in results_by_load[min(LOADS)]))
    rates = [
        Series(f"messages received, {load} messages/s", "/s", tuple(result.rate for result in results_by_load[load]))
        for load in LOADS
    ]
    core_series = [Series(name, "", tuple(values)) for name, values in cores.items() if len(values) == extent.runs]
    return Finding(
        "live",
        "kiln run with the demo network on the same cores",
        (*core_series, *rates, *delays, first, *counts.values(), *ideal.values()),
        tuple(
            Ratio(f"batches over those of event time, {load} messages/s", counts[load], ideal[load], WINDOWS_AIM)
            for load in LOADS
        ),
        {"s a run": seconds, "s counted": COUNTED},
    )


def measure_an_hour(extent: Extent, say: Say) -> Finding:
    """Measure the memory of each kind of process over an hour, and disk use at the end."""
    seconds = extent.of(HOUR, least=120)
    with tempfile.TemporaryDirectory(prefix="kiln-hour-") as folder:
        run = _loaded(Path(folder), min(LOADS), seconds, say)
        batches = _batches(run)
        notes: dict[str, Note] = {"s": seconds, "batches": batches.count, "batches by event time alone": batches.ideal}
        notes["late p50, s, last minute"] = round(batches.percentile(50), 2)
        notes["late p99, s, last minute"] = round(batches.percentile(99), 2)
        half = len(run.taken) // 2
        if minutes := len(run.taken) - 1 - half:
            for kind, spent in run.taken[-1].items():
                before = run.taken[half].get(kind, 0.0)
                notes[f"{kind}: cores, second half"] = round((spent - before) / 60 / minutes, 2)
        notes |= _on_disk(run.folder)
        ((copies,),) = query_lake(
            run.lake, "SELECT (SELECT count(*) FROM copies) / (SELECT count(*) FROM messages)"
        ).rows()
        notes["copies a message"] = round(float(str(copies)), 2)
    kinds = sorted(set().union(*run.memory))
    series = tuple(
        Series(f"{kind}, {minute} minutes", "MB", (memory[kind],))
        for kind in kinds
        for minute, memory in enumerate(run.memory, start=1)
        if kind in memory
    )
    return Finding("hour", "memory of kiln run at 50 messages/s", series, notes=notes)


def _in_words(run: Run) -> str:
    shown = ", ".join(f"{kind} {cores:.2f}" for kind, cores in sorted(run.cores.items(), key=lambda item: -item[1]))
    return f"{run.all_cores:.2f} cores ({shown})"


def _silent(folder: Path, seconds: int) -> Run:
    demo = DemoNetwork(Settings(state=folder / "silent", network=Network(name="local-demo")))
    demo.launch()
    try:
        peers = [part for address in demo.addresses() for part in ("--bootstrap", address)]
        return _watched(folder / "state", seconds, peers, {"KILN_DISCOVERY__ENABLED": "false"})
    finally:
        demo.stop()


def _loaded(folder: Path, load: int, seconds: int, say: Say | None = None) -> Run:
    traffic = {"KILN_TRAFFIC__RATE": str(load), "KILN_TRAFFIC__SEPARATORS": str(LOADS[load])}
    return _watched(folder / "state", seconds, [], traffic, say)


def _watched(
    state: Path, seconds: int, options: Sequence[str], settings: Mapping[str, str], say: Say | None = None
) -> Run:
    """Start `kiln run`, measure it, and wait for its end.

    Raises:
        BenchError: Kiln failed.
    """
    run = Run(state)
    with _kiln(state, seconds, options, settings) as kiln:
        run.started, began = time.time(), time.monotonic()
        usage = Usage(psutil.Process(kiln.pid))
        before, since = dict[str, float](), began
        while (now := time.monotonic() - began) < seconds:
            taken = usage.look()
            if now < seconds - COUNTED:
                before, since = dict(taken), time.monotonic()
            if now > 60 * (len(run.memory) + 1):
                run.memory.append(usage.memory())
                run.taken.append(taken)
                if say is not None and len(run.memory) % 5 == 0:
                    say(", ".join(f"{kind} {mb:,.0f} MB" for kind, mb in sorted(run.memory[-1].items())))
                    say(", ".join(f"{kind} {spent:,.0f} s of CPU" for kind, spent in sorted(taken.items())))
            if kiln.poll() is not None:
                raise BenchError(f"kiln run exited with code {kiln.returncode} after {now:.0f} s")
            time.sleep(_LOOK_EVERY)
        spent = time.monotonic() - since
        run.cores = {kind: (value - before.get(kind, 0.0)) / spent for kind, value in usage.look().items()}
        if kiln.wait(_ENDS_IN):
            raise BenchError(f"kiln run exited with code {kiln.returncode}")
    return run


@contextmanager
def _kiln(
    state: Path, seconds: int, options: Sequence[str], settings: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    broker, controller = find_free_ports()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KILN_")} | {
        "KILN_STATE": str(state),
        "KILN_KAFKA__EMBEDDED_PORT": str(broker),
        "KILN_KAFKA__EMBEDDED_CONTROLLER_PORT": str(controller),
        "KILN_BRIDGE__LISTEN": "/ip4/127.0.0.1/tcp/0",
        "KILN_MONITOR__LISTEN": "127.0.0.1:0",
        **settings,
    }
    command = [sys.executable, "-m", "kiln.deploy.cli", "run", "--for", f"{seconds + 1}s", *options]
    kiln = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield kiln
    finally:
        if kiln.poll() is None:
            kiln.send_signal(signal.SIGTERM)
            kiln.wait(_ENDS_IN)


def _batches(run: Run) -> Batches:
    """Read the batches of a run from the lake.

    Raises:
        BenchError: There are fewer than two batches, or the lake cannot be read.
    """
    sql = """
        SELECT opened_at, closed_at, emitted_at, late_seconds FROM batch_times
        WHERE origin = 'LIVE' ORDER BY emitted_at"""
    rows: list[tuple[datetime, datetime, datetime, float]] = []
    try:
        for row in query_lake(run.lake, sql).rows():
            match row:
                case (datetime() as opened, datetime() as closed, datetime() as emitted, float(seconds)):
                    rows.append((opened, closed, emitted, seconds))
        if len(rows) < 2:
            raise BenchError("the run has fewer than two batches")
        last = rows[-1][2]
        until = last - _END
        counted = last - timedelta(seconds=COUNTED)
        delays = sorted(seconds for _, closed, _, seconds in rows if closed > counted)
        heard = (update for update in read_received_updates(run.lake) if update.event_time < micros_of(until))
        ideal = sum(saving.batches for saving in estimate_savings(heard, [micros(Settings().batch.window)]))
        newest = "SELECT max(observed_at) FROM messages"
        sql = f"SELECT count(*) FROM messages WHERE observed_at > ({newest}) - to_seconds({COUNTED})"
        ((came,),) = query_lake(run.lake, sql).rows()
    except KilnError as error:
        raise BenchError(str(error)) from error
    return Batches(
        delays,
        sum(opened < until for opened, _, _, _ in rows),
        ideal,
        rows[0][2].timestamp() - run.started,
        int(str(came)) / COUNTED,
    )


def micros_of(moment: datetime) -> int:
    """Convert a time to Unix µs."""
    return round(moment.timestamp() * 1_000_000)


def _on_disk(state: Path) -> dict[str, Note]:
    notes: dict[str, Note] = {}
    lake = Lake(str(state / "lake"))
    for table in sorted(lake.tables()):
        log = state / "lake" / table / "_delta_log"
        notes[f"{table}: files"] = len(lake.open(table).file_uris())
        notes[f"{table}: log, kB"] = round(sum(file.stat().st_size for file in log.rglob("*") if file.is_file()) / 1e3)
    return notes
