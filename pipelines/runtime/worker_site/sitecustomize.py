"""Startup hook of Spark's Python processes in local mode: imports the installed package pyspark, and imports it once.

Spark puts a zip file of PySpark first on the import path. The zip file has no bytecode, so each process would compile
PySpark for most of a second. On a busy machine this can exceed the 10 s that Spark waits for a process. The installed
package has bytecode. It is the same release, because the driver uses the Spark inside this package.

While a query starts, Spark forks a process to create its source and another one to plan its reads, each from a daemon
that imports nothing: half a second of CPU for each. So the hook lets the daemon import what the processes need.

Source: Python documentation, module `site`.
"""

import os
import sys

if home := os.environ.get("SPARK_HOME"):
    sys.path[:] = [path for path in sys.path if not path.startswith(os.path.join(home, ""))]

if sys.orig_argv[-2:] in (
    ["pyspark.daemon", "pyspark.sql.worker.create_data_source"],
    ["pyspark.daemon", "pyspark.sql.worker.plan_data_source_read"],
):
    # ruff: noqa: F401 - imported for the processes that are forked
    import pyspark.sql.worker.create_data_source
    import pyspark.sql.worker.plan_data_source_read

    import kiln.pipelines.runtime.kafka
