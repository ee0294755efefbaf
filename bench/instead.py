"""The query `archive` beside what a user would write instead (`bench/peers`): the same frames into the same tables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from bench.catch_up import catch_up
from bench.frames import GENERATED, append, generated, live_options, stamped_anew
from bench.ground import Ends, Ground
from bench.peers import loop, naive_spark
from bench.report import Aim, Finding, Ratio
from bench.runs import BenchError, Extent, Side, in_turn
from conf.settings.model import Job, Settings
from pipelines.lake.lake import Lake
from pipelines.spark.rows import arrow_schema, ddl
from schemas.tables import TABLES

FRAMES = 200_000
FILLED = ("frames", "copies", "messages", "quarantine")
AIMS = {"kafka-python and deltalake": Aim(least=5), "quixstreams": Aim(least=3), "naive PySpark": Aim(least=2)}

_ROOT = Path(__file__).resolve().parents[1]


def measure(ground: Ground, extent: Extent) -> Finding:
    """Rates of all four, in turn, each into a lake of its own. BenchError: a program failed, or wrote too few rows."""
    settings = ground.plot("instead")
    count = extent.of(FRAMES)
    job = Job(trigger=timedelta(), max_offsets_per_trigger=0)
    settings = settings.model_copy(update={"jobs": settings.jobs.model_copy(update={"archive": job})})
    quix = _quix()
    ground.say(f"writing {count:,} frames")
    ends = append(ground, settings, stamped_anew(generated(extent.of(GENERATED), live_options()), count))
    sides = {"archive": _archive(ground, settings, ends, count)} | {
        name: _side(ground, settings, name, quix, count) for name in AIMS
    }
    ground.say("warming up")
    for side in sides.values():
        side(0)
    rates = dict(zip(sides, in_turn(sides, extent.runs, "frames/s", ground.say), strict=True))
    ratios = [Ratio(f"archive over {name}", rates["archive"], rates[name], aim) for name, aim in AIMS.items()]
    title = "frames from Kafka to frames, copies, messages and quarantine, by Kiln and by programs of a page each"
    notes: dict[str, str | int | float] = {"frames": count, "master": settings.spark.master}
    return Finding("instead", title, tuple(rates.values()), tuple(ratios), notes)


def _archive(ground: Ground, settings: Settings, ends: Ends, count: int) -> Side:
    def side(run: int) -> float:
        with ground.fresh(settings, "quarantine") as fresh:
            return count / sum(each.seconds for each in catch_up(ground.spark, fresh, "archive", {"frames": ends}))

    return side


def _side(ground: Ground, settings: Settings, name: str, quix: Path, count: int) -> Side:
    servers, topic = settings.kafka.servers, settings.kafka.topic("frames")
    columns = {table: TABLES[table].columns for table in FILLED}

    def side(run: int) -> float:
        folder = settings.state / f"{name.replace(' ', '-')}-{run}"
        lake = Lake(str(folder / "lake"))
        lake.create(FILLED)
        started = time.perf_counter()
        if name == "naive PySpark":
            schemas = {table: ddl(columns[table]) for table in FILLED}
            naive_spark.run(ground.spark, servers, topic, Path(lake.path), folder / "checkpoints", schemas)
        elif name == "quixstreams":
            _run(quix, "bench.peers.quix", servers, topic, str(count), lake.path)
        else:
            arrow = {table: arrow_schema(columns[table]) for table in FILLED}
            loop.run(servers, topic, count, Path(lake.path), arrow)
        took = time.perf_counter() - started
        rows = lake.open("frames").to_pyarrow_table(columns=["sequence"]).num_rows
        if rows < count * 0.9:  # what is no Frame is in quarantine
            raise BenchError(f"{name} wrote {rows:,} of {count:,} frames")
        shutil.rmtree(folder)
        return count / took

    return side


def _run(python: Path, module: str, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [str(python), "-m", module, *arguments],
        env=environment,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"{module} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


def _quix() -> Path:
    """The interpreter with quixstreams, which wants other versions of packages than Kiln; made where it is missing."""
    folder = _ROOT / ".peers" / "quix"
    python = folder / "bin" / "python"
    lock = _ROOT / "bench" / "peers" / "quix.lock"
    if not python.exists():
        uv = Path(sys.executable).with_name("uv")
        for command in (
            [str(uv), "venv", "--quiet", "--python", sys.executable, str(folder)],
            [str(uv), "pip", "install", "--quiet", "--python", str(python), "--no-deps", "-r", str(lock)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                shutil.rmtree(folder, ignore_errors=True)
                raise BenchError(f"no environment for quixstreams: {done.stderr.strip()[-300:]}")
    return python
