"""A real Kafka broker for one machine: one node in KRaft mode, on loopback, with its data in the state folder.

Layout under the state folder: `broker/data` (the log), `broker/password` (for clients, 0600),
`broker/server.properties` (written at each start, 0600), `broker/lock` (locked by the broker's process while it lives),
`broker/address.json`, `broker/tmp` (emptied at each start); `locks/broker` (locked by the broker's owner, the Kiln
process whose end stops the broker); `logs/broker.log` and `logs/broker.out` (output of the JVM). Paths in the
broker's settings are relative, so that the state folder can be moved.
"""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Final, NamedTuple, Self

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.files import ensure_password, private_file, replace_file
from kiln.conf.process.state_folder import claim_state_folder, read_lock_holder, try_lock
from kiln.conf.settings.model import EMBEDDED_USER, Kafka
from kiln.deploy.stack.child_process import bind_to_parent, terminate_process
from kiln.deploy.stack.jars import PROJECT, JarsError, list_jars
from kiln.deploy.stack.java import JavaError, find_java
from kiln.deploy.stack.ports import HOST, check_port_free, find_free_ports, find_port_holder

PROPERTIES = PROJECT / "conf" / "broker.properties"
LOG4J = PROJECT / "conf" / "log4j2-broker.properties"

_TEMPORARY_FOLDER: Final = "tmp"
"""folder of the JVM's temporary files, such as native libraries, which a killed broker does not delete"""

# JVM startup takes a second or two of CPU. The C1 compiler and the serial collector take the least, and leave the cores
# to Spark, which starts at the same time. The default initial heap is a 64th of the machine's memory, which the JVM
# fills with garbage before the first collection.
_JVM = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xms64m",
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Dkiln.logs=../logs",
    f"-Djava.io.tmpdir={_TEMPORARY_FOLDER}",
)


class BrokerError(PrerequisiteError):
    """The broker cannot be started or stopped, or does not answer."""


class BrokerRunningError(BrokerError):
    """Another process runs the broker of this state folder at `address`, which is `None` while the broker starts."""

    def __init__(self, state: Path, address: str | None) -> None:
        self.address = address
        where = f" at {address}" if address else " (and still starting)"
        super().__init__(
            f"the broker of the state folder {state} is already running{where}. Stop the Kiln process that uses it, or "
            "pass another folder with --state"
        )


def find_running_broker(state: Path) -> str | None:
    """Find the broker that runs on this state folder, started by any process.

    A broker that is starting does not answer yet: `await_broker` waits for it.

    Returns:
        The address of the broker, `host:port`, or `None` if no broker runs.
    """
    broker = _read_running_broker(state)
    return broker.address if broker else None


def stop_running(state: Path) -> bool:
    """Stop the broker of this state folder, started by any process.

    The broker gets SIGTERM, and SIGKILL if it has not ended after 20 s.

    Returns:
        True if a broker was running.

    Raises:
        BrokerError: The broker belongs to another user, or does not end on SIGKILL.
    """
    broker = _read_running_broker(state)
    if broker is None:
        return False
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(broker.pid, signal_number)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise BrokerError(
                f"cannot stop the broker of {state}: process {broker.pid} belongs to another user. Stop it as that user"
            ) from None
        # wait for the lock, because another process may get the same process number
        deadline = time.monotonic() + 20.0
        while _read_running_broker(state) == broker:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            return True
    raise BrokerError(f"cannot stop the broker of {state}: process {broker.pid} did not end after SIGKILL")


def await_broker(
    address: str,
    client_options: Mapping[str, object],
    timeout: float = 60.0,
    process: subprocess.Popen[bytes] | None = None,
) -> None:
    """Wait until the broker has joined its cluster, so that topics can be created and records written.

    Args:
        address: `host:port` of the broker.
        client_options: kafka-python's options, such as `EmbeddedBroker.client_options`.
        timeout: Seconds to wait.
        process: The broker's process, if known.

    Raises:
        BrokerError: The broker does not accept requests within the timeout, for example because it rejects the
            password, or `process` has ended.
    """
    # a slow import, made while the JVM starts
    from kafka.admin import KafkaAdminClient
    from kafka.errors import KafkaError

    from kiln.conf.process.kafka_clients import open_client

    deadline = time.monotonic() + timeout
    options = {**client_options, "bootstrap_servers": [address], "bootstrap_timeout_ms": 5000}
    host, _, port = address.rpartition(":")
    quiet = logging.getLogger("kafka")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)  # kafka-python logs each refused connection as an error
    try:
        while True:
            if process is not None and process.poll() is not None:
                raise BrokerError(f"the broker exited during startup (code {process.returncode})")
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"the broker at {address} did not answer within {timeout:.0f} s. The reason may be in "
                    "logs/broker.log in its state folder"
                )
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                with open_client(KafkaAdminClient, **options) as admin:
                    while time.monotonic() < deadline:
                        # a broker that opened its port but is still fenced is not listed, and takes no topics
                        if admin.describe_cluster()["brokers"]:
                            return
                        time.sleep(0.02)
            except (OSError, KafkaError):
                time.sleep(0.02)
    finally:
        quiet.setLevel(level)


def archive_classes(classpath: Iterable[Path]) -> Path:
    """Start the broker once in a temporary folder, and write a CDS archive of its classes next to the jars.

    The archive halves the time of later starts. A JVM of another version ignores it.

    Raises:
        BrokerError: The archive cannot be created.
    """
    jars = tuple(classpath)
    archive = _archive_path(jars)
    with tempfile.TemporaryDirectory(prefix="kiln-") as scratch:
        port, controller_port = find_free_ports()
        fresh = Path(scratch) / "classes.jsa"
        broker = EmbeddedBroker(Path(scratch), port, controller_port, jars)
        broker.jvm_options = (f"-XX:ArchiveClassesAtExit={fresh}", "-Xlog:cds*=off")
        broker.start()
        broker.stop(timeout=120)
        if not fresh.is_file():
            raise BrokerError(f"the JVM wrote no archive of its classes to {fresh}")
        unfinished = archive.with_name(f"{archive.name}.{os.getpid()}")
        shutil.copyfile(fresh, unfinished)
        unfinished.replace(archive)
    return archive


class EmbeddedBroker:
    """The broker of a state folder, as a context manager that starts and stops it.

    The broker listens on 127.0.0.1 only. On Linux, the broker ends when the *thread* that started it ends, even if the
    thread's process is killed.

    Args:
        port: Port for clients.
        controller_port: Port of the controller.
        classpath: `jars.list_jars("broker")`.
        heap: Maximum heap of the JVM.
        settings: Settings of Kafka that override `conf/broker.properties`.
    """

    def __init__(
        self,
        state: Path,
        port: int,
        controller_port: int,
        classpath: Iterable[Path],
        heap: str = "384m",
        *,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.state = state.absolute()
        self.port = port
        self.controller_port = controller_port
        self.classpath = tuple(jar.absolute() for jar in classpath)
        self.heap = heap
        self.settings = dict(settings or {})
        archive = _archive_path(self.classpath) if self.classpath else None
        # a JVM that does not match the archive runs without it
        self._archive_option = (f"-XX:SharedArchiveFile={archive}",) if archive and archive.is_file() else ()
        self.jvm_options: tuple[str, ...] = self._archive_option
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """`host:port` for clients."""
        return f"{HOST}:{self.port}"

    @property
    def client_options(self) -> Mapping[str, object]:
        """kafka-python's options for a connection as Kiln's user.

        Raises:
            SettingsError: The broker has not run yet.
        """
        return Kafka(embedded_port=self.port).of_state(self.state / "broker").client_options()

    @property
    def log(self) -> Path:
        """Path of the broker's log."""
        return self.state / "logs" / "broker.log"

    @property
    def pid(self) -> int | None:
        """Process number of the broker while it runs, else `None`."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, timeout: float = 60.0) -> str:
        """Start the broker, wait until it accepts requests, and return its address.

        Raises:
            BrokerRunningError: The broker of this state folder already runs.
            BrokerError: A port is in use, there is no usable Java, the state folder cannot be written, or the broker
                does not accept requests within `timeout` seconds and was stopped.
        """
        self.launch()
        with ExitStack() as cleanup:  # the cleanup also runs on an interrupt
            cleanup.callback(self.stop)
            try:
                await_broker(self.address, self.client_options, timeout, self._process)
            except BrokerError as error:
                self.stop()  # so that the broker's log is complete
                raise BrokerError(f"{error}\n{self._read_log_tail()}") from None
            cleanup.pop_all()
        return self.address

    def launch(self) -> None:
        """Start the broker, and return before it accepts requests. The errors are those of `start`."""
        if self.pid is not None:
            return
        folder = self.state / "broker"
        try:
            claim_state_folder(self.state)
            folder.mkdir(parents=True, exist_ok=True)
            (self.state / "logs").mkdir(exist_ok=True)
            lock = (folder / "lock").open("a")
        except OSError as error:
            raise BrokerError(f"cannot use the state folder {self.state}: {error}") from None
        with lock, (self.state / "logs" / "broker.out").open("wb") as out:
            if not try_lock(lock):
                raise BrokerRunningError(self.state, find_running_broker(self.state))
            address = folder / "address.json"
            address.unlink(missing_ok=True)
            _check_free(self.port, "kafka.embedded_port")
            _check_free(self.controller_port, "kafka.embedded_controller_port")
            properties = folder / "server.properties"
            private_file(properties, self._properties(ensure_password(folder))).replace(properties)
            shutil.rmtree(folder / _TEMPORARY_FOLDER, ignore_errors=True)
            (folder / _TEMPORARY_FOLDER).mkdir(exist_ok=True)
            if not (folder / "data" / "meta.properties").is_file():
                self._format(folder, out)
            java = self._java("-Xmx" + self.heap, f"-Dlog4j2.configurationFile={LOG4J.as_uri()}", *self.jvm_options)
            command = [*java, "kafka.Kafka", properties.name]
            self._process = subprocess.Popen(
                bind_to_parent(command),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches every process of a session, but the broker must outlive the queries that write to it
                start_new_session=True,
                # a lock lasts while any process has the file open: the broker keeps it after this process
                pass_fds=(lock.fileno(),),
            )
            replace_file(address, json.dumps({"bootstrap": self.address, "pid": self._process.pid}).encode())

    def stop(self, timeout: float = 20.0) -> None:
        """Stop the broker, if it runs: send SIGTERM, and SIGKILL if it takes longer than `timeout` seconds to end."""
        process, self._process = self._process, None
        if process is not None:
            terminate_process(process, timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _java(self, *options: str) -> list[str]:
        if not self.classpath:
            raise BrokerError("there are no jars for the broker. Run make jars, or python -m kiln.deploy.stack.jars")
        try:
            java = find_java().executable
        except JavaError as error:
            raise BrokerError(str(error)) from None
        return [str(java), *_JVM, *options, "-cp", ":".join(map(str, self.classpath))]

    def _properties(self, password: str) -> str:
        # the broker connects to itself as a client, on the port of the controller
        jaas = (
            f'org.apache.kafka.common.security.plain.PlainLoginModule required username="{EMBEDDED_USER}" '
            f'password="{password}" user_{EMBEDDED_USER}="{password}";'
        )
        own = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{self.controller_port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "KILN",
            "listeners": f"KILN://{HOST}:{self.port},CONTROLLER://{HOST}:{self.controller_port}",
            "advertised.listeners": f"KILN://{HOST}:{self.port}",
            "listener.security.protocol.map": "KILN:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "sasl.mechanism.controller.protocol": "PLAIN",
            "listener.name.kiln.plain.sasl.jaas.config": jaas,
            "listener.name.controller.plain.sasl.jaas.config": jaas,
            # relative to the broker's working folder: no path to escape, and the state folder can be moved
            "log.dirs": "data",
        }
        lines = [f"{key}={value}" for key, value in {**self.settings, **own}.items()]
        # Java takes the last of duplicate keys
        return "\n".join([PROPERTIES.read_text(encoding="utf-8"), "# added at start", *lines, ""])

    def _format(self, folder: Path, out: IO[bytes]) -> None:
        """Format the empty storage with Kafka's tool, which writes `meta.properties` last.

        Without this file, the next start formats the storage again, so an interruption does no harm.
        """
        java = self._java(f"-Dlog4j2.configurationFile={LOG4J.as_uri()}", *self._archive_option)
        command = [
            *java,
            "kafka.tools.StorageTool",
            "format",
            "-t",
            _read_cluster_id(folder),
            "-c",
            "server.properties",
        ]
        run = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        out.write(run.stdout + run.stderr)
        out.flush()
        if run.returncode != 0:
            raise BrokerError(f"Kafka cannot format its storage in {folder / 'data'}\n{self._read_log_tail()}")

    def _read_log_tail(self) -> str:
        lines: list[str] = []
        for path in (self.log, self.state / "logs" / "broker.out"):
            if path.is_file():
                lines += path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "\n".join([f"The end of its log ({self.log}):", *(f"    {line}" for line in lines)])


def _archive_path(classpath: tuple[Path, ...]) -> Path:
    return classpath[0].parent / "classes.jsa"


class _RunningBroker(NamedTuple):
    address: str
    pid: int


def _read_running_broker(state: Path) -> _RunningBroker | None:
    folder = state / "broker"
    if read_lock_holder(folder / "lock") is None:
        return None
    try:
        address = json.loads((folder / "address.json").read_bytes())
        return _RunningBroker(str(address["bootstrap"]), int(address["pid"]))
    except (FileNotFoundError, ValueError, KeyError):
        return None  # locked, but not launched yet


def _check_free(port: int, setting: str) -> None:
    error = check_port_free(port)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise BrokerError(f"cannot use port {port} on {HOST} ({error.strerror}). Set {setting} to a free port")
    holder = find_port_holder(port)
    by = holder.description if holder is not None else "another program"
    state = holder.state if holder is not None else None
    stop = f"stop that Kiln, or run kiln broker stop --state {shlex.quote(str(state))}; or " if state else ""
    raise BrokerError(f"port {port} on {HOST} is in use by {by}: {stop}set {setting} to a free port")


def _read_cluster_id(folder: Path) -> str:
    path = folder / "cluster.id"
    try:
        return path.read_bytes().decode("ascii").strip()
    except FileNotFoundError:
        name = "-"
        while name.startswith("-"):  # the tool would parse it as an option
            name = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        replace_file(path, name.encode())
        return name


def main() -> int:
    """Archive the broker's classes for the jars of this checkout. Return 0 even if that fails."""
    try:
        archive_classes(list_jars("broker"))
    except (BrokerError, JarsError) as error:
        print(f"cannot archive the broker's classes, so the broker starts more slowly: {error}", file=sys.stderr)
    return 0


OWNER: Final = "broker"
"""Name of a lock in the state folder. The process that holds it owns the broker, and stops the broker at its end."""


def read_owner(state: Path) -> int | None:
    """Read the process number of the owner of this state folder's broker (`OWNER`); `None` if it has no owner."""
    return read_lock_holder(state / "locks" / OWNER)


if __name__ == "__main__":
    sys.exit(main())
