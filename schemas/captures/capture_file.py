"""Capture files `*.rpc.gz`: gossipsub RPCs exactly as they were on the wire (docs/design/contracts.md, Capture file).

Layout, records one after another: u32 BE length of what follows · u8 version = 1 · u8 'R' (received) or 'S' (sent) ·
u64 BE unix nanoseconds · three strings, each u16 BE length and bytes: local peer id, remote peer id (multihash
bytes), negotiated protocol (UTF-8) · the RPC, to the end of the record, without its own length prefix.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple

from kiln.schemas.captures.compression import describe_damage, open_decompressed

VERSION: Final = 1
MAX_RECORD: Final = 64 * 1024 * 1024  # bytes; a longer one is a corrupt length

_LENGTH: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">BcQ")
_SHORT: Final = struct.Struct(">H")
_MAX_TIME: Final = 2**63 - 1  # Frame.observed_at is an int64


class CaptureError(ValueError):
    """The file is no capture, or truncated or corrupt. The text names the record, from 1, and its byte offset."""


class CaptureRecord(NamedTuple):
    direction: Literal["R", "S"]
    observed_at: int
    """unix nanoseconds"""
    local: bytes
    remote: bytes
    protocol: str
    rpc: bytes


def read_capture(stream: BinaryIO) -> Iterator[CaptureRecord]:
    """Read the records of an uncompressed capture, in file order, to the end of the stream.

    Raises:
        CaptureError: A record cannot be read. The records before it were yielded.
    """
    offset = 0
    number = 1
    while prefix := _read(stream, 4, number, offset):
        if len(prefix) < 4:
            raise CaptureError(f"record {number} at byte {offset}: the file ends inside the record's length")
        (length,) = _LENGTH.unpack(prefix)
        if length > MAX_RECORD:
            raise CaptureError(
                f"record {number} at byte {offset}: length {length} is more than {MAX_RECORD}: corrupt file"
            )
        body = _read(stream, length, number, offset)
        if len(body) < length:
            raise CaptureError(f"record {number} at byte {offset}: the file ends after {len(body)} of {length} bytes")
        yield _parse(body, number, offset)
        offset += 4 + length
        number += 1


def write_capture(stream: BinaryIO, records: Iterable[CaptureRecord]) -> int:
    """Write records uncompressed, and return their number. Wrap the stream in gzip for `*.rpc.gz`.

    Raises:
        CaptureError: A record does not fit the format.
    """
    number = 0
    for number, record in enumerate(records, 1):
        strings = (record.local, record.remote, record.protocol.encode())
        if max(map(len, strings)) > 0xFFFF:
            raise CaptureError(f"record {number}: a peer id or protocol is longer than 65535 bytes")
        if not 0 <= record.observed_at <= _MAX_TIME:
            raise CaptureError(f"record {number}: time {record.observed_at} does not fit unix nanoseconds")
        parts = [_HEAD.pack(VERSION, record.direction.encode(), record.observed_at)]
        for string in strings:
            parts += (_SHORT.pack(len(string)), string)
        parts.append(record.rpc)
        body = b"".join(parts)
        if len(body) > MAX_RECORD:
            raise CaptureError(f"record {number}: {len(body)} bytes are more than {MAX_RECORD}")
        stream.write(_LENGTH.pack(len(body)))
        stream.write(body)
    return number


@contextmanager
def open_capture(path: Path) -> Iterator[BinaryIO]:
    """Open a capture file for `read_capture`. Compression is detected by the first bytes, not by the name.

    Raises:
        OSError: The file cannot be opened.
    """
    with path.open("rb") as raw:
        yield open_decompressed(raw)


def _read(stream: BinaryIO, size: int, number: int, offset: int) -> bytes:
    """Read `size` bytes, or fewer at the end. A raw stream may return less than requested at a time."""
    data = b""
    with describe_damage() as damage:
        while len(data) < size and (more := stream.read(size - len(data))):
            data += more
    if damage:
        raise CaptureError(f"record {number} at byte {offset}: the compressed file {damage[0]}")
    return data


def _parse(body: bytes, number: int, offset: int) -> CaptureRecord:
    where = f"record {number} at byte {offset}"
    if len(body) < _HEAD.size:
        raise CaptureError(f"{where}: {len(body)} bytes are too few for a record")
    version, letter, observed_at = _HEAD.unpack_from(body)
    if version != VERSION:
        raise CaptureError(f"{where}: version {version}, only {VERSION} is known")
    if letter == b"R":
        direction: Literal["R", "S"] = "R"
    elif letter == b"S":
        direction = "S"
    else:
        raise CaptureError(f"{where}: direction {letter!r} is neither 'R' nor 'S'")
    if observed_at > _MAX_TIME:
        raise CaptureError(f"{where}: time {observed_at} is beyond the year 2262")
    position = _HEAD.size
    strings: list[bytes] = []
    for _ in range(3):
        start = position + _SHORT.size
        if start > len(body):
            raise CaptureError(f"{where}: it ends inside its peer ids and protocol")
        (length,) = _SHORT.unpack_from(body, position)
        position = start + length
        if position > len(body):
            raise CaptureError(f"{where}: it ends inside its peer ids and protocol")
        strings.append(body[start:position])
    local, remote, protocol = strings
    try:
        name = protocol.decode()
    except UnicodeDecodeError as error:
        raise CaptureError(f"{where}: protocol {protocol!r} is not UTF-8") from error
    return CaptureRecord(direction, observed_at, local, remote, name, body[position:])
