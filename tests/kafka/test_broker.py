"""The embedded broker and Kiln's topics on it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import pytest
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient
from kafka.errors import KafkaError

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kiln.deploy.stack.embedded_broker import (
    BrokerError,
    BrokerRunningError,
    EmbeddedBroker,
    await_broker,
    find_running_broker,
    stop_running,
)
from kiln.deploy.stack.kafka_broker import TopicsError, ensure_topics
from kiln.schemas.kafka.topics import TOPICS
from kit.awaiting import awaited
from kit.broker_access import client, security

pytestmark = pytest.mark.kafka

WEEK = timedelta(days=7)
PARTITIONS = {"frames": 3, "updates": 2}


class NewBroker(Protocol):
    def __call__(self, state: Path) -> EmbeddedBroker: ...


def make_topics(broker: EmbeddedBroker, prefix: str, partitions: dict[str, int] | None = None) -> list[str]:
    return ensure_topics(
        broker.address,
        prefix,
        partitions or PARTITIONS,
        dict.fromkeys(TOPICS, WEEK),
        client_options=security(broker.address),
    )


def write(address: str, topic: str, value: bytes, stamp_ms: int | None = None) -> None:
    producer = KafkaProducer(**client(address), max_request_size=8 * 1024 * 1024, acks="all")
    producer.send(topic, value=value, partition=0, timestamp_ms=stamp_ms).get(timeout=60)
    producer.close()


def read(address: str, topic: str, count: int) -> list[tuple[bytes, int, int]]:
    """(value, stamp in ms, type of stamp) of the first records of partition 0."""
    consumer = KafkaConsumer(**client(address), fetch_max_bytes=16 << 20, max_partition_fetch_bytes=16 << 20)
    partition = TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    found: list[tuple[bytes, int, int]] = []
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        for records in consumer.poll(timeout_ms=500).values():
            found += [(record.value, record.timestamp, record.timestamp_type) for record in records]
    consumer.close()
    return found


# ---------------------------------------------------------------- topics


def test_topics_are_made_once(broker: EmbeddedBroker, prefix: str) -> None:
    assert make_topics(broker, prefix) == sorted(f"{prefix}{name}" for name in TOPICS)
    assert make_topics(broker, prefix) == []
    with KafkaAdminClient(**client(broker.address)) as admin:
        topics = {topic["name"]: len(topic["partitions"]) for topic in admin.describe_topics()}
        resources = [ConfigResource(ConfigResourceType.TOPIC, f"{prefix}{name}") for name in TOPICS]
        told = admin.describe_configs(resources, config_filter="all")["topic"]
    assert [topics[f"{prefix}{name}"] for name in ("frames", "updates", "batches")] == [3, 2, 1]
    for name in TOPICS:
        settings = {key: entry["value"] for key, entry in told[f"{prefix}{name}"].items()}
        assert settings["message.timestamp.type"] == "LogAppendTime"
        assert int(settings["max.message.bytes"]) == 8 * 1024 * 1024
        assert settings["cleanup.policy"] == ("compact" if name == "streams" else "delete")
        if name != "streams":
            assert int(settings["retention.ms"]) == WEEK.total_seconds() * 1000


def test_records_of_7_mib_get_the_brokers_stamp(broker: EmbeddedBroker, prefix: str) -> None:
    make_topics(broker, prefix)
    value = random.randbytes(7 * 1024 * 1024)
    before = time.time_ns() // 1_000_000
    write(broker.address, f"{prefix}frames", value, stamp_ms=1)
    ((got, stamp, kind),) = read(broker.address, f"{prefix}frames", 1)
    assert got == value
    assert kind == 1
    assert before <= stamp <= time.time_ns() // 1_000_000


def test_partitions_of_updates_are_for_life(broker: EmbeddedBroker, prefix: str) -> None:
    make_topics(broker, prefix)
    with pytest.raises(TopicsError, match=rf"{prefix}updates has 2 partitions, .*Set kafka\.updates_partitions = 2"):
        make_topics(broker, prefix, {"frames": 3, "updates": 4})
    make_topics(broker, prefix, {"frames": 5, "updates": 2})  # of the others, what is there is taken


def test_topics_made_otherwise_are_refused_with_what_to_type(broker: EmbeddedBroker, prefix: str) -> None:
    wrong = {"message.timestamp.type": "CreateTime", "max.message.bytes": "1000000", "cleanup.policy": "compact"}
    with KafkaAdminClient(**client(broker.address)) as admin:
        admin.create_topics({f"{prefix}updates": {"num_partitions": 2, "replication_factor": 1, "configs": wrong}})
    with pytest.raises(TopicsError) as caught:
        make_topics(broker, prefix)
    for text in (
        f"--entity-name {prefix}updates --add-config message.timestamp.type=LogAppendTime",
        "--add-config max.message.bytes=8388608",
        "--add-config cleanup.policy=delete",
        f"--bootstrap-server {broker.address}",
    ):
        assert text in str(caught.value)


def test_topics_need_a_broker(free_port: int) -> None:
    with pytest.raises(TopicsError, match=rf"broker at 127\.0\.0\.1:{free_port}:"):
        ensure_topics(f"127.0.0.1:{free_port}", "kiln.", {}, {}, client_options={"bootstrap_timeout_ms": 500})


def test_misspelt_topic_is_not_made(broker: EmbeddedBroker, prefix: str) -> None:
    consumer = KafkaConsumer(f"{prefix}framse", **client(broker.address))
    consumer.poll(timeout_ms=500)
    consumer.close()
    with KafkaAdminClient(**client(broker.address)) as admin:
        assert f"{prefix}framse" not in admin.list_topics()


# ---------------------------------------------------------------- the broker's life


def test_second_kiln_on_the_same_folder(broker: EmbeddedBroker, new_broker: NewBroker) -> None:
    assert find_running_broker(broker.state) == broker.address
    with pytest.raises(BrokerRunningError, match=f"already running at {broker.address}") as caught:
        new_broker(broker.state).start()
    assert caught.value.address == broker.address
    await_broker(broker.address, security(broker.address), timeout=60)  # and the first is none the worse


def test_ctrl_c_does_not_reach_it(broker: EmbeddedBroker) -> None:
    assert broker.pid is not None
    assert os.getsid(broker.pid) != os.getsid(0)


def test_listens_on_loopback_only(broker: EmbeddedBroker) -> None:
    properties = (broker.state / "broker" / "server.properties").read_text()
    listeners = [line for line in properties.splitlines() if "listeners=" in line]
    assert listeners
    for line in listeners:
        assert all("//127.0.0.1:" in each for each in line.partition("=")[2].split(","))


def test_records_survive_kill_9_new_ports_an_update_of_java_and_a_lost_password(
    tmp_path: Path, new_broker: NewBroker
) -> None:
    state = tmp_path / "Zustand, neu é"  # a name that is no valid Kafka log.dirs
    first = new_broker(state)
    assert find_running_broker(state) is None
    first.start()
    assert find_running_broker(state) == first.address
    make_topics(first, "kiln.")
    write(first.address, "kiln.updates", b"before")
    lost = first.client_options["sasl_plain_password"]
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    assert awaited(lambda: find_running_broker(state) is None)
    assert awaited(lambda: first.pid is None)  # the lock is free a moment before the process can be waited for

    (state / "broker" / "password").write_text("")  # as a power cut can leave it
    second = new_broker(state)
    assert second.port != first.port
    (tmp_path / "classes.jsa").write_bytes(b"of another JVM" * 1000)
    second.jvm_options = (f"-XX:SharedArchiveFile={tmp_path / 'classes.jsa'}",)
    second.start()
    assert second.client_options["sasl_plain_password"] not in ("", lost)
    assert make_topics(second, "kiln.") == []
    write(second.address, "kiln.updates", b"after")
    assert [value for value, _, _ in read(second.address, "kiln.updates", 2)] == [b"before", b"after"]
    second.stop()
    assert find_running_broker(state) is None
    assert (state / "logs" / "broker.log").is_file()


@pytest.mark.parametrize("which", [0, 1])
def test_taken_port_names_its_setting(tmp_path: Path, new_broker: NewBroker, taken_port: int, which: int) -> None:
    broker = new_broker(tmp_path)
    broker.port, broker.controller_port = [(taken_port, broker.port), (broker.port, taken_port)][which]
    setting = ("kafka.embedded_port", "kafka.embedded_controller_port")[which]
    with pytest.raises(BrokerError, match=rf"port {taken_port} on 127\.0\.0\.1 is in use .* set {setting} "):
        broker.start()
    assert find_running_broker(tmp_path) is None


def test_taken_port_names_the_process_that_has_it(tmp_path: Path, new_broker: NewBroker, taken_port: int) -> None:
    broker = new_broker(tmp_path)
    broker.port = taken_port
    with pytest.raises(BrokerError, match=rf"in use by process {os.getpid()} \(.*\): set kafka\.embedded_port "):
        broker.start()


def test_taken_port_names_the_state_folder_of_the_kiln_that_has_it(
    tmp_path: Path, broker: EmbeddedBroker, new_broker: NewBroker
) -> None:
    other = new_broker(tmp_path)
    other.controller_port = broker.controller_port
    with pytest.raises(BrokerError) as caught:
        other.start()
    assert f"the embedded broker of the state folder {broker.state} (process {broker.pid})" in str(caught.value)
    assert f"kiln broker stop --state {broker.state}; or set kafka.embedded_controller_port " in str(caught.value)


def test_broker_that_cannot_start_says_why(tmp_path: Path, new_broker: NewBroker) -> None:
    broker = new_broker(tmp_path)
    broker.settings["log.retention.ms"] = "soon"
    with pytest.raises(BrokerError, match=r"(?s)log\.retention\.ms.*soon|soon.*log\.retention\.ms"):
        broker.start()
    assert find_running_broker(tmp_path) is None


STARTER = """
import json, signal, sys
from pathlib import Path
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
state, port, controller_port, classpath = json.loads(sys.argv[1])
EmbeddedBroker(Path(state), port, controller_port, map(Path, classpath), heap="256m").start()
print("started", flush=True)
signal.pause()
"""


def test_the_broker_ends_with_its_application_even_by_kill_9(tmp_path: Path, new_broker: NewBroker) -> None:
    broker = new_broker(tmp_path)
    arguments = json.dumps([str(tmp_path), broker.port, broker.controller_port, [str(jar) for jar in broker.classpath]])
    with subprocess.Popen([sys.executable, "-c", STARTER, arguments], stdout=subprocess.PIPE) as application:
        assert application.stdout is not None
        assert application.stdout.readline() == b"started\n"
        application.kill()
    assert awaited(lambda: find_running_broker(tmp_path) is None)
    assert stop_running(tmp_path) is False


# ---------------------------------------------------------------- the password


@pytest.mark.parametrize("port", ["port", "controller_port"])
@pytest.mark.parametrize(
    "login",
    [
        {},
        {"security_protocol": "SASL_PLAINTEXT", "sasl_plain_username": "kiln", "sasl_plain_password": "guessed"},
    ],
)
def test_without_the_password_nobody_is_let_in(broker: EmbeddedBroker, port: str, login: dict[str, str]) -> None:
    mechanism = {"sasl_mechanism": "PLAIN"} if login else {}
    address = f"127.0.0.1:{getattr(broker, port)}"
    with pytest.raises(KafkaError):
        KafkaAdminClient(bootstrap_servers=[address], bootstrap_timeout_ms=500, **login, **mechanism)


def test_the_password_is_the_users_own(broker: EmbeddedBroker) -> None:
    folder = broker.state / "broker"
    password = (folder / "password").read_text()
    assert len(password) >= 32
    for name in ("password", "server.properties"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600, name
    logs = b"".join(path.read_bytes() for path in (broker.state / "logs").iterdir())
    assert logs
    assert password.encode() not in logs
    assert password not in Path(f"/proc/{broker.pid}/cmdline").read_text()
