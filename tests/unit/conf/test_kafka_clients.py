"""kiln.conf.process.kafka_clients: a client that cannot be made leaves no descriptor and no thread, whatever the broker
does."""

from __future__ import annotations

import ast
import gc
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer
from kafka.errors import KafkaError

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kiln.bridge.kafka import producers
from kiln.bridge.kafka.producers import FramesProducerError, open_producer
from kiln.conf.process.kafka_clients import describe_kafka_error, open_client
from kit.descriptors import descriptors, hanging_broker

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("bridge", "pipelines", "deploy", "conf")
ATTEMPTS = 2
SASL = {"sasl_mechanism": "PLAIN", "sasl_plain_username": "kiln", "sasl_plain_password": "x"}
SECURITY: Mapping[str, dict[str, str]] = {
    "PLAINTEXT": {"security_protocol": "PLAINTEXT"},
    "SASL_PLAINTEXT": {"security_protocol": "SASL_PLAINTEXT", **SASL},
    "SASL_SSL": {"security_protocol": "SASL_SSL", **SASL},
}


@contextmanager
def refusing() -> Iterator[str]:
    """An address that refuses connections, and that no other program takes meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def silent() -> Iterator[str]:
    """The kernel takes connections, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def hanging_up() -> Iterator[str]:
    with hanging_broker() as broker:
        yield broker.address


@contextmanager
def speaking_http() -> Iterator[str]:
    with hanging_broker(b"HTTP/1.1 400 Bad Request\r\n\r\n") as broker:
        yield broker.address


@contextmanager
def nothing_left() -> Iterator[None]:
    """After this, as many descriptors are open and as many threads run as before, though no garbage was collected."""
    gc.collect()
    gc.disable()
    before = descriptors(), threading.active_count()
    try:
        yield
        assert (descriptors(), threading.active_count()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("away", [refusing, silent, hanging_up, speaking_http])
@pytest.mark.parametrize("protocol", SECURITY)
@pytest.mark.parametrize("kind", [KafkaConsumer, KafkaProducer, KafkaAdminClient])
def test_a_client_that_no_broker_answers_leaves_nothing(
    kind: Callable[..., object], protocol: str, away: Callable[[], AbstractContextManager[str]]
) -> None:
    options = SECURITY[protocol]
    with nothing_left(), away() as address:
        for _ in range(ATTEMPTS):
            with pytest.raises(KafkaError) as failed:
                open_client(kind, bootstrap_servers=[address], bootstrap_timeout_ms=100, **options)
            assert describe_kafka_error(failed.value, {"bootstrap_servers": [address], **options}, patience=0.1)
            del failed  # what is under test is done with the error when the next attempt begins


def test_options_that_are_wrong_leave_nothing() -> None:
    with nothing_left(), refusing() as address:
        for wrong in ({"no_such_option": 1}, {"bootstrap_servers": [address], "client_dns_lookup": "x"}):
            for kind in (KafkaConsumer, KafkaProducer, KafkaAdminClient):
                with pytest.raises((KafkaError, ValueError, AssertionError)):
                    open_client(kind, **wrong)


def test_a_producer_of_the_bridge_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "_METADATA_TIMEOUT", 0.05)
    with nothing_left(), refusing() as address:
        for _ in range(ATTEMPTS):
            with pytest.raises(FramesProducerError):
                open_producer({"bootstrap_servers": [address]}, ("kiln.frames",))


def test_every_client_is_made_here() -> None:
    found = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if name in ("KafkaConsumer", "KafkaProducer", "KafkaAdminClient", "KafkaConnectionManager"):
                    found.add(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert found == set()


READS_NO_RECORD = {"bridge/cluster/membership.py", "pipelines/runtime/driver_lease.py"}
"""They poll to stay in a group: no partition is assigned, or each is paused at once."""


def test_no_record_is_read_with_kafka_python() -> None:
    """It stays before a record whose codec or header key it cannot read."""
    polls = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                words = {word.arg for word in node.keywords}
                if node.func.attr == "poll" and "timeout_ms" in words:  # only kafka-python's has it
                    polls.add(str(path.relative_to(ROOT)))
    assert polls == READS_NO_RECORD


def test_every_codec_can_be_read() -> None:
    for codec in ("gzip", "snappy", "lz4", "zstd"):  # an error if librdkafka was built without it
        Consumer({"group.id": "codecs", "builtin.features": codec}).close()
