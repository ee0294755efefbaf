"""Spark's daemon for Python workers, with what every worker of Kiln needs already imported.

Workers are forked from it: each would otherwise spend a second or two of CPU on the same imports.
"""

from importlib import import_module

from pyspark.daemon import manager

NEEDED = (
    "pandas",
    "pyarrow",
    "pyspark.worker",
    "pipelines.spark.batcher",
    "pipelines.transforms.archive",
    "pipelines.transforms.messages",
    "pipelines.transforms.sink",
    "pipelines.transforms.updates",
)

if __name__ == "__main__":
    for name in NEEDED:
        import_module(name)
    manager()
