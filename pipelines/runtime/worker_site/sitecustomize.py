"""Startup hook of Spark's Python processes on one machine: makes them import the installed PySpark.

Spark puts its zip file of PySpark first on their path. A zip file has no bytecode, so each process would spend most of
a second on compiling PySpark, and a planner that takes longer than 10 s to start fails its query. The installed PySpark
has bytecode. It is the same release, because the driver found Spark in its folder.

Source: Python documentation, module `site`.
"""

import os
import sys

if home := os.environ.get("SPARK_HOME"):
    sys.path[:] = [path for path in sys.path if not path.startswith(os.path.join(home, ""))]
