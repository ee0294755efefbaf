"""Kiln's jobs on a Spark standalone cluster, by plain spark-submit, from a release: executors and drivers are killed,
yet log, batches and tables are as if nothing had happened. A second copy of a job is refused.

Tables and checkpoints are in an object store (versitygw), and once more in a folder that the machines share.

KILN_TEST_CLUSTER says how many executors and drivers are killed, one after the other. Without it the test is skipped:
master, workers, drivers and executors are a dozen JVMs, and the environment takes minutes to pack.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kiln.deploy.demo.traffic import TrafficOptions
from kiln.deploy.ops.status import read_status
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.schemas.queries import QUERIES
from kit.awaiting import wait_until
from kit.broker_access import variables
from kit.kiln_process import Kiln
from kit.log_feed import frames_producer, kiln_beside, new_records
from kit.log_model import Emitted, expected_batches, read_batches, read_log
from kit.object_store import ObjectStore
from kit.spark_cluster import SparkCluster, kill
from kit.traffic_feed import Feed

pytest_plugins = ["kit.object_store"]
pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.crash, pytest.mark.timeout(3_000)]

KILLS = int(os.environ.get("KILN_TEST_CLUSTER", "0"))
PARTITIONS = 8
WINDOW = 1_000_000  # µs
RATE = 100  # messages/s
SETTINGS = {
    "KILN_CONFIG": "conf/cluster.toml",
    **{f"KILN_JOBS__{job}__TRIGGER": "1s" for job in ("UPDATES", "BATCH")},  # few cores, for a cluster
    **{f"KILN_JOBS__{job}__TRIGGER": "5s" for job in ("ARCHIVE", "SINK")},
    "KILN_SPARK__SHUFFLE_PARTITIONS": "2",
}
CORES = {"updates": 2, "batch": 2, "archive": 1, "sink": 1}
"""Each is an executor; two of a job are on two workers."""


class Jobs:
    """The four queries on the cluster, and the log that they share."""

    def __init__(self, cluster: SparkCluster, dist: Path, address: str, prefix: str, kiln: Kiln) -> None:
        self._cluster, self._dist, self.address, self.prefix, self.kiln = cluster, dist, address, prefix, kiln
        told = {name: value for name, value in kiln.environment.items() if name.startswith("KILN_")}
        self._variables = {**told, "KILN_STATE": str(kiln.state)}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def submit(self, job: str) -> subprocess.Popen[bytes]:
        self.running[job] = self.second(job)
        return self.running[job]

    def second(self, job: str) -> subprocess.Popen[bytes]:
        return self._cluster.submit(self._dist, job, CORES[job], self._variables)

    def await_batches(self, number: int, seconds: float = 300) -> None:
        """Returns when so many new batches are on Kafka, while each driver runs."""
        came = 0

        def enough() -> bool:
            nonlocal came
            came += sum(map(len, watched.poll(timeout_ms=1_000).values()))
            ended = {job: self.said_by(job)[-6000:] for job, each in self.running.items() if each.poll() is not None}
            assert ended == {}
            return came >= number

        with new_records(self.address, f"{self.prefix}batches") as watched:
            wait_until(enough, lambda: f"{number} batches, not {came}\n{self.said()}", seconds)

    def kill_executor(self, job: str, random: Random) -> None:
        before = self._cluster.executors(job)
        os.kill(random.choice(before), signal.SIGKILL)
        wait_until(lambda: set(self._cluster.executors(job)) - set(before) != set(), f"a new executor of {job}", 180)

    def kill_driver(self, job: str) -> None:
        kill(self.running[job])
        self.submit(job)

    def behind(self) -> list[str]:
        settings = self.kiln.settings()
        return [query.name for query in read_status(settings).queries if query.name in QUERIES and query.lag != 0]

    def said(self) -> str:
        return "\n".join(f"{job}:\n{self._cluster.said(job)[-6000:]}" for job in self.running)

    def said_by(self, job: str) -> str:
        return self._cluster.said(job)


@pytest.fixture(scope="module")
def release(root: Path) -> Path:
    """A release, by `make dist` and `make jars-s3`."""
    if not KILLS:
        pytest.skip("KILN_TEST_CLUSTER is not set: a dozen JVMs, for some ten minutes")
    subprocess.run(["make", "dist", "jars-s3"], cwd=root, check=True)
    return root / "dist"


@pytest.fixture(scope="module", params=["store", "folder"])
def jobs(
    request: pytest.FixtureRequest,
    release: Path,
    broker: EmbeddedBroker,
    root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Jobs]:
    folder, prefix = tmp_path_factory.mktemp("cluster"), f"cluster-{request.param}."
    settings = {**SETTINGS, "KILN_CONFIG": str(root / SETTINGS["KILN_CONFIG"]), **variables(broker.address)}
    credentials: dict[str, str] | None = None
    if request.param == "store":
        store: ObjectStore = request.getfixturevalue("object_store")
        bucket, credentials = store.bucket(), store.credentials
        settings |= {"KILN_LAKE__URI": f"{bucket}/lake", "KILN_CHECKPOINTS__URI": f"{bucket}/checkpoints"}
        settings |= {f"KILN_LAKE__STORAGE_OPTIONS__{key.upper()}": value for key, value in store.address.items()}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (credentials or {}).items():
            environment.setenv(name, value)
        kiln = kiln_beside(broker.address, prefix, folder / "state", settings, partitions=PARTITIONS)
        cluster = SparkCluster(folder, credentials)
        try:
            cluster.start()
            cluster.unpack(release)
            yield Jobs(cluster, release, broker.address, prefix, kiln)
        finally:
            cluster.stop()


@pytest.fixture(scope="module")
def batches(jobs: Jobs) -> tuple[set[Emitted], list[Emitted]]:
    """What the model makes of the log, and what the jobs made, after all the killing and with nothing left to do."""
    address, random = jobs.address, Random(1)
    feed = Feed(TrafficOptions(seed=1, network="local-cluster"), RATE, lambda: frames_producer(address, jobs.prefix))
    feed.start()
    began = time.monotonic()
    for job in QUERIES:
        jobs.submit(job)
    jobs.await_batches(40, 900)  # ten JVMs start
    for turn in range(KILLS):
        job = ("batch", "updates", "archive", "sink")[turn % 4]
        jobs.kill_executor(job, random)
        jobs.await_batches(40)
        jobs.kill_driver(job)
        jobs.await_batches(40)
    feed.stop()
    assert feed.error is None
    wait_until(lambda: jobs.behind() == [], jobs.said, 300)
    topic = f"{jobs.prefix}batches"
    wait_until(lambda: expected(address, jobs.prefix) == set(read_batches(address, topic)), jobs.said, 300)
    wait_until(lambda: jobs.behind() == [], jobs.said, 300)
    emitted = read_batches(address, topic)
    print(f"{KILLS} executors and {KILLS} drivers killed in {time.monotonic() - began:.0f} s, {len(emitted)} batches")
    return expected(address, jobs.prefix), emitted


def expected(address: str, prefix: str) -> set[Emitted]:
    return expected_batches(read_log(address, f"{prefix}updates"), WINDOW)


def test_the_batches_are_those_of_the_model_over_the_log(batches: tuple[set[Emitted], list[Emitted]]) -> None:
    model, emitted = batches
    assert len(model) > 40 * KILLS
    assert set(emitted) == model


def test_nothing_is_lost_and_nothing_is_twice(jobs: Jobs, batches: tuple[set[Emitted], list[Emitted]]) -> None:
    rows = jobs.kiln.sql("select network, origin, separator_key, separator_value, batch_cid from batches")
    assert Counter(tuple(row.values()) for row in rows) == Counter((*each.owner, each.cid) for each in batches[0])
    jobs.kiln.check_tables_hold_each_thing_once()
    jobs.kiln.check_no_frame_or_tip_is_lost(jobs.address, jobs.prefix)
    jobs.kiln.check_updates_are_new_once()


@pytest.mark.usefixtures("batches")
def test_a_second_copy_of_a_job_is_refused_in_words(jobs: Jobs) -> None:
    for job in ("updates", "sink"):
        second = jobs.second(job)
        assert second.wait(timeout=240) == 1, jobs.said()
        assert f"cannot lock {job}: process " in jobs.said_by(job)
        assert jobs.running[job].poll() is None


def test_one_machine_gives_the_same_cids(
    jobs: Jobs, batches: tuple[set[Emitted], list[Emitted]], tmp_path: Path
) -> None:
    kill(jobs.running["batch"])
    count = str(PARTITIONS)
    settings = {"KILN_KAFKA__FRAMES_PARTITIONS": count, "KILN_KAFKA__UPDATES_PARTITIONS": count}
    settings["KILN_JOBS__QUERIES"] = '["batch"]'
    alone = kiln_beside(jobs.address, jobs.prefix, tmp_path, settings, partitions=PARTITIONS)
    before = len(read_batches(jobs.address, f"{jobs.prefix}batches"))
    alone.run("run", "--catch-up")
    again = read_batches(jobs.address, f"{jobs.prefix}batches")[before:]
    assert len(again) == len(set(again))
    assert set(again) == batches[0]
