"""The file of classes that `make setup` keeps for Spark's JVM (deploy/run/spark_classes.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kiln.deploy.stack.jars import spark_archive_path

pytestmark = pytest.mark.spark

COUNT = """
import sys
from pathlib import Path
from kiln.deploy.stack.jars import list_jars
from kiln.pipelines.runtime.session import create_session
spark = create_session(
    "classes", master="local[1]", driver_memory="512m", java_options=sys.argv[1], jars=list_jars("spark"),
    appended=[Path(sys.argv[2])], scratch=Path(sys.argv[2]),
)
print(spark.range(7).repartition(2).count())
"""


def count_with(classes: Path, tmp_path: Path) -> str:
    """The number of rows out of seven; the JVM notes where each class came from in `loaded`."""
    options = f'"-XX:SharedArchiveFile={classes}" "-Xlog:class+load:file={tmp_path / "loaded"}"'
    done = subprocess.run(
        [sys.executable, "-c", COUNT, options, str(tmp_path)], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_what_was_kept_is_not_read_from_jars_again(tmp_path: Path) -> None:
    assert count_with(spark_archive_path(), tmp_path) == "7"
    loaded = (tmp_path / "loaded").read_text().splitlines()
    kept = [line for line in loaded if "shared objects file (top)" in line]
    for name in ("org.apache.spark.SparkContext ", "org.apache.spark.sql.classic.SparkSession "):
        assert any(f" {name}" in line for line in kept), name
    assert sum(".jar" in line for line in loaded) < len(kept) / 10


def test_a_file_that_does_not_fit_costs_time_only(tmp_path: Path) -> None:
    other = tmp_path / "classes.jsa"
    other.write_bytes(b"of another JVM" * 1000)
    assert count_with(other, tmp_path) == "7"
