"""Backfill against what live made (decision 21): generated traffic through the live queries with kill -9, then the same
out of the table `frames` and out of Kafka, to the CID; and a run that is killed itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import cycle, islice
from random import Random

import duckdb
import psutil
import pytest

from kiln.deploy.demo.traffic import TrafficOptions
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.pipelines.backfill.run_log import find_run
from kiln.pipelines.delta.lake import Lake
from kit.awaiting import wait_until
from kit.kiln_process import Kiln, kill_all
from kit.log_feed import await_end, await_records, frames_producer, kiln_beside, new_records
from kit.traffic_feed import Feed

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.crash, pytest.mark.timeout(3_600)]

FRAMES = int(os.environ.get("KILN_TEST_BACKFILL_FRAMES", "3000"))
KILLS = int(os.environ.get("KILN_TEST_BACKFILL_KILLS", "1"))
INTERRUPTIONS = int(os.environ.get("KILN_TEST_BACKFILL_INTERRUPTIONS", "1"))
PREFIX = "history."
RATE = max(50, FRAMES // 600)  # messages a second
WORLD = TrafficOptions(seed=5, network="local-history", separators=200, streams=1_000, garbage=0.02, forged=0.02)

FRAME = "connection, direction, sequence, payload, kafka_partition, kafka_offset"
EQUAL = {
    "copies": (
        "kafka_partition, kafka_offset, message_index, network, message_id, remote_peer, verdict",
        "observed_at",
    ),
    "subscriptions": ("*", "observed_at"),
    "controls": ("*", "observed_at"),
    "messages": (
        "network, message_id, origin, type, from_peer, seqno, stream, tip, model, sep, batch_cid, data",
        "observed_at",
    ),
    "updates": ("*", "least(observed_at, log_time)"),
    "batches": ("*", "opened_at"),
}
"""What is to be equal of each table, and the time that says whether a row is of the range."""


@pytest.fixture(scope="module")
def kiln(broker: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Kiln:
    """A Kiln that was killed under live traffic, and caught up."""
    servers = broker.address
    kiln = kiln_beside(servers, PREFIX, tmp_path_factory.mktemp("history"))
    feed = Feed(WORLD, RATE, lambda: frames_producer(servers, PREFIX))
    feed.start()
    for _ in range(KILLS):
        with new_records(servers, f"{PREFIX}batches") as watched:
            process = kiln.start("run", "--no-network")
            try:
                await_records(watched, 20)
            finally:
                kill_all(process)
    await_end(servers, f"{PREFIX}frames", FRAMES, 300 + FRAMES / 1_000)
    feed.stop()
    assert feed.error is None
    kiln.run_kept("run", "--catch-up", timeout=1_800)
    return kiln


@pytest.fixture(scope="module")
def middle(kiln: Kiln) -> tuple[str, str]:
    """A range whose edges lie in the midst of the traffic."""
    (row,) = kiln.sql("select epoch_us(min(observed_at)) as low, epoch_us(max(observed_at)) as high from frames")
    low, high = int(str(row["low"])), int(str(row["high"]))
    return _iso(low + (high - low) // 4), _iso(high - (high - low) // 4)


def _iso(at: int) -> str:
    return datetime.fromtimestamp(at / 1_000_000, UTC).isoformat()


def differences(kiln: Kiln, run: str, table: str, low: str, high: str) -> list[object]:
    """Rows that live has in the range and the run has not, or the other way round."""
    columns, time = EQUAL.get(table, (FRAME, "observed_at"))
    lake = Lake(str(kiln.lake))
    within = f"{time} >= timestamptz '{low}' and {time} < timestamptz '{high}'"
    of_live, of_run = f"select {columns} from live where {within}", f"select {columns} from made where {within}"
    with duckdb.connect() as tables:
        tables.register("live", lake.open(table).to_pyarrow_table())
        tables.register("made", lake.locate_run(run).open(table).to_pyarrow_table())
        assert tables.sql(of_live).fetchall() != []
        found = [f"({of_live}) except all ({of_run})", f"({of_run}) except all ({of_live})"]
        found.append(f"select * from made where not ({within})")
        return [row for query in found for row in tables.sql(f"from ({query}) limit 3").fetchall()]


def interrupt(process: subprocess.Popen[str], kind: str, steps: Callable[[], int]) -> None:
    """`kind`: "worker" or "driver", which die by SIGKILL, "SIGTERM", or "all", which is left to the caller.

    `steps`: how many the run has done."""
    if kind == "SIGTERM":
        process.terminate()
        assert process.wait(120) == 130
    elif kind != "all":
        part = "pyspark.worker" if kind == "worker" else "org.apache.spark.deploy.SparkSubmit"
        with suppress(psutil.NoSuchProcess):
            wait_until(lambda: process.poll() is not None or parts(process, part) != [], f"a {kind} of the run", 120)
            for found in parts(process, part)[-1:]:  # the youngest: a daemon forks the workers
                found.kill()
        at = steps()
        # a worker may have had nothing to do when it died
        wait_until(lambda: process.poll() is not None or steps() > at, "the end of the run, or one more step", 600)


def parts(process: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [each for each in children if name in each.cmdline()]


def test_a_run_that_is_killed_and_called_again_gives_what_live_has(kiln: Kiln, middle: tuple[str, str]) -> None:
    low, high = middle
    command = ("backfill", "run", "--from", low, "--to", high, "--run", "killed")
    lake, random = Lake(str(kiln.lake)), Random(5)
    kiln.environment["KILN_BACKFILL__FRAMES_PER_CHUNK"] = str(kiln.count("frames") // (1 + INTERRUPTIONS))

    def steps() -> int:
        found = find_run(lake, "killed")
        return 0 if found is None else len(found.chunks)

    def under_way(process: subprocess.Popen[str], before: int) -> bool:
        return steps() > before or process.poll() is not None

    interrupted = 0
    for kind in islice(cycle(("all", "worker", "driver", "SIGTERM", "all", "driver")), INTERRUPTIONS):
        before = steps()
        process = kiln.start(*command)
        try:
            wait_until(partial(under_way, process, before), "a step of the run", 600)
            time.sleep(random.uniform(0, 1))  # at any moment, seeded
            interrupt(process, kind, steps)
        finally:
            with suppress(ProcessLookupError):
                kill_all(process)
        found = find_run(lake, "killed")
        assert found is not None
        interrupted += not found.is_done
    assert interrupted >= min(INTERRUPTIONS, 5)
    done = json.loads(kiln.run_kept(*command, "--json", timeout=1_800).stdout)
    assert done["wrote"] > 0
    for table in EQUAL:
        assert differences(kiln, "killed", table, low, high) == [], table
    assert json.loads(kiln.run_kept(*command, "--json").stdout)["wrote"] == 0


def test_kafka_gives_the_same_and_a_signal_ends_a_run_in_words(kiln: Kiln, middle: tuple[str, str]) -> None:
    low, high = middle
    command = ("backfill", "run", "--from", low, "--to", high, "--run", "of-kafka", "--source", "kafka")
    lake = Lake(str(kiln.lake))
    # a chunk reads so many records in all partitions: with uneven ones, two chunks read the topic, and one decodes it
    kiln.environment["KILN_BACKFILL__FRAMES_PER_CHUNK"] = str(kiln.count("frames"))
    process = kiln.start(*command)
    wait_until(lambda: find_run(lake, "of-kafka") is not None or process.poll() is not None, "the run", 600)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 130
    said = (kiln.state / "started.out").read_text(encoding="utf-8")
    assert (
        "backfill run of-kafka was stopped. Its finished part is stored: type the same command again to continue"
        in said
    )
    kiln.run_kept(*command, timeout=1_800)
    for table in (*EQUAL, "frames"):
        assert differences(kiln, "of-kafka", table, low, high) == [], table
