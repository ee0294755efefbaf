"""Time of `kiln quality`, compared with a count of the same rows by DuckDB and by Spark.

Measured are the first check of a lake of two million messages, a check after five more minutes of messages, and the
first check of ten million simple rows of frames, copies and messages. Each time is that of a whole command, including
imports.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import duckdb

from bench.report import Finding, Series
from bench.runs import BenchError, Extent, Say, in_turn
from bench.views import MESSAGES, tables, write
from kiln.pipelines.delta.lake import Lake
from kiln.schemas.delta.tables import TABLES

FIRST_SECONDS, NEXT_SECONDS = 90.0, 15.0
"""aims for the first check and for the check of five more minutes"""
ROWS = 10_000_000
_NEXT = 1 / 24
"""five minutes, as a share of two hours"""
_LOOK_EVERY = 0.05  # s
_MET = (0, 1)
"""exit codes of a finished check; 1 if an expectation failed, because the lake has a few gaps"""


def measure(extent: Extent, say: Say) -> Finding:
    """Measure `kiln quality`. Each run checks a copy of the lake, then one with five more minutes of messages."""
    with tempfile.TemporaryDirectory(prefix="kiln-quality-") as folder:
        place, count = Path(folder), extent.of(MESSAGES, least=2_000)
        say(f"writing a lake of {count:,} messages, and five more minutes of messages")
        rows = _make(place, count)
        say(", ".join(f"{name} {number:,}" for name, number in rows.items()))
        many = _make_many(place, extent.of(ROWS, least=3_000))
        runs = _Runs(place)
        sides = {
            "first check": runs.first,
            "check of five minutes more": runs.later,
            f"first check of {many:,} rows": runs.many,
            "count by DuckDB": runs.duckdb,
            "count by Spark": runs.spark,
        }
        series = in_turn(sides, extent.runs, "s", say)
        notes = {
            **rows,
            "expectations": runs.expectations,
            "failed": runs.failed,
            "state of the checks, bytes": runs.memory,
        }
    taken = [
        Series("CPU of the first check", "s", tuple(runs.first_cpu)),
        Series("CPU of the check of five minutes more", "s", tuple(runs.later_cpu)),
        Series("greatest memory of the first check", "MB", tuple(runs.peaks)),
        Series(f"CPU of the first check of {many:,} rows", "s", tuple(runs.many_cpu)),
        Series(f"greatest memory of the first check of {many:,} rows", "MB", tuple(runs.many_peaks)),
    ]
    aims = f"aims {FIRST_SECONDS:g} and {NEXT_SECONDS:g} s"
    return Finding(
        "quality", f"kiln quality, and counts of the same rows, as whole commands; {aims}", (*series, *taken), (), notes
    )


def _make(place: Path, count: int) -> dict[str, int]:
    """Write the lakes `before`, with `count` messages, and `after`, with another commit to each table.

    Returns:
        The number of rows in `before`, by table.
    """
    lake, rows = Lake(str(place / "before")), dict[str, int]()
    rest = {}
    for name, columns in tables(round(count * (1 + _NEXT))):
        first = round(len(next(iter(columns.values()))) / (1 + _NEXT))
        write(lake, name, {column_name: column.slice(0, first) for column_name, column in columns.items()})
        rest[name] = {column_name: column.slice(first) for column_name, column in columns.items()}
        rows[name] = first
    lake.create(TABLES)
    shutil.copytree(lake.path, place / "after", copy_function=os.link)
    for name, columns in rest.items():
        write(Lake(str(place / "after")), name, columns, batch_id=1)
    return rows


_PEER = "'12D3KooWM68GyFKBT9JsuTRB6CYkF61PtMuSkynUauSQEGBX51JW'"
_OF_ALL = {
    "network": "'clay'",
    "remote_peer": _PEER,
    "observed_at": "make_timestamptz(1767225600000000 + 1000 * i)",
    "kafka_partition": "(i % 4)::INTEGER",
    "kafka_offset": "i // 4",
}
_OF_MESSAGE = {"message_id": f"{_PEER} || '/' || hex(i)", "verdict": "'valid'", "message_index": "0"}
_MANY = {
    "frames": {
        "connection": "unhex(md5((i % 64)::VARCHAR))",
        "sequence": "i // 64 + 1",
        "direction": "'IN'",
        "local_peer": _PEER,
        "protocol": "'/meshsub/1.1.0'",
        "payload": "encode('x' || md5(i::VARCHAR))",
        **dict.fromkeys(("hello_in", "hello_out", "verdicts", "remote_address"), "''::BLOB"),
        "origin": "'LIVE'",
        "declared_length": "0::BIGINT",
        "kafka_timestamp": _OF_ALL["observed_at"],
    },
    "copies": _OF_MESSAGE,
    "messages": {
        **_OF_MESSAGE,
        "origin": "'LIVE'",
        "type": "'QUERY'",
        "from_peer": _PEER,
        "data": "encode(md5(i::VARCHAR))",
    },
}
"""columns by table, as SQL expressions of the row number `i`"""


def _make_many(place: Path, rows: int) -> int:
    """Write the lake `many` with `rows` rows, all of which pass the checks. Each frame has one message.

    Returns:
        The exact number of rows.
    """
    lake, count = Lake(str(place / "many")), rows // len(_MANY)
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        for name, columns in _MANY.items():
            terms = ", ".join(f"{term} AS {column}" for column, term in (_OF_ALL | columns).items())
            table = db.sql(f"SELECT {terms} FROM range({count}) AS r (i)").to_arrow_table()
            write(lake, name, {column: table[column].combine_chunks() for column in table.column_names})
    lake.create(TABLES)
    return count * len(_MANY)


class _Runs:
    def __init__(self, place: Path) -> None:
        self._place = place
        self.peaks: list[float] = []
        self.first_cpu: list[float] = []
        self.later_cpu: list[float] = []
        self.many_peaks: list[float] = []
        self.many_cpu: list[float] = []
        self.expectations = self.failed = self.memory = 0

    def first(self, run: int) -> float:
        shutil.rmtree(self._state, ignore_errors=True)
        self._lay("before")
        done = _timed(["quality", "--json"], self._state, _MET)
        told = json.loads(done.out)
        self.expectations, self.failed = len(told), sum(not result["success"] for result in told)
        self.memory = (self._state / "quality" / "positions.json").stat().st_size
        self.peaks.append(done.peak / 1e6)
        self.first_cpu.append(done.cpu)
        return done.seconds

    def later(self, run: int) -> float:
        self._lay("after")
        done = _timed(["quality", "--json"], self._state, _MET)
        self.later_cpu.append(done.cpu)
        return done.seconds

    def many(self, run: int) -> float:
        shutil.rmtree(self._state / "quality", ignore_errors=True)
        self._lay("many")
        done = _timed(["quality", "--json"], self._state)
        self.many_peaks.append(done.peak / 1e6)
        self.many_cpu.append(done.cpu)
        return done.seconds

    def duckdb(self, run: int) -> float:
        self._lay("before")
        return _timed(["sql", "--json", _COUNT], self._state).seconds

    def spark(self, run: int) -> float:
        return _timed(["sql", "--json", "--spark", _COUNT], self._state).seconds

    @property
    def _state(self) -> Path:
        return self._place / "state"

    def _lay(self, lake: str) -> None:
        """Replace the lake of the state folder by a copy of `lake`. A copy is used, because a check writes into it."""
        shutil.rmtree(self._state / "lake", ignore_errors=True)
        shutil.copytree(self._place / lake, self._state / "lake", copy_function=os.link)


_COUNTED = ("frames", "copies", "messages", "updates", "tips", "batches", "batch_tips", "publications", "streams")
_COUNT = " UNION ALL ".join(f"SELECT '{name}' AS name, count(*) AS n FROM {name}" for name in _COUNTED)


class _CheckTiming(NamedTuple):
    seconds: float
    cpu: float
    """s"""
    peak: int
    """bytes"""
    out: str


def _timed(arguments: Sequence[str], state: Path, good: Sequence[int] = (0,)) -> _CheckTiming:
    environment: Mapping[str, str] = {**os.environ, "KILN_STATE": str(state)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "kiln.deploy.cli", *arguments], stdout=out, stderr=err, env=environment
        )
        peak = 0
        while not (ended := os.wait4(child.pid, os.WNOHANG))[0]:
            peak = max(peak, _peak(child.pid))
            time.sleep(_LOOK_EVERY)
        seconds = time.perf_counter() - began
        _, status, used = ended
        code = child.returncode = os.waitstatus_to_exitcode(status)
        for stream in (out, err):
            stream.seek(0)
        if code not in good:
            raise BenchError(f"kiln {arguments[0]} exited with code {code}: {err.read()[-500:]}")
        return _CheckTiming(seconds, used.ru_utime + used.ru_stime, peak, out.read())


def _peak(process: int) -> int:
    """Return the peak memory of a process so far, in bytes; 0 if it has ended.

    The peak from `wait4` is not used, because it includes the memory of the parent, from which the process was forked.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0
