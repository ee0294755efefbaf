"""Spark's Thrift server over the lake: every table and view in its catalog, one user, and no way to write.

The catalog is in the JVM's memory: it has the places of the Delta tables, and each question reads their newest version.
`Door.scala` takes the password and refuses what is no question.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from conf.errors import KilnError, PrerequisiteError
from conf.locks import keep_private
from conf.settings.model import Settings
from deploy.embedded.jars import PROJECT, jars_for
from deploy.embedded.ports import HOST, port_holder, why_taken
from deploy.run.scratch import scratch
from deploy.run.spark import jvm_end, said_to
from deploy.serve.classes import compiled
from pipelines.lake.lake import Lake
from pipelines.spark.s3a import s3a_settings
from pipelines.spark.session import create_session
from schemas.views import views


@dataclass(frozen=True)
class Door:
    """Where the server listens, on loopback, and who may come in: one user, with the password in a file."""

    port: int
    user: str
    password_file: Path

    @property
    def jdbc(self) -> str:
        """The address as JDBC clients take it."""
        return f"jdbc:hive2://{HOST}:{self.port}/default"


def password_file(state: Path) -> Path:
    """The file of the password in a state folder, which only its user can read. Where it is missing, it is made with a
    random password."""
    keep_private(state)
    path = state / "sql-password"
    try:
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with os.fdopen(made, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(16) + "\n")  # nothing that a shell or a client would take for more
    return path


@contextmanager
def served(settings: Settings, lake: Lake, door: Door, memory: str, progress: Callable[[str], None]) -> Iterator[None]:
    """The server, from when it takes clients until the context is left. KilnError says what is missing or taken."""
    _check_free(door.port)
    if not lake.tables():
        raise KilnError(f"there are no tables in {lake.path} yet: kiln run makes them when it starts")
    jars = [*jars_for(uses_store=settings.uses_store, progress=progress), compiled(progress)]
    progress("starting Spark …")
    logs = settings.logs / "sql"
    logs.mkdir(parents=True, exist_ok=True)
    with said_to(logs / "spark.out"):
        spark = create_session(
            "kiln sql",
            master="local[*]",
            driver_memory=memory,
            java_options=" ".join(
                (
                    f'"-Dkiln.sql.user={door.user}"',
                    f'"-Dkiln.sql.password-file={door.password_file.absolute()}"',
                    # HiveServer2 reads the class of a login out of no other place
                    "-Dhive.server2.custom.authentication.class=kiln.PasswordFile",
                )
            ),
            jars=jars,
            log4j=PROJECT / "conf" / "log4j2-spark.properties",
            logs=logs,
            scratch=scratch(settings.state),
            extra=s3a_settings(settings.places, os.environ) | _settings(door),
        )
    try:
        make_catalog(spark, lake, progress)
        _start(spark)
        yield
    finally:
        with suppress(Py4JError, OSError):  # a JVM that got the same signal ends by itself
            spark.stop()


def _settings(door: Door) -> dict[str, str]:
    return {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,kiln.ReadOnly",
        "spark.sql.catalogImplementation": "in-memory",
        # no file by its path: the tables and views are all that there is
        "spark.sql.runSQLOnFiles": "false",
        "spark.hadoop.hive.server2.authentication": "CUSTOM",
        "spark.hadoop.hive.server2.transport.mode": "binary",
        "spark.hadoop.hive.server2.thrift.bind.host": HOST,
        "spark.hadoop.hive.server2.thrift.port": str(door.port),
        # one machine: Spark's 200 would be tasks for a handful of rows
        "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
        # a client is no user of this machine
        "spark.hadoop.hive.server2.enable.doAs": "false",
    }


def make_catalog(spark: SparkSession, lake: Lake, progress: Callable[[str], None]) -> None:
    """Names the lake's tables in the session's catalog, and the views over them. A view over a table that is not there
    yet is left out, and told. KilnError: Spark cannot take a table."""
    there = set(lake.tables())
    for name in sorted(there):
        try:
            spark.sql(f"CREATE TABLE {_quoted(name)} USING delta LOCATION '{_escaped(lake.folder(name).spark_uri)}'")
        except PySparkException as error:
            raise KilnError(f"table {name} in {lake.path}: {_first_line(error)}") from error
    for view in views().values():
        if missing := set(view.tables) - there:
            progress(f"no view {view.name}: {', '.join(sorted(missing))} is not there yet")
            continue
        try:
            spark.sql(f"CREATE VIEW {_quoted(view.name)} COMMENT '{_escaped(view.sentence)}' AS {view.spark_sql()}")
        except PySparkException as error:  # a table of other columns than Kiln's
            progress(f"no view {view.name}: {_first_line(error)}")


def _start(spark: SparkSession) -> None:
    jvm = spark._jvm
    if jvm is None:
        raise KilnError("Spark has no JVM here")
    jvm.kiln.ReadOnly.close()
    try:
        jvm.org.apache.spark.sql.hive.thriftserver.HiveThriftServer2.startWithSparkSession(spark._jsparkSession, False)
    except Py4JError as error:
        raise KilnError(f"Spark's Thrift server did not start: {_first_line(error)}") from error


def until_stopped() -> None:
    """Returns at SIGTERM or Ctrl-C. JvmEndedError: the JVM has ended by itself."""
    asked = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: asked.set())
    while not asked.is_set():
        if ended := jvm_end(1.0):
            raise ended


def _check_free(port: int) -> None:
    error = why_taken(port)
    if error is not None:
        holder = port_holder(port)
        by = f" ({holder.in_words} listens there)" if holder else ""
        raise PrerequisiteError(f"port {port} of {HOST} is not to be had: {error.strerror}{by}. Name another: --port")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
