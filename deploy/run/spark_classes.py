"""Class data sharing for Spark's JVM: an archive of loaded classes, next to the jars. It shortens startup.

A JVM writes the archive when it ends. Later JVMs with the same jars map it into memory (JEP 350).
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

from kiln.bridge.kafka.producers import connect
from kiln.conf.process.errors import KilnError
from kiln.conf.settings.model import Kafka, Settings, Spark
from kiln.deploy.demo.traffic import Traffic
from kiln.deploy.demo.traffic.options import traffic_options
from kiln.deploy.run.application import run_application
from kiln.deploy.run.screen import LineView
from kiln.deploy.stack.jars import ensure_jars, spark_archive_path
from kiln.deploy.stack.kafka_broker import start_broker
from kiln.deploy.stack.ports import find_free_ports

_START_NS = 1_735_689_600_000_000_000  # 2025-01-01
_TRAFFIC_NS = 3_000_000_000
_PATIENCE = 120.0  # s to write the file


def archive_spark_classes(root: Path) -> None:
    """Create the archive: run all queries once over synthetic traffic, in a temporary folder.

    Args:
        root: Folder of the jars, in which the archive is stored.

    Raises:
        KilnError: A query failed, or the JVM wrote no archive.
    """
    archive = spark_archive_path(root)
    archive.unlink(missing_ok=True)  # a JVM cannot read one archive and write another
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
            raise KilnError(f"the JVM ended without writing {fresh.name}, the archive of its classes")
        unfinished = archive.with_name(f"{archive.name}.{os.getpid()}")
        shutil.copyfile(fresh, unfinished)
        unfinished.replace(archive)


def _run_queries(settings: Settings) -> None:
    view = LineView(Console(quiet=True))
    with start_broker(settings, view.say) as servers:
        options = {**settings.broker.security_options(), "bootstrap_servers": servers}
        with connect(options, settings.kafka.topic("frames")) as producer:
            for frame in Traffic(traffic_options(settings), _START_NS, 100.0).frames(duration_ns=_TRAFFIC_NS):
                producer.send_record(frame.key, frame.value)
        outcome = run_application(settings, view, catch_up=True)
    if outcome.error:
        raise KilnError(outcome.error)


def _end_jvm() -> None:
    """End the JVM. It does not end with its session, but when its stdin is closed."""
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
    """Archive Spark's classes for the jars of this checkout. A failure is only printed, because Kiln also runs without
    the archive."""
    print("archiving the classes of Spark's JVM for faster starts (takes a minute, once)")
    try:
        archive_spark_classes(ensure_jars())
    except KilnError as error:
        print(f"cannot archive the classes of Spark's JVM, so Spark starts more slowly: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
