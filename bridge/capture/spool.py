"""Queue of frames for Kafka: in memory while Kafka acknowledges in time, otherwise in a spool on disk.

All frames form one queue, numbered in the order of `put`. Kafka gets them in this order, and so in order on each
connection (the connection's id is the key, so its frames share a partition). Kafka may get some frames twice.
Connection, direction and sequence identify a frame, and the first copies are always in order: the sink stops a producer
that fails before it could send frames after the failure, and the next producer begins with the oldest unacknowledged
frame.

A killed process loses the frames that are neither acknowledged nor in the spool. While Kafka is available, these are
the frames of LINGER or a round trip, whichever is longer, and of one more round trip. When an acknowledgement takes
longer than `spool_after`, all frames go to the spool, including those in flight, and further frames follow within TICK
until the spool is empty again. So the loss is at most `spool_after` + TICK of frames; gaps in the sequences show it.
The next start sends the spool first.

The sink has two threads besides the producer's own: one sends, and one writes the spool. Neither waits for the other's
disk or network.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from kafka.errors import KafkaError

from kiln.bridge.capture.segments import Segments
from kiln.bridge.kafka.producers import FramesProducerError, SendFuture, StoppableProducer
from kiln.conf.process.bridge_status import SpoolStatus
from kiln.schemas.kafka.frames import CONNECTION_BYTES
from kiln.schemas.kafka.topics import MAX_RECORD

TICK: Final = 0.1
"""Seconds between checks for frames that must go to disk."""
LINGER: Final = 0.02
"""Seconds that a frame waits for others. Waking the sender thread for each frame costs more than sending the frame, and
a request costs as much as many frames in it."""
MAX_FRAME: Final = MAX_RECORD - 64 * 1024
"""Bytes. With key and headers the frame must fit in a request."""

_OVERHEAD: Final = 256  # bytes of Python objects for each frame, roughly
_CHUNK: Final = 1024 * 1024  # bytes to disk at a time
# Bytes of frames for which one acknowledgement is enough: small enough to show progress on a slow link.
_BYTES_PER_CALLBACK: Final = 256 * 1024

# Of `connect`. SettingsError, a ValueError: the password file cannot be read, as when no file descriptor is free.
# RuntimeError: no thread can be started.
_CONNECT_ERRORS: Final = (FramesProducerError, OSError, ValueError, RuntimeError)
# Of a producer's send, and of reading the spool.
_SEND_ERRORS: Final = (KafkaError, OSError)


class SinkError(RuntimeError):
    """The spool folder cannot be used."""


class _PendingFrame:
    """A frame in memory, or passed to the producer, that Kafka has not acknowledged."""

    __slots__ = ("at", "connection", "done", "frame", "number", "size")

    def __init__(self, number: int, connection: bytes, frame: bytes | None, size: int, at: float) -> None:
        self.number = number
        self.connection = connection
        self.frame = frame
        """`None` if it is in the spool."""
        self.size = size
        self.at = at
        self.done = False


_Outgoing = tuple[_PendingFrame, bytes]  # with the frame, since the spool thread may clear it in the item meanwhile


class FrameSink:
    """Queue of frames for one Kafka topic; thread-safe. It runs from its construction to `close`."""

    def __init__(
        self,
        connect: Callable[[], StoppableProducer],
        topic: str,
        folder: Path,
        spool_limit: int,
        memory_limit: int,
        *,
        spool_after: float = 1.0,
        portion: int = 1024 * 1024,
        retry_after: float = 1.0,
        segment_bytes: int | None = None,
        durable: bool = False,
        clock: Callable[[], float] = time.monotonic,
        floor: int = 0,
        free: Callable[[], int] | None = None,
    ) -> None:
        """Open the spool and start the threads.

        Args:
            connect: Makes a producer, or raises FramesProducerError; called in a thread of the sink.
            spool_limit: Bytes of the spool.
            memory_limit: Bytes in memory above which frames go to disk.
            spool_after: Seconds without an acknowledgement after which frames go to disk.
            portion: Bytes passed to the producer at a time.
            retry_after: Seconds between attempts to connect.
            segment_bytes: Size of the spool's files, which are removed one by one.
            durable: If true, spooled frames survive a power cut.
            floor: Bytes of the disk that must stay free. With fewer the sink is full, until a quarter more is free.
            free: Returns the free bytes, by default of the folder's disk. It may raise OSError.

        Raises:
            SinkError: The folder cannot be used.
        """
        self._connect = connect
        self._topic = topic
        self._memory_limit = memory_limit
        self._spool_limit = spool_limit
        self._spool_after = spool_after
        self._portion = portion
        self._retry_after = retry_after
        self._clock = clock
        try:
            self._segments = Segments(folder, spool_limit, segment_bytes, durable=durable)
        except OSError as error:
            raise SinkError(
                f"cannot use the spool folder {folder} ({error}). Check its permissions and the disk."
            ) from error

        lock = threading.Lock()
        self._lock = lock
        self._to_send = threading.Condition(lock)
        self._to_spool = threading.Condition(lock)
        self._all_acknowledged = threading.Condition(lock)

        # The queue: acknowledged … _acknowledged_until … in flight … _sent … spooled … _waiting … _next
        self._next = self._segments.end
        first = self._segments.first
        self._sent = self._acknowledged_until = self._next if first is None else first
        self._in_flight: deque[_PendingFrame] = deque()
        self._waiting: deque[_PendingFrame] = deque()  # all in memory; the last one has number _next - 1
        self._memory = 0

        self._put_count = 0
        self._acknowledged = 0
        self._spooled = 0
        self._full = False
        self._progress_at = clock()
        self._kafka_error: str | None = None
        self._disk_error: str | None = None
        self._folder = folder
        self._floor = floor
        self._free = free or (lambda: shutil.disk_usage(folder).free)
        self._free_bytes = 0
        self._low_on_disk = False  # fewer bytes are free than the floor
        self._failure: BaseException | None = None
        self._producer: StoppableProducer | None = None
        self._sender_waiting = False
        self._spool_notified = False
        self._takes_input = True
        self._closing = False
        self._ended = False
        self._callbacks: list[Callable[[], None]] = []

        self._spooler = threading.Thread(target=self._run_spool, name="spool", daemon=True)
        self._sender = threading.Thread(target=self._run_sender, name="frames", daemon=True)
        self._spooler.start()
        self._sender.start()

    # ------------------------------------------------------------ for callers

    def put(self, connection: bytes, frame: bytes) -> None:
        """Add a serialized Frame to the queue.

        It never waits for Kafka or the disk. It also accepts frames while `full` is true, but keeps them in memory, so
        the caller should stop reading from peers. After `end_input` it ignores frames.

        Args:
            connection: The frame's key, 16 bytes.

        Raises:
            ValueError: The frame is over MAX_FRAME, the key has another length, or the sink is closed.
        """
        size = len(frame)
        if size > MAX_FRAME or len(connection) != CONNECTION_BYTES:
            raise ValueError(
                f"cannot queue a frame of {size} bytes (limit: {MAX_FRAME}) with a key of {len(connection)} bytes "
                f"(required: {CONNECTION_BYTES})"
            )
        at = self._clock()
        with self._lock:
            if self._closing:
                raise ValueError("cannot queue a frame: the sink is closed")
            if not self._takes_input:
                return
            self._waiting.append(_PendingFrame(self._next, connection, frame, size, at))
            self._next += 1
            self._put_count += 1
            self._memory += size + _OVERHEAD
            if self._sender_waiting and not self._in_flight:
                self._sender_waiting = False
                self._to_send.notify()
            if self._memory > self._memory_limit and not self._spool_notified:
                self._spool_notified = True
                self._to_spool.notify()

    def end_input(self) -> None:
        """Ignore all further frames. Kafka gets those in the queue."""
        with self._lock:
            self._takes_input = False

    @property
    def full(self) -> bool:
        """True if frames fit only into memory: stop reading from peers until `subscribe`'s callback."""
        return self._full

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback`, which must not wait, in a thread of the sink each time there is room again."""
        with self._lock:
            self._callbacks.append(callback)

    @property
    def error(self) -> str | None:
        """Description of the current errors, or `None`."""
        with self._lock:
            return self._describe_error()

    def status(self) -> SpoolStatus:
        """A consistent snapshot of all counters."""
        with self._lock:
            return SpoolStatus(
                put=self._put_count,
                acknowledged=self._acknowledged,
                waiting=self._next - self._acknowledged_until,
                memory_bytes=self._memory,
                disk_bytes=self._segments.size,
                spooled=self._spooled,
                torn_bytes=self._segments.torn_bytes,
                full=self._full,
                error=self._describe_error(),
                free_bytes=self._free_bytes,
            )

    def close(self, patience: float) -> int:
        """Wait up to `patience` seconds for Kafka, unless it is unavailable, spool the rest, and stop the threads.

        Returns:
            The number of frames that are lost because the spool is full. The next start sends the others.
        """
        with self._lock:
            self._closing = True
            deadline = self._clock() + patience
            while self._acknowledged_until < self._next and self._describe_kafka_error() is None:
                remaining = deadline - self._clock()
                if remaining <= 0:
                    break
                self._all_acknowledged.wait(min(remaining, TICK))
            self._ended = True
            self._to_send.notify_all()
            self._to_spool.notify_all()
        self._spooler.join()
        self._sender.join(timeout=2)  # it may be connecting; it is a daemon thread
        if not self._sender.is_alive():
            self._segments.close()
        with self._lock:
            return len(self._waiting) + sum(item.frame is not None for item in self._in_flight)

    # ------------------------------------------------------------ sending

    def _run_sender(self) -> None:
        while not self._ended:
            try:
                producer = self._connect()
            except _CONNECT_ERRORS as error:
                self._record_error(error)
                continue
            with self._lock:
                self._producer = producer
                self._failure = None
                if self._acknowledged_until == self._next:
                    self._kafka_error = None
            try:
                while batch := self._next_batch():
                    self._send_batch(producer, batch)
            except _SEND_ERRORS as error:
                self._stop_producer(producer, error)
            with self._lock:
                self._producer = None
                failure = self._failure
            producer.close(2)
            with self._lock:
                self._rewind()
            if failure is not None:
                self._record_error(failure)

    def _send_batch(self, producer: StoppableProducer, batch: list[_Outgoing]) -> None:
        """Pass a portion to the producer; raises one of `_SEND_ERRORS`."""
        on_error = partial(self._stop_producer, producer)
        futures: dict[bytes, SendFuture] = {}  # of each connection's last frame
        groups: dict[bytes, list[_PendingFrame]] = {}
        size = 0
        for item, frame in batch:
            future = producer.send(self._topic, value=frame, key=item.connection)
            future.add_errback(on_error)
            futures[item.connection] = future
            groups.setdefault(item.connection, []).append(item)
            size += item.size
            if size >= _BYTES_PER_CALLBACK:
                self._add_callbacks(producer, futures, groups)
                futures, groups, size = {}, {}, 0
        self._add_callbacks(producer, futures, groups)

    def _add_callbacks(
        self, producer: StoppableProducer, futures: dict[bytes, SendFuture], groups: dict[bytes, list[_PendingFrame]]
    ) -> None:
        """Acknowledge each connection's frames with its last one.

        The frames of a connection are acknowledged in order, and a failure among them is reported before the last one.
        """
        for connection, future in futures.items():
            future.add_callback(partial(self._acknowledge, producer, groups[connection]))

    def _next_batch(self) -> list[_Outgoing]:
        """Wait for the next portion, and move it in flight; empty if the producer has to be closed.

        Only one portion is in flight at a time: while librdkafka has records that wait for the response to a request,
        its thread polls without a pause.

        Raises:
            OSError: The spool cannot be read.
        """
        while True:
            with self._lock:
                if not self._await_frames():
                    return []
                in_memory = self._next - len(self._waiting)
                is_spooled = self._sent < in_memory and self._segments.has(self._sent)
                if not is_spooled:
                    self._sent = self._acknowledged_until = in_memory  # skips frames that cannot be read back
                    linger = self._waiting[0].at + LINGER - self._clock() if self._waiting else 0.0
                    if linger > 0:
                        self._to_send.wait(linger)
                    elif self._waiting:
                        return self._take_from_memory()
            if is_spooled and (batch := self._take_from_spool()):
                return batch

    def _await_frames(self) -> bool:
        """Wait until a portion can be sent; false if the producer has to be closed. The caller has the lock."""
        while not self._ended and self._failure is None:
            if self._sent < self._next and not self._in_flight:
                return True
            self._sender_waiting = True
            self._to_send.wait()
            self._sender_waiting = False
        return False

    def _take_from_spool(self) -> list[_Outgoing]:
        spooled = self._segments.read(self._sent, self._portion)  # only this thread changes `_sent`
        now = self._clock()
        batch: list[_Outgoing] = []
        with self._lock:
            in_memory = self._next - len(self._waiting)
            for record in spooled:
                if record.number >= in_memory:
                    break  # just written, and not yet removed from memory
                item = _PendingFrame(record.number, record.connection, None, len(record.frame), now)
                self._in_flight.append(item)
                self._sent = item.number + 1
                batch.append((item, record.frame))
        return batch

    def _take_from_memory(self) -> list[_Outgoing]:
        batch: list[_Outgoing] = []
        waiting, in_flight, size = self._waiting, self._in_flight, 0
        while waiting and size < self._portion:
            item = waiting.popleft()
            assert item.frame is not None
            in_flight.append(item)
            size += item.size
            batch.append((item, item.frame))
        self._sent += len(batch)
        return batch

    def _acknowledge(self, producer: StoppableProducer, items: list[_PendingFrame], _: object) -> None:
        """Mark frames as acknowledged; called in the producer's thread.

        Acknowledgements of a producer that failed are ignored: its frames are sent again.
        """
        with self._lock:
            if self._producer is not producer or self._failure is not None:
                return
            for item in items:
                item.done = True
            in_flight = self._in_flight
            if not in_flight or not in_flight[0].done:
                return  # an acknowledgement by another partition
            while in_flight and in_flight[0].done:
                head = in_flight.popleft()
                self._acknowledged += 1
                if head.frame is not None:
                    self._memory -= head.size + _OVERHEAD
            self._acknowledged_until = in_flight[0].number if in_flight else self._sent
            self._progress_at = self._clock()
            self._kafka_error = None
            if self._sender_waiting and self._sent < self._next and not in_flight:
                self._sender_waiting = False
                self._to_send.notify()
            if self._closing and self._acknowledged_until == self._next:
                self._all_acknowledged.notify_all()

    def _stop_producer(self, producer: StoppableProducer, error: BaseException) -> None:
        """Abandon a producer whose send failed, so that it sends no later frame."""
        with self._lock:
            if self._producer is not producer or self._failure is not None:
                return
            self._failure = error
            self._to_send.notify_all()
        producer.abandon()

    def _rewind(self) -> None:
        """Mark all unacknowledged frames to be sent again."""
        if not self._in_flight:
            return
        self._sent = self._in_flight[0].number
        for item in reversed(self._in_flight):
            if item.frame is not None:  # the newest frames; the others are in the spool
                item.done = False
                self._waiting.appendleft(item)
        self._in_flight.clear()

    def _record_error(self, error: BaseException) -> None:
        """Record the error, and wait before the next attempt."""
        with self._lock:
            self._kafka_error = f"frames wait for Kafka, topic {self._topic}: {error!r}"
            self._all_acknowledged.notify_all()
            until = self._clock() + self._retry_after
            while not self._ended and (remaining := until - self._clock()) > 0:
                self._to_send.wait(remaining)

    # ------------------------------------------------------------ the spool

    def _run_spool(self) -> None:
        ended = False
        while not ended:
            with self._lock:
                if not self._ended:
                    self._to_spool.wait(TICK)
                ended = self._ended
                self._spool_notified = False
                acked = self._acknowledged_until
            try:
                self._update_free_space()
                self._segments.release(acked)
                while self._spill(ended):
                    pass
            except OSError as error:
                self._record_disk_error(error)
            self._notify_room()

    def _update_free_space(self) -> None:
        """Update the free bytes; raises OSError if they cannot be read."""
        free = self._free()
        with self._lock:
            self._free_bytes = free
            self._low_on_disk = free < (self._floor + self._floor // 4 if self._low_on_disk else self._floor)
            if self._low_on_disk:
                self._full = True

    def _spill(self, ended: bool) -> bool:
        """Write a chunk of the frames that must go to disk.

        Returns:
            True if the chunk was full, so that there is more to write.

        Raises:
            OSError: No frame could be written.
        """
        with self._lock:
            if not self._needs_spill(ended):
                self._disk_error = None
                return False
            first, frames, size = self._list_unspooled()
        if not frames:
            return False
        written = self._segments.append(first, frames)
        with self._lock:
            end = first + written
            for item in self._in_flight:
                if item.number >= end:
                    break
                if item.frame is not None:
                    item.frame = None
                    self._memory -= item.size + _OVERHEAD
            while self._waiting and self._next - len(self._waiting) < end:
                self._memory -= self._waiting.popleft().size + _OVERHEAD
            self._spooled += written
            self._disk_error = None
            if written < len(frames):
                self._full = True
        return written == len(frames) and size >= _CHUNK

    def _needs_spill(self, ended: bool) -> bool:
        if ended or self._memory > self._memory_limit:
            return True
        if self._sent < self._next - len(self._waiting):
            return True  # older frames are in the spool
        oldest = self._in_flight[0].at if self._in_flight else self._waiting[0].at if self._waiting else None
        return oldest is not None and self._clock() - oldest > self._spool_after

    def _list_unspooled(self) -> tuple[int, list[tuple[bytes, bytes]], int]:
        """Return a chunk of the frames that are only in memory: (number of the first, frames, bytes), oldest first."""
        first = self._next - len(self._waiting)
        frames: list[tuple[bytes, bytes]] = []
        size = 0
        for item in self._in_flight:
            if item.frame is not None:
                first = min(first, item.number)
                frames.append((item.connection, item.frame))
                size += item.size
                if size >= _CHUNK:
                    return first, frames, size
        for item in self._waiting:
            assert item.frame is not None
            frames.append((item.connection, item.frame))
            size += item.size
            if size >= _CHUNK:
                break
        return first, frames, size

    def _record_disk_error(self, error: OSError) -> None:
        with self._lock:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._disk_error = (
                f"cannot write the spool: the disk is full ({error}). Free some space."
                if full
                else f"cannot use the spool ({error}). Check the folder's permissions and the disk."
            )
            self._full = True

    def _notify_room(self) -> None:
        with self._lock:
            room = self._segments.size <= self._spool_limit * 3 // 4 and self._memory <= self._memory_limit
            if not self._full or not room or self._low_on_disk or self._disk_error is not None:
                return
            self._full = False
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    # ------------------------------------------------------------ error texts

    def _describe_kafka_error(self) -> str | None:
        if self._kafka_error is not None:
            return self._kafka_error
        if not self._in_flight:
            return None
        elapsed = self._clock() - max(self._progress_at, self._in_flight[0].at)
        if elapsed <= self._spool_after:
            return None
        return f"frames wait for Kafka, topic {self._topic}: no acknowledgement for {elapsed:.0f} s"

    def _describe_error(self) -> str | None:
        full = f"reading from peers is paused: the spool is full ({self._spool_limit} bytes)" if self._full else None
        if self._low_on_disk:
            full = (
                f"reading from peers is paused: the disk of {self._folder} has {self._free_bytes} bytes free, less "
                f"than {self._floor} (bridge.min_free_bytes). Free some space."
            )
        threads = [thread.name for thread in (self._sender, self._spooler) if not thread.is_alive() and not self._ended]
        fault = f"the thread {threads[0]} has crashed. Restart the bridge." if threads else None
        texts = (fault, self._describe_kafka_error(), self._disk_error or full, self._segments.loss)
        return "; ".join(text for text in texts if text is not None) or None
