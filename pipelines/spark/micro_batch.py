"""Which micro-batch a task is of."""

from __future__ import annotations

from typing import NamedTuple

from pyspark import TaskContext


class MicroBatch(NamedTuple):
    """The same again when a crash makes a micro-batch run again (decision 7)."""

    query: str
    """its id for life"""
    number: int


def micro_batch() -> MicroBatch:
    """Of this task. Outside a streaming query: "batch", 0. RuntimeError: this is no task."""
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("only a task of a query is of a micro-batch, and this is none")
    query, number = context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty("streaming.sql.batchId")
    return MicroBatch(query or "batch", int(number or 0))
