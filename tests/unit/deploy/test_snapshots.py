"""kiln.deploy.ops.snapshot_builder: what a run looks like, out of what queries and topics tell."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import pytest
from pyspark.sql import SparkSession

from kiln.conf.settings.model import JobName, Settings
from kiln.deploy.ops.snapshot import BridgeInRun
from kiln.deploy.ops.snapshot_builder import SnapshotBuilder, TopicWatch
from kiln.pipelines.app.supervisor import Supervisor
from kiln.pipelines.runtime.progress import QueryProgress
from kiln.pipelines.runtime.query_status import build_query_state

NAMES: tuple[JobName, ...] = ("archive", "batch")
ENDS = {"kiln.frames": {0: 10, 1: 5}}


def made() -> tuple[SnapshotBuilder, Supervisor]:
    watch = TopicWatch({}, "kiln.", 1.0)
    snapshots = SnapshotBuilder(Settings(), NAMES, watch, mode="live", duration=None, started=100.0)
    return snapshots, Supervisor(cast(SparkSession, None), Settings(), NAMES, snapshots.count)


def test_frames_count_from_the_first_snapshot_and_the_rate_from_the_one_before() -> None:
    snapshots, queries = made()
    first = snapshots.build(101.0, ENDS, queries, None, ())
    assert (first.frames, first.frames_rate, first.elapsed) == (0, None, timedelta(seconds=1))
    second = snapshots.build(103.0, {"kiln.frames": {0: 30, 1: 15}}, queries, None, ())
    assert (second.frames, second.frames_rate) == (30, 15.0)
    assert snapshots.frames == 30


def test_messages_are_counted_by_type_and_reasons_are_not() -> None:
    snapshots, queries = made()
    assert snapshots.build(101.0, {}, queries, None, ()).copies is None
    snapshots.count("archive", {"UPDATE": 3, "bad_tip": 7, "copies": 9})
    snapshots.count("archive", {"UPDATE": 2, "QUERY": 1, "copies": 4, "control GRAFT": 2})
    snapshots.count("archive", {"control GRAFT": 1, "control IHAVE": 5})
    snapshots.count("updates", {"UPDATE": 100, "copies": 100})
    taken = snapshots.build(101.0, {}, queries, None, ())
    assert (taken.messages, taken.copies) == ({"UPDATE": 5, "QUERY": 1}, 13)
    assert taken.control_entries == {"GRAFT": 3, "IHAVE": 5}


def test_differences_of_the_core_are_counted_in_both_queries() -> None:
    snapshots, queries = made()
    snapshots.count("archive", {"core_differences": 1})
    snapshots.count("updates", {"core_differences": 2})
    assert snapshots.build(101.0, {}, queries, None, ()).core_differences == 3


def test_control_rates_are_those_of_the_last_minute() -> None:
    snapshots, queries = made()

    def rates(now: float) -> dict[str, float]:
        return dict(snapshots.build(now, {}, queries, None, ()).control_rates)

    assert rates(100.5) == {}
    snapshots.count("archive", {"control IHAVE": 40})
    assert rates(110.0) == {"IHAVE": 4.0}
    assert rates(130.0) == {"IHAVE": 40 / 30}
    snapshots.count("archive", {"control GRAFT": 6})
    assert rates(170.0) == {"IHAVE": 0.0, "GRAFT": 0.1}, "since the snapshot of a minute ago"


def test_bridge_and_errors_are_passed_on() -> None:
    snapshots, queries = made()
    bridge = BridgeInRun(None, {"kubo": 1})
    snapshot = snapshots.build(101.0, {}, queries, bridge, ["the broker does not answer"])
    assert snapshot.bridge is bridge
    assert snapshot.errors == ["the broker does not answer"]
    assert [query.phase for query in snapshot.queries] == ["starting", "starting"]


@pytest.mark.parametrize(
    ("progress", "error", "phase", "lag"),
    [
        (None, "", "starting", None),
        (None, "it failed", "restarting", None),
        (QueryProgress("batch", {}), "", "starting", None),
        (QueryProgress("batch", {}, idle=True), "", "idle", 0),
        (QueryProgress("batch", {"kiln.frames": {0: 8, 1: 5}}, input_rate=2.0), "", "running", 2),
        (QueryProgress("batch", {"kiln.frames": {0: 8}}, input_rate=2.0), "it failed", "restarting", 7),
    ],
)
def test_the_phase_of_a_query(progress: QueryProgress | None, error: str, phase: str, lag: int | None) -> None:
    line = build_query_state("batch", progress, ENDS, restarts=1, error=error)
    assert (line.phase, line.lag, line.restarts, line.error) == (phase, lag, 1, error)
