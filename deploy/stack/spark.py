"""Spark sessions for the processes of Kiln.

Spark's JVM writes to log files instead of the terminal. If the JVM has ended, the next session starts another JVM. Each
process has its own folder for Spark's temporary files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from kiln.conf.process.errors import KilnError, PrerequisiteError
from kiln.conf.process.logs import LogFile, configure_logs
from kiln.conf.process.state_folder import read_lock_holder
from kiln.conf.settings.model import Settings
from kiln.deploy.stack.jars import IVY_S3, PROJECT, ensure_jars, list_jars, s3_root, spark_archive_path
from kiln.deploy.stack.java import find_java
from kiln.pipelines.runtime.session import build_s3a_settings, create_session
from kiln.pipelines.runtime.spark_environment import is_local, isolate_spark

_LOG = logging.getLogger(__name__)


class JvmEndedError(KilnError):
    """Spark's JVM has ended during a run."""


class JvmStartError(PrerequisiteError):
    """Spark's JVM did not start. The message contains the cause that the JVM printed."""


def check_jvm(patience: float = 0.0) -> JvmEndedError | None:
    """Check that Spark's JVM runs.

    Args:
        patience: Seconds to wait for the JVM to end, because it may be ending already.

    Returns:
        The error if the JVM has ended. `None` if it runs, or if spark-submit started it.
    """
    process = getattr(SparkContext._gateway, "proc", None)
    if not isinstance(process, subprocess.Popen):
        return None  # spark-submit started the JVM
    try:
        code = process.wait(patience)
    except subprocess.TimeoutExpired:
        return None
    return JvmEndedError(
        f"the JVM of Spark exited with code {code}. A code of -9 often means that the kernel killed it for lack of "
        "memory: lower spark.driver_memory, or add memory. No data is lost"
    )


@contextmanager
def spark_session(settings: Settings, name: str = "kiln", classes: Sequence[Path] = ()) -> Iterator[SparkSession]:
    """Open a Spark session.

    The JVM logs to `logs/spark.log`. The printed output of the JVM and its Python workers goes to `logs/spark.out`.
    With a local master, environment variables of another Spark installation have no effect (`isolate_spark`).

    Args:
        name: Name of the application. With a name other than `kiln`, the logs are in the folder `logs/NAME`.
        classes: Folders to append to the class path of the JVM.

    Raises:
        JavaError: There is no usable Java.
        JvmStartError: The JVM did not start.
    """
    logs = settings.logs if name == "kiln" else settings.logs / name
    logs.mkdir(parents=True, exist_ok=True)
    # py4j logs a trace of each unanswered call to the root logger
    driver_log = LogFile(logs / "driver.log")
    configure_logs(settings.log.format, settings.log.level, settings.log.levels, driver_log, logging.WARNING)
    if is_local(settings.spark.master):
        isolate_spark()
    store_jars = list_jars("spark", ensure_jars(s3_root(), ivy_xml=IVY_S3), IVY_S3) if settings.uses_store else ()
    printed = logs / "spark.out"
    with _explain_failed_start(printed), redirect_output(printed), _ignore_hangups():
        spark = create_session(
            name,
            master=settings.spark.master,
            driver_memory=settings.spark.driver_memory,
            java_options=f"{settings.spark.java_options} {_build_archive_option()}",
            jars=list_jars("spark", ensure_jars()),
            appended=[*store_jars, *classes],
            log4j=PROJECT / "conf" / "log4j2-spark.properties",
            logs=logs,
            ui=settings.spark.ui,
            scratch=create_scratch_folder(settings.state),
            extra=build_s3a_settings(settings.locations, os.environ) | settings.spark.conf,
        )
    server = spark.sparkContext._accumulatorServer
    server.handle_error = _log_lost_connection  # type: ignore[method-assign]  # socketserver offers no setting for it
    try:
        yield spark
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the caller reports a JVM that has ended
            stop_session(spark)


def stop_session(spark: SparkSession) -> None:
    """Stop a session. If its JVM has ended, also reset PySpark, so that the next session starts a new JVM."""
    try:
        (spark if check_jvm() is None else spark.sparkContext).stop()
    except (Py4JError, OSError):
        if check_jvm(patience=1.0) is None:
            raise
        spark.sparkContext.stop()  # stop the rest: the first attempt gave up at the JVM
    gateway = SparkContext._gateway
    if gateway is not None and check_jvm() is not None:
        gateway.shutdown_callback_server()
        SparkContext._gateway = SparkContext._jvm = SparkSession._instantiatedSession = None


def _log_lost_connection(request: object, client_address: object) -> None:
    """Log a lost connection to the JVM. Otherwise, socketserver would print a traceback to the terminal."""
    _LOG.warning("lost the connection over which Spark's JVM sends accumulators", exc_info=True)


def _build_archive_option() -> str:
    """Build the JVM option for the CDS archive of Spark's classes, which shortens the start; empty without archive."""
    classes = spark_archive_path()
    # a JVM that does not match the archive runs without it
    return f'"-XX:SharedArchiveFile={classes}"' if classes.is_file() else ""


@contextmanager
def _explain_failed_start(printed: Path) -> Iterator[None]:
    """Raise `JvmStartError` if the JVM ends during startup, with the cause from its output file `printed`."""
    start = printed.stat().st_size if printed.exists() else 0
    try:
        yield
    except PySparkRuntimeError as error:
        if SparkContext._gateway is not None:
            raise
        find_java()
        lines = printed.read_bytes()[start:].decode(errors="replace").splitlines()
        causes = [line.strip() for line in lines if "Exception" in line or "Error" in line] or lines[-1:]
        cause = causes[-1].removeprefix("Caused by: ") if causes else "it printed nothing"
        raise JvmStartError(
            f"the JVM of Spark did not start: {cause}. Remove the cause (kiln doctor checks Java, memory and the limit "
            f"on open files), and start again. The whole output of the JVM is in {printed}"
        ) from error


@contextmanager
def _ignore_hangups() -> Iterator[None]:
    """Let processes started in this context ignore SIGHUP.

    When the terminal is closed, this process needs the JVM to stop the queries. The JVM ends with this process.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """Redirect the output of processes that are started in this context to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    originals = os.dup(1), os.dup(2)
    with path.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        yield
    finally:
        for number, copy in zip((1, 2), originals, strict=True):
            os.dup2(copy, number)
            os.close(copy)


_LOCK: Final = "lock"
"""Name of the lock file in each scratch folder, which the folder's process holds until it ends. The lock file next to
the folders has the same name, and is held while a folder is created."""

_locks: list[IO[str]] = []
"""Locks of this process's scratch folders, held until the process ends, because a JVM always uses the folder of its
first session."""


def create_scratch_folder(state: Path) -> Path:
    """Create a folder for this process in `STATE/scratch`, and remove the folders of killed processes (38 MB each)."""
    root = state / "scratch"
    root.mkdir(parents=True, exist_ok=True)
    with (root / _LOCK).open("a") as root_lock:
        fcntl.flock(root_lock, fcntl.LOCK_EX)  # a new folder is not locked at once, and must not look abandoned
        for folder in root.iterdir():
            if folder.is_dir() and read_lock_holder(folder / _LOCK) is None:  # its process was killed
                shutil.rmtree(folder, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root))
        lock = (fresh / _LOCK).open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        _locks.append(lock)
    return fresh
