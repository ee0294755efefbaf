"""One query as a Spark application of its own: what `spark-submit pipelines/jobs/NAME.py` runs.

The settings come from the file that KILN_CONFIG names and from KILN_… variables, as everywhere. What spark-submit is
given of master, memory and jars weighs more.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading

from kafka.errors import KafkaError

from conf.errors import KilnError
from conf.locks import keep_private
from conf.settings.model import JobName
from conf.settings.reading import load_settings
from conf.state_version import take_on
from pipelines.spark.session import create_session
from pipelines.supervisor import GaveUpError, Supervisor
from schemas.printable import printable_lines

_CHECK_EVERY = 1.0  # s
_REPORT_EVERY = 10  # checks


def main(name: JobName) -> int:
    """Runs a query until SIGTERM or SIGINT. Every ten seconds prints how the query fares, as one line of JSON.

    Returns the exit status: 0 after a signal, 1 where the query gave up, 2 where the settings are wrong.
    """
    try:
        settings = load_settings()
        keep_private(settings.state)
        take_on(settings.state)
    except KilnError as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return error.exit_code
    spark = create_session(
        f"kiln-{name}",
        master=settings.spark.master,
        driver_memory=settings.spark.driver_memory,
        java_options=settings.spark.java_options,
        jars=(),
        extra=settings.spark.conf,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    supervisor = Supervisor(spark, settings, [name])
    try:
        supervisor.start()
        for words in supervisor.mended:
            print(words, file=sys.stderr)
        for check in itertools.count(1):
            if stop.wait(_CHECK_EVERY):
                break
            supervisor.check()
            if check % _REPORT_EVERY == 0:
                print(json.dumps(_report(supervisor, name)), flush=True)
    except GaveUpError as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 1
    except KafkaError as error:
        print(printable_lines(f"Kafka at {settings.broker.servers}: {error}"), file=sys.stderr)
        return 1
    finally:
        supervisor.stop()
        spark.stop()
    return 0


def _report(supervisor: Supervisor, name: JobName) -> dict[str, object]:
    report: dict[str, object] = {"query": name, "errors": supervisor.errors}
    progress = supervisor.progress.get(name)
    if progress is None:
        return report
    return report | {
        "batch_id": progress.batch_id,
        "batch_ms": progress.batch_ms,
        "records": progress.records,
        "processed_per_second": round(progress.processed_rate, 1),
        "read": progress.read,
    }
