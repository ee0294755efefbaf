"""Rows of a table as `backfill` and `sink` read them: those that Delta's connector gives, out of the files that may
have them."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.tables import build_condition, count_rows_at_most, create_empty, read_rows, read_table
from kiln.pipelines.delta.time_bounds import TimeBounds
from kiln.pipelines.runtime.spark_environment import find_spark_home
from kiln.schemas.delta.tables import TABLES

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

TABLE = "tips"
HOUR = 3_600_000_000


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Version 1 has the hours 0 to 9, version 2 also 10 to 19, version 3 also 20 to 29."""
    return filled(tmp_path / "a lake")


def filled(folder: Path) -> Lake:
    made = Lake(str(folder))
    made.create([TABLE])
    commits = DeltaRsCommits(made)
    for number in range(3):
        assert commits.commit(TABLE, file_of(made, number), WriteId("query", number))
    return made


def test_another_spark_of_the_user_is_ignored(spark: SparkSession) -> None:
    """The session was opened with its variables (kit/local_spark.py)."""

    worker = describe_worker(spark)
    assert worker["interpreter"] == sys.executable
    assert spark.sparkContext._jsc.hadoopConfiguration().get("fs.defaultFS") == "file:///"
    assert spark.conf.get("spark.kiln.foreign", "") == ""
    assert {"HADOOP_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "SPARK_CONF_DIR"}.isdisjoint(os.environ)
    assert os.environ["SPARK_HOME"] == str(find_spark_home())


def test_python_workers_import_the_installed_pyspark(spark: SparkSession) -> None:
    """Spark's zip file of PySpark has no bytecode, so each process would compile PySpark."""
    worker = describe_worker(spark)
    assert worker["pyspark"] == str(find_spark_home() / "__init__.py")
    assert not [each for each in worker["path"].split(os.pathsep) if each.startswith(str(find_spark_home()))]


def describe_worker(spark: SparkSession) -> dict[str, str]:
    """Return the interpreter, the file of PySpark and `sys.path` of a Python worker."""

    def describe(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark

        for _ in batches:
            found = {"interpreter": sys.executable, "pyspark": pyspark.__file__, "path": os.pathsep.join(sys.path)}
            yield pa.RecordBatch.from_pylist([found])

    (row,) = spark.range(1).mapInArrow(describe, "interpreter string, pyspark string, path string").collect()
    return row.asDict()


def test_the_jvm_outlives_the_terminal_and_ends_with_its_parent(spark: SparkSession) -> None:
    """The JVM is in the session of the terminal: SIGHUP would end it in the middle of micro-batches."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    status = Path("/proc", str(gateway.proc.pid), "status").read_text()
    (ignored,) = re.findall(r"^SigIgn:\s+([0-9a-f]+)$", status, re.MULTILINE)
    assert int(ignored, 16) & 1 << signal.SIGHUP - 1
    assert signal.getsignal(signal.SIGHUP) != signal.SIG_IGN


def file_of(lake: Lake, number: int) -> list[DataFile]:
    out = TableFiles(lake, TABLE)
    for hour in range(10 * number, 10 * number + 10):
        out.add(tuple(hour * HOUR if each.type == "timestamp" else f"{hour}" for each in TABLES[TABLE].columns))
    return out.close()


def hours(rows: DataFrame) -> list[int]:
    return sorted(int(row.tip) for row in rows.collect())


@pytest.mark.parametrize(
    ("version", "times", "expected", "files"),
    [
        (0, TimeBounds(), [], 0),
        (1, TimeBounds(), range(10), 1),
        (3, TimeBounds(), range(30), 3),
        (3, TimeBounds(low=12 * HOUR), range(12, 30), 2),
        (3, TimeBounds(high=10 * HOUR), range(10), 1),
        (3, TimeBounds(low=19 * HOUR, high=20 * HOUR), [19], 1),
        (2, TimeBounds(low=20 * HOUR), [], 0),
        (None, TimeBounds(low=28 * HOUR), [28, 29], 1),
    ],
)
def test_rows_of_a_version_and_a_range_out_of_the_files_that_may_have_them(
    spark: SparkSession, lake: Lake, version: int | None, times: TimeBounds, expected: range | list[int], files: int
) -> None:
    rows = read_rows(spark, lake, TABLE, version, times)
    assert hours(rows) == list(expected)
    assert len(rows.inputFiles()) == files
    assert count_rows_at_most(lake, TABLE, version, times) == 10 * files
    of_connector = read_table(spark, lake, TABLE, version).where(build_condition(times))
    assert rows.columns == of_connector.columns
    assert sorted(rows.collect()) == sorted(of_connector.collect())


def test_a_folder_whose_name_is_a_pattern_to_spark(spark: SparkSession, tmp_path: Path) -> None:
    named = filled(tmp_path / "lake [1]")
    filled(tmp_path / "lake 1")
    assert hours(read_rows(spark, named, TABLE, 1, TimeBounds(low=8 * HOUR))) == [8, 9]


def test_a_file_that_states_no_times_is_read(spark: SparkSession, lake: Lake) -> None:
    assert count_rows_at_most(lake, TABLE) == 30
    untold = [msgspec.structs.replace(each, stats='{"numRecords": 10}') for each in file_of(lake, 3)]
    assert DeltaRsCommits(lake).commit(TABLE, untold, WriteId("query", 3))
    rows = read_rows(spark, lake, TABLE, 4, TimeBounds(low=25 * HOUR, high=35 * HOUR))
    assert hours(rows) == list(range(25, 35))
    assert count_rows_at_most(lake, TABLE, 4, TimeBounds(low=25 * HOUR, high=35 * HOUR)) == 20
    uncounted = [msgspec.structs.replace(each, stats="") for each in file_of(lake, 4)]
    assert DeltaRsCommits(lake).commit(TABLE, uncounted, WriteId("query", 4))
    assert count_rows_at_most(lake, TABLE) > 10**18


def test_spark_removes_an_empty_table_from_a_plan(spark: SparkSession, lake: Lake) -> None:
    """A union with it, and a semi join of it, cost no job."""
    rows, empty = read_rows(spark, lake, TABLE, 1), create_empty(spark, TABLE)
    assert empty.columns == rows.columns
    joined = rows.unionByName(empty.join(rows.select("tip").distinct(), "tip", "left_semi"))
    plan = joined._jdf.queryExecution().executedPlan().toString()
    assert "Union" not in plan
    assert "Join" not in plan


def test_a_file_whose_greatest_time_is_stated_in_milliseconds_is_read(spark: SparkSession, lake: Lake) -> None:
    """As Spark writes statistics."""
    out = TableFiles(lake, TABLE)
    out.add(tuple(40 * HOUR + 900 if each.type == "timestamp" else "40" for each in TABLES[TABLE].columns))
    (file,) = out.close()
    assert "T16:00:00.000900Z" in file.stats
    rounded = msgspec.structs.replace(file, stats=file.stats.replace("T16:00:00.000900Z", "T16:00:00.000Z"))
    assert DeltaRsCommits(lake).commit(TABLE, [rounded], WriteId("query", 3))
    assert hours(read_rows(spark, lake, TABLE, None, TimeBounds(low=40 * HOUR + 500))) == [40]


def test_rows_that_somebody_deleted_with_vectors_are_gone(spark: SparkSession, lake: Lake) -> None:
    """The files still have them: only Delta's connector knows."""
    table = f"delta.`{lake.table(TABLE)}`"
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    spark.sql(f"DELETE FROM {table} WHERE tip = '5'")
    version = lake.open(TABLE).version()
    assert hours(read_rows(spark, lake, TABLE, version, TimeBounds(high=8 * HOUR))) == [0, 1, 2, 3, 4, 6, 7]
    assert hours(read_rows(spark, lake, TABLE, 3, TimeBounds(high=8 * HOUR))) == list(range(8))
