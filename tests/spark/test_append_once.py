"""Appends to Delta tables by a real Spark: once for a micro-batch, and as other readers of Delta see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from conf.settings.model import Settings
from deploy.run.spark import spark_session
from pipelines.lake.append import Write, append_once, written
from pipelines.lake.lake import Lake

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

TABLE = "streams"


@pytest.fixture(scope="module")
def spark(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with spark_session(Settings(state=tmp_path_factory.mktemp("spark"))) as session:
        yield session


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    lake.create([TABLE])
    return lake


def rows(spark: SparkSession, lake: Lake, *streams: str) -> DataFrame:
    """Rows of the table, with these streams; what else it wants is the same in all."""
    empty = spark.read.format("delta").load(lake.table(TABLE))
    named = spark.createDataFrame([(stream,) for stream in streams], "stream string")
    others = [
        F.lit("0").cast(field.dataType).alias(field.name) if not field.nullable else F.lit(None).alias(field.name)
        for field in empty.schema
        if field.name != "stream"
    ]
    return named.select("*", *others).select(*(F.col(each.name).cast(each.dataType) for each in empty.schema))


def held(lake: Lake) -> list[str]:
    return sorted(DeltaTable(lake.table(TABLE)).to_pyarrow_table()["stream"].to_pylist())


def test_a_micro_batch_that_is_run_again_changes_nothing(spark: SparkSession, lake: Lake) -> None:
    first, second = Write("query", 0), Write("query", 1)
    append_once(rows(spark, lake, "a", "b"), lake, TABLE, first)
    append_once(rows(spark, lake, "a", "b"), lake, TABLE, first)
    assert held(lake) == ["a", "b"]
    append_once(rows(spark, lake, "c"), lake, TABLE, second)
    append_once(rows(spark, lake, "c"), lake, TABLE, first)
    assert held(lake) == ["a", "b", "c"]
    assert written(lake, TABLE, second)
    assert not written(lake, TABLE, Write("query", 2))


def test_another_query_and_another_write_are_others(spark: SparkSession, lake: Lake) -> None:
    for number, write in enumerate((Write("one", 5), Write("two", 5), Write("one", 5, "more"))):
        assert not written(lake, TABLE, write)
        append_once(rows(spark, lake, f"{number}"), lake, TABLE, write)
    assert held(lake) == ["0", "1", "2"]


def test_spark_s_own_writer_knows_what_was_appended(spark: SparkSession, lake: Lake) -> None:
    """The commits are those of the options txnAppId and txnVersion."""
    write = Write("query", 3)
    append_once(rows(spark, lake, "a"), lake, TABLE, write)
    again = rows(spark, lake, "a").write.format("delta").mode("append").option("txnAppId", write.app_id(TABLE))
    again.option("txnVersion", "3").save(lake.table(TABLE))
    assert held(lake) == ["a"]
    history = DeltaTable(lake.table(TABLE)).history(1)[0]
    assert (history["operation"], history["operationParameters"]["mode"]) == ("WRITE", "Append")
    assert history["isBlindAppend"]


def test_what_has_other_columns_is_refused(spark: SparkSession, lake: Lake) -> None:
    wrong = rows(spark, lake, "a").withColumn("stream", F.lit(1))
    with pytest.raises(ValueError, match=r"streams has the columns .*stream:string.*, not .*stream:int"):
        append_once(wrong, lake, TABLE, Write("query", 0))
    assert not held(lake)
