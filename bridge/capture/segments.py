"""The spool's files: numbered frames in segments, appended at one end and removed at the other.

Layout of `<number of its first frame, 20 digits>.spool`: the 8 bytes MAGIC, then for each frame u32 BE length of the
frame, u32 BE crc32 of connection and frame, the connection (16 bytes), the frame. A segment is written by one process
only: the next one starts a new segment, so a record that a crash cut off stays at a segment's end, where it ends the
reading and is counted.

What is written survives the end of the process, however it ends. It survives a power cut where the segments are
`durable`: then `append` returns when the frames are on the disk.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple
from zlib import crc32

from kiln.conf.process.disk import to_disk
from kiln.schemas.kafka.frames import CONNECTION_BYTES

MAGIC: Final = b"KILNSPL1"
SUFFIX: Final = ".spool"
DAMAGED: Final = ".damaged"  # a segment with a wrong checksum in it is kept under this suffix

_HEAD: Final = struct.Struct(">II")
_MAX_FRAME: Final = 64 * 1024 * 1024  # a length above it is no length


class SpooledFrame(NamedTuple):
    """A frame in the spool and its number."""

    number: int
    connection: bytes
    frame: bytes


def encode(connection: bytes, frame: bytes) -> bytes:
    """One record. `connection`: 16 bytes."""
    return _HEAD.pack(len(frame), crc32(frame, crc32(connection))) + connection + frame


def decode(stream: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """(connection, frame) of the good records from here to the first that is not, or to the end.

    The stream is then behind the last good one.
    """
    while True:
        start = stream.tell()
        head = stream.read(_HEAD.size + CONNECTION_BYTES)
        if len(head) == _HEAD.size + CONNECTION_BYTES:
            length, checksum = _HEAD.unpack_from(head)
            if length <= _MAX_FRAME:
                connection = head[_HEAD.size :]
                frame = stream.read(length)
                if len(frame) == length and crc32(frame, crc32(connection)) == checksum:
                    yield connection, frame
                    continue
        stream.seek(start)
        return


class _Segment:
    """One file. `end` is the number after its last good record."""

    def __init__(self, path: Path, first: int, end: int, size: int) -> None:
        self.path = path
        self.first = first
        self.end = end
        self.size = size
        self.damaged = False


class Segments:
    """The segments of one folder. One thread appends and releases, one reads; any may ask for numbers and sizes.

    Numbers rise, with gaps where frames needed no spool. Two processes must not use a folder at the same time.
    """

    def __init__(self, folder: Path, limit: int, segment_bytes: int | None = None, *, durable: bool = False) -> None:
        """Takes over what is in the folder, which is made if need be. OSError.

        `limit`: bytes of all segments together.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._durable = durable
        if durable:
            to_disk(folder.parent)
        self._folder = folder
        self._limit = limit
        self._segment_bytes = segment_bytes or max(1, min(16 * 1024 * 1024, limit // 8))
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._active: int | None = None  # file descriptor of the last segment, if it is ours
        self._reader: BinaryIO | None = None
        self._reading: _Segment | None = None
        self._position = 0  # number of the record that the reader is at
        self.torn_bytes = 0
        """bytes that could not be read back"""
        self.torn: str | None = None
        """in words: where, and what of it is lost; of the last such place"""
        self._load_folder()

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            return sum(segment.size for segment in self._segments)

    @property
    def first(self) -> int | None:
        """Number of the first frame held; None: there is none."""
        with self._lock:
            return self._segments[0].first if self._segments else None

    @property
    def end(self) -> int:
        """The number after the last frame held; 0 if there is none."""
        with self._lock:
            return self._segments[-1].end if self._segments else 0

    def has(self, number: int) -> bool:
        """Whether there are frames to read from this number on."""
        with self._lock:
            return any(segment.end > number for segment in self._segments)

    def append(self, first: int, frames: Sequence[tuple[bytes, bytes]]) -> int:
        """Write (connection, frame) number `first`, `first` + 1, …; how many had room.

        OSError: none could be written.
        """
        written = 0
        while written < len(frames):
            try:
                more = self._append(first + written, frames[written:])
            except OSError:
                if written:
                    return written
                raise
            if not more:
                break
            written += more
        return written

    def _append(self, first: int, frames: Sequence[tuple[bytes, bytes]]) -> int:
        """As append, into one segment."""
        room = self._limit - self.size
        records: list[bytes] = []
        total = len(MAGIC)  # there may be a new segment
        for connection, frame in frames:
            record = encode(connection, frame)
            if total + len(record) > room or (records and total + len(record) > self._segment_bytes):
                break
            total += len(record)
            records.append(record)
        if not records:
            return 0
        data = b"".join(records)
        segment = self._segment_for(first, len(data))
        assert self._active is not None
        try:
            _write(self._active, data)
            if self._durable:
                os.fsync(self._active)
        except OSError:
            self._drop_tail(segment)
            raise
        with self._lock:
            segment.size += len(data)
            segment.end = first + len(records)
        return len(records)

    def read(self, number: int, max_bytes: int) -> list[SpooledFrame]:
        """Some of the frames from `number` on, at least one if there is any. They may start at a later number.

        A segment's bytes from a bad record on are skipped and counted. OSError.
        """
        while True:
            segment = self._find_segment(number)
            if segment is None:
                return []
            number = max(number, segment.first)
            end = segment.end  # what is behind it may be half written
            found: list[SpooledFrame] = []
            size = 0
            for connection, frame in self._records(segment, number):
                found.append(SpooledFrame(self._position, connection, frame))
                self._position += 1
                size += len(frame)
                if self._position >= end or size >= max_bytes:
                    return found
            self._end_early(segment)
            if found:
                return found

    def release(self, number: int) -> None:
        """Remove the segments that hold only frames below this number. OSError."""
        while True:
            with self._lock:
                if not self._segments or self._segments[0].end > number:
                    return
                segment = self._segments.pop(0)
                last = not self._segments
            if last:
                self._close_active()
            _remove(segment)

    def close(self) -> None:
        """Close the files."""
        self._close_active()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _load_folder(self) -> None:
        paths = sorted(path for path in self._folder.glob("*" + SUFFIX) if path.stem.isdigit())
        firsts = [int(path.stem) for path in paths]
        for path, first, end in zip(paths, firsts, [*firsts, -1][1:], strict=True):
            segment = _Segment(path, first, end, path.stat().st_size)
            if end < 0:  # only the last one does not tell by the next one's name
                self._count_frames(segment)
            if segment.end > segment.first:
                self._segments.append(segment)
            else:
                _remove(segment)

    def _count_frames(self, segment: _Segment) -> None:
        good = position = 0
        with segment.path.open("rb") as stream:
            if stream.read(len(MAGIC)) == MAGIC:
                good = sum(1 for _ in decode(stream))
                position = stream.tell()
        segment.end = segment.first + good
        if position < segment.size or not segment.size:
            self._report_damage(segment, position)

    def _segment_for(self, first: int, size: int) -> _Segment:
        with self._lock:
            segment = self._segments[-1] if self._segments else None
        follows = self._active is not None and segment is not None and segment.end == first
        if follows and segment is not None and segment.size + size <= self._segment_bytes:
            return segment
        self._close_active()
        path = self._folder / f"{first:020}{SUFFIX}"
        self._active = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        segment = _Segment(path, first, first, len(MAGIC))
        try:
            _write(self._active, MAGIC)
            if self._durable:
                to_disk(self._folder)
        except OSError:
            self._close_active()
            with suppress(OSError):
                _remove(segment)
            raise
        with self._lock:
            self._segments.append(segment)
        return segment

    def _drop_tail(self, segment: _Segment) -> None:
        """After a failed write: gives the space back and never writes to this segment again."""
        assert self._active is not None
        # what cannot be cut off is behind the segment's end, where nobody reads
        with suppress(OSError):
            os.truncate(self._active, segment.size)
        self._close_active()
        if segment.end == segment.first:
            with self._lock:
                self._segments.remove(segment)
            with suppress(OSError):
                _remove(segment)

    def _close_active(self) -> None:
        if self._active is not None:
            os.close(self._active)
            self._active = None

    def _find_segment(self, number: int) -> _Segment | None:
        with self._lock:
            return next((segment for segment in self._segments if segment.end > number), None)

    def _records(self, segment: _Segment, number: int) -> Iterator[tuple[bytes, bytes]]:
        """The records of a segment from `number` on; the reader stays where the last one ended."""
        if self._reader is None or self._reading is not segment or self._position != number:
            if self._reader is not None:
                self._reader.close()
            self._reader = segment.path.open("rb")
            self._reading = segment
            self._position = segment.first
            if self._reader.read(len(MAGIC)) != MAGIC:
                self._reader.seek(0)
                return
            while self._position < number:
                if next(decode(self._reader), None) is None:
                    return
                self._position += 1
        yield from decode(self._reader)

    def _end_early(self, segment: _Segment) -> None:
        """No good record is left before the end that was expected."""
        assert self._reader is not None
        segment.end = self._position
        if self._reader.tell() < segment.size or not segment.size:
            self._report_damage(segment, self._reader.tell())

    def _report_damage(self, segment: _Segment, position: int) -> None:
        with segment.path.open("rb") as stream:
            stream.seek(position)
            head = stream.read(_HEAD.size + CONNECTION_BYTES)
        length = _HEAD.unpack_from(head)[0] if len(head) == _HEAD.size + CONNECTION_BYTES else 0
        if position:
            cut_off = length <= _MAX_FRAME and position + _HEAD.size + CONNECTION_BYTES + length > segment.size
        else:
            cut_off = segment.size < len(MAGIC)
        lost = segment.size - position
        self.torn_bytes += lost
        if not cut_off:
            segment.damaged = True
            self.torn = (
                f"spool: {segment.path} is damaged at byte {position}; its last {lost} bytes are not sent; it will be "
                f"kept as *{DAMAGED}"
            )
        elif not segment.size:
            self.torn = f"spool: {segment.path} is empty, as a power cut leaves files; what was in it is lost"
        else:
            self.torn = f"spool: {segment.path} ended in {lost} bytes of a frame that was cut off; it is lost"


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(file, view)
        if not written:
            raise OSError(errno.EIO, "wrote nothing")
        view = view[written:]


def _remove(segment: _Segment) -> None:
    if segment.damaged:
        # numbers start again once the spool was empty
        segment.path.rename(segment.path.with_suffix(f".{segment.path.stat().st_mtime_ns}{DAMAGED}"))
    else:
        segment.path.unlink(missing_ok=True)
