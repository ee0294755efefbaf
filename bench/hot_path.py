"""CPU time to decode a message in Python, and of the steps of decoding. One core, without Spark and broker."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from bench.frames import generated, live_options
from bench.report import Aim, Finding, Ratio
from bench.runs import BenchError, Extent, Say, Side, in_turn
from kiln.pipelines.decode.decoder import DecodeConfig, FrameDecoder
from kiln.schemas.kafka.frames import list_messages
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import check
from kiln.schemas.wire.pubsub import read_message
from kiln.schemas.wire.topic_table import BundleSet, negotiate_table, resolve_topic, write_hello

FRAMES = 20_000
AIM = Aim(most=1.05)
_ED25519 = b"\x00\x24\x08\x01"  # prefix of a peer id with an Ed25519 key (libp2p specs, peer-ids/peer-ids.md)

Published = Sequence[tuple[Frame, Sequence[Message]]]


def measure(extent: Extent, say: Say) -> Finding:
    """Measure the decoder with frames as a live bridge writes them, and with topics by index instead of name."""
    say("making frames")
    frames = list(with_messages(value for _, value in generated(extent.of(FRAMES, least=100), live_options())))
    bundles = BundleSet({"all": {message.topic for frame in frames for message in messages(frame)}})
    named, indexed = [agreed(frame, bundles) for frame in frames], [by_index(frame, bundles) for frame in frames]
    judged = [copied(frame, verdicts=b"") for frame in named]
    by_name, by_number = published(named), published(indexed)
    every = [message for _, messages in by_name for message in messages]
    signed = [message for message in every if getattr(message, "from").startswith(_ED25519)]
    how, count = DecodeConfig(bundles=bundles), len(every)
    sides: dict[str, Side] = {
        "decode": _timed(partial(_decode_all, serialized(named), how), count),
        "decode, topic by index": _timed(partial(_decode_all, serialized(indexed), how), count),
        "decode, signature judged": _timed(partial(_decode_all, serialized(judged), how), count),
        "topic by name": _timed(partial(_resolve_all, by_name, bundles), count),
        "topic by index": _timed(partial(_resolve_all, by_number, bundles), count),
        "read_message": _timed(partial(_read_all, [message.data for message in every]), count),
        "judge, ed25519": _timed(partial(_judge_all, signed), len(signed)),
    }
    say("warming up")
    for side in sides.values():
        side(0)
    series = {one_series.name: one_series for one_series in in_turn(sides, extent.runs, "µs/message", say)}
    return Finding(
        "hot-path",
        "per message, on one core",
        tuple(series.values()),
        (Ratio("decode, index over name", series["decode, topic by index"], series["decode"], AIM),),
        {
            "messages": count,
            "RPC bytes a message, by name": round(sum(len(frame.payload) for frame in named) / count, 1),
            "by index": round(sum(len(frame.payload) for frame in indexed) / count, 1),
        },
    )


# ---------------------------------------------------------------- frames


def messages(frame: Frame) -> Sequence[Message]:
    """Return the messages of a frame; none if the frame as a whole is rejected."""
    rpc_messages = list_messages(frame)
    return () if isinstance(rpc_messages, Rejected) else rpc_messages


def with_messages(values: Iterable[bytes]) -> Iterator[Frame]:
    for value in values:
        frame = Frame.FromString(value)
        if frame.direction == Frame.IN and messages(frame):
            yield frame


def copied(frame: Frame, *, verdicts: bytes) -> Frame:
    """Copy a frame with other verdicts."""
    copy = Frame()
    copy.CopyFrom(frame)
    copy.verdicts = verdicts
    return copy


def agreed(frame: Frame, bundles: BundleSet) -> Frame:
    """Copy a frame, and let the hellos of both peers offer all of `bundles`."""
    copy = copied(frame, verdicts=frame.verdicts)
    copy.hello_in = copy.hello_out = write_hello(bundles)
    return copy


def by_index(frame: Frame, bundles: BundleSet) -> Frame:
    """Copy a frame as `agreed` does, and replace topic names by indexes.

    Raises:
        BenchError: A topic is in no bundle.
    """
    copy = agreed(frame, bundles)
    table = negotiate_table(copy.hello_in, copy.hello_out, bundles).table
    rpc = RPC.FromString(copy.payload)
    for message in rpc.publish:
        index = table.find_index(message.topic)
        if index is None:
            raise BenchError(f"no bundle contains the topic {message.topic!r}")
        message.ClearField("topic")
        message.topicIndex = index
    copy.payload = rpc.SerializeToString()
    return copy


def published(frames: Iterable[Frame]) -> Published:
    """Return each frame with its messages."""
    return [(frame, messages(frame)) for frame in frames]


def serialized(frames: Iterable[Frame]) -> list[bytes]:
    return [frame.SerializeToString() for frame in frames]


# ---------------------------------------------------------------- what is timed


def _timed(work: Callable[[], None], count: int) -> Side:
    def side(run: int) -> float:
        gc.collect()  # garbage of an earlier side must not count for this side
        started = time.process_time()
        work()
        return 1e6 * (time.process_time() - started) / count

    return side


def _decode_all(values: Sequence[bytes], how: DecodeConfig) -> None:
    decoder = FrameDecoder(how)
    for offset, value in enumerate(values):
        deque(decoder.decode(value, 0, offset, 0), maxlen=0)


def _resolve_all(frames: Published, bundles: BundleSet) -> None:
    for frame, messages in frames:
        table = negotiate_table(frame.hello_in, frame.hello_out, bundles).table
        for message in messages:
            resolve_topic(message, table)


def _read_all(data: Sequence[bytes]) -> None:
    for payload in data:
        read_message(payload)


def _judge_all(messages: Sequence[Message]) -> None:
    for message in messages:
        check(message, "strict")
