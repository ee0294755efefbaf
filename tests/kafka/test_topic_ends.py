"""kiln.pipelines.runtime.topics and kiln.pipelines.runtime.topics on a real broker: partitions that are added,
topics that go."""

from __future__ import annotations

from datetime import timedelta

import pytest

from kafka import KafkaAdminClient, KafkaProducer
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.deploy.stack.kafka_broker import ensure_topics
from kiln.pipelines.runtime.topics import KafkaTopics, TopicEnds, TopicState
from kiln.schemas.kafka.topics import TOPICS
from kit.awaiting import wait_until
from kit.broker_access import client, security
from kit.topics import add_partitions, create_again

pytestmark = pytest.mark.kafka


@pytest.fixture
def address(broker: EmbeddedBroker, prefix: str) -> str:
    """A broker with Kiln's topics."""
    keep = dict.fromkeys(TOPICS, timedelta(days=1))
    ensure_topics(broker.address, prefix, {}, keep, client_options=security(broker.address))
    return broker.address


def write(address: str, topic: str, count: int, partition: int = 0) -> None:
    with KafkaProducer(**client(address), acks="all") as producer:
        for _ in range(count):
            producer.send(topic, value=b"x", partition=partition)


def test_the_ends_have_partitions_that_were_added_and_no_topic_that_is_gone(address: str, prefix: str) -> None:
    """Else `kiln run --catch-up` would end before it has read them."""
    frames, blocks = f"{prefix}frames", f"{prefix}blocks"
    write(address, frames, 3)
    ends = TopicEnds(client(address), [frames, blocks], check_every=0.2)
    assert ends.read() == {frames: {0: 3}, blocks: {0: 0}}
    add_partitions(address, frames, 2)
    write(address, frames, 5, partition=1)
    wait_until(lambda: ends.read() == {frames: {0: 3, 1: 5}, blocks: {0: 0}}, "the partition")
    with KafkaAdminClient(**client(address)) as admin:
        admin.delete_topics([blocks])
    wait_until(lambda: ends.read() == {frames: {0: 3, 1: 5}}, lambda: f"{ends.ends}, {ends.error}")
    assert ends.error == ""


def test_a_topic_that_is_created_again_has_another_id(address: str, prefix: str) -> None:
    topic, topics = f"{prefix}frames", KafkaTopics(lambda: client(address))
    try:
        write(address, topic, 4)
        (before,) = topics.read_states([topic, f"{prefix}none"]).values()
        assert before == TopicState(before.id, {0: 0}, {0: 4})
        assert topics.read_identities([topic])[topic].id == before.id
        create_again(address, prefix, "frames")
        (after,) = topics.read_states([topic]).values()
        assert after == TopicState(after.id, {0: 0}, {0: 0})
        assert after.id not in ("", before.id)
    finally:
        topics.close()
