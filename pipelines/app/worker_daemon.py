"""Daemon from which Spark forks its Python workers: it imports once what every worker of Kiln needs.

Without it, each worker would spend a second or two of CPU on these imports. PySpark collects garbage after each task.
The imported objects are exempt from this, because traversing them takes 70 ms of CPU, forty times the cost of a small
task. Within a task, garbage is collected rarely, because the rows are many objects without cycles.
"""

# ruff: noqa: F401 - imported for the workers

import gc

import pandas
import pyarrow
import pyspark.worker
from pyspark.daemon import manager

import kiln.pipelines.archive.transform
import kiln.pipelines.batch.processor
import kiln.pipelines.batch.transform
import kiln.pipelines.sink.transform
import kiln.pipelines.updates.transform

if __name__ == "__main__":
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    manager()
