"""kiln.pipelines.runtime.driver_lease against a broker: of two drivers of a query one goes on, and the other says why
not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from kafka.admin import KafkaAdminClient
from kafka.coordinator.base import MemberState

from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.pipelines.runtime.driver_lease import HOLDER_POLL_INTERVAL, DriverLease, SecondDriverError
from kit.awaiting import wait_until
from kit.broker_access import client
from kit.log_feed import kiln_beside
from kit.strange_records import GARBAGE, Writer

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

# What a driver does with it; prints `taken`, and in the end the error.
DRIVER = """
import json, sys, time
from kiln.pipelines.runtime.driver_lease import SecondDriverError, DriverLease
sole = DriverLease(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3])
try:
    sole.acquire()
    print("taken", flush=True)
    while True:
        sole.check()
        time.sleep(0.2)  # the pace of a driver's own loop
except SecondDriverError as error:
    print(error, flush=True)
"""

Driver = subprocess.Popen[str]


@pytest.fixture
def start(
    broker: EmbeddedBroker, prefix: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Driver]]:
    kiln_beside(broker.address, prefix, tmp_path_factory.mktemp("state"))  # makes the topics
    started: list[Driver] = []

    def start() -> Driver:
        arguments = [json.dumps(client(broker.address)), f"{prefix}updates", f"{prefix}updates"]
        started.append(subprocess.Popen([sys.executable, "-c", DRIVER, *arguments], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


def says(driver: Driver) -> str:
    assert driver.stdout is not None
    return driver.stdout.readline()


@pytest.fixture
def sole(broker: EmbeddedBroker, prefix: str) -> Iterator[DriverLease]:
    made = DriverLease(client(broker.address), f"{prefix}updates", f"{prefix}updates")
    yield made
    made.close()


def test_a_second_driver_is_refused_in_words(start: Callable[[], Driver], sole: DriverLease) -> None:
    first = start()
    assert says(first) == "taken\n"
    with pytest.raises(SecondDriverError, match=rf"updates: another driver runs it \(process {first.pid} on "):
        sole.acquire(patience=2)
    assert first.poll() is None


@pytest.mark.usefixtures("start")
def test_the_records_of_its_topic_do_not_matter(sole: DriverLease, broker: EmbeddedBroker, prefix: str) -> None:
    """The group has an offset after the first check, from which a consumer would read at the next start."""
    Writer(broker.address, "zstd").write(f"{prefix}updates", GARBAGE)
    for _ in range(4):
        sole.acquire()
        sole.check()
        sole.close()


def test_where_a_driver_was_killed_the_next_on_the_machine_starts_at_once(
    start: Callable[[], Driver], sole: DriverLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    assert says(first) == "taken\n"
    first.kill()
    first.wait()
    pauses: list[float] = []
    sleep = time.sleep

    def record_pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", record_pause)
    sole.acquire()
    sole.check()
    assert HOLDER_POLL_INTERVAL not in pauses, "the session of the killed driver is waited for"


def test_a_driver_that_stood_still_is_told_who_took_over(start: Callable[[], Driver], sole: DriverLease) -> None:
    first = start()
    assert says(first) == "taken\n"
    os.kill(first.pid, signal.SIGSTOP)  # a machine that hangs, or is cut off
    sole.acquire()
    os.kill(first.pid, signal.SIGCONT)
    assert f"another driver (process {os.getpid()} on " in says(first)
    assert first.wait(timeout=60) == 0
    sole.check()  # goes on


def test_a_driver_that_kafka_had_given_up_is_the_driver_again_and_is_told_of_the_next(
    start: Callable[[], Driver], sole: DriverLease, broker: EmbeddedBroker, prefix: str
) -> None:
    first = start()
    assert says(first) == "taken\n"
    with KafkaAdminClient(**client(broker.address)) as admin:
        group = f"{prefix}updates.driver"

        def state() -> str:
            return str(admin.describe_groups([group])[group]["group_state"])

        os.kill(first.pid, signal.SIGSTOP)
        wait_until(lambda: state() == "Empty", "Kafka has given the driver up", 60)
        os.kill(first.pid, signal.SIGCONT)
        wait_until(lambda: state() == "Stable", "the driver has joined again", 60)
    with pytest.raises(SecondDriverError, match=rf"updates: another driver runs it \(process {first.pid} on "):
        sole.acquire(patience=2)
    os.kill(first.pid, signal.SIGSTOP)
    sole.acquire()
    os.kill(first.pid, signal.SIGCONT)
    assert f"another driver (process {os.getpid()} on " in says(first)
    sole.check()


def test_a_driver_joins_again_whose_join_was_for_a_change_that_was_none(
    start: Callable[[], Driver], sole: DriverLease
) -> None:
    """A busy broker tells of a topic without a partition, and at the next look with all of them."""
    sole.acquire()
    consumer = sole._consumer
    assert consumer is not None
    coordinator = consumer._coordinator

    def forgotten() -> bool:
        coordinator._cluster.request_update()
        consumer.poll(timeout_ms=200)
        if not coordinator._metadata_snapshot or coordinator.need_rejoin():
            return False  # a join before the topic is seen is followed by a second
        # so kafka-python 3.0.12 leaves them where the topic is seen whole again while the join is on its way
        coordinator._disable_heartbeat()
        coordinator.state = MemberState.REBALANCING
        coordinator.rejoining = True
        return True

    wait_until(forgotten, "a member that has joined and seen the topic", 60)

    def joined() -> bool:
        sole.check()
        return consumer.group_metadata().state is MemberState.STABLE

    wait_until(joined, "the driver to join again", 60)
    second = start()
    assert "updates: another driver runs it" in says(second)
    sole.check()


def test_a_driver_may_begin_again_in_the_same_process(start: Callable[[], Driver], sole: DriverLease) -> None:
    second = start()
    assert says(second) == "taken\n"
    second.terminate()
    second.wait()
    sole.acquire()
    sole.close()
    sole.acquire()
    sole.check()
