"""`python -m bench`: measure the speed of Kiln and of alternatives on this machine. A slow result is no failure.

Each measurement is a module with a function that returns a `bench.report.Finding`. The programs to compare run in turn
(A B A B …) on one broker and one Spark session, so that other load on the machine affects all of them alike.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for `kit`
