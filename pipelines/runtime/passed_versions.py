"""Table versions that the quality checks may cover: all queries have processed the rows of these versions.

A check compares rows of several tables. So a row can be checked only after every query has written the rows that result
from it. The checkpoints show this, because they have the offsets of micro-batches and the times of their planning:

- A query writes its output to Kafka before Spark plans its next micro-batch.
- Spark reads the end offsets of the topics first, and the planning time after that. So if a micro-batch of `sink` read
  its topics to the end, it has certainly read all records written before its predecessor was planned.
- At the end of a run no further micro-batch is planned. The run saves in a file that all queries have read everything.

A row that some query may not have processed yet is checked later. Source: docs/design, decision 29.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from kiln.conf.process.location import Location
from kiln.pipelines.delta.lake import Lake, LakeError
from kiln.pipelines.delta.table_history import list_commits, read_commit
from kiln.pipelines.runtime.checkpoint import Checkpoint
from kiln.schemas.queries import QUERIES

CAUGHT_UP_FILE: Final = "caught-up.json"
"""file in the folder of the checkpoints: the newest micro-batch of each query, by query id, saved when all queries had
read all records"""

_NONE: Final = -1


class PlannedBatch(NamedTuple):
    """A micro-batch in a checkpoint."""

    number: int
    planned_at: int
    """time in ms"""
    ends: Mapping[tuple[str, int], int]
    """end offsets by topic and partition"""


_NOTHING: Final = PlannedBatch(_NONE, 0, {})


def save_caught_up(checkpoints: Location, numbers: Mapping[str, int]) -> None:
    """Save the number of each query's newest micro-batch, by query id. Call it once all queries have read their topics
    to the end."""
    (checkpoints / CAUGHT_UP_FILE).write([msgspec.json.encode(numbers)])


def read_committed(checkpoints: Location, names: Collection[str]) -> dict[str, int]:
    """Read the number of the newest micro-batch that each query has finished, by query id.

    Args:
        checkpoints: Folder with one checkpoint for each query.
        names: Names of the queries that have read their topics to the end.

    Returns:
        An empty dict if there is a checkpoint of another query, which may not have read everything.
    """
    existing = {name: checkpoint for name in QUERIES if (checkpoint := Checkpoint(checkpoints / name)).exists}
    return (
        {checkpoint.query_id: checkpoint.committed for checkpoint in existing.values()}
        if existing.keys() <= set(names)
        else {}
    )


def find_passed_versions(lake: Lake, checkpoints: Location, sink_limit: int) -> dict[str, int]:
    """Find, for each table, the newest version whose rows all queries have processed.

    Args:
        checkpoints: Folder with one checkpoint for each query.
        sink_limit: Maximum number of records that a micro-batch of `sink` reads; 0 for no limit.

    Returns:
        Versions by table. Tables without such a version are missing. The result is empty if `archive` or `sink` has no
            checkpoint.
    """
    existing = {name: checkpoint for name in QUERIES if (checkpoint := Checkpoint(checkpoints / name)).exists}
    if not {"archive", "sink"} <= existing.keys():
        return {}
    saved = checkpoints / CAUGHT_UP_FILE
    caught_up = msgspec.json.decode(saved.read(), type=dict[str, int]) if saved.exists() else {}
    passed = {name: caught_up.get(checkpoint.query_id, _NONE) for name, checkpoint in existing.items()}
    for name, number in _infer(existing, sink_limit).items():
        passed[name] = max(number, passed[name])
    return {
        table: version
        for name in ("archive", "sink")
        for table in QUERIES[name].tables
        if (version := _find_version(lake, table, existing[name].query_id, passed[name])) is not None
    }


def _infer(existing: Mapping[str, Checkpoint], sink_limit: int) -> dict[str, int]:
    """Find, from the checkpoints, the newest micro-batches of `archive` and `sink` whose rows the other queries have
    processed."""
    planned = {name: _list_batches(checkpoint) for name, checkpoint in existing.items()}
    done = {
        name: [one for one in planned[name] if one.number <= checkpoint.committed]
        for name, checkpoint in existing.items()
    }
    for before, newest in reversed(list(pairwise(done["sink"]))):
        count = sum(newest.ends.values()) - sum(before.ends.values())
        if sink_limit and count + len(newest.ends) >= sink_limit:  # the limit may have cut `newest` short
            continue  # it is not certain that `newest` reached the ends of its topics
        written = {name: _find_written(batches, before.planned_at) for name, batches in planned.items()}
        archive = [one for one in done["archive"] if one.number <= written["archive"].number]
        sink = [one for one in done["sink"] if one.number <= before.number]
        if "updates" in existing:
            archived = max(done["archive"], default=_NOTHING)
            archive = [one for one in archive if _has_read(written["updates"], one)]
            sink = [one for one in sink if _has_read(archived, _find_begun(planned["updates"], one))]
        if "batch" in existing:
            sink = [one for one in sink if _has_read(written["batch"], one)]
        return {name: batches[-1].number for name, batches in (("archive", archive), ("sink", sink)) if batches}
    return {}


def _find_written(batches: list[PlannedBatch], at: int) -> PlannedBatch:
    """Find the newest micro-batch whose successor was planned before a time (ms): its output was written by then."""
    return max((earlier for earlier, following in pairwise(batches) if following.planned_at < at), default=_NOTHING)


def _find_begun(batches: list[PlannedBatch], batch: PlannedBatch) -> PlannedBatch:
    """Find the newest of another query's `batches` that was planned no later than `batch`, which may have read it."""
    return max((earlier for earlier in batches if earlier.planned_at <= batch.planned_at), default=_NOTHING)


def _has_read(reader: PlannedBatch, other: PlannedBatch) -> bool:
    """Return true if `reader` has read at least as far as `other` in every topic that both read."""
    topics = {topic for topic, _ in reader.ends}
    ends = {part: end for part, end in other.ends.items() if part[0] in topics}
    return bool(ends) and all(reader.ends.get(part, 0) >= end for part, end in ends.items())


def _list_batches(checkpoint: Checkpoint) -> list[PlannedBatch]:
    return [
        PlannedBatch(
            number,
            checkpoint.get_planned_at(number),
            {(topic, part): at for topic, parts in checkpoint.ends(number).items() for part, at in parts.items()},
        )
        for number in checkpoint.list_planned()
    ]


def _find_version(lake: Lake, table: str, query_id: str, number: int) -> int | None:
    """Find the newest version of a table that has no rows of micro-batches later than `number`; None if unknown."""
    try:
        version = lake.open(table).version() if lake.has(table) else None
    except LakeError:
        return None  # whoever reads the table reports the error
    for commit in reversed(list_commits(lake.folder(table)) if version is not None else []):
        writes = [
            action["txn"]["version"]
            for action in read_commit(lake.folder(table), commit)
            if str(action.get("txn", {}).get("appId", "")).startswith(f"{query_id}:")
        ]
        if any(isinstance(written, int) and written <= number for written in writes):
            break
        if writes:
            version = commit - 1
    return version
