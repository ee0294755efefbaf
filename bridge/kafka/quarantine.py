"""Write records of the bridge to `kiln.quarantine`.

The records are few, so the writer sends one at a time, and retries until the broker has it. Until then a record is only
in memory. So the code that queued a record must be able to create it again after a crash.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from confluent_kafka import KafkaError, Producer

from kiln.bridge.kafka.producers import FramesProducerError, close_producer, open_producer
from kiln.bridge.kafka.session_thread import KafkaConfig, SessionThread
from kiln.schemas.kafka.records import QuarantineRecord, encode

_WRITE_TIMEOUT: Final = 10.0  # seconds for the broker to acknowledge a record
_TICK: Final = 0.2  # seconds between two checks whether to stop
_IDLE: Final = 10.0  # seconds between two steps of a thread without records


class _QueuedRecord(NamedTuple):
    key: bytes
    value: bytes
    written: threading.Event


class QuarantineWriter(SessionThread):
    """A thread that writes records in order, from `start()` to `stop()`."""

    def __init__(
        self, kafka: KafkaConfig, connect: Callable[[], Producer] | None = None, retry_after: float = 1.0
    ) -> None:
        """Create the thread without starting it.

        Args:
            connect: returns a connected producer, or raises `FramesProducerError`; called while records are queued.
            retry_after: seconds between attempts after an error.
        """
        self._topic = f"{kafka.prefix}quarantine"
        super().__init__("quarantine writer", f"no rejected input is written to {self._topic}", kafka, retry_after)
        self._connect = connect or (lambda: open_producer(kafka.client_options, (self._topic,)))
        self._queue: deque[_QueuedRecord] = deque()
        self._wake = threading.Event()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread, without writing the queued records."""
        self._stop.set()
        self._wake.set()
        super().stop(timeout)  # the thread may be connecting; it is a daemon

    def put(self, key: bytes, record: QuarantineRecord) -> threading.Event:
        """Queue a record without blocking. Return an event that is set once the broker has the record. Thread-safe."""
        queued = _QueuedRecord(key, encode(record), threading.Event())
        self._queue.append(queued)
        self._wake.set()
        return queued.written

    def _run_session(self) -> None:
        if self._queue:
            self._write_all()
        else:
            self._wake.wait(_IDLE)
            self._wake.clear()

    def _write_all(self) -> None:
        """Write all queued records. Return early if the thread must stop."""
        producer = self._connect()
        errors: list[KafkaError | None] = []
        try:
            while self._queue:
                record = self._queue[0]
                producer.produce(self._topic, record.value, record.key, on_delivery=lambda e, _: errors.append(e))
                deadline = time.monotonic() + _WRITE_TIMEOUT
                while producer.flush(_TICK):
                    if self._stop.is_set():
                        return
                    if time.monotonic() > deadline:
                        raise FramesProducerError(f"no acknowledgement within {_WRITE_TIMEOUT:g} s")
                if (error := errors.pop()) is not None:
                    raise FramesProducerError(f"the broker refused a record: {error.str()}")
                self._queue.popleft().written.set()
                self._error = None
        finally:
            close_producer(producer, 2)
