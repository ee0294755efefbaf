"""`python -m bench`: speed of Kiln on this machine, next to the speed of alternatives. Nothing here is asserted.

Each measurement is a module with a function that returns a `bench.report.Finding`. The sides of a comparison run in
turn (A B A B …) on one broker and one Spark session, so that other load on the machine affects all sides alike.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for `kit`
