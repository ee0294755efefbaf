"""Driver of one query as a Spark application, which `spark-submit pipelines/jobs/NAME.py` starts.

The settings come from the file that the variable KILN_CONFIG names, and from variables KILN_…. The options of
spark-submit for master, memory and jars override them. The driver serves `/metrics`, `/health` and `/ready` at
`monitor.listen`.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kafka.errors import KafkaError
from prometheus_client.metrics_core import Metric

from kiln.conf.process.errors import KilnError
from kiln.conf.process.exporter import Exporter
from kiln.conf.process.extras import read_version
from kiln.conf.process.logs import configure_logs
from kiln.conf.process.state_folder import lock_state
from kiln.conf.process.stop_signal import StopSignal
from kiln.conf.settings.model import JobName, Settings
from kiln.conf.settings.reading import load_settings
from kiln.pipelines.app.launch import create_submitted_session
from kiln.pipelines.app.supervisor import RestartsExhaustedError, Supervisor
from kiln.pipelines.runtime.query_status import RUNS, QueryState, QueryWatch, build_query_metrics
from kiln.pipelines.runtime.topics import TopicEnds
from kiln.schemas.metrics import build_family
from kiln.schemas.printable import printable_lines
from kiln.schemas.queries import QUERIES

_LOCK_PATIENCE = 25.0  # s to wait for the driver of a killed application to end
_CHECK_EVERY = 1.0  # s
_REPORT_EVERY = 10  # checks
_HANG_TIMEOUT = 30.0  # s after which a driver that does not check its query is considered hung


@dataclass(frozen=True)
class _Observation:
    at: float
    """time of the check, monotonic s"""
    line: QueryState
    problems: Sequence[str]


class SubmittedQuery:
    """Status of a query's driver, which the driver serves over HTTP. The driver passes new states to `observe`."""

    def __init__(self, name: str, network: str) -> None:
        self._name = name
        self._network = network
        self._started = time.monotonic()
        self._newest: _Observation | None = None

    def observe(self, line: QueryState, problems: Sequence[str]) -> None:
        self._newest = _Observation(time.monotonic(), line, problems)

    def metrics(self) -> Iterator[Metric]:
        yield build_family("kiln_info", [((read_version(), self._network, f"job {self._name}"), 1)])
        yield build_family("kiln_uptime_seconds", [((), time.monotonic() - self._started)])
        newest = self._newest
        if newest is not None:
            yield build_family("kiln_problems", [((), len(newest.problems))])
            yield from build_query_metrics([newest.line])

    def why_dead(self) -> list[str]:
        """Return the reasons why the driver counts as hung; none while it is starting."""
        silent = 0.0 if self._newest is None else time.monotonic() - self._newest.at
        return (
            [f"the driver hangs: its last check of the query was {silent:.0f} s ago"] if silent > _HANG_TIMEOUT else []
        )

    def why_not_ready(self) -> list[str]:
        newest = self._newest
        if newest is None:
            return [f"the query {self._name} is starting"]
        down = [] if newest.line.phase in RUNS else [f"the query {newest.line.name} is {newest.line.phase}"]
        return [*self.why_dead(), *down, *newest.problems]

    def page(self) -> None:
        """Return no status page: this driver serves none."""


def main(name: JobName) -> int:
    """Run a query until SIGTERM or SIGINT, and print its progress every ten seconds as one line of JSON.

    If the query fails, the last line has the root cause.

    Returns:
        The exit status: 0 after a signal, 1 if the query failed too often or must not start, 2 if the settings are
            invalid.
    """
    try:
        settings = load_settings()
        configure_logs(settings.log.format, settings.log.level, settings.log.levels)
        with lock_state(settings.state, name, _LOCK_PATIENCE):
            return _run_query(name, settings)
    except KilnError as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return error.exit_code


def _run_query(name: JobName, settings: Settings) -> int:
    spark = create_submitted_session(f"kiln-{name}", settings)
    stop = StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    supervisor = Supervisor(spark, settings, [name])
    job = SubmittedQuery(name, settings.network.name)
    failure, status = "", 0
    try:
        with Exporter(settings.monitor.host_and_port, job, settings.monitor.hosts) as exporter:
            if exporter.error:
                print(exporter.error, file=sys.stderr)
            supervisor.start()
            for words in (*supervisor.repairs, *supervisor.warnings):
                print(words, file=sys.stderr)
            topics = [settings.kafka.topic(topic) for topic in QUERIES[name].reads]
            ends = TopicEnds(settings.broker.client_options(), topics)
            watch = QueryWatch(name, topics)
            for check in itertools.count(1):
                if stop.wait(_CHECK_EVERY):
                    break
                supervisor.check()
                line = watch.build_state(
                    time.monotonic(),
                    ends.read(),
                    supervisor.progress.get(name),
                    restarts=supervisor.restarts[name],
                    error=supervisor.errors.get(name, ""),
                    tripped=False,
                )
                job.observe(line, [*supervisor.errors.values(), *([ends.error] if ends.error else [])])
                if check % _REPORT_EVERY == 0:
                    print(json.dumps(_build_report(supervisor, name)), flush=True)
    except RestartsExhaustedError as error:
        failure, status = str(error), 1
    except KilnError as error:  # such as a table that a newer Kiln has written
        failure, status = str(error), error.exit_code
    except KafkaError as error:
        failure, status = f"cannot use Kafka at {settings.broker.servers}: {error}. Check that the broker runs", 1
    finally:
        if failure:
            spark.sparkContext.setLogLevel("OFF")  # the reason is the last line, not Spark's shutdown messages
        supervisor.stop()
        spark.stop()
    if failure:
        print(printable_lines(failure), file=sys.stderr, flush=True)
        print(json.dumps(_build_report(supervisor, name) | {"errors": {name: failure}, "exit": status}), flush=True)
    return status


def _build_report(supervisor: Supervisor, name: JobName) -> dict[str, object]:
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
