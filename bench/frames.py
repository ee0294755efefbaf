"""Frames to measure with: made once by the traffic generator, then stamped anew until there are enough of them."""

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
    """A world whose frames are as a live bridge writes them: with the verdict on each message."""
    return TrafficOptions(network="local-bench", checked=1.0)


def generated(count: int, options: TrafficOptions) -> list[Keyed]:
    """The first `count` frames of a world."""
    traffic = Traffic(options, _START_NS, _RATE, keep_ledger=False)
    return [(frame.key, frame.value) for frame in islice(traffic.frames(), count)]


def stamped_anew(frames: Sequence[Keyed], count: int) -> Iterator[Keyed]:
    """`count` frames, no two the same: these, and as often as it takes these on new connections, with new messages.

    Sequences stay as they are, since each connection is new; a message gets a new seqno, in all its copies the same.
    No signature is made anew, so the verdicts in the frames must stand for them.
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
    except DecodeError:  # garbage, which is what it is for
        return payload
    if not rpc.publish:
        return payload
    for message in rpc.publish:
        if len(message.seqno) > len(mark):
            message.seqno = bytes(a ^ b for a, b in zip(message.seqno, mark, strict=False)) + message.seqno[len(mark) :]
    return rpc.SerializeToString()


def append(ground: Ground, settings: Settings, frames: Iterable[Keyed]) -> Ends:
    """Writes frames into `kiln.frames` of a plot; where the topic then ends."""
    with ground.producer(settings, "frames") as producer:
        for key, value in frames:
            producer.send_record(key, value)
    return ground.ends(settings, "frames")
