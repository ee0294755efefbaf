"""Records that the bridge itself quarantines: each is tried until the broker has it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from confluent_kafka import KafkaError, Producer

from kiln.bridge.kafka.producers import FramesProducerError
from kiln.bridge.kafka.quarantine import QuarantineWriter
from kiln.bridge.kafka.session_thread import KafkaConfig
from kiln.schemas.kafka.records import QuarantineRecord, decode_quarantine

PATIENCE = 20.0  # s
NOWHERE = KafkaConfig({"bootstrap_servers": ["127.0.0.1:1"]}, "kiln.")


class Broker:
    """Refuses connections and records as often as it is told to."""

    def __init__(self, *, away: int = 0, refusals: int = 0) -> None:
        self.away = away
        self.refusals = refusals
        self.records: list[tuple[str, bytes, QuarantineRecord]] = []
        self.open = 0
        self.errors: list[str | None] = []
        self.quarantine: QuarantineWriter | None = None

    def connect(self) -> Broker:
        self.errors.append(self.quarantine.error if self.quarantine else None)
        if self.away:
            self.away -= 1
            raise FramesProducerError("cannot write to Kafka at 127.0.0.1:1")
        self.open += 1
        return self

    def produce(
        self, topic: str, value: bytes, key: bytes, on_delivery: Callable[[KafkaError | None, object], None]
    ) -> None:
        if self.refusals:
            self.refusals -= 1
            on_delivery(KafkaError(KafkaError.NOT_ENOUGH_REPLICAS), None)
        else:
            self.records.append((topic, key, decode_quarantine(value)))
            on_delivery(None, None)

    def flush(self, timeout: float = -1) -> int:
        return 0

    def purge(self, **kinds: bool) -> None:
        self.open -= 1


@contextmanager
def running(broker: Broker) -> Iterator[QuarantineWriter]:
    broker.quarantine = quarantine = QuarantineWriter(
        NOWHERE, lambda: cast(Producer, broker.connect()), retry_after=0.01
    )
    quarantine.start()
    try:
        yield quarantine
    finally:
        quarantine.stop(PATIENCE)


def record(number: int) -> QuarantineRecord:
    return QuarantineRecord("bep50", "gap", f"number {number}", b"\x00", 1_700_000_000_000_000 + number)


def put_all(quarantine: QuarantineWriter) -> list[threading.Event]:
    return [quarantine.put(b"%d" % number, record(number)) for number in range(5)]


EXPECTED = [("kiln.quarantine", b"%d" % number, record(number)) for number in range(5)]


def test_records_are_written_in_their_order_and_said_to_be() -> None:
    broker = Broker()
    with running(broker) as quarantine:
        for _ in range(2):
            assert all(written.wait(PATIENCE) for written in put_all(quarantine))
        assert quarantine.error is None
    assert broker.records == EXPECTED * 2
    assert broker.open == 0


def test_while_the_broker_is_away_they_wait() -> None:
    broker = Broker(away=3, refusals=2)
    with running(broker) as quarantine:
        assert all(written.wait(PATIENCE) for written in put_all(quarantine))
        assert quarantine.error is None
    assert broker.records == EXPECTED
    assert broker.open == 0
    assert any(error and "no rejected input is written to kiln.quarantine" in error for error in broker.errors)


def test_one_that_is_stopped_has_not_written_what_waits() -> None:
    broker = Broker(away=1_000_000)
    with running(broker) as quarantine:
        waiting = put_all(quarantine)
    assert not any(written.is_set() for written in waiting)
