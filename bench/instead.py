"""Speed of the query `archive`, compared with programs that a user could write instead (`bench/peers`)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from bench.catch_up import catch_up, in_micro_batches
from bench.frames import GENERATED, append, generated, live_options, stamped_anew
from bench.ground import Ends, Ground
from bench.peers.by_hand import TABLES
from bench.report import Aim, Finding, Note, Ratio, Series, number
from bench.runs import BenchError, Extent
from kiln.deploy.stack.child_process import bind_to_parent
from kiln.deploy.stack.jars import list_jars
from kiln.pipelines.delta.lake import Lake

FRAMES = 150_000
WARM = 2_000
"""Frames that `archive` and PySpark read before each measurement. The other two programs need no warm-up."""
LIMIT = 180.0
"""s for a program, start and warm-up included. A program that takes longer is killed."""
AIMS = {"kafka-python and deltalake": Aim(least=4.5), "quixstreams": Aim(least=4.5), "naive PySpark": Aim(least=11)}

_INSTALL_LIMIT = 300.0  # s
_ALIKE = 0.02
"""Share by which the numbers of rows in `frames`, `copies` and `messages` may differ between programs."""
_ROOT = Path(__file__).resolve().parents[1]

_Counts = Mapping[str, int]


class _Field:
    """A topic with `count` frames, its end offsets, and settings to read it."""

    def __init__(self, ground: Ground, name: str, count: int, generated_frames: int) -> None:
        self.settings = in_micro_batches(ground.plot(name), 0, "archive")
        self.count = count
        self.ends: Ends = append(
            ground, self.settings, stamped_anew(generated(min(count, generated_frames), live_options()), count)
        )

    @property
    def topic(self) -> str:
        return self.settings.kafka.topic("frames")


def measure(ground: Ground, extent: Extent) -> Finding:
    """Measure `archive` and three other programs in turn, each with a lake of its own.

    If one of the other programs fails or takes too long, only its error is in the finding, as a note.

    Raises:
        BenchError: `archive` failed.
    """
    count = extent.of(FRAMES)
    ground.say(f"writing {count:,} frames")
    warm = _Field(ground, "instead-warm", WARM, WARM)
    field = _Field(ground, "instead", count, extent.of(GENERATED))
    rates: dict[str, list[float]] = {name: [] for name in ("archive", *AIMS)}
    rows: dict[str, _Counts] = {}
    failed: dict[str, Note] = {}
    for run in range(1, extent.runs + 1):
        for name in [name for name in rates if name not in failed]:
            try:
                if name == "archive":
                    _archive(ground, warm)  # warms up again: Spark ends workers that are idle for a minute
                    seconds, rows[name] = _archive(ground, field)
                else:
                    seconds, rows[name] = _program(name, field, warm)
                    _check(rows[name], rows["archive"])
            except BenchError as error:
                if name == "archive":
                    raise
                failed[name] = str(error)
                ground.say(f"{name} is left out: {error}")
                continue
            rates[name].append(count / seconds)
            ground.say(f"run {run} of {extent.runs}: {name}: {number(count / seconds)} frames/s in {seconds:.1f} s")
    series = {name: Series(name, "frames/s", tuple(values)) for name, values in rates.items() if name not in failed}
    ratios = [
        Ratio(f"archive over {name}", series["archive"], series[name], aim)
        for name, aim in AIMS.items()
        if name in series
    ]
    written: dict[str, Note] = {
        f"rows, {name}": ", ".join(f"{counts[table]:,} {table}" for table in TABLES) for name, counts in rows.items()
    }
    title = "frames from Kafka to frames, copies, messages and quarantine, by Kiln and by short programs without Kiln"
    notes: dict[str, Note] = {"frames": count, "master": field.settings.spark.master, **written, **failed}
    return Finding("instead", title, tuple(series.values()), tuple(ratios), notes)


def _archive(ground: Ground, field: _Field) -> tuple[float, _Counts]:
    """Run `archive`. Return the seconds until it has read all records, and its number of rows by table."""
    before = ground.ends(field.settings, "quarantine")
    with ground.fresh(field.settings, "quarantine") as fresh:
        started = time.perf_counter()
        catch_up(ground.spark, fresh, "archive", {"frames": field.ends}, LIMIT)
        seconds = time.perf_counter() - started
        faults = sum(ground.ends(field.settings, "quarantine").values()) - sum(before.values())
        return seconds, {**_rows(fresh.lake_root.uri, TABLES[:-1]), "quarantine": faults}


def _program(name: str, field: _Field, warm: _Field) -> tuple[float, _Counts]:
    """Run another program in its own process. Return the seconds that it prints, and its number of rows by table.

    Raises:
        BenchError: The program failed, took too long or printed no time.
    """
    field.settings.state.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(dir=field.settings.state))
    lake, warm_lake = (Lake(str(folder / name)) for name in ("lake", "warm"))
    lake.create(TABLES)
    kafka = field.settings.kafka
    servers = kafka.servers
    options = kafka.spark_options() if name == "naive PySpark" else kafka.security_options()
    if name == "naive PySpark":
        warm_lake.create(TABLES)
        jars = ",".join(str(jar) for jar in list_jars("spark") if "bare-naked" not in jar.name)  # used only by Kiln
        paths = (lake.path, str(folder / "checkpoints"), jars, warm.topic, warm_lake.path)
        command = [sys.executable, "-m", "bench.peers.naive_spark", servers, field.topic, *paths]
    elif name == "quixstreams":
        command = [str(_quix()), "-m", "bench.peers.quix", servers, field.topic, str(field.count), lake.path]
    else:
        command = [sys.executable, "-m", "bench.peers.loop", servers, field.topic, str(field.count), lake.path]
    said = run_within(LIMIT, command, folder, {"BENCH_KAFKA": json.dumps(options)})
    try:
        seconds = float(json.loads(said.splitlines()[-1])["seconds"])
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"the last line of the program's output is not its time: {said[-200:]!r}") from error
    counts = _rows(lake.path, TABLES)
    shutil.rmtree(folder)
    return seconds, counts


def _rows(lake: str, tables: Sequence[str]) -> _Counts:
    return {table: Lake(lake).open(table).count() for table in tables}


def _check(counts: _Counts, expected: _Counts) -> None:
    for table in TABLES[:-1]:
        if abs(counts[table] - expected[table]) > _ALIKE * expected[table]:
            raise BenchError(
                f"the program wrote {counts[table]:,} rows of {table}, but archive wrote {expected[table]:,}"
            )


def run_within(limit: float, command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Run a program, and return its output. At the end, all processes that it started are killed.

    Args:
        limit: Maximum duration, s.
        command: The command line.
        folder: Working folder, also for the files with the program's output.
        variables: Additional environment variables, such as secrets that `ps` must not show.

    Raises:
        BenchError: The program took longer, or failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONWARNINGS": "ignore", **(variables or {})}
    out, errors = folder / "out", folder / "errors"  # files, because a pipe stays open as long as any child lives
    with out.open("wb") as printed, errors.open("wb") as said:
        process = subprocess.Popen(
            bind_to_parent(command), env=environment, cwd=folder, stdout=printed, stderr=said, start_new_session=True
        )
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        raise BenchError(f"the program did not end within {limit:g} s. Last line of its log: {_last(errors)}") from None
    finally:
        with suppress(ProcessLookupError):  # all processes have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise BenchError(f"the program exited with code {process.returncode}. Last line of its log: {_last(errors)}")
    return out.read_text("utf-8", "replace")


def _last(file: Path) -> str:
    """Return the last line that is not indented. Lines of Java's stack traces and of Spark's plans are indented."""
    lines = file.read_text("utf-8", "replace").splitlines()
    return next((line for line in reversed(lines) if line.strip() and not line[0].isspace()), "")[:300]


def _quix() -> Path:
    """Return the path of the Python in the virtual environment with quixstreams.

    quixstreams needs other versions of packages than Kiln, so it has its own environment. The environment is installed
    if it is missing, or if `quix.lock` has changed.

    Raises:
        BenchError: The environment cannot be installed.
    """
    folder, lock = _ROOT / ".peers" / "quix", _ROOT / "bench" / "peers" / "quix.lock"
    python, installed = folder / "bin" / "python", folder / lock.name
    if not installed.exists() or installed.read_bytes() != lock.read_bytes():
        uv = str(Path(sys.executable).with_name("uv"))
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        install = (
            "pip",
            "install",
            "--quiet",
            "--python",
            str(python),
            "--no-deps",
            "--require-hashes",
            "-r",
            str(lock),
        )
        for arguments in (("venv", "--quiet", "--python", sys.executable, str(folder)), install):
            try:
                run_within(_INSTALL_LIMIT, [uv, *arguments], folder.parent)
            except BenchError as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise BenchError(f"cannot install quixstreams: {error}") from error
        shutil.copy(lock, installed)
    return python
