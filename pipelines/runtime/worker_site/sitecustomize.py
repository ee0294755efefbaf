"""Startup hook of Spark's Python processes in local mode: makes them import the installed package pyspark.

Spark puts a zip file of PySpark first on the import path. The zip file has no bytecode, so each process would compile
PySpark for most of a second. On a busy machine this can exceed the 10 s that Spark waits for a process. The installed
package has bytecode. It is the same release, because the driver uses the Spark inside this package.

Source: Python documentation, module `site`.
"""

import os
import sys

if home := os.environ.get("SPARK_HOME"):
    sys.path[:] = [path for path in sys.path if not path.startswith(os.path.join(home, ""))]
