"""Kiln's own capture files `*.rpc.gz`, and their conversion into Frames (docs/design/contracts.md, Capture file).

A capture has gossipsub RPCs exactly as they were on the wire. It is a sequence of records. Layout of a record: u32 BE
length of the rest · u8 version = 1 · u8 'R' (received) or 'S' (sent) · u64 BE nanoseconds since the epoch · three
strings, each with a u16 BE length: local peer id and remote peer id (multihash bytes), negotiated protocol (UTF-8) ·
the RPC without its length prefix, up to the end of the record.

A record names two peers, but no connection, so connections are told apart by their *hellos*, the first RPC of each
direction. Connection n of two peers begins with the n-th received and the n-th sent hello. A later RPC counts as a
hello if peers send such an RPC only at the start of a stream: it has control.extensions (gossipsub v1.3), or subscribes
to a topic to which the peer is subscribed already.

Every Frame contains the topic tables of both hellos, even if it precedes one of them. So a capture is read twice:
`survey_capture` finds the connections and hellos, and `build_frames` builds the Frames.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple

from kiln.schemas.captures.compression import describe_damage, open_decompressed
from kiln.schemas.captures.items import FILE_DAMAGED, FileSource, Item, UnreadableItem
from kiln.schemas.captures.lines import WHOLE, FileRange
from kiln.schemas.kafka.frames import CUT_PAYLOAD, MAX_NETWORK, MAX_RPC, read_rpc
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.proto.kiln import frame_pb2
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.topic_table import find_hello
from kiln.schemas.wire.topics import parse_topic

VERSION: Final = 1
MAX_RECORD: Final = 64 * 1024 * 1024  # bytes; a longer one is a corrupt length

_LENGTH: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">BcQ")
_SHORT: Final = struct.Struct(">H")
_MAX_TIME: Final = 2**63 - 1  # Frame.observed_at is an int64


class CaptureError(ValueError):
    """A file is not a valid capture. The message names the record and its byte offset."""


class CaptureRecord(NamedTuple):
    """An RPC in a capture. Peer ids are multihash bytes."""

    direction: Literal["R", "S"]
    """R: received. S: sent"""
    observed_at: int
    """capture time in ns since the epoch"""
    local: bytes
    remote: bytes
    protocol: str
    rpc: bytes


def read_capture(stream: BinaryIO) -> Iterator[CaptureRecord]:
    """Yield the records of an uncompressed capture, in file order.

    Raises:
        CaptureError: A record cannot be read. All records before it have been yielded.
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
        yield _parse_record(body, number, offset)
        offset += 4 + length
        number += 1


def write_capture(stream: BinaryIO, records: Iterable[CaptureRecord]) -> int:
    """Write records without compression, and return their number. For `*.rpc.gz`, pass a gzip stream.

    Raises:
        CaptureError: A field of a record is too long or too large for the format.
    """
    number = 0
    for number, record in enumerate(records, 1):
        strings = (record.local, record.remote, record.protocol.encode())
        if max(map(len, strings)) > 0xFFFF:
            raise CaptureError(f"record {number}: a peer id or protocol is longer than 65535 bytes")
        if not 0 <= record.observed_at <= _MAX_TIME:
            raise CaptureError(f"record {number}: time {record.observed_at} is not in 0…2^63-1 ns")
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
    """Open a capture file for `read_capture`, decompressed. Its first bytes show the compression.

    Raises:
        OSError: The file cannot be opened.
    """
    with path.open("rb") as raw:
        yield open_decompressed(raw)


def _read(stream: BinaryIO, size: int, number: int, offset: int) -> bytes:
    """Read `size` bytes, or fewer at the end of the stream, even if `stream.read` returns less at a time."""
    data = b""
    with describe_damage() as damage:
        while len(data) < size and (more := stream.read(size - len(data))):
            data += more
    if damage:
        raise CaptureError(f"record {number} at byte {offset}: the compressed file {damage[0]}")
    return data


def _parse_record(body: bytes, number: int, offset: int) -> CaptureRecord:
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
            raise CaptureError(f"{where}: the record ends inside its peer ids and protocol")
        (length,) = _SHORT.unpack_from(body, position)
        position = start + length
        if position > len(body):
            raise CaptureError(f"{where}: the record ends inside its peer ids and protocol")
        strings.append(body[start:position])
    local, remote, protocol = strings
    try:
        name = protocol.decode()
    except UnicodeDecodeError as error:
        raise CaptureError(f"{where}: protocol {protocol!r} is not UTF-8") from error
    return CaptureRecord(direction, observed_at, local, remote, name, body[position:])


NAME: Final = "kiln-capture"

MAX_SURVEY_BYTES: Final = 256 * 1024 * 1024
"""Maximum memory, in bytes, for the connections and subscriptions of a capture. A few kilobytes of gzip can contain
millions of them."""
_STREAM_BYTES: Final = 1000  # estimated memory of one direction of a connection, without its peer ids
_TOPIC_BYTES: Final = 100  # estimated memory of a subscription
_MAX_NETWORKS: Final = 10_000  # maximum number of networks that are counted

_Lane = tuple[bytes, bytes, Literal["R", "S"]]  # local peer, remote peer, direction


class ConnectionStream(NamedTuple):
    """One direction of a connection in a capture."""

    hello: bytes
    """topic table (ExtTopicTable bytes) in the hello; empty if there is none, or an invalid one"""
    records: int
    """number of records"""
    last_at: int
    """time of the last record in ns since the epoch"""


class CaptureSurvey(NamedTuple):
    """Result of the first pass over a capture, which the second pass needs."""

    streams: dict[tuple[_Lane, int], ConnectionStream]
    """streams by lane (peers and direction) and number of the connection, from 1"""
    networks: Counter[str]
    """number of topic names in the capture that belong to each Ceramic network"""
    records: int

    @property
    def connections(self) -> int:
        """Number of connections between all peers."""
        return len({(local, remote, number) for (local, remote, _), number in self.streams})

    def select_network(self, fallback: str) -> str:
        """Return the Ceramic network to which most topic names belong, or `fallback` if no topic is Ceramic's. Ties are
        broken by alphabetical order."""
        return min(self.networks, key=lambda name: (-self.networks[name], name), default=fallback)


class _StreamPosition(NamedTuple):
    """The stream that a record belongs to."""

    lane: _Lane
    number: int
    """number of the connection, from 1"""
    is_hello: bool


class _Lanes:
    """Numbering of the streams of each lane (peers and direction) by their hellos, the same in both passes."""

    def __init__(self) -> None:
        self._subscribed: dict[_Lane, set[int]] = {}
        self._number: dict[_Lane, int] = {}
        self._memory = 0

    def locate(self, record: CaptureRecord, rpc: rpc_pb2.RPC | None) -> _StreamPosition:
        """Find the stream of the next record. An invalid RPC is a hello only if it is the first of its lane.

        Args:
            rpc: The RPC in the record; `None` if it is invalid.

        Raises:
            CaptureError: The connections and subscriptions exceed MAX_SURVEY_BYTES.
        """
        lane = (record.local, record.remote, record.direction)
        is_hello = lane not in self._number or (rpc is not None and self._is_repeated_hello(lane, rpc))
        if is_hello:
            self._number[lane] = self._number.get(lane, 0) + 1
            previous = self._subscribed.get(lane, ())
            self._subscribed[lane] = set()
            self._add_memory(_STREAM_BYTES + len(record.local) + len(record.remote) - _TOPIC_BYTES * len(previous))
        if rpc is not None:
            topics = self._subscribed[lane]
            before = len(topics)
            for option in rpc.subscriptions:
                if option.subscribe:
                    topics.add(_hash_topic(option))
                else:
                    topics.discard(_hash_topic(option))
            self._add_memory(_TOPIC_BYTES * (len(topics) - before))
        return _StreamPosition(lane, self._number[lane], is_hello)

    def _add_memory(self, size: int) -> None:
        self._memory += size
        if self._memory > MAX_SURVEY_BYTES:
            raise CaptureError(
                f"the connections and subscriptions of the capture need more than {MAX_SURVEY_BYTES >> 20} MiB. "
                "Split the file"
            )

    def _is_repeated_hello(self, lane: _Lane, rpc: rpc_pb2.RPC) -> bool:
        if rpc.control.HasField("extensions"):
            return True
        topics = self._subscribed[lane]
        return any(option.subscribe and _hash_topic(option) in topics for option in rpc.subscriptions)


def _hash_topic(option: rpc_pb2.RPC.SubOpts) -> int:
    """Identify a topic by a number, because its name can be long."""
    return hash(option.topicid) if option.HasField("topicid") else option.topicIndex


def _parse(payload: bytes) -> rpc_pb2.RPC | None:
    if (
        len(payload) > MAX_RPC
    ):  # the Frame truncates such an RPC; 64 MiB of empty messages would take gigabytes as objects
        return None
    rpc = read_rpc(payload)
    return None if isinstance(rpc, Rejected) else rpc


def _count_networks(rpc: rpc_pb2.RPC, networks: Counter[str]) -> None:
    names: list[str | bytes] = [option.topicid for option in rpc.subscriptions if option.HasField("topicid")]
    names += [message.topic for message in rpc.publish if message.HasField("topic")]
    for name in names:
        # upb returns bytes for a name that is not UTF-8
        if isinstance(name, str) and (topic := parse_topic(name)) is not None:
            network = topic.network
            if network in networks or (len(network) <= MAX_NETWORK and len(networks) < _MAX_NETWORKS):
                networks[network] += 1


def survey_capture(records: Iterable[CaptureRecord]) -> CaptureSurvey:
    """Run the first pass over a capture: find the connections and their hellos, and count the networks."""
    lanes = _Lanes()
    streams: dict[tuple[_Lane, int], ConnectionStream] = {}
    networks: Counter[str] = Counter()
    count = 0
    for record in records:
        rpc = _parse(record.rpc)
        lane, number, is_hello = lanes.locate(record, rpc)
        key = (lane, number)
        if is_hello:
            streams[key] = ConnectionStream(b"" if rpc is None else find_hello(rpc), 1, record.observed_at)
        else:
            stream = streams[key]
            streams[key] = ConnectionStream(stream.hello, stream.records + 1, record.observed_at)
        if rpc is not None:
            _count_networks(rpc, networks)
        count += 1
    return CaptureSurvey(streams, networks, count)


def compute_connection_id(capture_sha256: bytes, local: bytes, remote: bytes, number: int) -> bytes:
    """Compute the id of a connection in a capture, so that reading a file twice gives equal Frames.

    Args:
        capture_sha256: sha256 of the file as stored.
        local: Local peer id.
        remote: Remote peer id.
        number: Number of the connection between the two peers, from 1.

    Returns:
        The first 16 bytes of sha256(capture_sha256 ‖ local ‖ remote ‖ number as u32 BE).
    """
    return hashlib.sha256(capture_sha256 + local + remote + number.to_bytes(4, "big")).digest()[:16]


def build_frames(
    records: Iterable[CaptureRecord], survey: CaptureSurvey, capture_sha256: bytes, network: str
) -> Iterator[frame_pb2.Frame]:
    """Run the second pass over a capture: build the Frames, in file order.

    The last Frame of each direction of a connection is followed by a closing Frame, with an empty payload and the same
    time. An RPC over 4 MiB is truncated to its first 64 KiB, and its length is in declared_length.

    Args:
        records: All records of the capture, read a second time.
        survey: Result of the first pass.
        capture_sha256: sha256 of the file as stored.
        network: Network of the Frames.
    """
    lanes = _Lanes()
    empty = ConnectionStream(b"", 0, 0)
    sequences: Counter[tuple[_Lane, int]] = Counter()
    ids: dict[tuple[bytes, bytes, int], bytes] = {}
    for record in records:
        lane, number, _ = lanes.locate(record, _parse(record.rpc))
        local, remote, direction = lane
        connection = ids.get((local, remote, number))
        if connection is None:
            connection = ids[local, remote, number] = compute_connection_id(capture_sha256, local, remote, number)
        key = (lane, number)
        sequences[key] += 1
        frame = frame_pb2.Frame(
            network=network,
            connection=connection,
            direction=frame_pb2.Frame.IN if direction == "R" else frame_pb2.Frame.OUT,
            local_peer=local,
            remote_peer=remote,
            protocol=record.protocol,
            observed_at=record.observed_at,
            payload=record.rpc,
            hello_in=survey.streams.get(((local, remote, "R"), number), empty).hello,
            hello_out=survey.streams.get(((local, remote, "S"), number), empty).hello,
            sequence=sequences[key],
            origin=frame_pb2.Frame.REPLAY,
        )
        if len(record.rpc) > MAX_RPC:
            frame.payload = record.rpc[:CUT_PAYLOAD]
            frame.declared_length = len(record.rpc)
        yield frame
        if sequences[key] == survey.streams[key].records:
            closing = frame_pb2.Frame()
            closing.CopyFrom(frame)
            closing.payload = b""
            closing.declared_length = 0
            closing.sequence += 1
            yield closing


def sniff(first: bytes) -> bool:
    """Return true if the first uncompressed bytes of a file are the start of a capture record."""
    return len(first) > 14 and int.from_bytes(first[:4]) >= 16 and first[4:6] in (b"\x01R", b"\x01S")


def read(file: BinaryIO, source: FileSource, part: FileRange = WHOLE) -> Iterator[Item]:
    """Read the items of a capture in two passes. If the file is damaged, the last item is an `UnreadableItem`.

    `part` is always WHOLE, because a capture cannot be split.
    """
    try:
        survey = survey_capture(_Records(file))
    except CaptureError as error:
        yield UnreadableItem(1, b"", FILE_DAMAGED, str(error))
        return
    records = _Records(file)
    yield from build_frames(records, survey, source.digest, survey.select_network(source.network))
    if records.damage:
        yield UnreadableItem(survey.records + 1, b"", FILE_DAMAGED, records.damage)


class _Records:
    """Iterator over the records of a capture until one is damaged. `damage` describes the error; else it is empty."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.damage = ""

    def __iter__(self) -> Iterator[CaptureRecord]:
        try:
            yield from read_capture(open_decompressed(self._file))
        except CaptureError as error:
            self.damage = str(error)
