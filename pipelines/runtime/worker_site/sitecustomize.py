"""Startup hook of Spark's Python processes in local mode, which makes them import less.

Spark puts a zip file of PySpark first on the import path. The zip file has no bytecode, so each process would compile
PySpark for most of a second. On a busy machine this can exceed the 10 s that Spark waits for a process. The installed
package has bytecode. It is the same release, because the driver uses the Spark inside this package.

Spark also starts two daemons, `python -m pyspark.daemon MODULE`, that fork a process for each query. A daemon imports
here what each fork would import after its start.

Source: Python documentation, module `site`.
"""

# ruff: noqa: F401 - imported for the forks

import gc
import os
import sys

if home := os.environ.get("SPARK_HOME"):
    sys.path[:] = [path for path in sys.path if not path.startswith(os.path.join(home, ""))]
if "pyspark.daemon" in sys.orig_argv:
    import pyspark.sql.worker.create_data_source
    import pyspark.sql.worker.plan_data_source_read

    import kiln.pipelines.runtime.kafka  # the data source that a fork unpickles

    gc.freeze()
