"""Commit times of a table, read from its log.

delta-rs finds the version at a time by the modification times of the log's files. These change when a table is copied.
So the time that a commit itself states is used (PROTOCOL.md, In-Commit Timestamps and Commit Provenance Information).
"""

from __future__ import annotations

import json
from typing import NamedTuple

from kiln.conf.process.location import Location
from kiln.pipelines.delta.lake import locate_commit, locate_log


class CommitTime(NamedTuple):
    """A commit, and its time, ms since the epoch."""

    version: int
    at: int


def find_commit_at(table: Location, at: int) -> CommitTime | None:
    """Find the newest commit of a table that was made at a time (ms since the epoch) or before. `table`: folder of the
    table.

    A commit that states no time counts as made at the time of the next commit. Returns None if the log has no commit as
    old as this.
    """
    for version in reversed(list_commits(table)):
        time = get_commit_time(read_commit(table, version))
        if time is not None and time <= at:
            return CommitTime(version, time)
    return None


def find_first_commit(table: Location) -> CommitTime | None:
    """Find, in the log of a table, the oldest commit that states its time. Maintenance may have removed older commits.

    Returns:
        None if no commit states its time.
    """
    times = ((version, get_commit_time(read_commit(table, version))) for version in list_commits(table))
    return next((CommitTime(version, at) for version, at in times if at is not None), None)


def list_commits(table: Location) -> list[int]:
    """List the versions of the commits in the log of a table, in ascending order. `table`: folder of the table."""
    names = (file.name.partition(".") for file in locate_log(table).files())
    return sorted(int(version) for version, _, kind in names if kind == "json" and version.isdecimal())


def read_commit(table: Location, version: int) -> list[dict[str, dict[str, object]]]:
    """Read the actions of a commit (PROTOCOL.md, Actions). A damaged or missing commit has no actions. `table`: folder
    of the table."""
    try:
        actions = [json.loads(line) for line in locate_commit(table, version).read().splitlines()]
    except (ValueError, FileNotFoundError):
        return []
    return actions if all(isinstance(action, dict) for action in actions) else []


def get_commit_time(actions: list[dict[str, dict[str, object]]]) -> int | None:
    """Return the time that a commit states, ms since the epoch; None if it states none."""
    for action in actions:
        info = action.get("commitInfo", {})
        for name in ("inCommitTimestamp", "timestamp"):
            at = info.get(name)
            if isinstance(at, int):
                return at
    return None
