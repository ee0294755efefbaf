"""The transforms of hearing time on a real Spark: the order of records, and the log's clock (decision 1)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from conf.settings.model import Settings
from deploy.run.spark import spark_session
from pipelines.transforms.sink import at_the_clock
from pipelines.transforms.updates import in_order_of_hearing

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def spark(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with spark_session(Settings(state=tmp_path_factory.mktemp("spark"))) as session:
        yield session


def test_records_of_a_micro_batch_are_written_in_the_order_of_hearing(spark: SparkSession) -> None:
    heard = [7, 3, 9, 1, 8, 2, 6]
    rows = [("updates", b"k%d" % (at % 2), b"%d" % at, at) for at in heard]
    made = spark.createDataFrame(rows, "topic string, key binary, value binary, heard_at bigint").repartition(3)
    written = in_order_of_hearing(made)
    assert written.columns == ["topic", "key", "value"]
    assert [bytes(row.value) for row in written.collect()] == [b"%d" % at for at in sorted(heard)]


def test_updated_at_is_the_clock_over_micro_batches_and_never_before_it(spark: SparkSession) -> None:
    def at(micros: int) -> datetime:
        return datetime.fromtimestamp(micros / 1e6, UTC)

    rows = [(0, at(10)), (0, at(40)), (1, at(10))]
    updates = spark.createDataFrame(rows, "log_partition int, updated_at timestamp")
    found = at_the_clock(updates, {0: 30}).selectExpr("log_partition", "unix_micros(updated_at) AS at").collect()
    assert sorted((row["log_partition"], row["at"]) for row in found) == [(0, 30), (0, 40), (1, 10)]
