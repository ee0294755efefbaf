"""The Spark session of `kiln run`, whose JVM writes into log files and not on the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from conf.settings.model import Settings
from deploy.embedded.jars import PROJECT, ensure, spark_classes, spark_jars
from pipelines.spark.session import create_session


@contextmanager
def spark_session(settings: Settings) -> Iterator[SparkSession]:
    """A Spark session. Its JVM logs to `logs/spark.log`, and prints to `logs/spark.out` while it starts."""
    settings.logs.mkdir(parents=True, exist_ok=True)
    with _said_to(settings.logs / "spark.out"):
        spark = create_session(
            "kiln",
            master=settings.spark.master,
            driver_memory=settings.spark.driver_memory,
            java_options=f"{settings.spark.java_options} {_kept_classes()}",
            jars=spark_jars(ensure()),
            log4j=PROJECT / "conf" / "log4j2-spark.properties",
            logs=settings.logs,
            ui=settings.spark.ui,
            scratch=settings.state / "scratch",
            extra=settings.spark.conf,
        )
    try:
        yield spark
    finally:
        spark.stop()


def _kept_classes() -> str:
    classes = spark_classes()
    # a JVM that the file does not fit goes on without it
    return f'"-XX:SharedArchiveFile={classes}"' if classes.is_file() else ""


@contextmanager
def _said_to(path: Path) -> Iterator[None]:
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
