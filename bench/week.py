"""Effect of table maintenance on the duration of commits and reads, and on the size of the Delta log, over a simulated
week. Kiln's writer and maintenance run in one process, without Spark and broker.

Time is simulated by commits: one commit to each table stands for ten seconds, the default trigger of the queries. One
lake has maintenance after every sixty commits, because `kiln run` maintains tables every ten minutes. Another lake gets
the same commits without maintenance, but only in the first quarter of the measuring time.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression
from typing import TypeVar

from msgspec import structs

from bench.report import Finding, Note, Series
from bench.runs import Extent, Say
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.maintenance.plan import MaintenancePolicy
from kiln.pipelines.maintenance.steps import maintain_table
from kiln.schemas.delta.tables import TABLES

WEEK = 60_480
"""commits to each table"""
SECONDS = 600
_TABLES = ("messages", "tips")
_ROWS = 50
"""rows of a commit in each table"""
_HOUR, _MAINTAINED_EVERY, _READ_EVERY = 360, 60, 600  # commits
_TARGET = 128 << 20


def measure(extent: Extent, say: Say) -> Finding:
    """Measure commits and reads of both lakes repeatedly. CPU time is measured, because other load affects it least."""
    with tempfile.TemporaryDirectory(prefix="kiln-week-") as folder:
        maintained, unmaintained = _Arm(Path(folder) / "maintained"), _Arm(Path(folder) / "unmaintained")
        began, lasts = time.monotonic(), extent.of(SECONDS)
        while (spent := time.monotonic() - began) < lasts or len(unmaintained.readings) < 2:
            arms = [maintained, unmaintained] if spent < lasts / 4 or len(unmaintained.readings) < 2 else [maintained]
            for arm in arms:
                arm.commit(_MAINTAINED_EVERY)
            if maintained.commits == _MAINTAINED_EVERY or maintained.commits % _READ_EVERY == 0:
                for arm in arms:
                    arm.read()
                    say(f"{arm.folder.name}: {arm.readings[-1]}")
            maintained.maintain()
        for arm in (maintained, unmaintained):
            arm.read()
        return _finding(maintained, unmaintained)


@dataclass(frozen=True)
class _TableReading:
    """State of the table `messages` after some commits. Times are in ms of CPU."""

    commits: int
    commit: float
    """time of a commit"""
    opened: float
    """time to open the table"""
    counted: float
    """time to count its rows"""
    files: int
    entries: int
    """JSON files of the log"""
    log: int
    """size of the log, bytes"""
    disk: int
    """size of all tables and logs on disk, bytes"""

    def __str__(self) -> str:
        return (
            f"{self.commits:,} commits, {self.files:,} files, {self.entries:,} log entries, log "
            f"{self.log / 1e6:.1f} MB, commit {self.commit:.1f} ms, open {self.opened:.1f} ms, "
            f"count {self.counted:.1f} ms"
        )


@dataclass
class _Arm:
    folder: Path
    commits: int = 0
    readings: list[_TableReading] = field(default_factory=list)
    maintenance_times: list[float] = field(default_factory=list)
    """time of each maintenance, ms of CPU"""

    def __post_init__(self) -> None:
        self._lake = Lake(str(self.folder))
        self._lake.create(_TABLES)
        self._writer = DeltaRsCommits(self._lake)
        list(query_lake(self._lake, "SELECT count(*) FROM messages").rows())  # so that later queries import nothing
        self._took: list[float] = []
        self._at: list[int] = []
        chance = random.Random(1)
        files = [_file(self._lake, table, chance) for table in _TABLES]
        # content of the files of each commit; maintenance deletes these files, because no commit names them
        self._files = [(file, (self.folder / file.table / file.name).read_bytes()) for file in files]

    def commit(self, times: int) -> None:
        for _ in range(times):
            for file, data in self._files:
                named = structs.replace(file, name=f"part-{self.commits:08}.snappy.parquet")
                (self.folder / file.table / named.name).write_bytes(data)
                started = time.process_time()
                self._writer.commit(file.table, [named], WriteId("week", self.commits))
                self._took.append(_since(started))
            self.commits += 1
            self._at.append(time.time_ns() // 1_000)

    def maintain(self) -> None:
        rules = MaintenancePolicy(_TARGET, self._since(12 * _HOUR), self._since(_HOUR), self._since(24 * _HOUR))
        started = time.process_time()
        for table in _TABLES:
            maintain_table(self._lake, table, rules, time.time_ns() // 1_000, lambda _: None)
        self.maintenance_times.append(_since(started))

    def _since(self, commits: int) -> int:
        """Return the age of the oldest of the last `commits` commits, in µs. If there were fewer commits, return the
        Unix time, so that nothing is old enough."""
        now = time.time_ns() // 1_000
        return now - self._at[-commits] if commits <= len(self._at) else now

    def read(self) -> None:
        log = self.folder / "messages" / "_delta_log"
        started = time.process_time()
        opened = self._lake.open("messages")
        taken = _since(started)
        started = time.process_time()
        ((rows,),) = query_lake(self._lake, "SELECT count(*) FROM messages").rows()
        counted = _since(started)
        assert rows == self.commits * _ROWS, "a row was lost or duplicated"
        took, self._took = self._took, []
        entries = list(log.iterdir())
        self.readings.append(
            _TableReading(
                self.commits,
                fmean(took) if took else self.readings[-1].commit,
                taken,
                counted,
                len(opened.file_uris()),
                sum(path.suffix == ".json" for path in entries),
                sum(path.stat().st_size for path in entries),
                sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()),
            )
        )


def _file(lake: Lake, table: str, chance: random.Random) -> DataFile:
    """Write a data file of a table without committing it."""
    out = TableFiles(lake, table)
    heard = time.time_ns() // 1_000
    for number in range(_ROWS):
        text = f"k2t6wyfsu4{chance.randrange(20_000):050}"
        values: dict[str, object] = {"string": text, "binary": chance.randbytes(200), "timestamp": heard + number}
        values |= {"int": number, "bigint": number}
        out.add([values.get(column.type) for column in TABLES[table].columns])
    (file,) = out.close()
    return file


def _finding(maintained: _Arm, unmaintained: _Arm) -> Finding:
    names = {"with maintenance": maintained, "without maintenance": unmaintained}
    series: list[Series] = []
    for what, unit in (("commit", "ms CPU"), ("opened", "ms CPU"), ("counted", "ms CPU")):
        for name, arm in names.items():
            series.append(
                Series(
                    f"{what}, {name} ({arm.commits:,} commits)",
                    unit,
                    tuple(getattr(reading, what) for reading in _last(arm.readings)),
                )
            )
    notes: dict[str, Note] = {}
    for name, arm in names.items():
        for moment, reading in (("at the start", arm.readings[0]), ("at the end", arm.readings[-1])):
            notes[f"{name} {moment}"] = str(reading)
        notes[f"most log entries, {name}"] = max(reading.entries for reading in arm.readings)
        notes[f"most files, {name}"] = max(reading.files for reading in arm.readings)
        notes[f"bytes on the disk, {name}"] = arm.readings[-1].disk
    notes["maintenance, ms CPU each"] = round(fmean(_last(maintained.maintenance_times)))
    notes["maintenance, cores"] = round(fmean(_last(maintained.maintenance_times)) / 1_000 / 600, 5)
    for what in ("commit", "opened", "counted"):
        notes[f"{what} after a week without maintenance, extrapolated, s"] = round(
            _after_a_week(unmaintained.readings, what) / 1_000, 2
        )
    return Finding("week", "a week of commits, one to each table every ten seconds", tuple(series), notes=notes)


_T = TypeVar("_T")


def _last(values: Sequence[_T]) -> Sequence[_T]:
    return values[-max(1, len(values) // 3) :]


def _after_a_week(readings: Sequence[_TableReading], what: str) -> float:
    """Extrapolate a time to a week of commits by linear regression, ms."""
    slope, least = linear_regression(
        [reading.commits for reading in readings], [getattr(reading, what) for reading in readings]
    )
    return least + slope * WEEK


def _since(started: float) -> float:
    """Return the CPU time since `started`, in ms."""
    return (time.process_time() - started) * 1_000
