"""The same questions to the same tables and views, answered by Spark.

Spark has no switch that keeps a session from writing. So a query is parsed first, and one that would do anything but
read is refused before Spark sees it. Spark also reads no files by name here: `parquet.`/path`` is no table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from py4j.java_gateway import JavaObject, is_instance_of
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from deploy.sql.as_of import AsOf, opened
from deploy.sql.ask import Answer, SqlError, named_in
from pipelines.lake.lake import Lake
from schemas.tables import TABLES
from schemas.views import views

_LOGICAL: Final = "org.apache.spark.sql.catalyst.plans.logical."
_ACTING: Final = (
    f"{_LOGICAL}Command",
    f"{_LOGICAL}ParsedStatement",
    f"{_LOGICAL}ScriptTransformation",
)
_LISTING: Final = (
    "org.apache.spark.sql.execution.command.ExplainCommand",
    f"{_LOGICAL}ShowTables",
    f"{_LOGICAL}ShowColumns",
    f"{_LOGICAL}DescribeRelation",
)
_BEGINS: Final = re.compile(
    r"\s*(?:(?:--[^\n]*\n|/\*.*?\*/|\()\s*)*(?:SELECT|WITH|FROM|VALUES|TABLE|EXPLAIN|SHOW|DESCRIBE|DESC)\b",
    re.IGNORECASE | re.DOTALL,
)
_JAVA: Final = re.compile(r"\b(?:try_)?(?:reflect|java_method)\s*\(", re.IGNORECASE)
_SETTINGS: Final = {"spark.sql.runSQLOnFiles": "false", "spark.sql.session.timeZone": "UTC"}


def ask_spark(
    spark: SparkSession,
    lake: Lake,
    sql: str,
    as_of: AsOf | None = None,
    *,
    most: int | None = None,
    partitions: int = 2,
) -> Answer:
    """Run one query on Spark over the tables of a lake, as they are or as they were. `most`: no more rows than these.
    `partitions`: of a shuffle.

    The answer passes through the memory of this program. SqlError, LakeError, NoSuchVersionError.
    """
    session = spark.newSession()
    for key, value in {**_SETTINGS, "spark.sql.shuffle.partitions": str(partitions)}.items():
        session.conf.set(key, value)
    _check(session, sql)
    names, wanted = named_in(sql, lake.tables())
    if not (names or wanted):
        names, wanted = lake.tables(), tuple(views().values())
    there = {name for name in names if _show(session, lake, name, as_of)}
    for name in {table for view in wanted for table in view.tables} - there:
        session.createDataFrame([], TABLES[name].ddl).createOrReplaceTempView(name)
    try:
        for view in wanted:
            session.sql(view.spark_sql()).createOrReplaceTempView(view.name)
        found = session.sql(sql)
        table = (found if most is None else found.limit(most)).toArrow()
    except (PySparkException, Py4JJavaError) as error:
        raise SqlError(_first_line(error)) from error
    return Answer(table.column_names, table.to_batches())


def _show(session: SparkSession, lake: Lake, name: str, as_of: AsOf | None) -> bool:
    """Makes a view of a table; False: there was no such table then."""
    table = opened(lake, name, as_of)
    if table is None:
        return False
    reader = session.read.format("delta")
    if as_of is not None:
        reader = reader.option("versionAsOf", table.version())
    frame: DataFrame = reader.load(lake.folder(name).spark_uri)
    frame.createOrReplaceTempView(name)
    return True


def _check(session: SparkSession, sql: str) -> None:
    """SqlError: the text is not one query that only reads."""
    if not _BEGINS.match(sql):
        raise SqlError("the lake is read only here: one query at a time, which begins with SELECT or WITH")
    if _JAVA.search(sql):
        raise SqlError("the lake is read only here: functions that call Java are not possible")
    gateway = session.sparkContext._gateway
    assert gateway is not None  # a classic session has one
    try:
        plan = session._jsparkSession.sessionState().sqlParser().parsePlan(sql)
    except (PySparkException, Py4JJavaError) as error:
        raise SqlError(_first_line(error)) from error
    if any(is_instance_of(gateway, plan, each) for each in _LISTING):
        return
    for node in _nodes(plan):
        if any(is_instance_of(gateway, node, each) for each in _ACTING):
            raise SqlError(f"the lake is read only here: {node.nodeName()} is not possible, only queries are")


def _nodes(plan: JavaObject) -> Iterator[JavaObject]:
    """A parsed plan and all plans in it: children, WITH queries, subqueries."""
    yield plan
    for inner in (plan.children(), plan.innerChildren(), plan.subqueries()):
        for number in range(inner.size()):
            child = inner.apply(number)
            if hasattr(child, "children"):
                yield from _nodes(child)


def _first_line(error: Exception) -> str:
    words = str(error).strip().split("\n")[0]
    return words or type(error).__name__
