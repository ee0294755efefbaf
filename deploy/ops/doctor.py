"""What `kiln doctor` looks at: whether this machine, these settings and this state folder will do, and what to do.

A check is a pure function from what was found to a `DoctorCheck`; `run_checks` finds it.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion

from kiln.bridge.ipfs.blocks import BlockStoreUnavailableError
from kiln.bridge.ipfs.helia import HeliaError, find_node, is_installed
from kiln.bridge.ipfs.kubo import Kubo
from kiln.conf.process.bridge_status import BridgeStatus, read_status
from kiln.conf.process.state_version import is_private
from kiln.conf.settings.model import Settings
from kiln.deploy.ops.clocks import ClockStatus, find_trailing_clocks
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
from kiln.deploy.stack.java import TRIED, Java, JavaError, find_java
from kiln.deploy.stack.ports import PortHolder, check_port_free, find_port_holder
from kiln.pipelines.delta.lake import Lake

Level = Literal["ok", "warn", "fail"]
_GB = 1_000_000_000
_KUBO = 3.0  # s that Kubo gets to answer
_SILENT = 10.0  # s without a status after which a bridge does not run


@dataclass(frozen=True)
class DoctorCheck:
    """One thing that was looked at. `what_to_do` is empty where nothing is to be done."""

    name: str
    level: Level
    found: str
    what_to_do: str = ""


# ---------------------------------------------------------------- the checks, pure


def check_python(version: tuple[int, int]) -> DoctorCheck:
    """Kiln is tried on Python 3.11 to 3.13 (pyproject.toml, requires-python)."""
    found = ".".join(map(str, version))
    if (3, 11) <= version <= (3, 13):
        return DoctorCheck("python", "ok", found)
    return DoctorCheck("python", "fail", found, "make a new .venv with Python 3.11, 3.12 or 3.13: make setup")


def check_java(java: Java | JavaError) -> DoctorCheck:
    """Java 17 or 21, as a system package (docs/design, Versions that work together)."""
    if isinstance(java, JavaError):
        found, _, remedy = str(java).partition("\n")
        return DoctorCheck("java", "fail", found, " ".join(remedy.split()) or "install Java 17")
    found = f"{java.version} ({java.executable})"
    if java.version not in TRIED:
        tried = " and ".join(map(str, TRIED))
        return DoctorCheck(
            "java", "warn", found, f"Kiln is tried with {tried}: if something is odd, set JAVA_HOME to one of them"
        )
    return DoctorCheck("java", "ok", found)


def check_jars(complete: bool, root: Path) -> DoctorCheck:
    """The jars of Spark's connectors and of the broker, pinned in `conf/ivy.xml`."""
    if complete:
        return DoctorCheck("jars", "ok", str(root))
    return DoctorCheck(
        "jars", "warn", f"not complete in {root}", "make jars (kiln run fetches them too, when it needs them)"
    )


def check_s3_jars(complete: bool) -> DoctorCheck:
    """The jars of Spark for an object store, pinned in `conf/ivy-s3.xml`."""
    if complete:
        return DoctorCheck("jars for the store", "ok", "complete")
    return DoctorCheck("jars for the store", "warn", "not complete", "make jars-s3 (kiln run fetches them too)")


def check_packages(required: Iterable[str], installed: Mapping[str, str]) -> DoctorCheck:
    """Installed versions against what the project asks for; `required` as in package metadata, extras left out."""
    wrong: list[str] = []
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
            wrong.append(f"{requirement.name} is missing")
            continue
        try:
            fits = requirement.specifier.contains(version, prereleases=True)
        except InvalidVersion:
            fits = False
        if not fits:
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        return DoctorCheck("packages", "fail", "; ".join(wrong), "make setup")
    return DoctorCheck("packages", "ok", f"{number} as required")


def check_state(folder: Path, problem: str, private: bool = True) -> DoctorCheck:
    """Whether the state folder can be written to; `problem` is empty if so. `private`: no other user may enter it."""
    if problem:
        return DoctorCheck("state folder", "fail", f"{folder}: {problem}", "name another with --state or KILN_STATE")
    if not private:
        advice = (
            f"chmod 700 {folder}, as its owner: the folder has keys (a folder of its user's own is closed at a start)"
        )
        return DoctorCheck("state folder", "warn", f"{folder}: other users of this machine can enter it", advice)
    return DoctorCheck("state folder", "ok", str(folder))


def check_disk(free: int) -> DoctorCheck:
    """Room for broker data and lake, bytes."""
    found = f"{free / _GB:,.1f} GB free"
    if free < _GB:
        return DoctorCheck("disk", "fail", found, "free some: the broker stops when the disk is full")
    if free < 5 * _GB:
        return DoctorCheck("disk", "warn", found, "enough to try; mainnet traffic fills some GB a day")
    return DoctorCheck("disk", "ok", found)


def parse_memory(text: str) -> int:
    """`512m`, `2g` in bytes."""
    return int(text[:-1]) * (1 << 30 if text.endswith("g") else 1 << 20)


def check_memory(available: int | None, wanted: int) -> DoctorCheck:
    """Memory for Spark, its Python workers and the broker, bytes; None: the system does not say."""
    if available is None:
        return DoctorCheck("memory", "ok", "not known on this system")
    found = f"{available / _GB:,.1f} GB available, about {wanted / _GB:,.1f} GB wanted"
    if available < wanted:
        return DoctorCheck("memory", "warn", found, "lower spark.driver_memory, or close something")
    return DoctorCheck("memory", "ok", found)


def check_port(setting: str, port: int, free: bool, ours: bool, holder: PortHolder | None = None) -> DoctorCheck:
    """A port of the embedded broker. `ours`: the broker of this state folder runs, and so has the port. `holder`: who
    has the port, where that is known."""
    name = f"port {port}"
    if ours:
        return DoctorCheck(name, "ok", "held by this folder's broker")
    if free:
        return DoctorCheck(name, "ok", "free")
    by = holder.in_words if holder is not None else "another program"
    return DoctorCheck(name, "fail", f"in use by {by}", f"set {setting} to a free one ({_name_variable(setting)})")


def _name_variable(setting: str) -> str:
    return "KILN_" + setting.upper().replace(".", "__")


def check_broker(broker: BrokerStatus, embedded: bool, runs: bool) -> DoctorCheck:
    """Whether the broker answers. The embedded one need not run: `kiln run` and `kiln replay` start it."""
    if broker.reachable:
        return DoctorCheck("broker", "ok", f"{broker.servers} answers, {len(broker.topics)} topics of Kiln's")
    if embedded and not runs:
        return DoctorCheck("broker", "ok", "the embedded one, not running; kiln run starts it")
    if embedded:
        return DoctorCheck("broker", "fail", f"runs, but {broker.problem}", "see logs/broker.log in the state folder")
    return DoctorCheck(
        "broker", "fail", f"{broker.servers}: {broker.problem}", "see kafka.bootstrap, and the TLS and SASL keys"
    )


def check_updates_partitions(broker: BrokerStatus, topic: str, wanted: int) -> DoctorCheck:
    """The partition count of `updates` is for life (docs/design, Kafka topics)."""
    name = "partitions of updates"
    found = next((len(status.end) for status in broker.topics if status.name == topic), None)
    if found is None:
        what = "not made yet" if broker.reachable else "the broker does not run"
        return DoctorCheck(name, "ok", f"{what}; {wanted} by the settings")
    if found != wanted:
        advice = f"set kafka.updates_partitions = {found}, or another kafka.prefix to start anew"
        return DoctorCheck(name, "fail", f"{topic} has {found}, the settings say {wanted}", advice)
    return DoctorCheck(name, "ok", str(found))


def check_lake(tables: Sequence[TableStatus]) -> DoctorCheck:
    """Whether each table of the lake can be opened."""
    bad = [table for table in tables if table.problem]
    if bad:
        problem = "; ".join(table.problem for table in bad)
        advice = "type kiln recover, which says what can be done"
        return DoctorCheck("lake", "fail", problem, advice)
    return DoctorCheck("lake", "ok", f"{len(tables)} tables" if tables else "no tables yet")


def check_store(uri: str, problem: str) -> DoctorCheck:
    """Whether commits are safe in the object store of the lake; `problem` is empty if so."""
    if problem:
        advice = "see docs/object-store.md: lake.uri and lake.options, the store's rights, and which stores will do"
        return DoctorCheck("object store", "fail", f"{uri}: {problem}", advice)
    found = (
        f"{uri}: refuses a second write of one key. Kiln commits by delta-rs; let nothing else write these tables by "
        "Delta's own log store for S3 (Spark, delta-spark), which loses commits"
    )
    return DoctorCheck("object store", "ok", found)


def check_checkpoints(queries: Sequence[QueryStatus]) -> DoctorCheck:
    """Check that each checkpoint is readable and belongs to the topics that Kafka has."""
    others = [query for query in queries if query.problem and query.batch is not None]
    if others:
        problem = "; ".join(f"{query.name}: {query.problem}" for query in others)
        return DoctorCheck("checkpoints", "fail", problem, "type kiln recover, which says what can be done")
    bad = [query for query in queries if query.problem]
    if bad:
        problem = "; ".join(f"{query.name}: {query.problem}" for query in bad)
        return DoctorCheck(
            "checkpoints", "fail", problem, "written by another Spark? use the versions in requirements.lock"
        )
    begun = [query.name for query in queries if query.batch is not None]
    return DoctorCheck("checkpoints", "ok", ", ".join(begun) or "none yet")


def check_clocks(trailing: Sequence[ClockStatus]) -> DoctorCheck:
    """Whether a clock trails what Kiln has kept."""
    if not trailing:
        return DoctorCheck("clocks", "ok", "none trails")
    return DoctorCheck(
        "clocks", "warn", "; ".join(clock.problem for clock in trailing), "set a clock right that is wrong"
    )


def check_bridge(status: BridgeStatus | None, now: float) -> DoctorCheck:
    """What the bridge says is wrong; `now`: unix seconds."""
    if status is None or now - status.at > _SILENT:
        return DoctorCheck("bridge", "ok", "does not run")
    if status.errors:
        return DoctorCheck("bridge", "warn", "; ".join(status.errors), "see the runbook, The bridge")
    return DoctorCheck("bridge", "ok", f"{len(status.peers)} peers, {len(status.topics)} topics")


def check_ipfs(api: str, found: str, problem: str, alone: bool = False) -> DoctorCheck:
    """Where the blocks of batches are, by `ipfs.api`; `problem` is empty if that works. `alone`: see `is_helia_isolated`."""
    if not api:
        found = f"no node: no peer can fetch the blocks of batches ({found}), and none is fetched from others"
        return DoctorCheck(
            "ipfs", "warn", found, 'set ipfs.api: the URL of Kubo\'s RPC, or "helia" for a node of our own'
        )
    if problem:
        first = "" if api == "helia" else "start Kubo, or "
        return DoctorCheck(
            "ipfs", "fail", problem, f"{first}set another ipfs.api ({_name_variable('ipfs.api')}): batches wait"
        )
    if alone:
        found = f"{found}; with no ipfs.peers, batches go out only while a gossip peer speaks bitswap: none is known"
        advice = "set ipfs.peers, or publish.enabled = true for batches to go out in any case"
        return DoctorCheck("ipfs", "warn", found, advice)
    return DoctorCheck("ipfs", "ok", found)


def is_helia_isolated(settings: Settings, status: BridgeStatus | None, now: float) -> bool:
    """Whether nobody is known who could fetch blocks from Helia, so that the bridge holds batches back.

    `status`: of the bridge; `now`: unix seconds.
    """
    node = None if status is None or now - status.at > _SILENT else status.ipfs_node
    return settings.needs_neighbours and (node is None or not (node.gossip_peers or node.connections))


# ---------------------------------------------------------------- finding out


def run_checks(settings: Settings) -> list[DoctorCheck]:
    """Look at everything; takes a few seconds at most."""
    kafka = settings.kafka
    runs = kafka.embedded and settings.state.is_dir() and find_running_broker(settings.state) is not None
    broker = read_broker_status(settings.broker)
    updates = next((each.end for each in broker.topics if each.name == kafka.topic("updates")), {})
    wanted = (
        parse_memory(settings.spark.driver_memory) + (parse_memory(kafka.embedded_heap) if kafka.embedded else 0) + _GB
    )
    ports = (
        ("kafka.embedded_port", kafka.embedded_port),
        ("kafka.embedded_controller_port", kafka.embedded_controller_port),
    )
    root = jars.default_root()
    bridge = read_status(settings.bridge_dir / "status.json")
    lake = Lake.from_location(settings.lake_root)
    return [
        check_python(sys.version_info[:2]),
        check_packages(metadata.requires("kiln") or (), _read_installed_versions()),
        check_java(_find_java()),
        check_jars(jars.is_complete(root), root),
        *([check_s3_jars(jars.is_complete(jars.s3_root(root), jars.IVY_S3))] if settings.uses_store else []),
        check_state(
            settings.state, _probe_writing(settings.state), not settings.state.exists() or is_private(settings.state)
        ),
        check_disk(shutil.disk_usage(_find_existing_parent(settings.state)).free),
        check_memory(_read_available_memory(), wanted),
        *(_check_port(name, port, runs) for name, port in ports if kafka.embedded),
        check_broker(broker, kafka.embedded, runs),
        check_updates_partitions(broker, kafka.topic("updates"), kafka.updates_partitions),
        check_checkpoints(
            [read_query_status(name, settings.checkpoints_root / name, {}) for name in settings.jobs.run]
        ),
        *([check_store(lake.path, probe_store(lake))] if lake.root.folder is None else []),
        check_lake(read_lake_status(lake)),
        check_clocks(find_trailing_clocks(settings, updates)),
        check_bridge(bridge, time.time()),
        check_ipfs(
            settings.ipfs.api, *_describe_block_store(settings), is_helia_isolated(settings, bridge, time.time())
        ),
    ]


def _read_installed_versions() -> dict[str, str]:
    names = ((each.metadata["Name"], each.version) for each in metadata.distributions())
    return {name.lower().replace("_", "-"): version for name, version in names if name}


def _find_java() -> Java | JavaError:
    try:
        return find_java()
    except JavaError as error:
        return error


def _describe_block_store(settings: Settings) -> tuple[str, str]:
    """What stands for `ipfs.api`, and what is wrong with it."""
    api = settings.ipfs.api
    if not api:
        return str(settings.state / "blocks"), ""
    if api == "helia":
        try:
            node = find_node().node
        except HeliaError as error:
            return "", str(error)
        installed = is_installed(settings.state / "helia" / "app")
        return f"helia, {'installed' if installed else 'installed by npm when it starts first'} ({node})", ""
    kubo = Kubo(api, settings.ipfs.api_auth.get_secret_value())
    try:
        return f"{kubo.identity(_KUBO).name} at {api}", ""
    except BlockStoreUnavailableError as away:
        return "", str(away)
    finally:
        kubo.close()


def _find_existing_parent(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _probe_writing(folder: Path) -> str:
    """Why a file cannot be made there; empty if it can. The folder itself is not made."""
    place = _find_existing_parent(folder)
    if not place.is_dir():
        return f"{place} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"cannot be written: {error.strerror}"


def _check_port(setting: str, port: int, ours: bool) -> DoctorCheck:
    free = check_port_free(port) is None
    return check_port(setting, port, free, ours, None if free or ours else find_port_holder(port))


def _read_available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found) * 1024


# ---------------------------------------------------------------- output


def has_failures(checks: Iterable[DoctorCheck]) -> bool:
    """Whether something is in the way."""
    return any(check.level == "fail" for check in checks)
