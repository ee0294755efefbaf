"""The epoch of a task: which query it is of, and which micro-batch (decision 7)."""

from __future__ import annotations

from pyspark import TaskContext

from kiln.schemas.kafka.records import Epoch


def get_task_epoch() -> Epoch:
    """The same again when a crash makes a micro-batch run again. Outside a streaming query: "batch", 0.

    RuntimeError: this is no task.
    """
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("only a task of a query has an epoch, and this is none")
    query, batch = context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty("streaming.sql.batchId")
    return Epoch(query or "batch", int(batch or 0))
