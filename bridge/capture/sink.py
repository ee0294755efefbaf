"""Queue of frames for Kafka: in memory while Kafka acknowledges in time, otherwise in the spool on disk.

Kafka gets all frames in the order of `put`: first those in the spool, then those in memory. The key of a frame is the
id of its connection, so the frames of a connection are in one partition and in order. Frames are sent in portions of
256 KiB to 2 MiB, and one portion is in flight at a time. If Kafka refuses a frame, a new producer sends the whole
portion again, so Kafka may get frames twice. Connection, direction and sequence identify a frame, and the first copies
are in order.

A process that is killed loses the frames that are neither acknowledged nor in the spool. While Kafka is available,
these are the frames of about LINGER plus two round trips. If an acknowledgement takes longer than `spool_after`, all
frames go to the spool, including those in flight. Further frames follow within TICK, until the spool is empty. So the
loss is at most the frames of `spool_after` + 2 TICK seconds; gaps in the sequences show it. After a restart, the frames
in the spool are sent first.

One thread sends the frames and uses the spool. It never waits longer than TICK for Kafka: librdkafka has threads of its
own, and another thread connects the producers.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from kiln.bridge.capture.spool import QueuedFrame, Spool
from kiln.bridge.kafka.producers import FramesProducerError, close_producer
from kiln.conf.process.bridge_status import SpoolStatus
from kiln.schemas.kafka.frames import CONNECTION_BYTES
from kiln.schemas.kafka.topics import MAX_RECORD

TICK: Final = 0.1
"""Seconds between two checks whether frames must go to the spool."""
LINGER: Final = 0.02
"""Seconds that a frame waits for further frames, to be sent together. One request for each frame would cost much more
CPU."""
PORTION: Final = 256 * 1024
"""Bytes of frames that are sent together at first. Kafka must acknowledge them within `spool_after`, even over a slow
link."""
MAX_PORTION: Final = 8 * PORTION
"""Bytes of frames that are sent together at most, if more wait and Kafka acknowledges quickly. Each portion takes a
round trip, so smaller ones would limit the rate, and peers that send much would delay the frames of all others."""
MAX_FRAME: Final = MAX_RECORD - 64 * 1024
"""Maximum size of a frame in bytes. A request to Kafka has room for this, the key and the headers."""

_OVERHEAD: Final = 256  # bytes of Python objects for each frame, roughly
# SettingsError, a ValueError: the password file cannot be read, as when no file descriptor is free.
_CONNECT_ERRORS: Final = (FramesProducerError, OSError, ValueError)


class FrameSink:
    """Queue of frames for one Kafka topic, with a thread that runs until `close`. Thread-safe."""

    def __init__(
        self,
        connect: Callable[[], Producer],
        topic: str,
        spool: Spool,
        memory_limit: int,
        *,
        spool_after: float = 1.0,
        retry_after: float = 1.0,
    ) -> None:
        """Start the thread.

        Args:
            connect: Returns a connected producer, or raises FramesProducerError. It is called in another thread,
                because it may take seconds.
            spool: Used only by the sink, which also closes it.
            memory_limit: Maximum bytes of frames in memory. Further frames go to the spool.
            spool_after: Seconds without an acknowledgement after which frames go to the spool.
            retry_after: Seconds between attempts to connect.
        """
        self._connect = connect
        self._topic = topic
        self._spool = spool
        self._memory_limit = memory_limit
        self._spool_after = spool_after
        self._retry_after = retry_after

        self._changed = threading.Condition()
        self._waiting: deque[QueuedFrame] = deque()
        self._portion: Sequence[QueuedFrame] = ()  # the frames in flight, unless they are in the spool
        self._in_flight = 0  # frames
        self._portion_bytes = PORTION  # of the next portion
        self._sent_at = 0.0
        self._memory = 0  # bytes
        self._put_count = 0
        self._acknowledged = 0

        self._producer: Producer | None = None
        self._connector: threading.Thread | None = None
        self._connect_at = time.monotonic()
        self._refusal: KafkaError | None = None
        self._kafka_error: str | None = None
        self._pause: str | None = None  # reason why `full` is true
        self._callbacks: list[Callable[[], None]] = []
        self._takes_input = True
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="frames", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for callers

    def put(self, connection: bytes, frame: bytes) -> None:
        """Add a serialized Frame to the queue.

        The call never waits for Kafka or the disk. While `full` is true, frames are still accepted and stay in memory,
        so callers should stop reading from peers. After `end_input` or `close`, frames are ignored.

        Args:
            connection: Id of the frame's connection, 16 bytes, which becomes the record's key.

        Raises:
            ValueError: The frame is larger than MAX_FRAME, or the id has another length.
        """
        size = len(frame)
        if size > MAX_FRAME or len(connection) != CONNECTION_BYTES:
            raise ValueError(
                f"cannot queue a frame of {size} bytes (limit: {MAX_FRAME}) with a key of {len(connection)} bytes "
                f"(required: {CONNECTION_BYTES})"
            )
        item = QueuedFrame(connection, frame, time.monotonic())
        with self._changed:
            if not self._takes_input:
                return
            self._waiting.append(item)
            self._put_count += 1
            self._memory += size + _OVERHEAD
            if len(self._waiting) == 1:
                self._changed.notify()

    def end_input(self) -> None:
        """Ignore all further frames. Kafka still gets the frames in the queue."""
        with self._changed:
            self._takes_input = False

    @property
    def full(self) -> bool:
        """True if no more frames can go to the spool. Then stop reading from peers until a callback of `subscribe`."""
        return self._pause is not None

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the sink's thread each time `full` becomes false. The callback must not block."""
        with self._changed:
            self._callbacks.append(callback)

    def status(self) -> SpoolStatus:
        """Return a snapshot of the counters and errors."""
        with self._changed:
            is_well = self._thread.is_alive() or self._ended
            crash = None if is_well else "the thread that writes frames to Kafka has crashed. Restart the bridge."
            pause = self._pause and f"reading from peers is paused: {self._pause}"
            errors = (crash, self._describe_kafka_error(), pause, self._spool.loss)
            return SpoolStatus(
                put=self._put_count,
                acknowledged=self._acknowledged,
                waiting=self._count_unacknowledged(),
                memory_bytes=self._memory,
                disk_bytes=self._spool.size,
                spooled=self._spool.spooled,
                torn_bytes=self._spool.lost_bytes,
                full=self.full,
                error="; ".join(text for text in errors if text is not None) or None,
                free_bytes=self._spool.free_bytes,
            )

    def close(self, patience: float) -> int:
        """Wait for Kafka to acknowledge all frames, write the rest to the spool, and stop the thread.

        Args:
            patience: Maximum seconds to wait. If Kafka is unavailable, the call does not wait.

        Returns:
            The number of frames that are lost, because the spool has no room. The next start sends the others.
        """
        deadline = time.monotonic() + patience
        with self._changed:
            self._takes_input = False
            while self._count_unacknowledged() and self._describe_kafka_error() is None and time.monotonic() < deadline:
                self._changed.wait(TICK)
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        return len(self._portion) + len(self._waiting)

    # ------------------------------------------------------------ sending

    def _run(self) -> None:
        check_at = time.monotonic()
        while not self._ended:
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + TICK
                self._update_spool()
            if self._producer is None:
                self._await_producer()
            else:
                self._send(self._producer)
        self._update_spool()
        self._spool.close()
        self._producer = None

    def _send(self, producer: Producer) -> None:
        """Send the next frames if none are in flight, and wait up to TICK for the acknowledgement.

        Further frames are sent only after the acknowledgement, because librdkafka's thread polls without a pause while
        records are queued behind a request that has no response yet.
        """
        try:
            if not self._in_flight:
                portion: Sequence[QueuedFrame] = self._spool.read(self._portion_bytes) if self._spool.unread else ()
                with self._changed:
                    if not portion:
                        if not self._waiting and not self._ended:
                            self._changed.wait(TICK)
                        while self._waiting and (linger := self._waiting[0].queued_at + LINGER - time.monotonic()) > 0:
                            self._changed.wait(linger)
                        self._portion = portion = self._list_waiting(self._portion_bytes)
                        for _ in portion:
                            self._waiting.popleft()
                    self._in_flight = len(portion)
                    self._sent_at = time.monotonic()
                for item in portion:
                    producer.produce(self._topic, item.frame, item.connection, on_delivery=self._record_refusal)
            unacknowledged = producer.flush(TICK)
        except (KafkaException, OSError, sqlite3.Error) as error:
            self._abandon(producer, error)
            return
        if self._refusal is not None:
            self._abandon(producer, KafkaException(self._refusal))
        elif not unacknowledged:
            with self._changed:
                self._portion_bytes = self._choose_portion_bytes(time.monotonic() - self._sent_at)
                self._acknowledged += self._in_flight
                self._memory -= sum(len(queued.frame) + _OVERHEAD for queued in self._portion)
                self._portion, self._in_flight = (), 0
                self._spool.acknowledge()
                self._kafka_error = None
                self._changed.notify_all()

    def _choose_portion_bytes(self, elapsed: float) -> int:
        """Choose the size of the next portion: larger if frames wait that Kafka would acknowledge quickly.

        Args:
            elapsed: Seconds that Kafka took to acknowledge the last portion.
        """
        if elapsed > 2 * TICK or not (self._waiting or self._spool.unread):
            return PORTION
        return min(2 * self._portion_bytes, MAX_PORTION)

    def _list_waiting(self, limit: int) -> list[QueuedFrame]:
        """List the oldest frames that wait in memory, about `limit` bytes. The caller must hold the lock."""
        portion: list[QueuedFrame] = []
        size = 0
        for item in self._waiting:
            portion.append(item)
            size += len(item.frame)
            if size >= limit:
                break
        return portion

    def _record_refusal(self, error: KafkaError | None, _: Message) -> None:
        """Record that Kafka refused a frame. `flush` calls this for refused frames only."""
        if self._refusal is None:
            self._refusal = error

    def _abandon(self, producer: Producer, error: Exception) -> None:
        """Close a producer after an error, and put its unacknowledged frames back into the queue."""
        close_producer(producer, TICK)
        with self._changed:
            self._waiting.extendleft(reversed(self._portion))
            self._portion, self._in_flight = (), 0
            self._spool.rewind()
            self._producer = self._refusal = None
            self._record_kafka_error(error)

    def _await_producer(self) -> None:
        """Start the thread that connects, if it is time, and wait up to TICK for the producer."""
        with self._changed:
            if self._producer is not None:  # connected after the caller's check. A second one would replace it
                return
            is_connecting = self._connector is not None and self._connector.is_alive()
            if not is_connecting and time.monotonic() >= self._connect_at:
                self._connector = threading.Thread(target=self._open_producer, name="frames connector", daemon=True)
                try:
                    self._connector.start()
                except RuntimeError as error:  # no more threads
                    self._record_kafka_error(error)
            self._changed.wait(TICK)

    def _open_producer(self) -> None:
        try:
            producer = self._connect()
        except _CONNECT_ERRORS as error:
            with self._changed:
                self._record_kafka_error(error)
            return
        with self._changed:
            self._producer = producer
            self._changed.notify_all()

    def _record_kafka_error(self, error: Exception) -> None:
        reason = error.args[0].str() if isinstance(error, KafkaException) else error
        self._kafka_error = f"frames wait for Kafka, topic {self._topic}: {reason}"
        self._connect_at = time.monotonic() + self._retry_after

    def _describe_kafka_error(self) -> str | None:
        elapsed = time.monotonic() - self._sent_at if self._in_flight else 0.0
        if self._kafka_error is not None or elapsed <= self._spool_after:
            return self._kafka_error
        return f"frames wait for Kafka, topic {self._topic}: no acknowledgement for {elapsed:.0f} s"

    # ------------------------------------------------------------ the spool

    def _update_spool(self) -> None:
        """Delete acknowledged frames from the spool, move frames from memory to the spool if necessary, and pause or
        resume reading from peers."""
        try:
            pause = self._spool.find_shortage()
            self._spool.release()
            while self._must_spool():
                self._move_to_spool()
            if self._memory > self._memory_limit or not self._spool.has_room():
                pause = pause or self._pause
        except (OSError, sqlite3.Error) as error:
            pause = self._spool.describe_error(error)
        with self._changed:
            callbacks = list(self._callbacks) if self._pause and not pause else ()
            self._pause = pause
        for callback in callbacks:
            callback()

    def _must_spool(self) -> bool:
        if not self._portion and not self._waiting:
            return False
        if self._ended or self._memory > self._memory_limit or self._spool.unread:
            return True
        is_in_spool = self._in_flight and not self._portion
        oldest = self._sent_at if is_in_spool else (self._portion or self._waiting)[0].queued_at
        return time.monotonic() - oldest > self._spool_after

    def _move_to_spool(self) -> None:
        """Move the frames in flight to the spool or, if there are none, about PORTION bytes of the waiting frames."""
        if portion := self._portion:
            self._spool.append(portion, are_read=True)
        else:
            with self._changed:
                portion = self._list_waiting(PORTION)
            self._spool.append(portion)
        with self._changed:
            self._memory -= sum(len(queued.frame) + _OVERHEAD for queued in portion)
            if self._portion:
                self._portion = ()
            else:
                for _ in portion:
                    self._waiting.popleft()

    def _count_unacknowledged(self) -> int:
        return self._spool.unacknowledged + len(self._portion) + len(self._waiting)
