"""Writes what the bridge itself finds for `kiln.quarantine`: few records, and seldom.

So the writer sends each record alone, and tries until the broker has it. Until then the record is in memory only.
Whoever puts a record keeps what the record was found by, and finds it again after a crash.
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

_PATIENCE: Final = 10.0  # s for the broker to take a record
_TICK: Final = 0.2  # s between two looks whether to stop
# what kafka-python's constructor and send raise (its partitioner a ValueError)
_AWAY: Final = (KafkaError, FramesProducerError, ValueError, AssertionError, OSError)


class _QueuedRecord(NamedTuple):
    key: bytes
    value: bytes
    written: threading.Event


class QuarantineWriter:
    """Writes records in a thread of its own, in their order, from `start()` to `stop()`."""

    def __init__(self, connect: Callable[[], StoppableProducer], topic: str, retry_after: float = 1.0) -> None:
        """`connect`: a new producer, or FramesProducerError; called in the thread, when there is something to write."""
        self._connect = connect
        self._topic = topic
        self._retry_after = retry_after
        self._waiting: deque[_QueuedRecord] = deque()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="quarantine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Ends the thread. Records that wait are not written."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout)  # it may be trying to connect; it is a daemon

    def put(self, key: bytes, record: QuarantineRecord) -> threading.Event:
        """Takes a record without waiting, from any thread. The event is set once the broker has the record."""
        waiting = _QueuedRecord(key, encode(record), threading.Event())
        self._waiting.append(waiting)
        self._wake.set()
        return waiting.written

    @property
    def error(self) -> str | None:
        """Why nothing can be written now; None: writing works."""
        return self._error

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._waiting:
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                self._write_all()
            except _AWAY as error:
                self._error = f"{len(self._waiting)} records wait for the topic {self._topic}, Kafka fails: {error!r}"
                self._stop.wait(self._retry_after)

    def _write_all(self) -> None:
        """Writes all records that wait; returns early when the thread is to stop."""
        producer = self._connect()
        try:
            while self._waiting and self._write(producer, self._waiting[0]):
                self._waiting.popleft().written.set()
                self._error = None
        finally:
            producer.close(2)

    def _write(self, producer: StoppableProducer, record: _QueuedRecord) -> bool:
        """Whether the broker has the record; False when the thread is to stop."""
        told: SimpleQueue[BaseException | None] = SimpleQueue()  # filled by kafka-python's thread
        future = producer.send(self._topic, value=record.value, key=record.key)
        future.add_callback(lambda _: told.put(None))
        future.add_errback(told.put)
        deadline = time.monotonic() + _PATIENCE
        while not self._stop.is_set():
            try:
                error = told.get(timeout=_TICK)
            except Empty:
                if time.monotonic() < deadline:
                    continue
                raise FramesProducerError(f"no answer within {_PATIENCE:g} s") from None
            if error is not None:
                raise FramesProducerError(f"a record was refused: {error!r}") from error
            return True
        return False
