"""kiln.pipelines.batch.ticker on a real broker whose stamps trail what the log holds."""

from __future__ import annotations

import re
import time

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from kafka.admin import NewTopic

from kafka import KafkaAdminClient, KafkaProducer
from kiln.conf.process.librdkafka import librdkafka_options
from kiln.deploy.stack.embedded_broker import EmbeddedBroker
from kiln.pipelines.batch.ticker import Ticker, read_log_times
from kit.awaiting import wait_until
from kit.broker_access import client

pytestmark = pytest.mark.kafka

AHEAD = 1_801_000  # ms


def test_the_ticker_says_when_stamps_trail_the_log_and_ticks_on(broker: EmbeddedBroker, prefix: str) -> None:
    """A topic with the stamps of its producers stands for a broker whose clock was ahead, and was put right."""
    options, topic = client(broker.address), f"{prefix}updates"
    admin = KafkaAdminClient(**options)
    admin.create_topics([NewTopic(topic, 2, 1, topic_configs={"message.timestamp.type": "CreateTime"})])
    admin.close()
    ahead = int(time.time() * 1000) + AHEAD
    producer = KafkaProducer(**options)
    for stamp in (ahead, ahead - AHEAD):
        producer.send(topic, value=b"update", partition=1, timestamp_ms=stamp).get(timeout=60)
    producer.close()
    names = [TopicPartition(topic, partition) for partition in (0, 1)]
    assert read_log_times(AdminClient({**librdkafka_options(options)}), names) == {1: ahead}
    ticker = Ticker(options, topic, interval=0.02, window=0)
    assert ticker.clock_error is None
    ticker.start()
    try:
        wait_until(lambda: ticker.clock_error is not None, lambda: f"the ticker spoke; error: {ticker.error}")
        assert re.match(
            rf"the broker's clock is 1,(80[01]|79\d) s behind the newest timestamp in {topic}, since ",
            ticker.clock_error or "",
        )
        assert ticker.quiet_ends is None
    finally:
        ticker.stop()
