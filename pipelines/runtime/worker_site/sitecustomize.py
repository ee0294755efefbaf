"""What Python runs at the start of each Python process of Spark on this machine (Python documentation, module `site`).

Spark puts its zip file of PySpark first on the path of these processes. A zip file has no bytecode: each process would
compile PySpark anew, 0.7 s of CPU, and a planning process that takes longer than 10 s fails its query. PySpark is
installed too, with its bytecode, from the same release: it is where the driver found Spark.
"""

import os
import sys

if home := os.environ.get("SPARK_HOME"):
    sys.path[:] = [path for path in sys.path if not path.startswith(os.path.join(home, ""))]
