"""`python -m bench`: how fast Kiln is on this machine, beside what it could be at best. Nothing here is asserted.

Each measurement is a module with a function that returns a `bench.report.Finding`. What is compared runs in turn in one
go (A B A B …), on one broker and one Spark session, so that whatever else the machine does strikes both sides.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # for `kit`
