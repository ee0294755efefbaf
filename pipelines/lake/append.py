"""Writing to Kafka and, exactly once, to Delta (DESIGN, decision 7)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import deltalake
from py4j.java_gateway import JVMView
from pyspark.sql import DataFrame

from pipelines.spark.kafka import Broker
from schemas.tables import TABLES, Column, Table

# As much as the topics allow (DESIGN, Kafka topics).
MAX_REQUEST = 8 << 20

# Names of Spark DDL types in the Delta protocol (PROTOCOL.md, Schema Serialization Format), where they differ.
_DELTA_TYPES: dict[str, str | dict[str, object]] = {
    "int": "integer",
    "bigint": "long",
    "map<string,string>": {"type": "map", "keyType": "string", "valueType": "string", "valueContainsNull": True},
    "array<string>": {"type": "array", "elementType": "string", "containsNull": True},
}


def sink_options(broker: Broker) -> dict[str, str]:
    """Options of Spark's Kafka sink, streaming or batch."""
    return {
        "kafka.bootstrap.servers": broker.servers,
        "kafka.max.request.size": str(MAX_REQUEST),
        "kafka.enable.idempotence": "true",
        **broker.options,
    }


def write_topic(records: DataFrame, broker: Broker, topic: str) -> None:
    """Appends key, value to a topic; at least once."""
    records.select("key", "value").write.format("kafka").options(**sink_options(broker)).option(
        "topic", broker.topic(topic)
    ).save()


@dataclass(frozen=True)
class Lake:
    """The folder of the Delta tables, one folder a table; any path Spark can write. `options`: delta-rs's for it."""

    path: str
    options: Mapping[str, str] = field(default_factory=dict)

    def table(self, name: str) -> str:
        return f"{self.path}/{name}"


@dataclass(frozen=True)
class Write:
    """One write of one micro-batch. Done again under the same name it changes nothing."""

    query_id: str
    batch_id: int
    name: str = "append"

    def app_id(self, table: str) -> str:
        return f"{self.query_id}:{table}:{self.name}"


def create_tables(lake: Lake, names: Iterable[str]) -> None:
    """Makes the tables that are not there yet, with their columns' comments.

    By delta-rs and not by Spark, which takes a second a table: reader and writer protocol are the base ones either way.
    """
    for name in names:
        table = TABLES[name]
        fields = [_field(column) for column in table.columns]
        deltalake.DeltaTable.create(
            lake.table(name),
            deltalake.Schema.from_json(json.dumps({"type": "struct", "fields": fields})),
            mode="ignore",
            name=name,
            description=table.comment,
            configuration={
                "delta.checkpointInterval": "50",
                "delta.dataSkippingStatsColumns": ",".join(_skipped_by(table)),
            },
            storage_options=dict(lake.options) or None,
        )


def _skipped_by(table: Table) -> list[str]:
    """The columns whose least and greatest value a file tells, so that readers can pass it over: what people filter by.
    By default it would be the first 32, which for wide rows of text costs a third of the write."""
    told = {"network", "type", "stream", "cid", "separator_value"}
    return [each.name for each in table.columns if each.name in told or each.type in ("timestamp", "int", "bigint")]


def _field(column: Column) -> dict[str, object]:
    return {
        "name": column.name,
        "type": _DELTA_TYPES.get(column.type, column.type),
        "nullable": column.nullable,
        "metadata": {"comment": column.comment},
    }


def has_rows(lake: Lake, table: str) -> bool:
    """Whether a table is there and holds anything."""
    path, options = lake.table(table), dict(lake.options) or None
    if not deltalake.DeltaTable.is_deltatable(path, options):
        return False
    return bool(deltalake.DeltaTable(path, storage_options=options).file_uris())


def append_once(rows: DataFrame, lake: Lake, table: str, write: Write) -> None:
    """Appends to a table, once for a `Write`: a second append under the same one does nothing.

    The commit is what the options txnAppId and txnVersion of Delta's writer make. Not by these options: they have Spark
    compute the whole state of the table before each append, for its transaction ids, and that is most of what an append
    of a small micro-batch costs (docs/DESIGN.md, decision 7). ValueError: the table's columns are others.
    """
    if written(lake, table, write):
        return
    spark, path = rows.sparkSession, lake.table(table)
    data = rows.select(*(column.name for column in TABLES[table].columns))._jdf
    jvm = cast(JVMView, spark._jvm)  # none of it has a door in Python
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
    known = deltalake.DeltaTable(lake.table(table), storage_options=dict(lake.options) or None)
    newest = known.transaction_version(write.app_id(table))
    return newest is not None and newest >= write.batch_id
