"""The startup hook of Spark's Python processes in local mode: what a daemon imports for its forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).resolve().parents[3] / "pipelines" / "runtime" / "worker_site"
PLANNER = "pyspark.sql.worker.plan_data_source_read"


def list_imports(*command: str) -> set[str]:
    """Run Python with the hook, without anything on stdin, and list the modules that it imported."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HOOK), *sys.path]),
        "PYTHON_WORKER_FACTORY_SECRET": "secret",
    }
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines()}


@pytest.mark.parametrize(
    ("command", "expected"),
    [(("-m", "pyspark.daemon", PLANNER), {PLANNER, "kiln.pipelines.runtime.kafka"}), (("-m", "calendar"), set())],
)
def test_a_daemon_imports_what_its_forks_need_and_no_kafka_python(command: tuple[str, ...], expected: set[str]) -> None:
    imported = list_imports(*command)
    assert "sitecustomize" in imported
    assert imported & {PLANNER, "kiln.pipelines.runtime.kafka"} == expected
    assert "kafka" not in imported, "kafka-python takes longer to import than the source's own modules"
