"""Epoch of a Spark task: the ids of its query and micro-batch (decision 7)."""

from __future__ import annotations

from pyspark import TaskContext

from kiln.schemas.kafka.records import Epoch


def get_task_epoch() -> Epoch:
    """Return the query id and the micro-batch of the running task.

    They are the same when Spark repeats the micro-batch after a crash. Outside a streaming query, the query id is
    "batch" and the micro-batch 0.

    Raises:
        RuntimeError: The caller is not a Spark task.
    """
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("cannot read the ids of query and micro-batch outside a Spark task")
    query, batch = context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty("streaming.sql.batchId")
    return Epoch(query or "batch", int(batch or 0))
