"""Tasks of `make bench` in Spark's workers, which import nothing from the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from bench.batcher import _log, updates
from bench.ground import send_bench

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_a_task_uses_modules_of_bench(spark: SparkSession, tmp_path: Path) -> None:
    send_bench(spark, tmp_path)
    rows = updates(spark, _log(10, 2), range(10)).collect()
    assert {row.key for row in rows} == {_log(10, 2)(number)[0] for number in range(10)}
