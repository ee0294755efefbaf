"""Checks of `kiln doctor`: pure functions from measured values to the result of a check."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from kiln.conf.process.bridge_status import BridgeStatus
from kiln.conf.process.errors import PrerequisiteError
from kiln.conf.process.extras import Extra, format_install_command
from kiln.deploy.ops.status import (
    BrokerStatus,
    QueryStatus,
    TableStatus,
)
from kiln.deploy.stack.java import TESTED_VERSIONS, Java, JavaError
from kiln.deploy.stack.ports import PortHolder
from kiln.pipelines.native.library import BUILD_COMMAND, Engine
from kiln.pipelines.runtime.checkpoint import DELETED_ADVICE

Level = Literal["ok", "warn", "fail"]
GB = 1_000_000_000
_OPEN_FILES: Final = 1_024  # the default of most systems
_SILENT = 10.0  # age of a bridge's status, in seconds, above which the bridge counts as stopped


@dataclass(frozen=True)
class DoctorCheck:
    """Result of one check; `what_to_do` is empty if nothing needs to be done."""

    name: str
    level: Level
    found: str
    what_to_do: str = ""
    group: str = ""
    """task that fails if the check fails, such as "query a lake"; a key of `doctor.GROUPS`"""


class Listener(NamedTuple):
    """A port on which Kiln listens, with the key of its setting."""

    setting: str
    host: str
    port: int
    udp: bool = False

    @property
    def is_of_broker(self) -> bool:
        """True if it is a port of the embedded broker."""
        return self.setting.startswith("kafka.")


def judge(name: str, problem: str, advice: str, fine: str, level: Level = "fail") -> DoctorCheck:
    """Build the result of a check: "ok" and the text `fine`, or `level` and `advice` if there is a problem."""
    return DoctorCheck(name, level, problem, advice) if problem else DoctorCheck(name, "ok", fine)


def check_python(version: tuple[int, int]) -> DoctorCheck:
    """Check that Python is 3.11 to 3.13 (pyproject.toml, requires-python)."""
    text = ".".join(map(str, version))
    problem = "" if (3, 11) <= version <= (3, 13) else text
    return judge("python", problem, "install Python 3.11, 3.12 or 3.13, and create a new .venv: make setup", text)


def check_java(java: Java | JavaError) -> DoctorCheck:
    """Check that Java is installed, in one of the versions with which Kiln is tested."""
    if isinstance(java, JavaError):
        problem, _, remedy = str(java).partition("\n")
        return DoctorCheck("java", "fail", problem, " ".join(remedy.split()) or "install Java 17")
    text = f"{java.version} ({java.executable})"
    if java.version not in TESTED_VERSIONS:
        tested = " and ".join(map(str, TESTED_VERSIONS))
        return DoctorCheck(
            "java", "warn", text, f"Kiln is tested with Java {tested}. If Spark fails, set JAVA_HOME to one of these"
        )
    return DoctorCheck("java", "ok", text)


def check_packages(
    required: Sequence[Requirement], installed: Mapping[str, str], extra: Extra | None = None
) -> DoctorCheck:
    """Compare installed versions with the project's requirements.

    Args:
        required: The requirements that apply here.
        installed: Versions by normalized package name.
        extra: The extra that has these requirements, if any. Missing packages of an extra are only a warning.
    """
    row = f"extra {extra}" if extra else "packages"
    wrong: list[str] = []
    missing: list[str] = []
    for requirement in required:
        version = installed.get(requirement.name.lower().replace("_", "-"))
        if version is None:
            missing.append(requirement.name)
            continue
        try:
            is_satisfied = requirement.specifier.contains(version, prereleases=True)
        except InvalidVersion:
            is_satisfied = False
        if not is_satisfied:
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if extra and missing:
        return DoctorCheck(row, "warn", f"not installed: {', '.join(missing)}", format_install_command(extra))
    wrong += [f"{name} is missing" for name in missing]
    if wrong:
        return DoctorCheck(row, "fail", "; ".join(wrong), format_install_command(extra))
    return DoctorCheck(row, "ok", f"all {len(required)} requirements are satisfied")


def check_spark(home: Path | PrerequisiteError, ignored: Sequence[str]) -> DoctorCheck:
    """Check that Kiln runs with the Spark inside PySpark.

    Args:
        home: Folder of that Spark, or the reason why it cannot be used.
        ignored: Environment variables that configure another Spark, which Kiln ignores.
    """
    if isinstance(home, PrerequisiteError):
        problem, _, remedy = str(home).partition(". ")
        return DoctorCheck("spark", "fail", problem, remedy or "make setup, in a shell without PYTHONPATH")
    text = f"Kiln's own, in {home}"
    return DoctorCheck("spark", "ok", f"{text}; ignored variables: {', '.join(ignored)}" if ignored else text)


def check_engine(engine: Engine) -> DoctorCheck:
    """Check that the native core decodes frames, not Python, which is slower."""
    if engine.is_native:
        return DoctorCheck("native core", "ok", "decodes frames")
    text = f"Python decodes frames: {engine.reason}"
    if BUILD_COMMAND not in engine.reason:
        return DoctorCheck("native core", "ok", text)  # building the core would not help
    return DoctorCheck("native core", "warn", text, BUILD_COMMAND)


def check_state(folder: Path, problem: str, private: bool = True, owner: str = "") -> DoctorCheck:
    """Check that the state folder can be used, belongs to this user and is private.

    Args:
        problem: Reason why Kiln cannot use the folder; empty if it can.
        private: True if no other user can enter the folder.
        owner: Name of the folder's owner if that is another user, else empty.
    """
    if problem:
        return DoctorCheck(
            "state folder", "fail", f"{folder}: {problem}", "pass another folder with --state or KILN_STATE"
        )
    if owner:
        advice = f"run Kiln as {owner}, or pass another --state: {owner} cannot read the files that you create"
        return DoctorCheck("state folder", "warn", f"{folder}: belongs to the user {owner}", advice)
    if not private:
        advice = f"the folder holds private keys: run chmod 700 {folder} as its owner"
        return DoctorCheck("state folder", "warn", f"{folder}: other users of this machine can enter it", advice)
    return DoctorCheck("state folder", "ok", str(folder))


def check_disk(free: int) -> DoctorCheck:
    """Check the free disk space for the state folder, in bytes."""
    text = f"{free / GB:,.1f} GB free"
    if free < GB:
        return DoctorCheck("disk", "fail", text, "make room on the disk: when it is full, the Kafka broker stops")
    if free < 5 * GB:
        advice = "this is enough for a trial. Mainnet traffic takes several GB a day: make more room for it"
        return DoctorCheck("disk", "warn", text, advice)
    return DoctorCheck("disk", "ok", text)


def parse_memory(text: str) -> int:
    """Convert a size of memory, such as `512m` or `2g`, to bytes."""
    return int(text[:-1]) * (1 << 30 if text.endswith("g") else 1 << 20)


def check_memory(available: int, wanted: int) -> DoctorCheck:
    """Check that the available memory is enough for Spark, its Python workers and the broker, in bytes."""
    text = f"{available / GB:,.1f} GB available, about {wanted / GB:,.1f} GB needed"
    problem = text if available < wanted else ""
    return judge("memory", problem, "lower spark.driver_memory, or stop other programs", text, "warn")


def check_open_files(limit: int) -> DoctorCheck:
    """Check how many files and sockets a process may open. Spark's JVM and a bridge with many peers need many."""
    text = f"a process may open at most {limit:,} files and sockets"
    problem = text if limit < _OPEN_FILES else ""
    return judge("open files", problem, "raise the limit in the shell that starts Kiln: ulimit -n 4096", text, "warn")


def check_port(listener: Listener, error: OSError | None, ours: bool, holder: PortHolder | None = None) -> DoctorCheck:
    """Check a port on which Kiln listens.

    Args:
        listener: The port, and the key of its setting.
        error: Error of an attempt to listen on the port; `None` if it succeeded.
        ours: True if a Kiln with this state folder already listens on the port.
        holder: The other process that listens on the port, if known.
    """
    name, setting = f"port {listener.port}", listener.setting
    if ours:
        return DoctorCheck(name, "ok", "in use by this Kiln")
    if error is None:
        return DoctorCheck(name, "ok", f"free, for {setting}")
    if error.errno == errno.EADDRINUSE:
        problem = f"in use by {holder.description if holder is not None else 'another program'}"
    else:
        problem = f"cannot be used on {listener.host} ({error.strerror})"
    return DoctorCheck(name, "fail", problem, f"set {setting} ({_name_variable(setting)}) to another port or address")


def _name_variable(setting: str) -> str:
    return "KILN_" + setting.upper().replace(".", "__")


def check_broker(broker: BrokerStatus, embedded: bool, runs: bool) -> DoctorCheck:
    """Check that the Kafka broker answers.

    Args:
        broker: State of the broker.
        embedded: True for an embedded broker, which `kiln run` and `kiln replay` start.
        runs: True if the process of the embedded broker runs.
    """
    if broker.reachable:
        return DoctorCheck("broker", "ok", f"{broker.servers} answers, with {len(broker.topics)} Kiln topics")
    if embedded and not runs:
        return DoctorCheck("broker", "ok", "embedded, not running; kiln run starts it")
    if embedded:
        return DoctorCheck("broker", "fail", f"runs, but {broker.problem}", "see logs/broker.log in the state folder")
    return DoctorCheck(
        "broker",
        "fail",
        f"{broker.servers}: {broker.problem}",
        "check kafka.bootstrap and the TLS and SASL settings",
    )


def check_updates_partitions(broker: BrokerStatus, topic: str, wanted: int) -> DoctorCheck:
    """Check that the topic `updates` has as many partitions as the settings say. The number must never change,
    because it decides which partition has the updates of a separator."""
    name = "partitions of updates"
    count = next((len(status.end) for status in broker.topics if status.name == topic), None)
    if count is None:
        reason = "the topic is not created yet" if broker.reachable else "the broker does not answer"
        return DoctorCheck(name, "ok", f"{reason}; the settings have {wanted}")
    if count != wanted:
        advice = f"set kafka.updates_partitions = {count}, or set another kafka.prefix to start with new topics"
        return DoctorCheck(name, "fail", f"{topic} has {count}, but the settings have {wanted}", advice)
    return DoctorCheck(name, "ok", str(count))


def check_lake(tables: Sequence[TableStatus], faults: Sequence[str] = ()) -> DoctorCheck:
    """Check that each table of the lake can be opened and read. `faults` describes tables that cannot be read."""
    problems = [table.problem for table in tables if table.problem]
    advice = (
        "run kiln recover, which lists the possible repairs"
        if problems
        else 'see "A table cannot be read" in docs/RUNBOOK.md'
    )
    return judge(
        "lake", "; ".join((*problems, *faults)), advice, f"{len(tables)} tables" if tables else "no tables yet"
    )


def check_store(uri: str, problem: str) -> DoctorCheck:
    """Check that commits to the object store of the lake are safe. If they are not, `problem` has the reason."""
    advice = "check lake.uri, lake.storage_options and the permissions. Supported stores: docs/object-store.md"
    text = (
        f"{uri}: supports conditional writes, which Kiln uses to commit. Do not write these tables with Spark: Delta's "
        "log store for S3 makes no conditional writes, so it can overwrite commits"
    )
    return judge("object store", problem and f"{uri}: {problem}", advice, text)


def check_checkpoints(queries: Sequence[QueryStatus]) -> DoctorCheck:
    """Check that each checkpoint is readable, and that its topics were not deleted and created again."""
    failing = [query for query in queries if query.problem]
    with_other_topics = [query for query in failing if query.batch is not None]
    problem = "; ".join(f"{query.name}: {query.problem}" for query in with_other_topics or failing)
    advice = (
        "run kiln recover, which lists the possible repairs"
        if with_other_topics
        else "run kiln recover. If another version of Spark wrote the checkpoint, use the version in requirements.lock"
    )
    fine = ", ".join(query.name for query in queries if query.batch is not None) or "none yet"
    return judge("checkpoints", problem, advice, fine)


def check_first_offsets(deleted: Mapping[str, str]) -> DoctorCheck:
    """Check that Kafka had not deleted records of a topic before a query first read it. `deleted` describes the records
    by query."""
    fine = "no topic had lost records before a query first read it"
    return judge("first records", "; ".join(deleted.values()), DELETED_ADVICE, fine, "warn")


def check_bridge(status: BridgeStatus | None, now: float) -> DoctorCheck:
    """Check that the bridge reports no errors. `now` is in Unix seconds."""
    if status is None or now - status.at > _SILENT:
        return DoctorCheck("bridge", "ok", "not running")
    if status.errors:
        return DoctorCheck("bridge", "warn", "; ".join(status.errors), 'see "The bridge" in docs/RUNBOOK.md')
    return DoctorCheck("bridge", "ok", f"{len(status.peers)} peers, {len(status.topics)} topics")


def check_geneses(status: BridgeStatus | None, now: float) -> list[DoctorCheck]:
    """Check that no update waits for a genesis (first event of its stream) that no peer has. `now` is in Unix
    seconds."""
    fetcher = None if status is None or now - status.at > _SILENT else status.fetcher
    if fetcher is None or not fetcher.unanswered_streams:
        return []
    updates, streams = fetcher.unanswered_updates, fetcher.unanswered_streams
    text = f"{updates:,} updates of {streams:,} streams wait for the streams' first events, which no peer has sent"
    advice = (
        "add a peer that has these streams to ipfs.peers, such as the IPFS node of a Ceramic node. Otherwise the "
        "updates go to quarantine after ipfs.give_up_after"
    )
    return [DoctorCheck("geneses", "warn", text, advice)]


def check_ipfs(api: str, store: str, problem: str) -> DoctorCheck:
    """Check the store from which peers fetch the blocks of batches.

    Args:
        api: The setting `ipfs.api`.
        store: Description of the store.
        problem: Reason why the store does not work; empty if it does.
    """
    if not api:
        text = f"off: peers cannot fetch the blocks of batches (in {store}), and Kiln fetches no block from peers"
        return DoctorCheck("ipfs", "warn", text, 'set ipfs.api to "self", or to the URL of Kubo\'s RPC')
    if problem:
        advice = (
            f"start Kubo, or set another ipfs.api ({_name_variable('ipfs.api')}): until then, no batch is published"
        )
        return DoctorCheck("ipfs", "fail", problem, advice)
    return DoctorCheck("ipfs", "ok", store)
