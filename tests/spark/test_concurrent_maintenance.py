"""Spark beside the care of tables: Spark reads the same rows before and after, and a writer goes on over a log that was
shortened under it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.commits import WriteId
from kiln.pipelines.delta.delta_rs import DeltaRsCommits
from kiln.pipelines.delta.files import DataFile, TableFiles
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.delta.tables import read_table
from kiln.pipelines.maintenance.plan import MaintenancePolicy
from kiln.pipelines.maintenance.state import read_log
from kiln.pipelines.maintenance.steps import MaintenanceResult, maintain_table
from kiln.schemas.delta.tables import TABLES

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

TABLE = "tips"


def file_of(lake: Lake, name: str) -> list[DataFile]:
    out = TableFiles(lake, TABLE)
    at = time.time_ns() // 1_000
    for number in range(3):
        out.add(
            tuple(at if each.type == "timestamp" else f"{name}-{number}" for each in TABLES[TABLE].columns),
        )
    return out.close()


def cared(lake: Lake) -> MaintenanceResult:
    """With nothing kept but the newest hundred commits."""
    return maintain_table(
        lake, TABLE, MaintenancePolicy(128 << 20, keep=0), time.time_ns() // 1_000 + 86_400_000_000, lambda _: None
    )


def rows(spark: SparkSession, lake: Lake) -> list[str]:
    """As Spark, deltalake and DuckDB read them, which is the same."""
    of_spark = sorted(row.tip for row in read_table(spark, lake, TABLE).collect())
    assert sorted(lake.open(TABLE).to_pyarrow_table()["tip"].to_pylist()) == of_spark
    assert [row[0] for row in query_lake(lake, f"SELECT tip FROM {TABLE} ORDER BY tip").rows()] == of_spark
    return of_spark


def test_spark_reads_the_same_and_the_writer_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.create([TABLE])
    writer = DeltaRsCommits(lake)
    assert writer.commit(TABLE, file_of(lake, "mine 0"), WriteId("query", 0))
    assert len(rows(spark, lake)) == 3
    others = DeltaRsCommits(lake)
    for number in range(160):  # of which Spark and the writer know nothing yet
        assert others.commit(TABLE, file_of(lake, f"others {number}"), WriteId("others", number))
    before = rows(spark, lake)
    assert cared(lake).files[1] == 1
    done = cared(lake)
    assert read_log(lake.folder(TABLE))[0][0].version > 2, done
    assert rows(spark, lake) == before
    assert not writer.commit(TABLE, [], WriteId("query", 0)), "what a query wrote stays known"
    assert writer.commit(TABLE, file_of(lake, "mine 1"), WriteId("query", 1))
    after = rows(spark, lake)
    assert set(before) < set(after)
    assert len(after) == len(before) + 3
    told = spark.sql(f"DESCRIBE HISTORY delta.`{lake.table(TABLE)}`").collect()
    assert any(row.userMetadata and row.userMetadata.startswith("kiln maintain: ") for row in told)
    (recent,) = spark.sql(
        f"SELECT count(*) FROM delta.`{lake.table(TABLE)}` WHERE observed_at > '2020-01-01'"
    ).collect()
    assert recent[0] == len(after), "Spark skips by what the files state"
