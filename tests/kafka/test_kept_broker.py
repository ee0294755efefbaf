"""The broker of a run is started again when it dies, whoever had started it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from kafka import KafkaProducer
from kit.awaiting import wait_until

from conf.settings.model import Kafka, Settings
from deploy.embedded.broker import EmbeddedBroker, await_broker, running
from deploy.kafka.broker import launched_broker

pytestmark = pytest.mark.kafka


def test_a_broker_that_was_found_is_started_again_on_its_data(
    tmp_path: Path, new_broker: Callable[..., EmbeddedBroker]
) -> None:
    found = new_broker(tmp_path)
    settings = Settings(
        state=tmp_path, kafka=Kafka(embedded_port=found.port, embedded_controller_port=found.controller_port)
    )
    found.start()
    with launched_broker(settings, lambda words: None, die_with_parent=True) as launched:
        servers = launched.ready()
        producer = KafkaProducer(bootstrap_servers=servers, acks="all")
        first = producer.send("kiln.frames", value=b"before", partition=0).get(timeout=30)
        for _ in range(2):
            assert not launched.error
            killed = _pid(tmp_path)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: launched.error == "the broker has ended; it is started again", "its end is told")
            wait_until(partial(_another, tmp_path, killed), "another broker")
            wait_until(lambda: not launched.error, lambda: f"no error, but {launched.error}")
        await_broker(servers)
        second = producer.send("kiln.frames", value=b"after", partition=0).get(timeout=30)
        assert second.offset == first.offset + 1
        producer.close()
    assert running(tmp_path) is None


def _pid(state: Path) -> int:
    told = state / "broker" / "address.json"
    return int(json.loads(told.read_bytes())["pid"]) if running(state) and told.exists() else 0


def _another(state: Path, killed: int) -> bool:
    return _pid(state) not in (0, killed)
