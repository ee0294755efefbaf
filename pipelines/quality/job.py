"""Run the quality checks as a separate application, for a cluster whose queries run as jobs of their own.

`spark-submit pipelines/jobs/quality.py` and `python pipelines/jobs/quality.py` run it. No Spark session starts: DuckDB
reads the tables.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from kiln.conf.process.errors import KilnError
from kiln.conf.process.state_version import claim_state_folder
from kiln.conf.settings.reading import load_settings
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.quality.check import check_lake
from kiln.pipelines.quality.results import CheckResult
from kiln.pipelines.quality.suites import read_all_suites
from kiln.schemas.printable import printable_lines

_DEFAULT_PAUSE = 600.0  # s, if `quality.interval` is 0


def main() -> int:
    """Check the tables every `quality.interval` until SIGTERM or SIGINT.

    Each check prints a line of JSON with the number of expectations and the failed ones.

    Returns:
        The exit status: 0 after a signal, or that of an error in a suite, a setting or a table.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = load_settings()
        claim_state_folder(settings.state)
        every = read_all_suites(settings.quality.suites)
        from kiln.pipelines.quality.expectations import RowValidator  # slow: faults of a suite are reported before it

        validator, lake = RowValidator(), Lake.from_location(settings.lake_root)
        while not stop.is_set():
            began = time.monotonic()
            results = check_lake(settings, lake, every, validator, datetime.now(UTC), recent=True)
            print(json.dumps(_build_report(results, time.monotonic() - began), default=str), flush=True)
            stop.wait(settings.quality.interval.total_seconds() or _DEFAULT_PAUSE)
    except KilnError as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return error.exit_code
    return 0


def _build_report(results: Sequence[CheckResult], seconds: float) -> dict[str, object]:
    return {
        "expectations": len(results),
        "seconds": round(seconds, 1),
        "failed": [result.as_json() for result in results if not result.success],
    }
