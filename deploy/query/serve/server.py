"""Spark's Thrift server over the lake: all tables and views in its catalog, one user, read-only.

The catalog is in the JVM's memory: it has the paths of the Delta tables, and each query reads their newest version.
`ReadOnly.scala` restricts queries, `Door.scala` authenticates clients, and `sandbox.py` limits the files that the JVM
can open. The JVM has none of Kiln's settings and passwords: it gets its own environment, and reads the catalog and a
digest of the clients' password from its stdin (`Main.scala`). It ends when its stdin is closed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kiln.conf.process.errors import KilnError, PrerequisiteError
from kiln.conf.process.small_files import read_small_file
from kiln.conf.process.state_version import claim_state_folder
from kiln.conf.settings.model import Settings
from kiln.deploy.query.serve.classes import compile_classes
from kiln.deploy.query.serve.sandbox import Limits, build_confined_command, list_system_paths, read_landlock_version
from kiln.deploy.stack.jars import PROJECT, list_jars, list_store_jars
from kiln.deploy.stack.java import find_java
from kiln.deploy.stack.ports import HOST, check_port_free, find_free_ports, find_port_holder
from kiln.deploy.stack.scratch import create_scratch_folder
from kiln.deploy.stack.spark import JvmEndedError, build_archive_option
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.s3a import build_s3a_settings
from kiln.pipelines.runtime.session import APPENDED_CLASS_PATH, build_session_settings, format_properties
from kiln.pipelines.runtime.spark_environment import find_spark_home
from kiln.schemas.delta.views import views

_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "JAVA_HOME", "JDK_JAVA_OPTIONS")
_WEB: Final = (80, 443)
"""Ports of an object store, and of the machine's instance metadata."""
_PATIENCE: Final = 20.0  # s until a JVM that does not end is killed


@dataclass(frozen=True)
class SqlEndpoint:
    """Port of the server on loopback, its only user, and the file with the password."""

    port: int
    user: str
    password_file: Path

    @property
    def jdbc(self) -> str:
        """JDBC URL of the server."""
        return f"jdbc:hive2://{HOST}:{self.port}/default"


def ensure_password_file(state: Path) -> Path:
    """Return a state folder's password file; a missing one is created with a random password and mode 0600."""
    claim_state_folder(state)
    path = state / "sql-password"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(16) + "\n")  # no characters that need quoting
    return path


class Server:
    """The JVM, which answers each line of JSON with one."""

    def __init__(self, process: subprocess.Popen[str], endpoint: SqlEndpoint) -> None:
        self._process = process
        self._endpoint = endpoint
        self._password = ""

    def call(self, **message: str) -> str | None:
        """Send a message and wait for the answer.

        Returns:
            Why it failed, or `None` if it succeeded.

        Raises:
            JvmEndedError: The JVM has ended.
        """
        self._send(**message)
        return self.read().get("failed")

    def read(self) -> dict[str, str]:
        """Read the next answer of the JVM.

        Raises:
            JvmEndedError: The JVM has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._build_exit_error(self._process.wait())
        answer: dict[str, str] = json.loads(line)
        return answer

    def send_password(self) -> None:
        """Send a digest of the password, if it has changed.

        Raises:
            KilnError: The file cannot be read.
        """
        path = self._endpoint.password_file
        try:
            password = read_small_file(path).partition(b"\n")[0].rstrip(b"\r")
        except FileNotFoundError:
            if self._password:  # an editor replaces the file
                return
            raise KilnError(f"there is no password file {path}. Create it, or omit --password-file") from None
        except OSError as error:
            raise KilnError(f"cannot read the password in {path} ({error.strerror})") from error
        # without a digest, no client can log in
        digest = hashlib.sha256(password).hexdigest() if password else ""
        if digest != self._password:
            self._password = digest
            self._send(password=digest)

    def wait_for_signal(self) -> None:
        """Serve until SIGTERM or Ctrl-C.

        Raises:
            JvmEndedError: The JVM has ended.
        """
        stop = threading.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: stop.set())
        while not stop.wait(1.0):
            code = self._process.poll()
            if code is not None:
                raise self._build_exit_error(code)
            self.send_password()

    def _send(self, **message: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._build_exit_error(self._process.wait()) from None

    def _build_exit_error(self, code: int) -> JvmEndedError:
        return JvmEndedError(
            f"the JVM of the SQL server exited with code {code}. See logs/sql in the state folder. A code of -9 often "
            "means that the kernel killed it for lack of memory: lower --memory. Then start the server again"
        )


@contextmanager
def start_server(
    settings: Settings, lake: Lake, endpoint: SqlEndpoint, memory: str, progress: Callable[[str], None]
) -> Iterator[Server]:
    """Start the server, which accepts clients while the context is open.

    Args:
        settings: The settings.
        lake: The lake.
        endpoint: Port and password.
        memory: Maximum heap of the JVM.
        progress: Called with progress messages.

    Raises:
        KilnError: There are no tables, the port is in use, or the JVM does not start.
    """
    _check_free(endpoint.port)
    if not lake.tables():
        raise KilnError(f"there are no tables in {lake.path} yet. Create them with kiln run")
    for name in lake.tables():
        lake.open(name)  # refuses a table of another version
    jars = list_jars(progress)
    appended = [*(list_store_jars(progress) if settings.uses_store else ()), compile_classes(progress)]
    progress("starting Spark …")
    logs = settings.logs / "sql"
    logs.mkdir(parents=True, exist_ok=True)
    folder = create_scratch_folder(settings.state)
    ports = find_free_ports()
    conf = build_session_settings(
        master="local[*]",
        driver_memory=memory,
        java_options=f'-XX:-UsePerfData "-Duser.home={folder}" {build_archive_option()}',
        jars=jars,
        log4j=PROJECT / "conf" / "log4j2-spark.properties",
        logs=logs,
        scratch=folder,
        extra=build_s3a_settings([settings.lake_root], os.environ) | _build_settings(endpoint, folder, ports),
    )
    limits = Limits(
        read=[
            *list_system_paths(find_java().executable),
            str(find_spark_home()),
            *sorted({str(jar if jar.is_dir() else jar.resolve().parent) for jar in (*jars, *appended)}),
            str(PROJECT / "conf"),
            *_list_lake_folders(lake),
        ],
        write=[str(folder), str(logs), "/dev/null"],
        connect=[*ports, *_list_store_ports(settings, conf)],
    )
    with _start_jvm(
        conf, endpoint, limits, _build_environment(settings, appended), folder, logs / "spark.out", progress
    ) as server:
        create_catalog(server, lake, progress)
        server.send_password()
        server.call(serve="")
        yield server


@contextmanager
def _start_jvm(
    conf: Mapping[str, str],
    endpoint: SqlEndpoint,
    limits: Limits,
    environment: Mapping[str, str],
    folder: Path,
    out: Path,
    progress: Callable[[str], None],
) -> Iterator[Server]:
    """Start the JVM within its limits, and wait until Spark has started.

    Raises:
        KilnError: Spark's launcher fails.
        JvmEndedError: The JVM ends.
    """
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".properties", encoding="ascii") as file:  # 0600
        file.write(format_properties(conf))
        file.flush()
        command = _build_spark_command(Path(file.name), endpoint.user, environment)
        if read_landlock_version():
            command = build_confined_command(command, limits)
        else:
            progress("this kernel has no Landlock, so the server can open all files of your user (docs/bi.md)")
        with out.open("ab") as errors:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        server = Server(process, endpoint)
        try:
            server.read()  # until the JVM has read the file, which may have keys of a store and is then deleted
        except JvmEndedError:
            process.wait()
            raise
    try:
        yield server
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _build_spark_command(properties: Path, user: str, environment: Mapping[str, str]) -> list[str]:
    """Build the command of a JVM with Spark's options, as Spark's script `spark-submit` does.

    Raises:
        KilnError: Spark's launcher fails.
    """
    java = str(find_java().executable)
    launcher = [java, "-XX:TieredStopAtLevel=1", "-cp", f"{find_spark_home()}/jars/*", "org.apache.spark.launcher.Main"]
    options = ["--properties-file", str(properties), "--load-spark-defaults", "--class", "kiln.Main"]
    command = [*launcher, "org.apache.spark.deploy.SparkSubmit", *options, "spark-internal", user]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise KilnError(f"Spark's launcher failed: {done.stderr.strip()[:500]}")
    return [java, *done.stdout.lstrip("\0\n").rstrip("\0").split("\0")[1:]]


def _build_environment(settings: Settings, appended: Iterable[Path]) -> dict[str, str]:
    """Build the JVM's environment without Kiln's settings, some of which are secret."""
    names = [name for name in os.environ if name.startswith("AWS_")] if settings.uses_store else []
    inherited = {name: os.environ[name] for name in (*_ENVIRONMENT, *names) if name in os.environ}
    # Spark's launcher cannot detect the Scala version of a wheel
    return inherited | {
        "SPARK_HOME": str(find_spark_home()),
        "SPARK_SCALA_VERSION": "2.13",
        "MALLOC_ARENA_MAX": "2",
        APPENDED_CLASS_PATH: os.pathsep.join(map(str, appended)),
    }


def _list_lake_folders(lake: Lake) -> list[str]:
    folder = lake.root.folder
    return [] if folder is None else [str(folder.resolve())]


def _list_store_ports(settings: Settings, conf: Mapping[str, str]) -> list[int]:
    if settings.lake_root.folder is not None:
        return []
    ports = (urlsplit(value).port for key, value in conf.items() if key.endswith(".endpoint"))
    return [*_WEB, *(port for port in ports if port is not None)]


def _build_settings(endpoint: SqlEndpoint, folder: Path, ports: tuple[int, int]) -> dict[str, str]:
    return {
        "spark.app.name": "kiln sql",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,kiln.ReadOnly",
        "spark.sql.catalogImplementation": "in-memory",
        # queries can read tables and views, but no files by path
        "spark.sql.runSQLOnFiles": "false",
        # ${env:NAME} in a query would be replaced by an environment variable
        "spark.sql.variable.substitute": "false",
        "spark.hadoop.hive.server2.transport.mode": "binary",
        "spark.hadoop.hive.server2.thrift.bind.host": HOST,
        "spark.hadoop.hive.server2.thrift.port": str(endpoint.port),
        # clients could read the log of an operation
        "spark.hadoop.hive.server2.logging.operation.enabled": "false",
        "spark.hadoop.hive.exec.scratchdir": str(folder / "hive"),
        # Spark fetches session classes and large task results from these ports
        "spark.driver.port": str(ports[0]),
        "spark.driver.blockManager.port": str(ports[1]),
        # Spark's default of 200 is too many for one machine
        "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
        # clients are not users of this machine
        "spark.hadoop.hive.server2.enable.doAs": "false",
    }


def create_catalog(server: Server, lake: Lake, progress: Callable[[str], None]) -> None:
    """Create the lake's tables and views in the server's catalog, except views over missing tables.

    Raises:
        KilnError: Spark cannot read a table.
    """
    tables = set(lake.tables())
    for name in sorted(tables):
        uri = _escape_string(lake.folder(name).spark_uri)
        if problem := server.call(sql=f"CREATE TABLE {_quote_name(name)} USING delta LOCATION '{uri}'"):
            raise KilnError(f"cannot serve table {name} in {lake.path}: {problem}")
    for view in views().values():
        if missing := set(view.tables) - tables:
            progress(f"no view {view.name}: there is no table {', '.join(sorted(missing))} yet")
            continue
        comment = _escape_string(view.sentence)
        # a table may have other columns than Kiln's
        if problem := server.call(sql=f"CREATE VIEW {_quote_name(view.name)} COMMENT '{comment}' AS {view.spark}"):
            progress(f"no view {view.name}: {problem}")


def _check_free(port: int) -> None:
    error = check_port_free(port)
    if error is not None:
        holder = find_port_holder(port)
        by = f" by {holder.description}" if holder else ""
        raise PrerequisiteError(f"cannot use port {port} of {HOST} ({error.strerror}{by}). Pass another with --port")


def _quote_name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _escape_string(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
