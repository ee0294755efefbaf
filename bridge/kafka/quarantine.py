"""Write the bridge's own records to `kiln.quarantine`.

These records are few, so the writer sends each alone and retries until the broker has it. Until then a record is only
in memory, so the code that made the record must be able to make it again after a crash.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from kiln.bridge.kafka.producers import FramesProducerError, StoppableKafkaProducer, StoppableProducer
from kiln.bridge.kafka.session_thread import KafkaConfig, SessionThread
from kiln.schemas.kafka.records import QuarantineRecord, encode

_WRITE_TIMEOUT: Final = 10.0  # s for the broker to acknowledge a record
_TICK: Final = 0.2  # s between two checks whether to stop
_IDLE: Final = 10.0  # s between two steps of a thread without records


class _QueuedRecord(NamedTuple):
    key: bytes
    value: bytes
    written: threading.Event


class QuarantineWriter(SessionThread):
    """A thread that writes records in their order, from `start()` to `stop()`."""

    def __init__(
        self, kafka: KafkaConfig, connect: Callable[[], StoppableProducer] | None = None, retry_after: float = 1.0
    ) -> None:
        """Create the thread without starting it.

        Args:
            connect: returns a new producer or raises `FramesProducerError`; called in the thread when a record waits.
        """
        self._topic = f"{kafka.prefix}quarantine"
        super().__init__("quarantine", f"records wait for the topic {self._topic}", kafka, retry_after)
        self._connect = connect or self._open_producer
        self._queue: deque[_QueuedRecord] = deque()
        self._wake = threading.Event()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread. Queued records are not written."""
        self._stop.set()
        self._wake.set()
        super().stop(timeout)  # the thread may be connecting; it is a daemon

    def put(self, key: bytes, record: QuarantineRecord) -> threading.Event:
        """Queue a record without waiting, from any thread, and return an event that is set once the broker has it."""
        queued = _QueuedRecord(key, encode(record), threading.Event())
        self._queue.append(queued)
        self._wake.set()
        return queued.written

    def _open_producer(self) -> StoppableProducer:
        return StoppableKafkaProducer(self._servers, self._client_options)

    def _release_resources(self) -> None: ...

    def _run_session(self) -> None:
        if self._queue:
            self._write_all()
        else:
            self._wake.wait(_IDLE)
            self._wake.clear()

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
