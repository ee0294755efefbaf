"""Checks of `kiln doctor`: tasks that Kiln can do on this machine, with these settings and this state folder.

A check is a pure function from measured values to a `DoctorCheck`; `run_checks` measures them, in groups by task. A
group whose extra is not installed has one row, with the command that installs it.
"""

import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar

from deltalake.exceptions import DeltaError
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.conf.process.errors import KilnError, PrerequisiteError
from kiln.conf.process.extras import Extra, format_install_command, list_requirements
from kiln.conf.process.location import shorten_error
from kiln.conf.process.locks import read_lock_holders
from kiln.conf.process.state_version import StateVersionError, check_state_version, is_private
from kiln.conf.settings.model import Kafka, Settings
from kiln.deploy.ops.clocks import ClockStatus, find_trailing_clocks
from kiln.deploy.ops.machine import (
    find_existing_parent,
    name_user,
    probe_writing,
    read_available_memory,
    read_open_files_limit,
)
from kiln.deploy.ops.status import (
    BrokerStatus,
    QueryStatus,
    TableStatus,
    read_broker_status,
    read_lake_status,
    read_query_status,
)
from kiln.deploy.ops.store import probe_store
from kiln.deploy.stack import jars
from kiln.deploy.stack.embedded_broker import find_running_broker
from kiln.deploy.stack.java import TESTED_VERSIONS, Java, JavaError, find_java
from kiln.deploy.stack.kafka_topics import read_compression
from kiln.deploy.stack.ports import HOST, PortHolder, check_port_free, find_port_holder
from kiln.pipelines.delta.duckdb_tables import find_reading_faults
from kiln.pipelines.delta.lake import Lake, LakeError, find_column_fault
from kiln.pipelines.native.library import BUILD_COMMAND, Engine, find_engine
from kiln.pipelines.runtime.checkpoint import DELETED_ADVICE, Checkpoint, describe_deleted_records
from kiln.pipelines.runtime.spark_environment import check_user, find_foreign_variables, find_spark_home, is_local
from kiln.pipelines.runtime.table_ages import OLDER_TABLE_REMEDY, find_older_tables

Level = Literal["ok", "warn", "fail"]
_T = TypeVar("_T")
_GB = 1_000_000_000
_KUBO = 3.0  # s, timeout of a request to Kubo
_OPEN_FILES: Final = 1_024  # the default of most systems
_SILENT = 10.0  # s, age of a status after which its bridge counts as stopped
GROUPS: Final[Mapping[str, Extra | None]] = {
    "query a lake": None,
    "maintain a lake": "lake",
    "capture from a network": "bridge",
    "run the queries": "spark",
    "check quality": "quality",
    "run the demo network": "demo",
}
"""Purposes, in the order of the output, and the extra that each needs."""

_IN_STORE: Final = frozenset({"checkpoints", "first records", "lake", "columns", "table ages", "clocks"})
"""checks that read the lake's store, which takes minutes if it does not answer"""
_TCP: Final = re.compile(r"/ip[46]/([^/]+)/tcp/(\d+)")


@dataclass(frozen=True)
class DoctorCheck:
    """Result of one check; `what_to_do` is empty if nothing needs to be done."""

    name: str
    level: Level
    found: str
    what_to_do: str = ""
    group: str = ""
    """purpose that the check belongs to, such as "query a lake"; one of `GROUPS`"""


class Listener(NamedTuple):
    """A port that Kiln listens on, and the key of its setting."""

    setting: str
    host: str
    port: int
    udp: bool = False

    @property
    def is_of_broker(self) -> bool:
        """True if the embedded broker listens there."""
        return self.setting.startswith("kafka.")


# ---------------------------------------------------------------- the checks, pure


def _judge(name: str, problem: str, advice: str, fine: str, level: Level = "fail") -> DoctorCheck:
    """Build a check that passes if there is no problem."""
    return DoctorCheck(name, level, problem, advice) if problem else DoctorCheck(name, "ok", fine)


def check_python(version: tuple[int, int]) -> DoctorCheck:
    """Check for Python 3.11 to 3.13 (pyproject.toml, requires-python)."""
    text = ".".join(map(str, version))
    if (3, 11) <= version <= (3, 13):
        return DoctorCheck("python", "ok", text)
    return DoctorCheck("python", "fail", text, "create a new .venv with Python 3.11, 3.12 or 3.13: make setup")


def check_java(java: Java | JavaError) -> DoctorCheck:
    """Check for Java 17 or 21 as a system package (docs/design, Versions that work together)."""
    if isinstance(java, JavaError):
        problem, _, remedy = str(java).partition("\n")
        return DoctorCheck("java", "fail", problem, " ".join(remedy.split()) or "install Java 17")
    text = f"{java.version} ({java.executable})"
    if java.version not in TESTED_VERSIONS:
        tested = " and ".join(map(str, TESTED_VERSIONS))
        return DoctorCheck(
            "java", "warn", text, f"Kiln is tested with {tested}: if something fails, set JAVA_HOME to one of them"
        )
    return DoctorCheck("java", "ok", text)


def check_packages(required: Iterable[str], installed: Mapping[str, str], extra: Extra | None = None) -> DoctorCheck:
    """Compare installed versions with the project's requirements.

    Args:
        required: Requirements as in package metadata; requirements of extras are skipped.
        installed: Versions by normalized package name.
        extra: The extra that has these requirements. Missing packages are then no fault.
    """
    row = f"extra {extra}" if extra else "packages"
    wrong: list[str] = []
    missing: list[str] = []
    number = 0
    for line in required:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            wrong.append(f"unreadable requirement {line!r}")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        number += 1
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
    return DoctorCheck(row, "ok", f"all {number} requirements are satisfied")


def check_spark(home: Path | PrerequisiteError, ignored: Sequence[str]) -> DoctorCheck:
    """Check that PySpark contains its own Spark. Name the environment variables that point to another Spark; Kiln
    ignores them."""
    if isinstance(home, PrerequisiteError):
        problem, _, remedy = str(home).partition(". ")
        return DoctorCheck("spark", "fail", problem, remedy or "make setup, in a shell without PYTHONPATH")
    text = f"Kiln's own, in {home}"
    return DoctorCheck("spark", "ok", f"{text}; ignores {', '.join(ignored)} of another Spark" if ignored else text)


def check_engine(engine: Engine) -> DoctorCheck:
    """Check that the native core decodes frames."""
    if engine.is_native:
        return DoctorCheck("native core", "ok", "decodes frames")
    text = f"Python decodes frames: {engine.reason}"
    if BUILD_COMMAND not in engine.reason:
        return DoctorCheck("native core", "ok", text)  # there is nothing to be done
    return DoctorCheck("native core", "warn", text, BUILD_COMMAND)


def check_state(folder: Path, problem: str, private: bool = True, owner: str = "") -> DoctorCheck:
    """Check that the state folder can be used, belongs to this user and is private.

    Args:
        folder: The state folder.
        problem: Why Kiln cannot use it; empty if Kiln can.
        private: True if no other user can enter the folder.
        owner: Name of the owner, if that is another user.
    """
    if problem:
        return DoctorCheck(
            "state folder", "fail", f"{folder}: {problem}", "set another folder with --state or KILN_STATE"
        )
    if owner:
        advice = f"run Kiln as {owner}, who could not read the files that you would create, or pass another --state"
        return DoctorCheck("state folder", "warn", f"{folder}: belongs to the user {owner}", advice)
    if not private:
        advice = f"the folder holds keys: run chmod 700 {folder} as its owner"
        return DoctorCheck("state folder", "warn", f"{folder}: other users of this machine can enter it", advice)
    return DoctorCheck("state folder", "ok", str(folder))


def check_disk(free: int) -> DoctorCheck:
    """Check the free space for broker data and lake, in bytes."""
    text = f"{free / _GB:,.1f} GB free"
    if free < _GB:
        return DoctorCheck("disk", "fail", text, "free some space: the broker stops when the disk is full")
    if free < 5 * _GB:
        return DoctorCheck("disk", "warn", text, "enough for a trial; mainnet traffic takes several GB a day")
    return DoctorCheck("disk", "ok", text)


def parse_memory(text: str) -> int:
    """Convert `512m` or `2g` to bytes."""
    return int(text[:-1]) * (1 << 30 if text.endswith("g") else 1 << 20)


def check_memory(available: int | None, wanted: int) -> DoctorCheck:
    """Compare available memory with the needs of Spark, its Python workers and the broker.

    Args:
        available: Bytes; `None` if the system does not report it.
        wanted: Bytes.
    """
    if available is None:
        return DoctorCheck("memory", "ok", "unknown on this system")
    text = f"{available / _GB:,.1f} GB available, about {wanted / _GB:,.1f} GB needed"
    if available < wanted:
        return DoctorCheck("memory", "warn", text, "lower spark.driver_memory, or stop other programs")
    return DoctorCheck("memory", "ok", text)


def check_open_files(limit: int) -> DoctorCheck:
    """Check the limit of open files of a process, which the JVM of Spark and a bridge with many peers reach."""
    text = f"at most {limit:,} a process"
    if limit < _OPEN_FILES:
        return DoctorCheck("open files", "warn", text, "raise the limit in the shell that starts Kiln: ulimit -n 4096")
    return DoctorCheck("open files", "ok", text)


def check_port(listener: Listener, error: OSError | None, ours: bool, holder: PortHolder | None = None) -> DoctorCheck:
    """Check a port on which Kiln listens.

    Args:
        listener: The port.
        error: Why Kiln could not listen on it now; `None` if Kiln could.
        ours: True if Kiln listens on it already, with this state folder.
        holder: The process that listens on it, if known.
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
    """Check that the broker answers. An embedded broker may be stopped: `kiln run` and `kiln replay` start it."""
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
    """Compare the partition count of `updates`, which never changes, with the settings (docs/design, Kafka topics)."""
    name = "partitions of updates"
    count = next((len(status.end) for status in broker.topics if status.name == topic), None)
    if count is None:
        reason = "not created yet" if broker.reachable else "the broker does not run"
        return DoctorCheck(name, "ok", f"{reason}; {wanted} in the settings")
    if count != wanted:
        advice = f"set kafka.updates_partitions = {count}, or start over with another kafka.prefix"
        return DoctorCheck(name, "fail", f"{topic} has {count}, but the settings have {wanted}", advice)
    return DoctorCheck(name, "ok", str(count))


def check_compression(compression: Mapping[str, str], codecs: Collection[str]) -> DoctorCheck:
    """Check that Kiln can decompress the records of its topics.

    Args:
        compression: `compression.type` by topic.
        codecs: Codecs that the installed librdkafka reads.
    """
    name = "compression"
    by_codec: dict[str, list[str]] = {}
    for topic, codec in sorted(compression.items()):
        if codec not in ("producer", "uncompressed"):
            by_codec.setdefault(codec, []).append(topic)
    unreadable = {codec: topics for codec, topics in by_codec.items() if codec not in codecs}
    readable = f"confluent-kafka reads {', '.join(codecs) or 'no codec'}"
    if unreadable:
        text = "; ".join(f"{', '.join(topics)}: compression.type is {codec}" for codec, topics in unreadable.items())
        advice = "install confluent-kafka from its wheel, which has every codec, or set compression.type=producer"
        return DoctorCheck(name, "fail", f"{text}, but {readable}", advice)
    text = "; ".join(f"{codec}: {', '.join(topics)}" for codec, topics in by_codec.items())
    return DoctorCheck(name, "ok", f"{text}; {readable}" if text else readable)


def check_lake(tables: Sequence[TableStatus], faults: Sequence[str] = ()) -> DoctorCheck:
    """Check that each table of the lake can be opened and read; `faults`: why open tables cannot be read."""
    problems = [table.problem for table in tables if table.problem]
    if problems:
        return DoctorCheck(
            "lake", "fail", "; ".join((*problems, *faults)), "run kiln recover, which shows the possible repairs"
        )
    if faults:
        return DoctorCheck("lake", "fail", "; ".join(faults), "see the runbook, A table cannot be read")
    return DoctorCheck("lake", "ok", f"{len(tables)} tables" if tables else "no tables yet")


def check_store(uri: str, problem: str) -> DoctorCheck:
    """Check that commits are safe in the object store of the lake; `problem` is empty if they are."""
    if problem:
        advice = "see docs/object-store.md: lake.uri and lake.storage_options, permissions, and supported stores"
        return DoctorCheck("object store", "fail", f"{uri}: {problem}", advice)
    text = (
        f"{uri}: supports conditional writes. Kiln commits with delta-rs; never write these tables with Delta's own "
        "log store for S3 (Spark, delta-spark), which loses commits"
    )
    return DoctorCheck("object store", "ok", text)


def check_checkpoints(queries: Sequence[QueryStatus]) -> DoctorCheck:
    """Check that each checkpoint is readable and belongs to the topics that Kafka has."""
    failing = [query for query in queries if query.problem]
    with_other_topics = [query for query in failing if query.batch is not None]
    if failing:
        problem = "; ".join(f"{query.name}: {query.problem}" for query in with_other_topics or failing)
        advice = (
            "run kiln recover, which shows the possible repairs"
            if with_other_topics
            else "run kiln recover. If another version of Spark wrote them, use the versions in requirements.lock"
        )
        return DoctorCheck("checkpoints", "fail", problem, advice)
    return DoctorCheck(
        "checkpoints", "ok", ", ".join(query.name for query in queries if query.batch is not None) or "none yet"
    )


def check_first_offsets(deleted: Mapping[str, str]) -> DoctorCheck:
    """Check that Kafka had all records of its topics when the queries first ran; `deleted` by query."""
    fine = "no topic had lost records before a query first ran"
    return _judge("first records", "; ".join(deleted.values()), DELETED_ADVICE, fine, "warn")


def check_clocks(trailing: Sequence[ClockStatus]) -> DoctorCheck:
    """Check that no clock is behind the times that Kiln has stored."""
    problem = "; ".join(clock.problem for clock in trailing)
    return _judge("clocks", problem, "correct the wrong clock", "none is behind", "warn")


def check_bridge(status: BridgeStatus | None, now: float) -> DoctorCheck:
    """Show the errors that the bridge reports; `now` in Unix seconds."""
    if status is None or now - status.at > _SILENT:
        return DoctorCheck("bridge", "ok", "not running")
    if status.errors:
        return DoctorCheck("bridge", "warn", "; ".join(status.errors), "see the runbook, The bridge")
    return DoctorCheck("bridge", "ok", f"{len(status.peers)} peers, {len(status.topics)} topics")


def check_geneses(status: BridgeStatus | None, now: float) -> list[DoctorCheck]:
    """Check that no update waits for a genesis that no peer has; `now` in Unix seconds."""
    fetcher = None if status is None or now - status.at > _SILENT else status.fetcher
    if fetcher is None or not fetcher.unanswered_streams:
        return []
    updates, streams = fetcher.unanswered_updates, fetcher.unanswered_streams
    text = f"{updates:,} updates of {streams:,} streams wait for geneses that no peer has sent"
    advice = (
        "add a peer that has these streams to ipfs.peers, such as the IPFS node of a Ceramic node; after "
        "ipfs.give_up_after the updates go to quarantine"
    )
    return [DoctorCheck("geneses", "warn", text, advice)]


def check_ipfs(api: str, store: str, problem: str) -> DoctorCheck:
    """Check the store of batch blocks.

    Args:
        api: The setting `ipfs.api`.
        store: Description of the store.
        problem: Why the store does not work; empty if it does.
    """
    if not api:
        text = f"off: peers cannot fetch the blocks of batches ({store}), and Kiln fetches no blocks of others"
        return DoctorCheck("ipfs", "warn", text, 'set ipfs.api = "self", or to the URL of Kubo\'s RPC')
    if problem:
        advice = f"batches wait until it answers: start Kubo, or set another ipfs.api ({_name_variable('ipfs.api')})"
        return DoctorCheck("ipfs", "fail", problem, advice)
    return DoctorCheck("ipfs", "ok", store)


# ---------------------------------------------------------------- measurements


def run_checks(settings: Settings) -> list[DoctorCheck]:
    """Run all checks, in a few seconds at most.

    A check that cannot be made, for example because a store does not answer, counts as failed; the others are still
    made.
    """
    kafka = settings.kafka
    runs = kafka.embedded and _read(lambda: find_running_broker(settings.state), None) is not None
    kilns = _read(lambda: read_lock_holders(settings.state), set[int]())
    broker = read_broker_status(settings.broker)
    updates = next((topic.end for topic in broker.topics if topic.name == kafka.topic("updates")), {})
    wanted = (
        parse_memory(settings.spark.driver_memory) + (parse_memory(kafka.embedded_heap) if kafka.embedded else 0) + _GB
    )
    bridge = _read(lambda: read_status(settings.bridge_dir / "status.json"), None)
    listeners = list_listeners(settings)
    lake = Lake.from_location(settings.lake_root)
    away = probe_store(lake) if settings.uses_store else ""
    installed = _read_installed_versions()
    checks: Mapping[str, Mapping[str, Callable[[], Iterable[DoctorCheck]]]] = {
        "query a lake": {
            "python": lambda: [check_python(sys.version_info[:2])],
            "state folder": lambda: [_check_state(settings.state)],
            "object store": lambda: [check_store(lake.path, away)] if settings.uses_store else [],
            "lake": lambda: [check_lake(read_lake_status(lake), find_reading_faults(lake))],
            "columns": lambda: [_check_columns(lake)],
        },
        "capture from a network": {
            "ports": lambda: [
                _check_port(listener, runs, kilns) for listener in listeners if not listener.is_of_broker
            ],
            "bridge": lambda: [check_bridge(bridge, time.time())],
            "geneses": lambda: check_geneses(bridge, time.time()),
            "ipfs": lambda: [check_ipfs(settings.ipfs.api, *_describe_block_store(settings))],
        },
        "run the queries": {
            "java": lambda: [check_java(_find_java())],
            "spark": lambda: (
                [check_spark(_find_spark(), find_foreign_variables(os.environ))]
                if is_local(settings.spark.master)
                else []
            ),
            "jars": lambda: [_check_jars()],
            "jars for the store": lambda: [_check_s3_jars()] if settings.uses_store else [],
            "native core": lambda: [check_engine(find_engine())],
            "disk": lambda: [check_disk(shutil.disk_usage(find_existing_parent(settings.state)).free)],
            "memory": lambda: [check_memory(read_available_memory(), wanted)],
            "ports": lambda: [_check_port(listener, runs, kilns) for listener in listeners if listener.is_of_broker],
            "open files": lambda: [check_open_files(read_open_files_limit())],
            "broker": lambda: [check_broker(broker, kafka.embedded, runs)],
            "partitions of updates": lambda: [
                check_updates_partitions(broker, kafka.topic("updates"), kafka.updates_partitions)
            ],
            "compression": lambda: [_check_compression(settings.broker, broker)],
            "checkpoints": lambda: [
                check_checkpoints(
                    [read_query_status(name, settings.checkpoints_root / name, {}) for name in settings.queries]
                )
            ],
            "table ages": lambda: [
                _judge(
                    "table ages",
                    "; ".join(find_older_tables(lake, settings.checkpoints_root)),
                    OLDER_TABLE_REMEDY,
                    "no table is older than its checkpoint",
                )
            ],
            "first records": lambda: [check_first_offsets(_read_deleted_records(settings))],
            "clocks": lambda: [check_clocks(find_trailing_clocks(settings, updates))],
        },
    }
    skipped = _IN_STORE if away else frozenset()
    found: list[DoctorCheck] = []
    for group, extra in GROUPS.items():
        packages = check_packages(
            [f"{needed.name}{needed.specifier}" for needed in list_requirements(extra)], installed, extra
        )
        rows = [packages]
        if packages.level != "warn":
            for name, run in checks.get(group, {}).items():
                rows += [] if name in skipped else _run_check(name, run)
        found += [replace(row, group=group) for row in rows]
    return found


def _run_check(name: str, run: Callable[[], Iterable[DoctorCheck]]) -> list[DoctorCheck]:
    try:
        return list(run())
    except (KilnError, DeltaError, OSError) as error:
        return [DoctorCheck(name, "fail", shorten_error(error), "remove the cause, and run kiln doctor again")]


def list_listeners(settings: Settings) -> list[Listener]:
    """List the ports on which Kiln listens with these settings, without the ports that the system chooses."""
    kafka, monitor = settings.kafka, settings.monitor.host_and_port
    listeners = [
        Listener("kafka.embedded_port", HOST, kafka.embedded_port),
        Listener("kafka.embedded_controller_port", HOST, kafka.embedded_controller_port),
    ]
    listeners = listeners if kafka.embedded else []
    for match in map(_TCP.match, settings.bridge.listen):
        if match is not None:
            listeners.append(Listener("bridge.listen", match[1], int(match[2])))
    if monitor is not None:
        listeners.append(Listener("monitor.listen", *monitor))
    for address in settings.bep50.listen if settings.bep50.enabled else ():
        host, _, port = address.rpartition(":")
        listeners.append(Listener("bep50.listen", host.strip("[]"), int(port), udp=True))
    return [listener for listener in listeners if listener.port]


def _check_compression(kafka: Kafka, broker: BrokerStatus) -> DoctorCheck:
    from kiln.conf.process.kafka_records import list_codecs

    topics = [topic.name for topic in broker.topics]
    return check_compression(read_compression(topics, kafka.client_options()) if topics else {}, list_codecs())


def _read_deleted_records(settings: Settings) -> dict[str, str]:
    checkpoints = {name: Checkpoint(settings.checkpoints_root / name) for name in settings.queries}
    descriptions = {
        name: describe_deleted_records(name, checkpoint.deleted_records) for name, checkpoint in checkpoints.items()
    }
    return {name: text for name, text in descriptions.items() if text}


def _check_columns(lake: Lake) -> DoctorCheck:
    """Check that no other program has changed the columns of a table that can be opened."""
    faults = []
    for name in lake.tables():
        with suppress(LakeError):  # `check_lake` reports it
            if fault := find_column_fault(name, lake.open(name).schema().to_json(), added_later=True):
                faults.append(f"{name}: {fault}")
    advice = (
        "the queries stop before they write to it: change the columns back, or restore an older version of the table"
    )
    return _judge("columns", "; ".join(faults), advice, "those that Kiln writes")


def _check_jars() -> DoctorCheck:
    """Check the jars of Spark's connectors and of the broker, pinned in `conf/ivy.xml`."""
    root = jars.default_root()
    problem = "" if jars.is_complete(root) else f"incomplete in {root}"
    return _judge("jars", problem, "make jars (or let kiln run fetch them when it needs them)", str(root), "warn")


def _check_s3_jars() -> DoctorCheck:
    """Check Spark's jars for an object store, pinned in `conf/ivy-s3.xml`."""
    problem = "" if jars.is_complete(jars.s3_root(), jars.IVY_S3) else "incomplete"
    return _judge("jars for the store", problem, "make jars-s3 (or let kiln run fetch them)", "complete", "warn")


def _read_installed_versions() -> dict[str, str]:
    packages = ((package.metadata["Name"], package.version) for package in metadata.distributions())
    return {name.lower().replace("_", "-"): version for name, version in packages if name}


def _find_spark() -> Path | PrerequisiteError:
    try:
        check_user()
        return find_spark_home()
    except PrerequisiteError as error:
        return error


def _find_java() -> Java | JavaError:
    try:
        return find_java()
    except JavaError as error:
        return error


def _describe_block_store(settings: Settings) -> tuple[str, str]:
    """Return a description of the store that `ipfs.api` selects, and the store's problem (empty if it has no
    problem)."""
    api = settings.ipfs.api
    if not api:
        return str(settings.state / "blocks"), ""
    if api == "self":
        return f"the bridge serves the blocks in {settings.state / 'blocks'}, and fetches others", ""
    from kiln.bridge.ipfs.blocks import BlockStoreUnavailableError
    from kiln.bridge.ipfs.kubo import Kubo

    kubo = Kubo(api, settings.ipfs.api_auth.get_secret_value())
    try:
        return f"{kubo.identity(_KUBO).name} at {api}", ""
    except BlockStoreUnavailableError as away:
        return "", str(away)
    finally:
        kubo.close()


def _check_state(folder: Path) -> DoctorCheck:
    if not folder.exists():
        return check_state(folder, probe_writing(folder))
    problem, owner = probe_writing(folder), folder.stat().st_uid
    if not problem:
        try:
            check_state_version(folder)
        except StateVersionError as error:
            problem = str(error)
    return check_state(folder, problem, is_private(folder), "" if owner == os.geteuid() else name_user(owner))


def _read(read: Callable[[], _T], otherwise: _T) -> _T:
    """Read a part of the state folder. If this user may not read it, `check_state` reports that."""
    try:
        return read()
    except OSError:
        return otherwise


def _check_port(listener: Listener, broker_runs: bool, kilns: Collection[int]) -> DoctorCheck:
    """Check a port. Kiln's own processes may use it: the broker, the processes that hold a lock, and their children."""
    error = check_port_free(listener.port, listener.host, udp=listener.udp)
    if error is None or listener.is_of_broker:
        holder = None if error is None or broker_runs else find_port_holder(listener.port)
        return check_port(listener, error, ours=broker_runs and error is not None, holder=holder)
    holder = None if listener.udp else find_port_holder(listener.port)
    return check_port(listener, error, bool(kilns) if holder is None else holder.pid in kilns, holder)
