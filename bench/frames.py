"""Synthetic frames for measurements. A part is generated, and then repeated with new ids until there are enough."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from google.protobuf.message import DecodeError

from bench.ground import Ends, Ground
from kiln.conf.settings.model import Settings
from kiln.deploy.demo.traffic import Traffic, TrafficOptions
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC
from kiln.schemas.proto.kiln.frame_pb2 import Frame

Keyed = tuple[bytes, bytes]
"""Key (the connection) and value of a record of `kiln.frames`."""

GENERATED = 100_000
_START_NS = 1_735_689_600_000_000_000  # 2025-01-01, so that the frames are the same each time
_RATE = 200.0  # messages a second


def live_options() -> TrafficOptions:
    """Return options for frames as a live bridge writes them, with a verdict on each message."""
    return TrafficOptions(network="local-bench", checked=1.0)


def generated(count: int, options: TrafficOptions) -> list[Keyed]:
    """Generate the first `count` frames of traffic with these options."""
    traffic = Traffic(options, _START_NS, _RATE, keep_ledger=False)
    return [(frame.key, frame.value) for frame in islice(traffic.frames(), count)]


def stamped_anew(frames: Sequence[Keyed], count: int) -> Iterator[Keyed]:
    """Yield `count` distinct frames: first the given ones, then repeats of them with new connections and messages.

    A repeated frame keeps its sequence number, because its connection is new. All copies of a repeated message get the
    same new seqno. Signatures become invalid, so the frames must have verdicts.
    """
    done = 0
    while done < count:
        repeat = done // len(frames)
        block = islice(frames, count - done)
        yield from (_renewed(key, value, repeat) for key, value in block) if repeat else block
        done += len(frames)


def _renewed(key: bytes, value: bytes, repeat: int) -> Keyed:
    frame = Frame.FromString(value)
    mark = repeat.to_bytes(2)
    frame.connection = mark + key[2:]
    frame.payload = _new_messages(frame.payload, mark)
    return frame.connection, frame.SerializeToString()


def _new_messages(payload: bytes, mark: bytes) -> bytes:
    try:
        rpc = RPC.FromString(payload)
    except DecodeError:  # intended garbage
        return payload
    if not rpc.publish:
        return payload
    for message in rpc.publish:
        if len(message.seqno) > len(mark):
            message.seqno = bytes(a ^ b for a, b in zip(message.seqno, mark, strict=False)) + message.seqno[len(mark) :]
    return rpc.SerializeToString()


def append(ground: Ground, settings: Settings, frames: Iterable[Keyed]) -> Ends:
    """Write frames to the topic `frames` in these settings, and return its end offsets."""
    with ground.producer(settings, "frames") as producer:
        for key, value in frames:
            producer.send_record(key, value)
    return ground.ends(settings, "frames")
