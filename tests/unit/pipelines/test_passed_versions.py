"""A check covers the commits that all queries have passed, by what the checkpoints of the queries say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kiln.conf.process.location import parse_location
from kiln.pipelines.delta.lake import Lake
from kiln.pipelines.runtime.passed_versions import find_passed_versions, read_committed, save_caught_up
from kiln.schemas.queries import QUERIES
from kit.checkpoint_files import commit, plan


class Stand:
    """A lake and checkpoints, which are written by hand."""

    def __init__(self, folder: Path) -> None:
        self.lake = Lake(str(folder / "lake"))
        self.folder = folder / "checkpoints"
        self.checkpoints = parse_location(self.folder)
        self.lake.create(["messages", "updates"])

    def plan(self, query: str, batch: int, at: int, ends: Mapping[str, int]) -> None:
        plan(self.folder, query, batch, at, ends)

    def commit(self, table: str, query: str, batch: int) -> int:
        return commit(self.lake, table, query, batch)

    def passed(self) -> dict[str, int]:
        return find_passed_versions(self.lake, self.checkpoints, 1_000)


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    """Two micro-batches of each query, each of which follows from the one before."""
    stand = Stand(tmp_path)
    for batch, at in ((0, 1_000), (1, 2_000)):
        stand.plan("archive", batch, at, {"frames": 10 * batch + 10})
        stand.plan("updates", batch, at, {"frames": 10 * batch + 10})
        stand.plan("batch", batch, at + 10, {"updates": 10 * batch + 10})
        stand.plan("sink", batch, at + 20, {"updates": 10 * batch + 10})
        stand.commit("messages", "archive", batch)
        stand.commit("updates", "sink", batch)
    return stand


def test_without_checkpoints_all_is_passed(tmp_path: Path) -> None:
    assert Stand(tmp_path).passed() == {}


def test_what_follows_from_a_row_is_in_the_tables_before_the_row_is_judged(stand: Stand) -> None:
    assert stand.passed() == {"messages": 0, "updates": 0}
    stand.plan("sink", 2, 3_000, {"updates": 25})
    assert stand.passed()["messages"] == 1  # planned after the second micro-batch of the others had begun
    stand.plan("sink", 3, 4_000, {"updates": 26})
    assert stand.passed()["messages"] == 1  # nothing says that the second one has ended
    for query in ("archive", "updates"):
        stand.plan(query, 2, 3_500, {"frames": 21})
    stand.plan("batch", 2, 3_500, {"updates": 26})
    stand.plan("batch", 3, 3_600, {"updates": 26})
    stand.plan("sink", 4, 5_000, {"updates": 26})
    assert stand.passed() == {"messages": 2, "updates": 2}


@pytest.mark.parametrize(("read", "passed"), [(1_000, 0), (998, 0), (900, 2)])
def test_a_sink_that_lags_has_passed_nothing(read: int, passed: int, stand: Stand) -> None:
    """It may read 1,000 records at once, of which Spark rounds the share of each partition down."""
    for query in ("archive", "updates"):
        stand.plan(query, 2, 3_500, {"frames": 21})
    for batch in (2, 3):
        stand.plan("sink", batch, 2_000 + 1_000 * batch, {"updates": read * batch, "batches": batch})
    assert stand.passed()["messages"] == passed


def test_an_update_is_judged_once_its_batch_may_be_there(stand: Stand) -> None:
    for batch in (2, 3):
        stand.plan("sink", batch, 2_000 + 1_000 * batch, {"updates": 10 * batch + 10})
        stand.commit("updates", "sink", batch)
    for query in ("archive", "updates"):
        stand.plan(query, 2, 3_000, {"frames": 30})
    assert stand.passed()["updates"] == 1  # the query `batch` has not read more
    stand.plan("batch", 2, 3_000, {"updates": 30})
    stand.plan("batch", 3, 3_500, {"updates": 31})
    assert stand.passed()["updates"] == 3


def test_an_update_is_judged_once_its_message_may_be_there(stand: Stand) -> None:
    stand.plan("updates", 2, 3_000, {"frames": 30})
    for batch in (2, 3):
        stand.plan("batch", batch, 3_000 + batch, {"updates": 30})
    for batch in (2, 3, 4):
        stand.plan("sink", batch, 2_000 + 1_000 * batch, {"updates": 30})
        stand.commit("updates", "sink", batch)
    assert stand.passed()["updates"] == 2  # the query `archive` has not read the frames of more
    stand.plan("archive", 2, 6_000, {"frames": 30})
    assert stand.passed()["updates"] == 4


def test_at_the_end_of_a_run_all_is_passed_that_it_had_read(stand: Stand) -> None:
    save_caught_up(stand.checkpoints, read_committed(stand.checkpoints, tuple(QUERIES)))
    assert stand.passed() == {"messages": 2, "updates": 2}
    stand.commit("messages", "archive", 2)
    assert stand.passed() == {"messages": 2, "updates": 2}


def test_queries_that_did_not_run_are_not_said_to_have_read_everything(stand: Stand) -> None:
    assert read_committed(stand.checkpoints, ("archive", "updates")) == {}
