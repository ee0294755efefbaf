"""A real Kafka broker for one machine: one node in KRaft mode, on loopback, with its data in the state folder.

Layout under the state folder: `broker/data` (the log), `broker/password` (what clients must know, 0600),
`broker/server.properties` (written at each start, 0600), `broker/lock` (locked by the broker's process for as long as
that process lives), `broker/address.json`, `broker/owner` (deploy/stack/broker_owner.py); `logs/broker.log` and
`logs/broker.out` (what the JVM prints). The log's place is relative, so that the folder can be moved.
"""

from __future__ import annotations

import base64
import errno
import fcntl
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
from typing import IO, Self

from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.state_version import claim_state_folder
from kiln.conf.settings.broker_password import ensure_password, private_file
from kiln.conf.settings.model import EMBEDDED_USER, Kafka
from kiln.deploy.stack.broker_owner import try_lock
from kiln.deploy.stack.jars import PROJECT, JarsError, list_broker_jars
from kiln.deploy.stack.java import JavaError, find_java
from kiln.deploy.stack.ports import HOST, check_port_free, find_free_ports, find_port_holder
from kiln.deploy.stack.spawn import bind_to_parent

PROPERTIES = PROJECT / "conf" / "broker.properties"
LOG4J = PROJECT / "conf" / "log4j2-broker.properties"

# A start takes the JVM a second or two of CPU. The quick compiler and a collector without threads of its own take the
# least, and leave the cores to Spark, which starts at the same time. Java begins with a heap of a 64th of the machine's
# memory, and fills all of it with garbage before it looks for any.
_JVM = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xms64m",
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Dkiln.logs=../logs",
)


class BrokerError(PrerequisiteError):
    """The broker cannot be started or did not start; the text says why and what to do."""


class BrokerRunningError(BrokerError):
    """Another process runs the broker of this state folder at `address`, or is just starting it (None)."""

    def __init__(self, state: Path, address: str | None) -> None:
        self.address = address
        where = f" at {address}" if address else ", and still starting"
        super().__init__(
            f"the broker of {state} is already running{where}: stop that Kiln, or give this one another state folder"
        )


def find_running_broker(state: Path) -> str | None:
    """`host:port` of the broker that runs on this state folder, whoever started the broker; None: no broker runs.

    A young broker does not answer yet: `await_broker` waits until the broker does.
    """
    found = _read_running_broker(state)
    return found[0] if found else None


def stop_running(state: Path, timeout: float = 20.0) -> bool:
    """End the broker of this state folder, whoever started the broker, and return whether there was one.

    BrokerError: the broker belongs to another user, or is still there after SIGKILL.
    """
    found = _read_running_broker(state)
    if found is None:
        return False
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(found[1], signal_number)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise BrokerError(f"the broker of {state} belongs to another user (process {found[1]})") from None
        # its own lock is the one sign of its end that no reused process number can fake
        deadline = time.monotonic() + timeout
        while _read_running_broker(state) == found:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            return True
    raise BrokerError(f"the broker of {state} (process {found[1]}) did not end")


def await_broker(
    address: str,
    client_options: Mapping[str, object],
    timeout: float = 60.0,
    process: subprocess.Popen[bytes] | None = None,
) -> None:
    """Return once the broker has a place in the cluster, so that topics can be created and records written.

    `client_options`: kafka-python's, such as `EmbeddedBroker.client_options`. BrokerError after `timeout` seconds, or
    as soon as `process` has ended, or where the broker does not take the password.
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
                raise BrokerError(f"the broker ended while starting (status {process.returncode})")
            if time.monotonic() > deadline:
                raise BrokerError(f"the broker at {address} did not answer within {timeout:.0f} s")
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
    """Start the broker once in a scratch folder, and keep the classes that it loads, parsed, in a file beside the jars.

    The file halves the time of later starts. A JVM that the file does not fit ignores the file. BrokerError: the file
    cannot be made.
    """
    jars = tuple(classpath)
    archive = _archive_path(jars)
    with tempfile.TemporaryDirectory(prefix="kiln-") as scratch:
        port, controller_port = find_free_ports()
        fresh = Path(scratch) / "classes.jsa"
        broker = EmbeddedBroker(Path(scratch), port, controller_port, jars, die_with_parent=True)
        broker.jvm_options = (f"-XX:ArchiveClassesAtExit={fresh}", "-Xlog:cds*=off")
        broker.start()
        broker.stop(timeout=120)
        if not fresh.is_file():
            raise BrokerError("the JVM kept no classes")
        unfinished = archive.with_name(f"{archive.name}.{os.getpid()}")
        shutil.copyfile(fresh, unfinished)
        unfinished.replace(archive)
    return archive


class EmbeddedBroker:
    """The broker of one state folder; a context manager that starts and stops it.

    The broker listens on `port` and `controller_port` of 127.0.0.1 only. `classpath`: `jars.broker_classpath()`.
    `settings` are Kafka's own, and weigh more than `conf/broker.properties`. `die_with_parent` (Linux): the broker ends
    when the *thread* that started it ends, even by SIGKILL. Otherwise the broker outlives a killed parent, and
    `find_running_broker` finds it. `port_settings`: the settings of the two ports, for the error about a taken port.
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
        die_with_parent: bool = False,
        port_settings: tuple[str, str] = ("kafka.embedded_port", "kafka.embedded_controller_port"),
    ) -> None:
        self.state = state.absolute()
        self.port = port
        self.controller_port = controller_port
        self.classpath = tuple(jar.absolute() for jar in classpath)
        self.heap = heap
        self.settings = dict(settings or {})
        self.die_with_parent = die_with_parent
        self.port_settings = port_settings
        archive = _archive_path(self.classpath) if self.classpath else None
        # a JVM that the file does not fit goes on without it
        self.jvm_options: tuple[str, ...] = (
            (f"-XX:SharedArchiveFile={archive}",) if archive and archive.is_file() else ()
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """`host:port` for clients."""
        return f"{HOST}:{self.port}"

    @property
    def client_options(self) -> Mapping[str, object]:
        """kafka-python's, to connect as Kiln does. SettingsError: the broker has not run yet."""
        return Kafka(embedded_port=self.port).of_state(self.state / "broker").client_options()

    @property
    def log(self) -> Path:
        """The broker's log."""
        return self.state / "logs" / "broker.log"

    @property
    def pid(self) -> int | None:
        """The broker's process number while the broker runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, timeout: float = 60.0) -> str:
        """Start the broker, wait until it takes requests, and return its address.

        BrokerRunningError: this folder's broker runs already. BrokerError: a port is taken, Java or the disk fails, or
        the broker does not come up within `timeout` seconds, and so was ended again.
        """
        self.launch()
        with ExitStack() as failed:  # or was interrupted: no broker is left behind
            failed.callback(self.stop)
            try:
                await_broker(self.address, self.client_options, timeout, self._process)
            except BrokerError as error:
                self.stop()  # first, that its last words are all there
                raise BrokerError(f"{error}\n{self._read_log_tail()}") from None
            failed.pop_all()
        return self.address

    def launch(self) -> None:
        """Start the broker and return at once. `await_broker` and `start` wait. Errors as of
        `start`."""
        if self.pid is not None:
            return
        folder = self.state / "broker"
        try:
            claim_state_folder(self.state)
            folder.mkdir(parents=True, exist_ok=True)
            (self.state / "logs").mkdir(exist_ok=True)
            lock = (folder / "lock").open("a")
        except OSError as error:
            raise BrokerError(f"the state folder cannot be used: {error}") from None
        with lock, (self.state / "logs" / "broker.out").open("wb") as out:
            if not try_lock(lock):
                raise BrokerRunningError(self.state, find_running_broker(self.state))
            address = folder / "address.json"
            address.unlink(missing_ok=True)
            for port, setting in zip((self.port, self.controller_port), self.port_settings, strict=True):
                _check_free(port, setting)
            properties = folder / "server.properties"
            private_file(properties, self._properties(ensure_password(folder))).replace(properties)
            if not (folder / "data" / "meta.properties").is_file():
                self._format(folder, out)
            java = self._java("-Xmx" + self.heap, f"-Dlog4j2.configurationFile={LOG4J.as_uri()}", *self.jvm_options)
            command = [*java, "kafka.Kafka", properties.name]
            if self.die_with_parent:
                command = bind_to_parent(command)
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                # Ctrl-C goes to every process of a session: the broker must outlive the queries that still write to it
                start_new_session=True,
                # a lock lasts as long as a process has its file open: so the broker holds the lock when we are gone
                pass_fds=(lock.fileno(),),
            )
            _replace_file(address, json.dumps({"bootstrap": self.address, "pid": self._process.pid}))

    def stop(self, timeout: float = 20.0) -> None:
        """End the broker, if it runs: SIGTERM, and SIGKILL if the end takes longer than `timeout` seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _java(self, *options: str) -> list[str]:
        if not self.classpath:
            raise BrokerError("no jars for the broker: make jars")
        try:
            java = find_java().executable
        except JavaError as error:
            raise BrokerError(str(error)) from None
        return [str(java), *_JVM, *options, "-cp", ":".join(map(str, self.classpath))]

    def _properties(self, password: str) -> str:
        # to itself the broker is a client, too: on the port of the controller
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
            # relative to the folder where the broker runs: no path to escape, and the state folder can be moved
            "log.dirs": "data",
        }
        lines = [f"{key}={_escape_property(value)}" for key, value in {**self.settings, **own}.items()]
        # of a key given twice, Java takes the last
        return "\n".join([PROPERTIES.read_text(encoding="utf-8"), "# added at start", *lines, ""])

    def _format(self, folder: Path, out: IO[bytes]) -> None:
        """Lay the empty storage. Kafka writes `meta.properties` last, so an interrupted storage is laid again."""
        java = self._java(f"-Dlog4j2.configurationFile={LOG4J.as_uri()}")
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
            raise BrokerError(f"Kafka could not lay its storage in {folder / 'data'}\n{self._read_log_tail()}")

    def _read_log_tail(self) -> str:
        lines: list[str] = []
        for path in (self.log, self.state / "logs" / "broker.out"):
            if path.is_file():
                lines += path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "\n".join([f"The end of its log ({self.log}):", *(f"    {line}" for line in lines)])


def _archive_path(classpath: tuple[Path, ...]) -> Path:
    return classpath[0].parent / "classes.jsa"


def _read_running_broker(state: Path) -> tuple[str, int] | None:
    folder = state / "broker"
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        try:
            told = json.loads((folder / "address.json").read_bytes())
            return str(told["bootstrap"]), int(told["pid"])
        except (FileNotFoundError, ValueError, KeyError):
            return None  # locked, and not launched yet
    return None


def _check_free(port: int, setting: str) -> None:
    error = check_port_free(port)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise BrokerError(f"port {port} on {HOST} is not to be had ({error.strerror}): set {setting} to a free one")
    holder = find_port_holder(port)
    by = holder.description if holder is not None else "another program"
    state = holder.state if holder is not None else None
    stop = f"stop that Kiln, or type kiln broker stop --state {shlex.quote(str(state))}; or " if state else ""
    raise BrokerError(f"port {port} on {HOST} is in use by {by}: {stop}set {setting} to a free one")


def _read_cluster_id(folder: Path) -> str:
    path = folder / "cluster.id"
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        name = "-"
        while name.startswith("-"):  # the tool would take the name for an option
            name = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        _replace_file(path, name)
        return name


def _replace_file(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _escape_property(value: str) -> str:
    """A value as java.util.Properties reads it."""
    return "".join(
        character if " " <= character <= "~" else "".join(f"\\u{unit:04x}" for unit in _encode_utf16(character))
        for character in value.replace("\\", "\\\\")
    )


def _encode_utf16(character: str) -> list[int]:
    raw = character.encode("utf-16-be")
    return [int.from_bytes(raw[at : at + 2]) for at in range(0, len(raw), 2)]


def main() -> int:
    """Keep the broker's classes for the jars of this checkout. Where that fails, print a note and return 0."""
    try:
        archive_classes(list_broker_jars())
    except (BrokerError, JarsError) as error:
        print(f"the broker's classes could not be kept, so it starts slower: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
