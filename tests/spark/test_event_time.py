"""The order of event time on a real Spark (decision 1)."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from kiln.pipelines.updates.transform import sort_by_capture_time

pytest_plugins = ["kit.local_spark"]
pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_records_of_a_micro_batch_are_written_in_the_order_of_event_time(spark: SparkSession) -> None:
    heard = [7, 3, 9, 1, 8, 2, 6]
    rows = [("updates", b"k%d" % (at % 2), b"%d" % at, at) for at in heard]
    made = spark.createDataFrame(rows, "topic string, key binary, value binary, observed_at bigint").repartition(1)
    written = sort_by_capture_time(made)
    assert written.columns == made.columns
    assert [bytes(row.value) for row in written.collect()] == [b"%d" % at for at in sorted(heard)]
