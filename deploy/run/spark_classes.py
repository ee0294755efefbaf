"""Keeps the classes that Spark's JVM loads, parsed, in a file beside the jars: loading them is a third of a start.

Class data sharing (JEP 350): the JVM writes the file when the JVM ends. A later JVM with the same jars maps the file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pyspark import SparkContext
from rich.console import Console

from kiln.bridge.kafka.producers import FramesProducer, connect
from kiln.conf.process.errors import KilnError
from kiln.conf.settings.model import Kafka, Settings, Spark
from kiln.deploy.demo.traffic import Traffic
from kiln.deploy.demo.traffic.options import traffic_options
from kiln.deploy.run.application import run_application
from kiln.deploy.screens.views import LineView
from kiln.deploy.stack.jars import ensure_jars, spark_archive_path
from kiln.deploy.stack.kafka_broker import start_broker
from kiln.deploy.stack.ports import find_free_ports

_START_NS = 1_735_689_600_000_000_000  # 2025-01-01
_TRAFFIC_NS = 3_000_000_000
_PATIENCE = 120.0  # s to write the file


def archive_spark_classes(root: Path) -> None:
    """Runs all queries once over some made-up traffic, in a scratch folder. `root`: the folder of jars.

    KilnError: the queries lack something, or the JVM wrote no file.
    """
    kept = spark_archive_path(root)
    kept.unlink(missing_ok=True)  # a JVM cannot read such a file and write another
    with tempfile.TemporaryDirectory(prefix="kiln-") as scratch:
        fresh = Path(scratch) / "classes.jsa"
        port, controller_port = find_free_ports()
        options = f"{Spark().java_options} -XX:ArchiveClassesAtExit={fresh} -Xlog:cds*=off"
        settings = Settings(
            state=Path(scratch),
            kafka=Kafka(embedded_port=port, embedded_controller_port=controller_port),
            spark=Spark(java_options=options),
        )
        _run_queries(settings)
        _end_jvm()
        if not fresh.is_file():
            raise KilnError("the JVM kept no classes")
        unfinished = kept.with_name(f"{kept.name}.{os.getpid()}")
        shutil.copyfile(fresh, unfinished)
        unfinished.replace(kept)


def _run_queries(settings: Settings) -> None:
    view = LineView(Console(quiet=True))
    with start_broker(settings, view.say, die_with_parent=True) as servers:
        with FramesProducer(
            connect([servers], settings.broker.security_options()), settings.kafka.topic("frames")
        ) as producer:
            for frame in Traffic(traffic_options(settings), _START_NS, 100.0).frames(duration_ns=_TRAFFIC_NS):
                producer.send_record(frame.key, frame.value)
        outcome = run_application(settings, view, catch_up=True)
    if outcome.error:
        raise KilnError(outcome.error)


def _end_jvm() -> None:
    """Ends the JVM, which goes on after its session until Python closes the JVM's stdin."""
    gateway = SparkContext._gateway
    assert gateway is not None
    jvm: subprocess.Popen[bytes] = gateway.proc
    assert jvm.stdin is not None
    jvm.stdin.close()
    try:
        jvm.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        jvm.kill()


def main() -> int:
    """Keep Spark's classes for the jars of this checkout. Where that fails, print a note and return 0."""
    print("keeping what Spark's JVM loads, for quicker starts (a minute, once)")
    try:
        archive_spark_classes(ensure_jars())
    except KilnError as error:
        print(f"Spark's classes could not be kept, so it starts slower: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
