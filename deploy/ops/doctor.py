"""`kiln doctor`: checks what Kiln can do on this machine, with these settings and this state folder.

`run_checks` measures the values that the functions of `doctor_checks` judge. Checks are grouped by task. If the Python
packages of a task are not installed, its group has only one row, with the command that installs them.
"""

from __future__ import annotations

import os
import pwd
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Final, TypeVar
from uuid import uuid4

from deltalake import CommitProperties
from deltalake.exceptions import CommitFailedError, DeltaError

from kiln.conf.process.bridge_status import read_status
from kiln.conf.process.errors import KilnError, PrerequisiteError
from kiln.conf.process.extras import Extra, list_requirements
from kiln.conf.process.location import shorten_error
from kiln.conf.process.state_folder import StateVersionError, check_state_version, is_private, read_lock_holders
from kiln.conf.settings.model import Settings
from kiln.deploy.ops.doctor_checks import (
    GB,
    DoctorCheck,
    Listener,
    check_bridge,
    check_broker,
    check_checkpoints,
    check_disk,
    check_engine,
    check_first_offsets,
    check_geneses,
    check_ipfs,
    check_java,
    check_lake,
    check_memory,
    check_open_files,
    check_packages,
    check_port,
    check_python,
    check_spark,
    check_state,
    check_store,
    check_updates_partitions,
    judge,
    parse_memory,
)
from kiln.deploy.ops.status import (
    read_broker_status,
    read_lake_status,
    read_query_status,
)
from kiln.deploy.stack import jars
from kiln.deploy.stack.embedded_broker import find_running_broker
from kiln.deploy.stack.java import Java, JavaError, find_java
from kiln.deploy.stack.ports import HOST, check_port_free, find_port_holder
from kiln.pipelines.delta.duckdb_tables import find_reading_faults
from kiln.pipelines.delta.lake import Lake, LakeError, find_column_fault
from kiln.pipelines.native.library import find_engine
from kiln.pipelines.runtime.checkpoint import Checkpoint, describe_deleted_records
from kiln.pipelines.runtime.spark_environment import check_user, find_foreign_variables, find_spark_home, is_local
from kiln.pipelines.runtime.table_ages import OLDER_TABLE_REMEDY, find_older_tables

_T = TypeVar("_T")
_KUBO = 3.0  # timeout of a request to Kubo, in seconds
GROUPS: Final[Mapping[str, Extra | None]] = {
    "query a lake": None,
    "maintain a lake": "lake",
    "capture from a network": "bridge",
    "run the queries": "spark",
    "check quality": "quality",
    "run the demo network": "demo",
}
"""Tasks in the order of the output, each with the extra (group of Python packages) that it needs."""

_IN_STORE: Final = frozenset({"checkpoints", "first records", "lake", "columns", "table ages"})
"""Checks that read the object store of the lake. They are skipped if `probe_store` returns a problem, because they
would take minutes if the store does not answer."""
_TCP: Final = re.compile(r"/ip[46]/([^/]+)/tcp/(\d+)")


_TABLE = "bundles"  # schema of the temporary table that tests an object store; any other would do


def run_checks(settings: Settings) -> list[DoctorCheck]:
    """Run all checks, which takes a few seconds.

    A check that raises an error, for example because a file cannot be read, counts as failed, and the others continue.
    """
    kafka = settings.kafka
    runs = kafka.embedded and _read(lambda: find_running_broker(settings.state), None) is not None
    kilns = _read(lambda: read_lock_holders(settings.state), set[int]())
    broker = read_broker_status(settings.broker)
    wanted = (
        parse_memory(settings.spark.driver_memory) + (parse_memory(kafka.embedded_heap) if kafka.embedded else 0) + GB
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
            "memory": lambda: [check_memory(_read_available_memory(), wanted)],
            "ports": lambda: [_check_port(listener, runs, kilns) for listener in listeners if listener.is_of_broker],
            "open files": lambda: [check_open_files(read_open_files_limit())],
            "broker": lambda: [check_broker(broker, kafka.embedded, runs)],
            "partitions of updates": lambda: [
                check_updates_partitions(broker, kafka.topic("updates"), kafka.updates_partitions)
            ],
            "checkpoints": lambda: [
                check_checkpoints(
                    [read_query_status(name, settings.checkpoints_root / name, {}) for name in settings.queries]
                )
            ],
            "table ages": lambda: [
                judge(
                    "table ages",
                    "; ".join(find_older_tables(lake, settings.checkpoints_root)),
                    OLDER_TABLE_REMEDY,
                    "no table is older than its checkpoint",
                )
            ],
            "first records": lambda: [check_first_offsets(_read_deleted_records(settings))],
        },
    }
    skipped = _IN_STORE if away else frozenset()
    found: list[DoctorCheck] = []
    for group, extra in GROUPS.items():
        packages = check_packages(list_requirements(extra), installed, extra)
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
        return [DoctorCheck(name, "fail", shorten_error(error), "fix this error, and run kiln doctor again")]


def list_listeners(settings: Settings) -> list[Listener]:
    """List the ports on which Kiln listens with these settings. Port 0, for which the system chooses, is left out."""
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


def _read_deleted_records(settings: Settings) -> dict[str, str]:
    checkpoints = {name: Checkpoint(settings.checkpoints_root / name) for name in settings.queries}
    descriptions = {
        name: describe_deleted_records(name, checkpoint.deleted_records) for name, checkpoint in checkpoints.items()
    }
    return {name: text for name, text in descriptions.items() if text}


def _check_columns(lake: Lake) -> DoctorCheck:
    """Check that the columns of each table are those that Kiln declares. Another program may have changed them."""
    faults = []
    for name in lake.tables():
        with suppress(LakeError):  # `check_lake` reports it
            if fault := find_column_fault(name, lake.open(name).schema().to_json(), added_later=True):
                faults.append(f"{name}: {fault}")
    advice = (
        "the query that writes this table stops until you change the columns back, or restore an older version of the "
        "table"
    )
    return judge("columns", "; ".join(faults), advice, "as Kiln declares them")


def _check_jars() -> DoctorCheck:
    """Check that the jars of the broker and of Spark's connectors are there, as pinned in `conf/ivy.xml`."""
    root = jars.default_root()
    problem = "" if jars.is_complete(root) else f"not all jars are in {root}"
    return judge("jars", problem, "fetch them: make jars (kiln run also fetches them)", str(root), "warn")


def _check_s3_jars() -> DoctorCheck:
    """Check that Spark's jars for an object store are there, as pinned in `conf/ivy-s3.xml`."""
    problem = "" if jars.is_complete(jars.s3_root(), jars.IVY_S3) else f"not all jars are in {jars.s3_root()}"
    advice = "fetch them: make jars-s3 (kiln run also fetches them)"
    return judge("jars for the store", problem, advice, "complete", "warn")


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
    """Return a description of the block store that `ipfs.api` selects, and its problem (empty if it works)."""
    api = settings.ipfs.api
    if not api:
        return str(settings.state / "blocks"), ""
    if api == "self":
        return f"the bridge serves the blocks in {settings.state / 'blocks'}, and fetches blocks from peers", ""
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
    """Call `read`, which reads the state folder. Return `otherwise` on an error, because `check_state` reports it."""
    try:
        return read()
    except OSError:
        return otherwise


def _check_port(listener: Listener, broker_runs: bool, kilns: Collection[int]) -> DoctorCheck:
    """Check that a port is free, or that this Kiln uses it: its broker, or a process that holds a lock of the state
    folder. `kilns` has the ids of these processes."""
    error = check_port_free(listener.port, listener.host, udp=listener.udp)
    if error is None or listener.is_of_broker:
        holder = None if error is None or broker_runs else find_port_holder(listener.port)
        return check_port(listener, error, ours=broker_runs and error is not None, holder=holder)
    holder = None if listener.udp else find_port_holder(listener.port)
    return check_port(listener, error, bool(kilns) if holder is None else holder.pid in kilns, holder)


def find_existing_parent(folder: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def probe_writing(folder: Path) -> str:
    """Return the reason why no file can be created in a folder; empty if one can. A missing folder is not created."""
    parent = find_existing_parent(folder)
    if not parent.is_dir():
        return f"{parent} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=parent):
            return ""
    except OSError as error:
        return f"cannot be written ({error.strerror})"


def name_user(number: int) -> str:
    """Return the name of the user with this id, or the id if this machine does not know the user."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # such as a user of another container
        return str(number)


def _read_available_memory() -> int:
    import psutil  # in the extra spark

    return psutil.virtual_memory().available


def read_open_files_limit() -> int:
    """Read how many files and sockets a Kiln process may have open: the soft limit, which Kiln does not raise."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def probe_store(lake: Lake) -> str:
    """Test commits to the object store of a lake, with a temporary table.

    Kiln needs permission to write, list and delete objects. The store must reject the second of two writes of one key:
    otherwise two writers could overwrite each other's commits.

    Returns:
        The reason why Kiln must not commit to the store; empty if commits are safe.
    """
    probe = Lake.from_location(lake.root / f"doctor-{uuid4().hex}")
    try:
        probe.create((_TABLE,))
        for is_conflict in (False, True):
            table = probe.open(_TABLE)
            if is_conflict:
                table.load_as_version(0)  # simulate a second writer, which has not read the first commit
            try:
                table.create_write_transaction(
                    [], "append", table.schema(), commit_properties=CommitProperties(max_commit_retries=0)
                )
            except CommitFailedError:
                if not is_conflict:
                    raise
            else:
                if is_conflict:
                    return "the store lets a second writer overwrite a commit. Use a store with conditional writes"
        probe.root.remove_all()
    except (DeltaError, KilnError, OSError) as error:
        return shorten_error(error)
    return ""
