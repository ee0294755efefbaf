"""The Spark session of `kiln run`, whose JVM writes into log files and not on the screen."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from kiln.conf.process.errors import KilnError
from kiln.conf.process.logs import LogFile, configure_logs
from kiln.conf.settings.model import Settings
from kiln.deploy.stack.jars import PROJECT, list_jars, spark_archive_path
from kiln.deploy.stack.scratch import create_scratch_folder
from kiln.pipelines.runtime.s3a import build_s3a_settings
from kiln.pipelines.runtime.session import create_session

_LOG = logging.getLogger(__name__)


class JvmEndedError(KilnError):
    """Spark's JVM has ended under a run."""


def check_jvm(patience: float = 0.0) -> JvmEndedError | None:
    """Why nothing can go on, where Spark's JVM has ended; None while it runs. Waits up to `patience` s for its end."""
    process = getattr(SparkContext._gateway, "proc", None)
    if not isinstance(process, subprocess.Popen):
        return None  # somebody else started the JVM: spark-submit
    try:
        code = process.wait(patience)
    except subprocess.TimeoutExpired:
        return None
    return JvmEndedError(
        f"the JVM of Spark ended with {code}. With -9 somebody killed the JVM, often the kernel for want of memory: "
        "lower spark.driver_memory, or give the machine more. Nothing is lost: start Kiln again"
    )


@contextmanager
def spark_session(settings: Settings, name: str = "kiln", classes: Sequence[Path] = ()) -> Iterator[SparkSession]:
    """A Spark session. Its JVM logs to `logs/spark.log`, and prints to `logs/spark.out` while it starts; that of an
    application of another name does so in the folder `logs/NAME`. `classes`: folders that its class path has too."""
    logs = settings.logs if name == "kiln" else settings.logs / name
    logs.mkdir(parents=True, exist_ok=True)
    # with traces of each call that a JVM does not answer, which py4j tells the root logger
    kept = LogFile(logs / "driver.log")
    configure_logs(settings.log.format, settings.log.level, settings.log.levels, kept, logging.WARNING)
    with redirect_output(logs / "spark.out"):
        spark = create_session(
            name,
            master=settings.spark.master,
            driver_memory=settings.spark.driver_memory,
            java_options=f"{settings.spark.java_options} {_archive_option()}",
            jars=[*list_jars(uses_store=settings.uses_store), *classes],
            log4j=PROJECT / "conf" / "log4j2-spark.properties",
            logs=logs,
            ui=settings.spark.ui,
            scratch=create_scratch_folder(settings.state),
            extra=build_s3a_settings(settings.places, os.environ) | settings.spark.conf,
        )
    server = spark.sparkContext._accumulatorServer
    server.handle_error = _log_lost_connection  # type: ignore[method-assign]  # socketserver has no other way
    try:
        yield spark
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a JVM that has ended, which the caller tells
            stop_session(spark)


def stop_session(spark: SparkSession) -> None:
    """Stops a session, and what is left of one whose JVM has ended, at whatever moment."""
    try:
        (spark if check_jvm() is None else spark.sparkContext).stop()
    except (Py4JError, OSError):
        if check_jvm(patience=1.0) is None:  # else the JVM was killed before or meanwhile
            raise


def _log_lost_connection(request: object, client_address: object) -> None:
    """In place of a trace on the screen when the JVM ends."""
    _LOG.warning("the connection on which Spark sends accumulators is lost", exc_info=True)


def _archive_option() -> str:
    classes = spark_archive_path()
    # a JVM that the file does not fit goes on without it
    return f'"-XX:SharedArchiveFile={classes}"' if classes.is_file() else ""


@contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """A process that is started meanwhile writes its output to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with path.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        yield
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
