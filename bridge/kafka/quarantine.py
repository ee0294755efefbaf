"""Write the bridge's own records to `kiln.quarantine`.

They are few, so the writer sends each record alone and retries until the broker has it. Until then a record is only in
memory; its producer must be able to reproduce it after a crash.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from kafka.errors import KafkaError

from kiln.bridge.kafka.producers import FramesProducerError, StoppableProducer
from kiln.schemas.kafka.records import QuarantineRecord, encode

_WRITE_TIMEOUT: Final = 10.0  # s for the broker to acknowledge a record
_TICK: Final = 0.2  # s between two checks whether to stop
# raised by kafka-python's constructor and send (ValueError by its partitioner)
_KAFKA_ERRORS: Final = (KafkaError, FramesProducerError, ValueError, AssertionError, OSError)


class _QueuedRecord(NamedTuple):
    key: bytes
    value: bytes
    written: threading.Event


class QuarantineWriter:
    """A thread that writes records in their order, from `start()` to `stop()`."""

    def __init__(self, connect: Callable[[], StoppableProducer], topic: str, retry_after: float = 1.0) -> None:
        """Create the thread without starting it.

        Args:
            connect: returns a new producer or raises `FramesProducerError`; called in the thread when a record waits.
        """
        self._connect = connect
        self._topic = topic
        self._retry_after = retry_after
        self._queue: deque[_QueuedRecord] = deque()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="quarantine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread. Queued records are not written."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout)  # it may be connecting; it is a daemon thread

    def put(self, key: bytes, record: QuarantineRecord) -> threading.Event:
        """Queue a record without waiting, from any thread, and return an event that is set once the broker has it."""
        queued = _QueuedRecord(key, encode(record), threading.Event())
        self._queue.append(queued)
        self._wake.set()
        return queued.written

    @property
    def error(self) -> str | None:
        """The reason why nothing can be written now, if any."""
        return self._error

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._queue:
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                self._write_all()
            except _KAFKA_ERRORS as error:
                self._error = f"{len(self._queue)} records wait for the topic {self._topic}, Kafka fails: {error!r}"
                self._stop.wait(self._retry_after)

    def _write_all(self) -> None:
        """Write all queued records, or return early when the thread is to stop."""
        producer = self._connect()
        try:
            while self._queue and self._write(producer, self._queue[0]):
                self._queue.popleft().written.set()
                self._error = None
        finally:
            producer.close(2)

    def _write(self, producer: StoppableProducer, record: _QueuedRecord) -> bool:
        """Write a record, and return false if the thread is to stop before the broker has it."""
        results: SimpleQueue[BaseException | None] = SimpleQueue()  # filled by kafka-python's thread
        future = producer.send(self._topic, value=record.value, key=record.key)
        future.add_callback(lambda _: results.put(None))
        future.add_errback(results.put)
        deadline = time.monotonic() + _WRITE_TIMEOUT
        while not self._stop.is_set():
            try:
                error = results.get(timeout=_TICK)
            except Empty:
                if time.monotonic() < deadline:
                    continue
                raise FramesProducerError(f"no acknowledgement within {_WRITE_TIMEOUT:g} s") from None
            if error is not None:
                raise FramesProducerError(f"the broker refused a record: {error!r}") from error
            return True
        return False
