"""Spark's daemon for Python workers, with what every worker of Kiln needs already imported.

Workers are forked from it: each would otherwise spend a second or two of CPU on the same imports.
"""

import pandas  # noqa: F401  (imported for the workers, as all here)
import pyarrow  # noqa: F401
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import pipelines.batcher
import pipelines.transforms.archive
import pipelines.transforms.messages
import pipelines.transforms.sink
import pipelines.transforms.updates  # noqa: F401

if __name__ == "__main__":
    manager()
