"""Frames on their way to Kafka: through memory while Kafka is well, through a spool on disk while it is not.

All frames stand in one line, numbered in the order of `put`. Kafka gets the frames in this order, so in order on each
connection (the connection's id is the key, so its frames share a partition). Kafka may get some frames twice. A frame
is known by connection, direction and sequence, and the first copies are always in order: the sink stops a producer that
fails before that producer could send what comes after the failure, and the next producer begins with the oldest frame
that is not acknowledged.

A killed process loses the frames that are neither acknowledged nor in the spool. While Kafka is well, these are the
frames of LINGER or a round trip, whichever is longer, and of a round trip more. When an answer takes longer than
`spool_after`, all frames go to the spool, those under way too, and further frames within TICK until the spool is
empty again. So the loss is at most `spool_after` + TICK of frames; gaps in the sequences show the loss. The next
start sends the spool first.

The sink has two threads besides the producer's own: one sends, one keeps the spool. Neither waits for the other's disk
or network.
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
"""seconds: how often the spool's thread looks whether frames must go to disk"""
LINGER: Final = 0.02
"""seconds: how long a frame waits for others to gather. Waking the thread that sends for each frame costs more than
sending the frame, and a request costs as much as many frames in it"""
MAX_FRAME: Final = MAX_RECORD - 64 * 1024
"""bytes: with key and headers it must fit in a request"""

_OVERHEAD: Final = 256  # bytes of Python objects around a frame, roughly
_CHUNK: Final = 1024 * 1024  # bytes to disk at a time
_BYTES_PER_CALLBACK: Final = (
    256 * 1024
)  # bytes of frames for which one answer is enough; a slow link is to be seen to move


# what `connect` raises. SettingsError, a ValueError: the file of the password cannot be read, as where no descriptor is
# free. RuntimeError: no thread can be started
_CONNECT_ERRORS: Final = (FramesProducerError, OSError, ValueError, RuntimeError)
# what a producer's send raises, and what reading the spool does
_SEND_ERRORS: Final = (KafkaError, OSError)


class SinkError(RuntimeError):
    """An unusable spool folder."""


class _PendingFrame:
    """A frame in memory, or with the producer, that Kafka has not acknowledged."""

    __slots__ = ("at", "connection", "done", "frame", "number", "size")

    def __init__(self, number: int, connection: bytes, frame: bytes | None, size: int, at: float) -> None:
        self.number = number
        self.connection = connection
        self.frame = frame
        """None: it is in the spool"""
        self.size = size
        self.at = at
        self.done = False


_Outgoing = tuple[_PendingFrame, bytes]  # the frame once more: the spool may take it out of the item meanwhile


class FrameSink:
    """Takes frames for one Kafka topic; thread-safe. The sink works from its construction to `close`."""

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
        """SinkError: the folder cannot be used.

        `connect`: a new producer, or FramesProducerError; called in a thread of the sink. `spool_limit`,
        `memory_limit`, `portion` (handed to the producer at a time): bytes. `spool_after`: seconds without an answer
        until frames go to disk. `segment_bytes`: size of the spool's files, removed one by one. `durable`:
        what is in the spool survives a power cut. `floor`: how many bytes of the disk must stay free; with fewer the
        sink is full, until a quarter more than that is free. `free`: how many are, by default of the folder's disk. It
        may raise OSError.
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
            raise SinkError(f"the folder {folder} cannot hold a spool: {error}") from error

        lock = threading.Lock()
        self._lock = lock
        self._to_send = threading.Condition(lock)
        self._to_keep = threading.Condition(lock)
        self._settled = threading.Condition(lock)

        # The line: acknowledged … _acked … flying … _sent … in the spool … in _waiting … _next
        self._next = self._segments.end
        first = self._segments.first
        self._sent = self._acknowledged_until = self._next if first is None else first
        self._in_flight: deque[_PendingFrame] = deque()
        self._waiting: deque[_PendingFrame] = deque()  # all in memory; its last one has number _next - 1
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
        self._disk_is_low = False  # fewer bytes are free than the floor
        self._failure: BaseException | None = None
        self._producer: StoppableProducer | None = None
        self._sender_waits = False
        self._keeper_called = False
        self._closing = False
        self._ended = False
        self._listeners: list[Callable[[], None]] = []

        self._keeper = threading.Thread(target=self._run_spool, name="spool", daemon=True)
        self._sender = threading.Thread(target=self._run_sender, name="frames", daemon=True)
        self._keeper.start()
        self._sender.start()

    # ------------------------------------------------------------ for callers

    def put(self, connection: bytes, frame: bytes) -> None:
        """Take one serialized Frame; `connection`: its key, 16 bytes.

        Never waits for Kafka or disk, and takes it also when `full`: what is under way then stays in memory, so stop
        reading. ValueError: a frame over MAX_FRAME, a key of another length, or the sink is closed.
        """
        size = len(frame)
        if size > MAX_FRAME or len(connection) != CONNECTION_BYTES:
            raise ValueError(f"frame of {size} bytes (at most {MAX_FRAME}) with a key of {len(connection)} (not 16)")
        at = self._clock()
        with self._lock:
            if self._closing:
                raise ValueError("the sink is closed: it takes no more frames")
            self._waiting.append(_PendingFrame(self._next, connection, frame, size, at))
            self._next += 1
            self._put_count += 1
            self._memory += size + _OVERHEAD
            if self._sender_waits and not self._in_flight:
                self._sender_waits = False
                self._to_send.notify()
            if self._memory > self._memory_limit and not self._keeper_called:
                self._keeper_called = True
                self._to_keep.notify()

    @property
    def full(self) -> bool:
        """True if frames fit only into memory: stop reading from peers until `subscribe`'s callback."""
        return self._full

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in a thread of the sink, each time there is room again. It must not wait."""
        with self._lock:
            self._listeners.append(callback)

    @property
    def error(self) -> str | None:
        """A description of what fails now, if anything."""
        with self._lock:
            return self._describe_error()

    def status(self) -> SpoolStatus:
        """All counters at once."""
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
        """Wait up to `patience` seconds for Kafka (not if it is away), put the rest into the spool, end.

        Returns how many frames are lost because the spool was full; the others are sent on the next start.
        """
        with self._lock:
            self._closing = True
            deadline = self._clock() + patience
            while self._acknowledged_until < self._next and self._describe_kafka_error() is None:
                remaining = deadline - self._clock()
                if remaining <= 0:
                    break
                self._settled.wait(min(remaining, TICK))
            self._ended = True
            self._to_send.notify_all()
            self._to_keep.notify_all()
        self._keeper.join()
        self._sender.join(timeout=2)  # it may be trying to connect; it is a daemon
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
                self._fail(producer, error)
            with self._lock:
                self._producer = None
                failure = self._failure
            producer.close(2)
            with self._lock:
                self._rewind()
            if failure is not None:
                self._record_error(failure)

    def _send_batch(self, producer: StoppableProducer, batch: list[_Outgoing]) -> None:
        """All of `_REFUSED`."""
        failed = partial(self._fail, producer)
        lasts: dict[bytes, tuple[SendFuture, list[_PendingFrame]]] = {}
        unasked = 0
        for item, frame in batch:
            record = producer.send(self._topic, value=frame, key=item.connection)
            record.add_errback(failed)
            last = lasts.get(item.connection)
            items = last[1] if last is not None else []
            items.append(item)
            lasts[item.connection] = (record, items)
            unasked += item.size
            if unasked >= _BYTES_PER_CALLBACK:
                self._add_callbacks(producer, lasts)
                lasts, unasked = {}, 0
        self._add_callbacks(producer, lasts)

    def _add_callbacks(
        self, producer: StoppableProducer, lasts: dict[bytes, tuple[SendFuture, list[_PendingFrame]]]
    ) -> None:
        """By connection: its last frame, and all that an answer to that one answers. The frames of a connection are
        answered in order, and a failure among them is told before it."""
        for record, items in lasts.values():
            record.add_callback(partial(self._acknowledge, producer, items))

    def _next_batch(self) -> list[_Outgoing]:
        """The next portion, now flying; empty: this producer is done with. OSError: the spool cannot be read.

        No portion flies beside another: where librdkafka has records that wait for the answer to a request, its thread
        polls without a pause until the answer comes.
        """
        while True:
            with self._lock:
                while not self._ended and self._failure is None:
                    if self._sent < self._next and not self._in_flight:
                        break
                    self._sender_waits = True
                    self._to_send.wait()
                    self._sender_waits = False
                else:
                    return []
                in_memory = self._next - len(self._waiting)
                if self._sent >= in_memory or not self._segments.has(self._sent):
                    self._sent = in_memory  # over what cannot be read back, if that was next
                    self._acknowledged_until = self._sent
                    if not self._waiting:
                        continue
                    gathers = self._waiting[0].at + LINGER - self._clock()
                    if gathers <= 0:
                        return self._next_from_memory()
                    self._to_send.wait(gathers)
                    continue
                number = self._sent
            kept = self._segments.read(number, self._portion)
            now = self._clock()
            with self._lock:
                in_memory = self._next - len(self._waiting)
                batch: list[_Outgoing] = []
                for each in kept:
                    if each.number >= in_memory:
                        break  # just written, and not yet taken out of memory
                    item = _PendingFrame(each.number, each.connection, None, len(each.frame), now)
                    self._in_flight.append(item)
                    self._sent = item.number + 1
                    batch.append((item, each.frame))
            if batch:
                return batch

    def _next_from_memory(self) -> list[_Outgoing]:
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
        """In the producer's thread. Of a producer that failed or was given up it changes nothing: what it has sent goes
        again."""
        with self._lock:
            if self._producer is not producer or self._failure is not None:
                return
            for item in items:
                item.done = True
            in_flight = self._in_flight
            if not in_flight or not in_flight[0].done:
                return  # another partition's answer
            while in_flight and in_flight[0].done:
                head = in_flight.popleft()
                self._acknowledged += 1
                if head.frame is not None:
                    self._memory -= head.size + _OVERHEAD
            self._acknowledged_until = in_flight[0].number if in_flight else self._sent
            self._progress_at = self._clock()
            self._kafka_error = None
            if self._sender_waits and self._sent < self._next and not in_flight:
                self._sender_waits = False
                self._to_send.notify()
            if self._closing and self._acknowledged_until == self._next:
                self._settled.notify_all()

    def _fail(self, producer: StoppableProducer, error: BaseException) -> None:
        """A frame was refused: this producer must send nothing that comes after it."""
        with self._lock:
            if self._producer is not producer or self._failure is not None:
                return
            self._failure = error
            self._to_send.notify_all()
        producer.abandon()

    def _rewind(self) -> None:
        """All frames that are not acknowledged are to be sent again."""
        if not self._in_flight:
            return
        self._sent = self._in_flight[0].number
        for item in reversed(self._in_flight):
            if item.frame is not None:  # the newest ones; the others are in the spool
                item.done = False
                self._waiting.appendleft(item)
        self._in_flight.clear()

    def _record_error(self, error: BaseException) -> None:
        """Note it, and wait before the next try."""
        with self._lock:
            self._kafka_error = f"frames wait for Kafka, topic {self._topic}: {error!r}"
            self._settled.notify_all()
            until = self._clock() + self._retry_after
            while not self._ended and (remaining := until - self._clock()) > 0:
                self._to_send.wait(remaining)

    # ------------------------------------------------------------ the spool

    def _run_spool(self) -> None:
        ended = False
        while not ended:
            with self._lock:
                if not self._ended:
                    self._to_keep.wait(TICK)
                ended = self._ended
                self._keeper_called = False
                acked = self._acknowledged_until
            try:
                self._check_free_space()
                self._segments.release(acked)
                while self._spill(ended):
                    pass
            except OSError as error:
                self._record_disk_error(error)
            self._notify_room()

    def _check_free_space(self) -> None:
        """OSError: the disk does not say."""
        free = self._free()
        with self._lock:
            self._free_bytes = free
            self._disk_is_low = free < (self._floor + self._floor // 4 if self._disk_is_low else self._floor)
            if self._disk_is_low:
                self._full = True

    def _spill(self, ended: bool) -> bool:
        """Write what must go to disk, a chunk of it; whether the chunk was full, so that there is more. OSError."""
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
            return True  # older ones are in the spool
        oldest = self._in_flight[0].at if self._in_flight else self._waiting[0].at if self._waiting else None
        return oldest is not None and self._clock() - oldest > self._spool_after

    def _list_unspooled(self) -> tuple[int, list[tuple[bytes, bytes]], int]:
        """(number of the first, frames, their bytes) that are in memory only, oldest first: up to a chunk of them."""
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
            what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "the spool cannot be used"
            self._disk_error = f"{what}: {error}"
            self._full = True

    def _notify_room(self) -> None:
        with self._lock:
            room = self._segments.size <= self._spool_limit * 3 // 4 and self._memory <= self._memory_limit
            if not self._full or not room or self._disk_is_low or self._disk_error is not None:
                return
            self._full = False
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    # ------------------------------------------------------------ in words

    def _describe_kafka_error(self) -> str | None:
        if self._kafka_error is not None:
            return self._kafka_error
        if not self._in_flight:
            return None
        silent = self._clock() - max(self._progress_at, self._in_flight[0].at)
        if silent <= self._spool_after:
            return None
        return f"frames wait for Kafka, topic {self._topic}: no answer for {silent:.0f} s"

    def _describe_error(self) -> str | None:
        full = f"the spool is full ({self._spool_limit} bytes): nothing is read from peers" if self._full else None
        if self._disk_is_low:
            full = (
                f"{self._free_bytes} bytes are free on the disk of {self._folder}, and {self._floor} must stay free "
                "(bridge.min_free_bytes): nothing is read from peers until there is room"
            )
        threads = [each.name for each in (self._sender, self._keeper) if not each.is_alive() and not self._ended]
        fault = f"the thread {threads[0]} has ended by a fault" if threads else None
        texts = (fault, self._describe_kafka_error(), self._disk_error or full, self._segments.torn)
        return "; ".join(text for text in texts if text is not None) or None
