"""Epoch of a task: its query and micro-batch (decision 7)."""

from __future__ import annotations

from pyspark import TaskContext

from kiln.schemas.kafka.records import Epoch


def get_task_epoch() -> Epoch:
    """Return the epoch of this task, which is the same when a micro-batch is repeated after a crash.

    Outside a streaming query it is "batch", 0.

    Raises:
        RuntimeError: The caller is not a task.
    """
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("not in a Spark task, so there is no epoch")
    query, batch = context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty("streaming.sql.batchId")
    return Epoch(query or "batch", int(batch or 0))
