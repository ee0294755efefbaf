"""The checks as an application of its own, beside the queries of a cluster: what `spark-submit
pipelines/jobs/quality.py` runs, and `python pipelines/jobs/quality.py` too. No Spark session starts: DuckDB reads the
tables.
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
from kiln.conf.process.locks import keep_private
from kiln.conf.settings.reading import load_settings
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.quality.check import check_lake
from kiln.pipelines.quality.results import CheckResult
from kiln.pipelines.quality.suites import read_all
from kiln.schemas.printable import printable_lines

_USUAL_PAUSE = 600.0  # s, where `kiln run` does not check


def main() -> int:
    """Checks every `quality.every` until SIGTERM or SIGINT. After each check prints a line of JSON: how many
    expectations there are, and each that is not met.

    Returns the exit status: 0 after a signal, else that of the error: a suite or a setting is wrong, or a table cannot
    be read.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = load_settings()
        keep_private(settings.state)
        every = read_all(settings.quality.suites)
        from kiln.pipelines.quality.expectations import (
            RowValidator,  # seconds of imports: what is wrong in a suite is said before
        )

        judge, lake = RowValidator(), Lake.from_location(settings.lake_root)
        while not stop.is_set():
            began = time.monotonic()
            results = check_lake(settings, lake, every, judge, datetime.now(UTC))
            print(json.dumps(_report(results, time.monotonic() - began), default=str), flush=True)
            stop.wait(settings.quality.every.total_seconds() or _USUAL_PAUSE)
    except KilnError as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return error.exit_code
    return 0


def _report(results: Sequence[CheckResult], seconds: float) -> dict[str, object]:
    return {
        "expectations": len(results),
        "seconds": round(seconds, 1),
        "failed": [each.as_json() for each in results if not each.success],
    }
