"""SIGKILL to the whole application at seeded moments: log, batches and tables are as if nothing had happened."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from kiln.conf.settings.model import Settings
from kiln.deploy.demo.traffic import TrafficOptions
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.pipelines.batch.windows import PartitionWindows
from kit.kiln_process import Kiln, kill_all
from kit.local_spark import open_session
from kit.log_feed import await_records, frames_producer, kiln_beside, new_records
from kit.log_model import Emitted, expected_batches, read_batches, read_log
from kit.traffic_feed import Feed

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.crash, pytest.mark.timeout(3_000)]

KILLS = int(os.environ.get("KILN_TEST_KILLS", "4"))
SEED = int(os.environ.get("KILN_TEST_SEED", "1"))
PREFIX = "killed."
WINDOW = 1_000_000  # µs


@dataclass
class Run:
    kiln: Kiln
    servers: str
    expected: set[Emitted]
    emitted: list[Emitted]


@pytest.fixture(scope="module")
def run(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A Kiln under live traffic, killed again and again, then left to catch up."""
    servers = broker.address
    kiln = kiln_beside(servers, PREFIX, tmp_path_factory.mktemp("killed"))
    random = Random(SEED)
    feed = Feed(TrafficOptions(seed=SEED, network="local-kill"), 150, lambda: frames_producer(servers, PREFIX))
    feed.start()
    for _ in range(KILLS):
        # `updates` grows by ticks and updates from the first second on, `batches` once all is warm
        topic, most = random.choice((("updates", 400), ("batches", 60), ("batches", 60), ("quarantine", 40)))
        with new_records(servers, PREFIX + topic) as watched:
            process = kiln.start("run", "--no-network")
            try:
                await_records(watched, random.randint(1, most), polls=300)  # with what waits since the kill before
            finally:
                kill_all(process)
    feed.stop()
    assert feed.error is None
    kiln.run("run", "--catch-up")
    expected = expected_batches(read_log(servers, f"{PREFIX}updates"), WINDOW)
    return Run(kiln, servers, expected, read_batches(servers, f"{PREFIX}batches"))


def test_the_batches_are_those_of_the_model_over_the_log(run: Run) -> None:
    assert len(run.expected) > 20 * KILLS
    assert set(run.emitted) == run.expected


def test_the_tables_hold_each_thing_once(run: Run) -> None:
    rows = run.kiln.sql("select network, origin, separator_key, separator_value, batch_cid from batches")
    assert Counter(tuple(row.values()) for row in rows) == Counter((*each.owner, each.cid) for each in run.expected)
    run.kiln.check_tables_hold_each_thing_once()


def test_no_frame_update_or_tip_is_lost(run: Run) -> None:
    run.kiln.check_no_frame_or_tip_is_lost(run.servers, PREFIX)
    run.kiln.check_updates_are_new_once()


def test_no_window_is_left_in_state(run: Run, tmp_path: Path) -> None:
    checkpoint = str(run.kiln.state / "checkpoints" / "batch")
    with open_session(
        Settings(state=tmp_path)
    ) as spark:  # with the memory that the tests of Spark have: one JVM for all
        assert spark.streams.active == []  # the reader wants what starts with the first look at the streams
        rows = spark.read.format("statestore").option("stateVarName", "windows").load(checkpoint).collect()
    assert sorted(row.key.partition for row in rows) == [0, 1]
    assert [len(PartitionWindows(WINDOW, bytes(row.value.state))) for row in rows] == [0, 0]


def test_a_fresh_checkpoint_over_the_same_log_gives_the_same_cids(run: Run, tmp_path: Path) -> None:
    second = kiln_beside(run.servers, PREFIX, tmp_path, {"KILN_JOBS__QUERIES": '["batch"]'})
    before = len(read_batches(run.servers, f"{PREFIX}batches"))
    second.run("run", "--catch-up")
    again = read_batches(run.servers, f"{PREFIX}batches")[before:]
    assert len(again) == len(set(again))
    assert set(again) == run.expected
