"""Commits by Delta's own Spark connector, for installations in which Spark's catalog and log store must commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

from delta.exceptions import ConcurrentTransactionException
from py4j.java_gateway import JVMView
from pyspark.sql import SparkSession

from kiln.pipelines.delta.commits import WriteId, build_second_writer_error
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake


class DeltaSparkCommits:
    """`Commits` by delta-spark. Its Python API has no such commit, so this class calls the JVM's."""

    def __init__(self, lake: Lake, spark: SparkSession, *, durable: bool = False) -> None:
        """Create the committer. `durable`: sync each commit to disk before `commit` returns."""
        self._lake = lake
        self._durable = durable
        self._spark = spark

    def commit(self, table: str, files: Sequence[DataFile], write: WriteId) -> bool:
        """Append files to a table, as `Commits.commit`."""
        jvm = cast(JVMView, self._spark._jvm)
        delta, nothing = jvm.org.apache.spark.sql.delta, jvm.scala.Option.empty()
        log = delta.DeltaLog.forTable(self._spark._jsparkSession, self._lake.folder(table).spark_uri)
        transaction = log.startTransaction()
        app_id = write.app_id(table)
        # From this call on, the transaction fails if another driver commits under the same id.
        if transaction.txnVersion(app_id) >= write.batch_id:
            return False
        self._lake.check_columns(table, str(transaction.metadata().schemaString()))
        if self._durable:
            self._lake.folder(table).sync()  # the files are named before a commit names them
        now = log.clock().getTimeMillis()
        # PROTOCOL.md, Add File and Transaction Identifiers
        fixed = {"partitionValues": {}, "modificationTime": now, "dataChange": True}
        added = [{"add": {"path": each.name, "size": each.size, "stats": each.stats, **fixed}} for each in files]
        txn = {"txn": {"appId": app_id, "version": write.batch_id, "lastUpdated": now}}
        actions = jvm.java.util.ArrayList()
        for action in (*added, txn):
            actions.add(delta.actions.Action.fromJson(json.dumps(action)))
        append = getattr(delta, "DeltaOperations$Write")(jvm.org.apache.spark.sql.SaveMode.Append, *[nothing] * 8)
        try:
            version = transaction.commit(jvm.org.apache.spark.api.python.PythonUtils.toSeq(actions), append)
        except ConcurrentTransactionException as error:
            raise build_second_writer_error(table, write) from error
        if self._durable:
            self._lake.sync_commits(table, version, version)
        return True
