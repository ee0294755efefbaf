"""Commits of a table that a power cut left empty or truncated, or whose files it lost. Only `restore_version`
writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kiln.conf.process.location import Location
from kiln.pipelines.delta.commits import MAINTENANCE_PREFIX, WriteId
from kiln.pipelines.delta.files import DataFile
from kiln.pipelines.delta.lake import Lake, locate_commit

_INSPECTED_COMMITS = 50
"""commits, the newest ones: what is older is on the disk long since"""


@dataclass
class TableLog:
    """The newest commits of a table."""

    newest: int = -1
    torn: list[int] = field(default_factory=list)
    """the newest commits, as far as they cannot be read, or name files that are not there; the newest first"""
    torn_since: float | None = None
    """unix s: when the first torn commit was made, or the first file was written that it may name. A micro-batch writes
    its files after the one before it was noted as done, and is noted as done after its commits. None: no commit is
    torn"""
    within: list[int] = field(default_factory=list)
    """such commits that others follow, which are whole"""
    checkpoints: list[Path] = field(default_factory=list)
    """summaries of the log that cannot be read, of which the log itself says all"""


def inspect_log(lake: Lake, table: str) -> TableLog:
    """Find damage in the newest commits of a table: none in a store, whose objects are complete or absent."""
    place = lake.folder(table)
    folder = place.folder
    if folder is None:
        return TableLog(lake.open(table).version())
    versions = sorted(int(path.stem) for path in (folder / "_delta_log").glob("*.json") if path.stem.isdigit())
    log = TableLog(max(versions, default=-1))
    removed: set[str] = set()
    whole = False
    for version in reversed(versions[-_INSPECTED_COMMITS:]):
        actions = read_commit(place, version)
        good = bool(actions) and all(
            _is_there(folder, add) for add in _select_actions(actions, "add") if add["path"] not in removed
        )
        removed |= {str(remove["path"]) for remove in _select_actions(actions, "remove")}
        if not good:
            (log.within if whole else log.torn).append(version)
        whole = whole or good
    if log.torn:
        said = [at for version in log.torn if (at := _committed_at(read_commit(place, version))) is not None]
        # the time of a file that was torn or put back says nothing
        log.torn_since = min([_written_since(place, folder, log.newest - len(log.torn)), *said])
    log.checkpoints = _torn_checkpoints(folder / "_delta_log", versions)
    return log


def read_commit(table: Location, version: int) -> list[dict[str, dict[str, object]]]:
    """Read the actions of a commit (PROTOCOL.md, Actions) in a table's folder; none if the file is damaged."""
    try:
        actions = [json.loads(line) for line in locate_commit(table, version).read().splitlines()]
    except (ValueError, FileNotFoundError):
        return []
    return actions if all(isinstance(action, dict) for action in actions) else []


def adds_any(actions: Sequence[Mapping[str, Mapping[str, object]]], files: Sequence[DataFile]) -> bool:
    """Report if a commit adds one of these files to its table."""
    names = {file.name for file in files}
    return any(action["add"]["path"] in names for action in actions if "add" in action)


def find_newest_write(lake: Lake, table: str, query_id: str, log: TableLog) -> int:
    """Find the newest micro-batch of a query in the undamaged commits of a table; -1 if there is none."""
    place = lake.folder(table)
    if place.folder is not None:  # what is torn cannot be opened
        last = log.newest - len(log.torn)
        for version in range(last, max(-1, last - _INSPECTED_COMMITS), -1):
            found = _list_batches(read_commit(place, version), query_id, table)
            if found:
                return max(found)
        if log.torn or last < _INSPECTED_COMMITS:
            return -1
    opened = lake.open(table)
    wrote = (opened.transaction_version(WriteId(query_id, 0, name).app_id(table)) for name in ("append", "received"))
    return max((each for each in wrote if each is not None), default=-1)


def _list_batches(actions: list[dict[str, dict[str, object]]], query_id: str, table: str) -> list[int]:
    txns = _select_actions(actions, "txn")
    return [int(str(txn["version"])) for txn in txns if str(txn["appId"]).startswith(f"{query_id}:{table}:")]


def find_version_before(lake: Lake, table: str, query_id: str, batch: int) -> int | None:
    """Find the newest version of a table without the micro-batches of a query from `batch` on.

    Returns:
        None if the log does not go back so far, or another writer has committed in between.
    """
    place, newest = lake.folder(table), lake.open(table).version()
    later: list[int] = []  # commits of these micro-batches, the newest first
    apart: list[int] = []  # other commits of rows
    oldest = newest + 1
    for version in range(newest, -1, -1):
        actions = read_commit(place, version)
        if not actions:
            break  # `kiln.pipelines.maintenance` or Delta has cleaned up what is older
        oldest = version
        if any(wrote >= batch for wrote in _list_batches(actions, query_id, table)):
            later.append(version)
        elif _get_operation(actions) == "SET TBLPROPERTIES" or _is_maintenance(actions):
            continue  # adds no row
        elif later or _get_operation(actions) != "RESTORE":  # such a one at the end is of a recovery that was cut short
            apart.append(version)
    if not later:
        return newest
    base = later[-1] - 1
    return base if base >= oldest and not any(version > base for version in apart) else None


def restore_version(lake: Lake, table: str, version: int) -> None:
    """Restore a table to a version, by one more commit."""
    opened = lake.open(table)
    if opened.version() == version:
        return
    opened.restore(version)
    newest = lake.open(table).version()
    lake.sync_commits(table, newest, newest)


def _written_since(table: Location, folder: Path, version: int) -> float:
    """When the first data file after a commit was written; when the commit was, where there is none."""
    entry = Path(locate_commit(table, version).uri)
    committed = entry.stat().st_mtime if entry.exists() else 0.0
    return min((at for path in folder.glob("*.parquet") if (at := path.stat().st_mtime) > committed), default=committed)


def _select_actions(actions: list[dict[str, dict[str, object]]], kind: str) -> list[dict[str, object]]:
    return [action[kind] for action in actions if kind in action]


def _get_operation(actions: list[dict[str, dict[str, object]]]) -> object:
    return next((info.get("operation") for info in _select_actions(actions, "commitInfo")), None)


def _committed_at(actions: list[dict[str, dict[str, object]]]) -> float | None:
    """When a commit that can be read was made, unix s, as it says."""
    times = [info["timestamp"] for info in _select_actions(actions, "commitInfo")]
    return next((at / 1_000 for at in times if isinstance(at, int)), None)


def _is_maintenance(actions: list[dict[str, dict[str, object]]]) -> bool:
    return any(
        str(info.get("userMetadata", "")).startswith(MAINTENANCE_PREFIX)
        for info in _select_actions(actions, "commitInfo")
    )


def _is_there(folder: Path, add: dict[str, object]) -> bool:
    path = folder / str(add["path"])
    return path.is_file() and path.stat().st_size == add["size"]


def _torn_checkpoints(log: Path, versions: list[int]) -> list[Path]:
    """Summaries that cannot be read, where the log tells all without them: from the first commit on, or from an older
    summary on that can be read."""
    found = [path for path in log.glob("*.checkpoint*.parquet") if not _is_readable(path)]
    if not _is_complete(versions, [path for path in log.glob("*.checkpoint.parquet") if path not in found]):
        return []
    last = log / "_last_checkpoint"
    try:
        said = json.loads(last.read_bytes())
        named = bool(said) and not any(path.name.startswith(f"{said['version']:020}.") for path in found)
    except FileNotFoundError:
        return found
    except ValueError:
        named = False
    return found if named else [*found, last]


def _is_complete(versions: list[int], summaries: list[Path]) -> bool:
    if not versions or versions[-1] - versions[0] >= len(versions):
        return False
    return versions[0] == 0 or any(int(path.name.partition(".")[0]) >= versions[0] - 1 for path in summaries)


def _is_readable(path: Path) -> bool:
    try:
        pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError):
        return False
    return True
