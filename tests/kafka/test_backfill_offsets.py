"""What a backfill run can still read out of Kafka, and what it says of records that retention took."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
from kafka.admin import KafkaAdminClient

from kafka import KafkaProducer, TopicPartition
from kiln.conf.settings.reading import load_settings
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.pipelines.app.backfill_run import build_terms, read_kafka_offsets
from kiln.pipelines.backfill.sources import InputError
from kiln.schemas.kafka.topics import TOPICS
from kit.broker_access import client, security, variables

pytestmark = pytest.mark.kafka


def test_a_run_says_which_frames_of_its_range_kafka_has_let_go(
    broker: EmbeddedBroker, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, topic = broker.address, f"{prefix}frames"
    retention = dict.fromkeys(TOPICS, timedelta(days=1))
    ensure_topics(address, prefix, {"frames": 2}, retention, client_options=security(address))
    for name, value in {**variables(address), "KILN_KAFKA__PREFIX": prefix, "KILN_STATE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    end = time.time_ns() // 1000 + 10**9

    def write(count: int) -> None:
        with KafkaProducer(**client(address), acks="all") as producer:
            for number in range(count):
                producer.send(topic, value=b"x", partition=number % 2)

    def let_go(before: int, *partitions: int) -> None:
        with KafkaAdminClient(**client(address)) as admin:  # as retention does
            admin.delete_records({TopicPartition(topic, each): before for each in partitions})

    def asked(low: int) -> tuple[dict[str, tuple[int, int]], list[str]]:
        return read_kafka_offsets(settings, build_terms(settings, "r", low, end, source="kafka"))

    assert asked(1) == ({"0": (0, 0), "1": (0, 0)}, [])  # nothing was ever there
    write(20)
    assert asked(1) == ({"0": (0, 10), "1": (0, 10)}, [])
    let_go(4, 0)
    offsets, (words,) = asked(1)
    assert offsets == {"0": (4, 10), "1": (0, 10)}
    assert words.startswith(f"{topic}, partition 0: Kafka has removed 4 records older than 20")
    assert asked(end - 1) == ({"0": (4, 10), "1": (0, 10)}, [])  # they came before the range
    let_go(10, 0, 1)
    with pytest.raises(InputError, match=r"partition 0: Kafka has removed all 10 records; parti.*"):
        asked(1)
