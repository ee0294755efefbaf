"""One query as a Spark application of its own: what `spark-submit pipelines/jobs/NAME.py` runs.

Settings come as everywhere (`conf.settings.reading`: KILN_CONFIG, KILN_…). spark-submit sets master, memory and jars.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from types import FrameType

from conf.errors import KilnError
from conf.settings.model import JobName
from conf.settings.reading import load_settings
from pipelines.spark.session import create_session
from pipelines.supervisor import GaveUpError, Supervisor

_REPORT_EVERY = 10.0  # s


def main(name: JobName) -> int:
    """Runs a query until SIGTERM or SIGINT, and says on stdout how it goes, a JSON object a line. The exit status."""
    try:
        settings = load_settings()
    except KilnError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    stop = threading.Event()

    def asked(number: int, frame: FrameType | None) -> None:
        stop.set()

    spark = create_session(
        f"kiln-{name}",
        master=settings.spark.master,
        driver_memory=settings.spark.driver_memory,
        java_options=settings.spark.java_options,
        jars=(),
        extra=settings.spark.conf,
    )
    signal.signal(signal.SIGTERM, asked)
    signal.signal(signal.SIGINT, asked)
    supervisor = Supervisor(spark, settings, [name])
    try:
        supervisor.start()
        while not stop.wait(1.0):
            supervisor.check()
            if stop.wait(_REPORT_EVERY - 1.0):
                break
            _say(supervisor, name)
    except GaveUpError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        supervisor.stop()
        spark.stop()
    return 0


def _say(supervisor: Supervisor, name: JobName) -> None:
    progress = supervisor.progress.get(name)
    line: dict[str, object] = {"query": name, "errors": supervisor.errors}
    if progress is not None:
        line |= {
            "batch_id": progress.batch_id,
            "batch_ms": progress.batch_ms,
            "records": progress.records,
            "processed_per_second": round(progress.processed_rate, 1),
            "read": progress.read,
        }
    print(json.dumps(line), flush=True)
