"""One query as a Spark application of its own: what `spark-submit pipelines/jobs/<name>.py` runs.

Settings come as everywhere (`conf/settings/model.py`: KILN_CONFIG, KILN_…); master, memory and jars are spark-submit's.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime
from types import FrameType

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery

from conf.errors import KilnError
from conf.settings.durations import micros, spark_interval
from conf.settings.model import Job, JobName, Settings
from conf.settings.reading import load_settings
from pipelines.lake.bundles import read_bundles, remember_bundles
from pipelines.lake.lake import Lake
from pipelines.logic.batching import Batching
from pipelines.logic.breaker import Breaker
from pipelines.logic.decode import Decoding
from pipelines.queries import archive, batch, messages, sink, updates
from pipelines.queries.plan import Plan, Report
from pipelines.spark.kafka import Broker
from pipelines.spark.known_streams import StreamsTopic
from pipelines.spark.session import create_session
from pipelines.supervisor import GaveUpError, Supervisor
from pipelines.transforms.updates import Separating
from schemas.topic_table import Bundles

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
    application = Supervisor(spark, settings, [name])
    try:
        application.start()
        while not stop.wait(1.0):
            application.check()
            if stop.wait(_REPORT_EVERY - 1.0):
                break
            _say(application, name)
    except GaveUpError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        application.stop()
        spark.stop()
    return 0


def _say(application: Supervisor, name: JobName) -> None:
    progress = application.progress.get(name)
    line: dict[str, object] = {"query": name, "errors": application.errors}
    if progress is not None:
        line |= {
            "batch_id": progress.batch_id,
            "batch_ms": progress.batch_ms,
            "records": progress.records,
            "processed_per_second": round(progress.processed_rate, 1),
            "read": progress.read,
        }
    print(json.dumps(line), flush=True)


def start_job(
    name: JobName,
    spark: SparkSession,
    settings: Settings,
    listener: StreamingQueryListener | None = None,
    report: Report | None = None,
) -> StreamingQuery:
    """Starts one query as the settings say. BundleError: those of the settings contradict what was once known."""
    plan = _plan(spark, settings, settings.jobs.of(name), listener)
    if report is not None:
        plan = replace(plan, report=report)
    remembered = spark_interval(settings.dedupe.signed)
    how = decoding(settings, remember=name == "messages")
    match name:
        case "archive":
            return archive.start(plan, how.bundles)
        case "messages":
            breaker = Breaker(settings.breaker.authors, settings.breaker.streak)
            return messages.start(plan, how, remembered, breaker)
        case "updates":
            return updates.start(plan, how, separating(settings), remembered)
        case "batch":
            return batch.start(plan, Batching(micros(settings.batch.window), settings.batch.block_limit))
        case "sink":
            return sink.start(plan, remembered)


def decoding(settings: Settings, *, remember: bool = False) -> Decoding:
    """How to decode as the settings say, with all topic bundles that are known: theirs, and those of the table.

    `remember`: those of the settings go into the table. BundleError: the two contradict each other.
    """
    lake = Lake(str(settings.lake))
    given = Bundles(settings.topic_table.bundles)
    if remember:
        lake.create(("bundles",))
        bundles = remember_bundles(lake, given, datetime.now(UTC))
    else:
        bundles = given.joined(read_bundles(lake))
    return Decoding(
        default_policy=settings.policy.default,
        policies=settings.policy.networks,
        batch_typ=settings.batch.typ,
        unsigned_horizon=micros(settings.dedupe.unsigned),
        bundles=bundles,
    )


def separating(settings: Settings) -> Separating:
    """Verified separators are looked up in any case, as an earlier run may have learnt them."""
    kafka = settings.kafka
    streams = StreamsTopic(kafka.topic("streams"), tuple(kafka.server_list()), tuple(kafka.security_options().items()))
    return Separating(streams, fetch=bool(settings.ipfs.api), twice=settings.transition.under_way)


def _plan(spark: SparkSession, settings: Settings, job: Job, listener: StreamingQueryListener | None) -> Plan:
    broker = Broker(settings.kafka.servers, settings.kafka.prefix, settings.kafka.spark_options())
    return Plan(
        spark=spark,
        broker=broker,
        lake=Lake(str(settings.lake)),
        checkpoints=str(settings.checkpoints),
        trigger=spark_interval(job.trigger),
        at_most=job.max_offsets_per_trigger,
        state_partitions=settings.spark.shuffle_partitions,
        listener=listener,
    )
