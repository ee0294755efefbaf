"""Tables of the lake through Spark: rows appended exactly once (decision 7), and tables read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from delta.tables import DeltaTable
from py4j.java_gateway import JVMView
from pyspark.sql import DataFrame, SparkSession

from pipelines.lake.lake import Lake
from schemas.tables import TABLES


@dataclass(frozen=True)
class Write:
    """One write of one micro-batch, by which a repeated write is known. `name` tells two writes to one table apart."""

    query_id: str
    batch_id: int
    name: str = "append"

    def app_id(self, table: str) -> str:
        """The application of Delta's transaction (PROTOCOL.md, Transaction Identifiers); its version is the batch."""
        return f"{self.query_id}:{table}:{self.name}"


def append_once(rows: DataFrame, lake: Lake, table: str, write: Write) -> None:
    """Appends rows to a table, once for a `Write`: a second append under the same `Write` does nothing.

    The commit is the one that Delta's writer makes with its options txnAppId and txnVersion. This function does without
    the writer: for these options, the writer has Spark compute the whole state of the table before each append, which
    is most of what the append of a small micro-batch costs (decision 7). ValueError: the table has other columns.
    """
    if written(lake, table, write):
        return
    spark, path = rows.sparkSession, lake.table(table)
    data = rows.select(*(column.name for column in TABLES[table].columns))._jdf
    jvm = cast(JVMView, spark._jvm)  # delta-spark's Python API has no such commit
    delta, nothing = jvm.org.apache.spark.sql.delta, jvm.scala.Option.empty()
    log = delta.DeltaLog.forTable(spark._jsparkSession, path)
    transaction = log.startTransaction()
    expected, found = (each.schema().catalogString() for each in (transaction.metadata(), data))
    if expected != found:
        raise ValueError(f"{path} has the columns {expected}, not {found}")
    told = jvm.scala.Option.apply(log.clock().getTimeMillis())
    mark = delta.actions.SetTransaction(write.app_id(table), write.batch_id, told)
    append = getattr(delta, "DeltaOperations$Write")(jvm.org.apache.spark.sql.SaveMode.Append, *[nothing] * 8)
    transaction.commit(transaction.writeFiles(data).appended(mark), append)


def written(lake: Lake, table: str, write: Write) -> bool:
    """Whether a `Write` was committed to a table before."""
    newest = lake.open(table).transaction_version(write.app_id(table))
    return newest is not None and newest >= write.batch_id


def read_table(spark: SparkSession, lake: Lake, table: str) -> DataFrame:
    """The newest version of a table."""
    frame: DataFrame = DeltaTable.forPath(spark, lake.table(table)).toDF()
    return frame
