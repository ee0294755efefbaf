"""Spark's Thrift server over the lake: every table and view in its catalog, one user, and no way to write.

The catalog is in the JVM's memory: it has the paths of the Delta tables, and each query reads their newest version.
`ReadOnly.scala` has what a query may be, `Door.scala` who comes in, and `sandbox.py` what the JVM can open at all. The
JVM has none of Kiln's settings and passwords: Kiln starts it with an environment of its own, sends it the catalog and a
digest of the clients' password on its input, and reads its answers (`Main.scala`). The JVM ends when its input does.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kiln.conf.process.errors import KilnError, PrerequisiteError
from kiln.conf.process.state_version import claim_state_folder
from kiln.conf.settings.model import Settings
from kiln.deploy.query.serve.classes import compile_classes, find_spark_home
from kiln.deploy.query.serve.sandbox import Limits, build_confined_command, list_system_paths, read_landlock_version
from kiln.deploy.stack.jars import PROJECT, list_jars
from kiln.deploy.stack.java import find_java
from kiln.deploy.stack.ports import HOST, check_port_free, find_free_ports, find_port_holder
from kiln.deploy.stack.scratch import create_scratch_folder
from kiln.deploy.stack.spark import JvmEndedError
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.s3a import build_s3a_settings
from kiln.pipelines.runtime.session import build_session_settings, format_properties
from kiln.schemas.delta.views import views

_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "JAVA_HOME", "JDK_JAVA_OPTIONS")
_WEB: Final = (80, 443)
"""of an object store, and of the machine's own role there"""
_LAST_WORDS: Final = 20.0  # s


@dataclass(frozen=True)
class SqlEndpoint:
    """Where the server listens, on loopback, and who may come in: one user, with the password in a file."""

    port: int
    user: str
    password_file: Path

    @property
    def jdbc(self) -> str:
        """The address as JDBC clients take it."""
        return f"jdbc:hive2://{HOST}:{self.port}/default"


def ensure_password_file(state: Path) -> Path:
    """The file of the password in a state folder, which only its user can read. Where it is missing, it is made with a
    random password."""
    claim_state_folder(state)
    path = state / "sql-password"
    try:
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with os.fdopen(made, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(16) + "\n")  # nothing that a shell or a client would take for more
    return path


class Server:
    """The JVM. It answers each line of JSON with one."""

    def __init__(self, process: subprocess.Popen[str], door: SqlEndpoint) -> None:
        self._process = process
        self._door = door
        self._password = ""

    def call(self, **message: str) -> str | None:
        """Send a message and wait for the answer. Returns why it failed. JvmEndedError: the JVM has ended."""
        self._send(**message)
        return self.read().get("failed")

    def read(self) -> dict[str, str]:
        """The next line of the JVM. JvmEndedError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended(self._process.wait())
        answer: dict[str, str] = json.loads(line)
        return answer

    def send_password(self) -> None:
        """Send a digest of the password, if its file has another than before. KilnError: the file cannot be read."""
        path = self._door.password_file
        try:
            password = path.read_bytes().partition(b"\n")[0].rstrip(b"\r")
        except FileNotFoundError:
            if self._password:  # an editor replaces the file
                return
            raise KilnError(f"there is no file {path} with the password") from None
        except OSError as error:
            raise KilnError(f"cannot read the password in {path} ({error.strerror})") from error
        # an empty password has no digest, so that nobody comes in
        digest = hashlib.sha256(password).hexdigest() if password else ""
        if digest != self._password:
            self._password = digest
            self._send(password=digest)

    def wait_for_signal(self) -> None:
        """Serve until SIGTERM or Ctrl-C. JvmEndedError: the JVM has ended by itself."""
        asked = threading.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: asked.set())
        while not asked.wait(1.0):
            code = self._process.poll()
            if code is not None:
                raise self._ended(code)
            self.send_password()

    def _send(self, **message: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended(self._process.wait()) from None

    def _ended(self, code: int) -> JvmEndedError:
        return JvmEndedError(
            f"the JVM of the SQL server ended with {code}: logs/sql in the state folder says why. With -9 the kernel "
            "was often short of memory: lower --memory. Then start the server again"
        )


@contextmanager
def start_server(
    settings: Settings, lake: Lake, door: SqlEndpoint, memory: str, progress: Callable[[str], None]
) -> Iterator[Server]:
    """The server, from when it takes clients until the context is left. KilnError says what is missing or taken."""
    _check_free(door.port)
    if not lake.tables():
        raise KilnError(f"there are no tables in {lake.path} yet: kiln run makes them when it starts")
    for name in lake.tables():
        lake.open(name)  # refuses a table of another version
    jars = [*list_jars(uses_store=settings.uses_store, progress=progress), compile_classes(progress)]
    progress("starting Spark …")
    logs = settings.logs / "sql"
    logs.mkdir(parents=True, exist_ok=True)
    folder = create_scratch_folder(settings.state)
    ports = find_free_ports()
    conf = build_session_settings(
        master="local[*]",
        driver_memory=memory,
        java_options=f'-XX:-UsePerfData "-Djava.io.tmpdir={folder}" "-Duser.home={folder}"',
        jars=jars,
        log4j=PROJECT / "conf" / "log4j2-spark.properties",
        logs=logs,
        scratch=folder,
        extra=build_s3a_settings([settings.lake_root], os.environ) | _build_settings(door, folder, ports),
    )
    limits = Limits(
        read=[
            *list_system_paths(find_java().executable),
            str(find_spark_home()),
            *_list_folders(jars),
            str(PROJECT / "conf"),
            *_list_lake_folders(lake),
        ],
        write=[str(folder), str(logs), "/dev/null"],
        connect=[*ports, *_list_store_ports(settings, conf)],
    )
    with _start_jvm(conf, door, limits, _build_environment(settings), folder, logs / "spark.out", progress) as server:
        create_catalog(server, lake, progress)
        server.send_password()
        server.call(serve="")
        yield server


@contextmanager
def _start_jvm(
    conf: Mapping[str, str],
    door: SqlEndpoint,
    limits: Limits,
    environment: Mapping[str, str],
    folder: Path,
    out: Path,
    progress: Callable[[str], None],
) -> Iterator[Server]:
    """The JVM within its limits, from when Spark has started. KilnError, JvmEndedError."""
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".properties", encoding="ascii") as file:  # 0600
        file.write(format_properties(conf))
        file.flush()
        command = _build_spark_command(Path(file.name), door.user, environment)
        if read_landlock_version():
            command = build_confined_command(command, limits)
        else:
            progress("this kernel has no Landlock, so the server can open whatever your user can (docs/bi.md)")
        with out.open("ab") as errors:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        server = Server(process, door)
        try:
            server.read()  # when the JVM has read the file, which may hold keys of a store
        except JvmEndedError:
            process.wait()
            raise
    try:
        yield server
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_LAST_WORDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _build_spark_command(properties: Path, user: str, environment: Mapping[str, str]) -> list[str]:
    """The command of a JVM with Spark's own options, as Spark's script `spark-submit` would make it. KilnError."""
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


def _build_environment(settings: Settings) -> dict[str, str]:
    """What the JVM has of the environment: none of Kiln's settings, of which some are secret."""
    names = [name for name in os.environ if name.startswith("AWS_")] if settings.uses_store else []
    kept = {name: os.environ[name] for name in (*_ENVIRONMENT, *names) if name in os.environ}
    # Spark's launcher looks for a version of Scala where there is none in a wheel, unless it is given one
    return kept | {"SPARK_HOME": str(find_spark_home()), "SPARK_SCALA_VERSION": "2.13", "MALLOC_ARENA_MAX": "2"}


def _list_folders(jars: list[Path]) -> list[str]:
    return sorted({str(jar if jar.is_dir() else jar.resolve().parent) for jar in jars})


def _list_lake_folders(lake: Lake) -> list[str]:
    folder = lake.root.folder
    return [] if folder is None else [str(folder.resolve())]


def _list_store_ports(settings: Settings, conf: Mapping[str, str]) -> list[int]:
    if settings.lake_root.folder is not None:
        return []
    ports = (urlsplit(value).port for key, value in conf.items() if key.endswith(".endpoint"))
    return [*_WEB, *(port for port in ports if port is not None)]


def _build_settings(door: SqlEndpoint, folder: Path, ports: tuple[int, int]) -> dict[str, str]:
    return {
        "spark.app.name": "kiln sql",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,kiln.ReadOnly",
        "spark.sql.catalogImplementation": "in-memory",
        # no file by its path: the tables and views are all that there is
        "spark.sql.runSQLOnFiles": "false",
        # ${env:NAME} in a query would stand for a variable of the environment
        "spark.sql.variable.substitute": "false",
        "spark.hadoop.hive.server2.transport.mode": "binary",
        "spark.hadoop.hive.server2.thrift.bind.host": HOST,
        "spark.hadoop.hive.server2.thrift.port": str(door.port),
        # the log of an operation, which clients may read
        "spark.hadoop.hive.server2.logging.operation.enabled": "false",
        "spark.hadoop.hive.exec.scratchdir": str(folder / "hive"),
        # from which Spark fetches the classes of a session and the large results of its own tasks
        "spark.driver.port": str(ports[0]),
        "spark.driver.blockManager.port": str(ports[1]),
        # one machine: Spark's 200 would be tasks for a handful of rows
        "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
        # a client is no user of this machine
        "spark.hadoop.hive.server2.enable.doAs": "false",
    }


def create_catalog(server: Server, lake: Lake, progress: Callable[[str], None]) -> None:
    """Create the lake's tables in the server's catalog, and the views over them. A view over a table that is not there
    yet is left out, with a note. KilnError: Spark cannot take a table."""
    there = set(lake.tables())
    for name in sorted(there):
        place = _escape_string(lake.folder(name).spark_uri)
        if failed := server.call(sql=f"CREATE TABLE {_quote_name(name)} USING delta LOCATION '{place}'"):
            raise KilnError(f"table {name} in {lake.path}: {failed}")
    for view in views().values():
        if missing := set(view.tables) - there:
            progress(f"no view {view.name}: {', '.join(sorted(missing))} is not there yet")
            continue
        comment = _escape_string(view.sentence)
        # a table may have other columns than Kiln's
        if failed := server.call(sql=f"CREATE VIEW {_quote_name(view.name)} COMMENT '{comment}' AS {view.spark_sql()}"):
            progress(f"no view {view.name}: {failed}")


def _check_free(port: int) -> None:
    error = check_port_free(port)
    if error is not None:
        holder = find_port_holder(port)
        by = f" ({holder.description} listens there)" if holder else ""
        raise PrerequisiteError(f"port {port} of {HOST} is not to be had: {error.strerror}{by}. Name another: --port")


def _quote_name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _escape_string(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
