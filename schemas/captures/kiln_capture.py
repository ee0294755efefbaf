"""Kiln's own capture files, into the Frames that `kiln replay` sends (docs/design/contracts.md, Capture file).

A capture knows pairs of peers, not connections. Connection n of a pair is its n-th inbound with its n-th outbound
hello: a hello is the first RPC of a direction, and a later one that no peer sends twice on a stream: it carries
control.extensions (gossipsub v1.3: in the first message only), or subscribes to a topic that this peer is already
subscribed to.

Every frame carries both hellos of its connection, also the frames before the later one of the two. So a file is read
twice: `survey_capture` finds the connections, `build_frames` makes the frames.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final, Literal, NamedTuple

from kiln.schemas.captures.capture_file import CaptureError, CaptureRecord, read_capture
from kiln.schemas.captures.items import FILE_DAMAGED, FileSource, Item, UnreadableItem
from kiln.schemas.captures.lines import WHOLE, FileRange, open_decompressed
from kiln.schemas.kafka.frames import CUT_PAYLOAD, MAX_NETWORK, MAX_RPC, read_rpc
from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.proto.kiln import frame_pb2
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.topic_table import find_hello
from kiln.schemas.wire.topics import parse_topic

NAME: Final = "kiln-capture"

MAX_HELD: Final = 256 * 1024 * 1024
"""Bytes that a reader holds of the connections and subscriptions of one capture. A few kilobytes of gzip can name
millions of them."""
_STREAM_BYTES: Final = 1000  # of one direction of a connection, about, beside its peer ids
_TOPIC_BYTES: Final = 100  # of a subscription, about
_MAX_NETWORKS: Final = 10_000  # that are counted

_Lane = tuple[bytes, bytes, Literal["R", "S"]]  # local peer, remote peer, direction


class ConnectionStream(NamedTuple):
    """One direction of one connection, as surveyed."""

    hello: bytes
    """ExtTopicTable bytes of its hello; empty if none or refused"""
    records: int
    last_at: int
    """unix nanoseconds of its last record"""


class CaptureSurvey(NamedTuple):
    """Survey of a whole capture, made in the first pass for the second."""

    streams: dict[tuple[_Lane, int], ConnectionStream]
    """by lane and number of the connection, from 1"""
    networks: Counter[str]
    """how often each Ceramic network is named in a topic"""
    records: int
    size: int
    """bytes of all RPCs"""

    def network(self, fallback: str) -> str:
        """The Ceramic network named most often (of equals the first in the alphabet), else the fallback."""
        return min(self.networks, key=lambda name: (-self.networks[name], name), default=fallback)


class _Lanes:
    """Numbers the streams of each pair and direction, by their hellos.

    Both passes see the same records, so the same numbers.
    """

    def __init__(self) -> None:
        self._subscribed: dict[_Lane, set[int]] = {}
        self._number: dict[_Lane, int] = {}
        self._held = 0

    def place(self, record: CaptureRecord, rpc: rpc_pb2.RPC | None) -> tuple[_Lane, int, bool]:
        """(lane, number of the connection, whether this RPC is its hello).

        An RPC that does not parse is one only if first. CaptureError: the capture names more than MAX_HELD.
        """
        lane = (record.local, record.remote, record.direction)
        hello = lane not in self._number or (rpc is not None and self._is_again(lane, rpc))
        if hello:
            self._number[lane] = self._number.get(lane, 0) + 1
            gone = self._subscribed.get(lane, ())
            self._subscribed[lane] = set()
            self._hold(_STREAM_BYTES + len(record.local) + len(record.remote) - _TOPIC_BYTES * len(gone))
        if rpc is not None:
            topics = self._subscribed[lane]
            before = len(topics)
            for option in rpc.subscriptions:
                if option.subscribe:
                    topics.add(_hash_topic(option))
                else:
                    topics.discard(_hash_topic(option))
            self._hold(_TOPIC_BYTES * (len(topics) - before))
        return lane, self._number[lane], hello

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > MAX_HELD:
            raise CaptureError(
                f"the capture names more connections and subscriptions than {MAX_HELD >> 20} MiB hold. Cut it in two"
            )

    def _is_again(self, lane: _Lane, rpc: rpc_pb2.RPC) -> bool:
        if rpc.control.HasField("extensions"):
            return True
        topics = self._subscribed[lane]
        return any(option.subscribe and _hash_topic(option) in topics for option in rpc.subscriptions)


def _hash_topic(option: rpc_pb2.RPC.SubOpts) -> int:
    """Hash a topic, whose name can be long."""
    return hash(option.topicid) if option.HasField("topicid") else option.topicIndex


def _parse(payload: bytes) -> rpc_pb2.RPC | None:
    if len(payload) > MAX_RPC:  # cut in its frame; 64 MiB of empty messages would take gigabytes as objects
        return None
    rpc = read_rpc(payload)
    return None if isinstance(rpc, Rejected) else rpc


def _count_networks(rpc: rpc_pb2.RPC, networks: Counter[str]) -> None:
    names: list[str | bytes] = [option.topicid for option in rpc.subscriptions if option.HasField("topicid")]
    names += [message.topic for message in rpc.publish if message.HasField("topic")]
    for name in names:
        # upb hands out bytes where a name is not UTF-8
        if isinstance(name, str) and (topic := parse_topic(name)) is not None:
            network = topic.network
            if network in networks or (len(network) <= MAX_NETWORK and len(networks) < _MAX_NETWORKS):
                networks[network] += 1


def survey_capture(records: Iterable[CaptureRecord]) -> CaptureSurvey:
    """First pass: the connections of a capture with their hellos and lengths, and the networks it names."""
    lanes = _Lanes()
    streams: dict[tuple[_Lane, int], ConnectionStream] = {}
    networks: Counter[str] = Counter()
    count = size = 0
    for record in records:
        rpc = _parse(record.rpc)
        lane, number, hello = lanes.place(record, rpc)
        key = (lane, number)
        if hello:
            streams[key] = ConnectionStream(b"" if rpc is None else find_hello(rpc), 1, record.observed_at)
        else:
            stream = streams[key]
            streams[key] = ConnectionStream(stream.hello, stream.records + 1, record.observed_at)
        if rpc is not None:
            _count_networks(rpc, networks)
        count += 1
        size += len(record.rpc)
    return CaptureSurvey(streams, networks, count, size)


def compute_connection_id(capture_sha256: bytes, local: bytes, remote: bytes, number: int) -> bytes:
    """16 bytes: sha256(sha256 of the file as stored ‖ local ‖ remote ‖ number as u32 BE, from 1), the first 16."""
    return hashlib.sha256(capture_sha256 + local + remote + number.to_bytes(4, "big")).digest()[:16]


def build_frames(
    records: Iterable[CaptureRecord], found: CaptureSurvey, capture_sha256: bytes, network: str
) -> Iterator[frame_pb2.Frame]:
    """Second pass: the frames of the surveyed records, in file order.

    After its last record each direction of a connection has a closing frame: empty payload, at the time of that
    record. An RPC over 4 MiB is cut to its first 64 KiB, with its length in declared_length.
    """
    lanes = _Lanes()
    empty = ConnectionStream(b"", 0, 0)
    sequences: Counter[tuple[_Lane, int]] = Counter()
    ids: dict[tuple[bytes, bytes, int], bytes] = {}
    for record in records:
        lane, number, _ = lanes.place(record, _parse(record.rpc))
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
            hello_in=found.streams.get(((local, remote, "R"), number), empty).hello,
            hello_out=found.streams.get(((local, remote, "S"), number), empty).hello,
            sequence=sequences[key],
            origin=frame_pb2.Frame.REPLAY,
        )
        if len(record.rpc) > MAX_RPC:
            frame.payload = record.rpc[:CUT_PAYLOAD]
            frame.declared_length = len(record.rpc)
        yield frame
        if sequences[key] == found.streams[key].records:
            closing = frame_pb2.Frame()
            closing.CopyFrom(frame)
            closing.payload = b""
            closing.declared_length = 0
            closing.sequence += 1
            yield closing


def sniff(first: bytes) -> bool:
    """Return true if the first bytes of a file, unzipped, are those of a capture: length, version 1, 'R' or 'S'."""
    return len(first) > 14 and int.from_bytes(first[:4]) >= 16 and first[4:6] in (b"\x01R", b"\x01S")


def read(file: BinaryIO, source: FileSource, part: FileRange = WHOLE) -> Iterator[Item]:
    """The items of a capture, read twice from the beginning; what comes after damage is one Unread.

    `part` is always WHOLE: a capture is not cut.
    """
    try:
        found = survey_capture(_Records(file))
    except CaptureError as error:
        yield UnreadableItem(1, b"", FILE_DAMAGED, str(error))
        return
    records = _Records(file)
    yield from build_frames(records, found, source.digest, found.network(source.network))
    if records.damage:
        yield UnreadableItem(found.records + 1, b"", FILE_DAMAGED, records.damage)


class _Records:
    """The records of a capture up to its damage, which is a sentence afterwards."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.damage = ""

    def __iter__(self) -> Iterator[CaptureRecord]:
        try:
            yield from read_capture(open_decompressed(self._file))
        except CaptureError as error:
            self.damage = str(error)
