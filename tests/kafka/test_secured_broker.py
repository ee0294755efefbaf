"""A cluster with TLS, SCRAM users and rights: Kiln works there, and says in words which setting stands in the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka.admin import ACL, ACLOperation, ACLPermissionType, ACLResourcePatternType, ResourcePattern, ResourceType
from kafka.structs import OffsetAndMetadata

from conftest import free_ports
from kafka import KafkaConsumer, TopicPartition
from kiln.bridge.kafka.producers import FramesProducerError, connect
from kiln.conf.process.kafka_clients import describe_kafka_error
from kiln.conf.settings.model import Kafka
from kiln.deploy.cli.app import run_command
from kiln.deploy.ops.status import read_broker_status
from kiln.deploy.stack.kafka_broker import TopicsError, make_topics
from kit.kiln_process import Kiln
from kit.secured_broker import SecuredBroker, make_authority

pytestmark = pytest.mark.kafka

TOPIC_RIGHTS = ("CREATE", "DESCRIBE", "DESCRIBE_CONFIGS", "READ", "WRITE")


@pytest.fixture(scope="module")
def broker(broker_classpath: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    folder = tmp_path_factory.mktemp("secured")
    first, second = free_ports(2)
    with SecuredBroker(folder, (first, second), broker_classpath, kiln="kilns own", poor="poors own") as running:
        allow(running, "kiln", TOPIC_RIGHTS)
        allow(running, "poor", ("DESCRIBE", "DESCRIBE_CONFIGS", "READ"))
        (folder / "password").write_text("kilns own\n")
        yield running


def allow(broker: SecuredBroker, user: str, rights: tuple[str, ...]) -> None:
    """On topics and consumer groups that begin with `kiln.`."""
    names = {ResourceType.TOPIC: rights, ResourceType.GROUP: ("READ",) if user == "kiln" else ()}
    acls = [
        ACL(
            f"User:{user}",
            "*",
            ACLOperation[right],
            ACLPermissionType.ALLOW,
            ResourcePattern(kind, "kiln.", ACLResourcePatternType.PREFIXED),
        )
        for kind, allowed in names.items()
        for right in allowed
    ]
    with broker.admin() as admin:
        told = admin.create_acls(acls)
    assert not told["failed"]


def settings(broker: SecuredBroker, **changes: str) -> dict[str, str]:
    own = {
        "bootstrap": broker.address,
        "security_protocol": "SASL_SSL",
        "sasl_username": "kiln",
        "sasl_password_file": str(broker.folder / "password"),
        "ssl_cafile": str(broker.authority),
    }
    return {**own, **changes}


def variables(kafka: dict[str, str]) -> dict[str, str]:
    return {f"KILN_KAFKA__{key.upper()}": value for key, value in kafka.items()}


def test_topics_records_and_places(broker: SecuredBroker) -> None:
    kafka = Kafka.model_validate(settings(broker))
    make_topics(kafka, kafka.servers)
    with connect(kafka.client_options(), "kiln.batches") as producer:
        producer.send_record(b"key", b"value")
    consumer = KafkaConsumer(**kafka.client_options(), group_id="kiln.publisher.x", enable_auto_commit=False)
    part = TopicPartition("kiln.batches", 0)
    consumer.assign([part])
    consumer.seek_to_beginning(part)
    assert [record.value for record in consumer.poll(timeout_ms=20_000)[part]] == [b"value"]
    consumer.commit({part: OffsetAndMetadata(1, "")})
    assert consumer.committed(part) == 1
    consumer.close()
    status = read_broker_status(kafka)
    assert (status.reachable, len(status.topics) > 5) == (True, True)


REFUSED = {
    "password": ({"sasl_password_file": "wrong"}, "kafka.sasl_username (kiln), kafka.sasl_password"),
    "user": ({"sasl_username": "nobody"}, "kafka.sasl_username (nobody), kafka.sasl_password"),
    "mechanism": ({"sasl_mechanism": "PLAIN"}, "kafka.sasl_mechanism (PLAIN)"),
    "authority": ({"ssl_cafile": "other.pem"}, "no authority there has signed the broker's certificate"),
    "no such file": ({"ssl_cafile": "none.pem"}, "none.pem"),
    "certificate": ({"ssl_certfile": "other.pem"}, "kafka.ssl_certfile"),
    "no TLS": ({"security_protocol": "SASL_PLAINTEXT"}, "kafka.security_protocol is wrong"),
    "no password": ({"security_protocol": "SSL"}, "kafka.security_protocol (SSL)"),
    "host": ({"bootstrap": "127.0.0.1"}, "kafka.bootstrap: the broker's certificate is for another host"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_names_the_setting(broker: SecuredBroker, what: str) -> None:
    changes, expected = REFUSED[what]
    make_authority(broker.folder, "other")
    (broker.folder / "wrong").write_text("wrong")
    paths = {key: str(broker.folder / value) for key, value in changes.items() if "file" in key}
    servers = {key: broker.address.replace("localhost", value) for key, value in changes.items() if key == "bootstrap"}
    kafka = Kafka.model_validate(settings(broker, **{**changes, **paths, **servers}))
    with pytest.raises(FramesProducerError) as refused:
        connect(kafka.client_options(), "kiln.batches")
    assert expected in str(refused.value)
    assert "own" not in str(refused.value)


def test_a_command_says_so_without_a_stack_trace(
    broker: SecuredBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (broker.folder / "wrong").write_text("wrong")
    wrong = {"sasl_password_file": str(broker.folder / "wrong"), "state": str(tmp_path)}
    for name, value in variables(settings(broker, **wrong)).items():
        monkeypatch.setenv(name.replace("KILN_KAFKA__STATE", "KILN_STATE"), value)
    assert run_command(("doctor",)) != 0
    told = capsys.readouterr()
    assert "kafka.sasl_username (kiln), kafka.sasl_password" in " ".join((told.out + told.err).split())
    assert "Traceback" not in told.out + told.err


def test_missing_rights_are_listed(broker: SecuredBroker) -> None:
    (broker.folder / "poor").write_text("poors own")
    kiln = Kafka.model_validate(settings(broker))
    make_topics(kiln, kiln.servers)
    poor = Kafka.model_validate(settings(broker, sasl_username="poor", sasl_password_file=str(broker.folder / "poor")))
    with pytest.raises(TopicsError) as refused:
        make_topics(poor, poor.servers)
    assert "kafka.sasl_username (poor) lacks these rights. Grant them:" in str(refused.value)
    assert "kiln.frames: WRITE" in str(refused.value)
    consumer = KafkaConsumer(**poor.client_options(), group_id="kiln.publisher.x", enable_auto_commit=False)
    with pytest.raises(Exception, match="GroupAuthorizationFailed") as group:
        consumer.committed(TopicPartition("kiln.batches", 0), timeout_ms=10_000)
    words = describe_kafka_error(group.value, poor.client_options())
    lacks = "kafka.sasl_username (poor) lacks the right READ on the consumer group kiln.publisher.x"
    assert words == f"{lacks}. Grant the rights in docs/kafka-security.md"
    consumer.close()
    elsewhere = poor.model_copy(update={"prefix": "other."})
    with pytest.raises(TopicsError, match="the user lacks the right CREATE, or DESCRIBE if the topic exists"):
        make_topics(elsewhere, elsewhere.servers)


@pytest.mark.spark
def test_spark_reads_and_writes(broker: SecuredBroker, tmp_path: Path) -> None:
    kiln = Kiln(
        tmp_path / "state", free_ports(2), {**variables(settings(broker)), "KILN_JOBS__QUERIES": "updates,sink"}
    )
    capture = str(tmp_path / "traffic.rpc.gz")
    kiln.run_kept("generate", capture, "--for", "5s", "--rate", "10")
    kiln.run_kept("replay", capture)
    kiln.run_kept("run", "--catch-up")
    assert kiln.count("updates") > 0
