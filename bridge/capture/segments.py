"""The spool's files: numbered frames in segments, appended at one end and removed at the other.

Layout of `<number of its first frame, 20 digits>.spool`: the 8 bytes MAGIC, then for each frame u32 BE length of the
frame, u32 BE crc32 of connection and frame, the connection (16 bytes), the frame. Only one process writes a segment:
the next process starts a new one, so a record that a crash cut off is at a segment's end, where reading stops and
counts it.

Written frames survive the end of the process, however it ends. They survive a power cut if the segments are `durable`:
then `append` returns after fsync.
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
DAMAGED_SUFFIX: Final = ".damaged"  # of a segment with a wrong checksum, which is renamed, not removed

_HEAD: Final = struct.Struct(">II")
_MAX_FRAME: Final = 64 * 1024 * 1024  # a greater length means a damaged record


class SpooledFrame(NamedTuple):
    """A frame in the spool and its number."""

    number: int
    connection: bytes
    frame: bytes


def encode_record(connection: bytes, frame: bytes) -> bytes:
    """Encode a record; `connection` has 16 bytes."""
    return _HEAD.pack(len(frame), crc32(frame, crc32(connection))) + connection + frame


def decode_records(stream: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Yield (connection, frame) of the records up to the first damaged one, or to the end.

    The stream is then positioned after the last good record.
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
    """A segment file. `end` is the number after its last good record."""

    def __init__(self, path: Path, first: int, end: int, size: int) -> None:
        self.path = path
        self.first = first
        self.end = end
        self.size = size
        self.damaged = False


class Segments:
    """The segments of one folder.

    One thread appends and releases, and one reads; the properties may be used in any thread. Numbers rise, with gaps
    where frames were not spooled. Two processes must not use a folder at the same time.
    """

    def __init__(self, folder: Path, limit: int, segment_bytes: int | None = None, *, durable: bool = False) -> None:
        """Open the folder with its segments, or create it.

        Args:
            limit: Bytes of all segments together.
            segment_bytes: Size of a segment.
            durable: If true, written frames survive a power cut.

        Raises:
            OSError: The folder cannot be used.
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
        self._active: int | None = None  # file descriptor of the last segment, if this process wrote it
        self._reader: BinaryIO | None = None
        self._reading: _Segment | None = None
        self._position = 0  # number of the record that the reader is at
        self.torn_bytes = 0
        """Bytes that could not be read back."""
        self.loss: str | None = None
        """Description of the last damage: file, position, lost bytes."""
        self._load_folder()

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            return sum(segment.size for segment in self._segments)

    @property
    def first(self) -> int | None:
        """Number of the first frame; `None` if there is none."""
        with self._lock:
            return self._segments[0].first if self._segments else None

    @property
    def end(self) -> int:
        """The number after the last frame; 0 if there is none."""
        with self._lock:
            return self._segments[-1].end if self._segments else 0

    def has(self, number: int) -> bool:
        """True if there are frames to read from this number on."""
        with self._lock:
            return any(segment.end > number for segment in self._segments)

    def append(self, first: int, frames: Sequence[tuple[bytes, bytes]]) -> int:
        """Write (connection, frame) pairs as numbers `first`, `first` + 1, …

        Returns:
            The number of frames that had room.

        Raises:
            OSError: No frame could be written.
        """
        written = 0
        while written < len(frames):
            try:
                count = self._append_to_segment(first + written, frames[written:])
            except OSError:
                if written:
                    return written
                raise
            if not count:
                break
            written += count
        return written

    def _append_to_segment(self, first: int, frames: Sequence[tuple[bytes, bytes]]) -> int:
        room = self._limit - self.size
        records: list[bytes] = []
        total = len(MAGIC)  # a new segment may be needed
        for connection, frame in frames:
            record = encode_record(connection, frame)
            if total + len(record) > room or (records and total + len(record) > self._segment_bytes):
                break
            total += len(record)
            records.append(record)
        if not records:
            return 0
        data = b"".join(records)
        segment = self._open_segment(first, len(data))
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
        """Read frames from `number` on, at least one if there is any. They may start at a later number.

        A segment's bytes from a damaged record on are skipped and counted.

        Raises:
            OSError: A segment cannot be read.
        """
        while True:
            segment = self._find_segment(number)
            if segment is None:
                return []
            number = max(number, segment.first)
            end = segment.end  # later bytes may be half written
            frames: list[SpooledFrame] = []
            size = 0
            for connection, frame in self._read_records(segment, number):
                frames.append(SpooledFrame(self._position, connection, frame))
                self._position += 1
                size += len(frame)
                if self._position >= end or size >= max_bytes:
                    return frames
            self._end_segment(segment)
            if frames:
                return frames

    def release(self, number: int) -> None:
        """Remove the segments that contain only frames below this number.

        Raises:
            OSError: A segment cannot be removed.
        """
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
            if end < 0:  # the last segment's end does not follow from the name of a next one
                self._count_frames(segment)
            if segment.end > segment.first:
                self._segments.append(segment)
            else:
                _remove(segment)

    def _count_frames(self, segment: _Segment) -> None:
        good = position = 0
        with segment.path.open("rb") as stream:
            if stream.read(len(MAGIC)) == MAGIC:
                good = sum(1 for _ in decode_records(stream))
                position = stream.tell()
        segment.end = segment.first + good
        if position < segment.size or not segment.size:
            self._report_damage(segment, position)

    def _open_segment(self, first: int, size: int) -> _Segment:
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
        """Truncate the segment after a failed write, and never write to it again."""
        assert self._active is not None
        # bytes that cannot be truncated are after the segment's end, where nothing reads
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

    def _read_records(self, segment: _Segment, number: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield the records of a segment from `number` on; the reader stays after the last one."""
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
                if next(decode_records(self._reader), None) is None:
                    return
                self._position += 1
        yield from decode_records(self._reader)

    def _end_segment(self, segment: _Segment) -> None:
        """Set a segment's end to the reader's position: no good record is left before the expected end."""
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
            self.loss = (
                f"spool: {segment.path} is damaged at byte {position}; its last {lost} bytes cannot be sent. Check the "
                f"disk; the file will be renamed to *{DAMAGED_SUFFIX}"
            )
        elif not segment.size:
            self.loss = f"spool: {segment.path} is empty, as after a power cut; its frames are lost"
        else:
            self.loss = f"spool: {segment.path} ends in {lost} bytes of an incomplete frame, which is lost"


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(file, view)
        if not written:
            raise OSError(errno.EIO, "the write stored no bytes")
        view = view[written:]


def _remove(segment: _Segment) -> None:
    if segment.damaged:
        # a name with a time, since numbers start again once the spool is empty
        segment.path.rename(segment.path.with_suffix(f".{segment.path.stat().st_mtime_ns}{DAMAGED_SUFFIX}"))
    else:
        segment.path.unlink(missing_ok=True)
