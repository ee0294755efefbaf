"""Files of history for tests: read whole or in parts, and lines as their programs write them."""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections.abc import Iterable
from datetime import UTC, datetime

from kiln.pipelines.decode.decoder import DecodeConfig, DecodedMessage, FrameDecoder, RejectedMessage
from kiln.schemas.captures.formats import FORMATS
from kiln.schemas.captures.items import FileSource, Item, UnreadableItem
from kiln.schemas.captures.lines import WHOLE, FileRange
from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.wire.identity import peer_text

HEARD_AT = 1_700_000_000_000_000_000
SOURCE = FileSource(bytes(range(32)), "local-history", HEARD_AT)


def items(name: str, raw: bytes, part: FileRange = WHOLE, source: FileSource = SOURCE) -> list[Item]:
    """What the reader of a format makes of a file."""
    return list(FORMATS[name].read(io.BytesIO(raw), source, part))


def in_parts(name: str, raw: bytes, size: int) -> list[Item]:
    """The same, read in parts of `size` bytes."""
    return [item for part in FORMATS[name].split(io.BytesIO(raw), size) for item in items(name, raw, part)]


def only_frames(found: Iterable[Item]) -> list[Frame]:
    """The items, all of which must be Frames."""
    frames = list(found)
    assert [item for item in frames if isinstance(item, UnreadableItem)] == []
    return [item for item in frames if isinstance(item, Frame)]


def unread(found: Iterable[Item]) -> list[tuple[int, str]]:
    """Line and reason of what is no Frame."""
    return [(item.line, item.reason) for item in found if isinstance(item, UnreadableItem)]


def message_of(frame: Frame) -> Message:
    """The one message of a Frame."""
    (message,) = RPC.FromString(frame.payload).publish
    return message


def decoded(frame: Frame) -> DecodedMessage | RejectedMessage:
    """What the live decoder makes of a Frame with one message."""
    (found,) = FrameDecoder(DecodeConfig()).decode_frame(frame, 0, frame.sequence)
    return found


def zipped(raw: bytes) -> bytes:
    return gzip.compress(raw, mtime=0)


def multibase(data: bytes) -> str:
    return "u" + base64.urlsafe_b64encode(data).decode().rstrip("=")


def kubo_line(author: bytes, data: bytes, seqno: bytes, topic: str) -> bytes:
    """As Kubo from 0.11 on answers pubsub/sub."""
    line = {
        "from": peer_text(author),
        "data": multibase(data),
        "seqno": multibase(seqno),
        "topicIDs": [multibase(topic.encode())],
    }
    return json.dumps(line, separators=(",", ":")).encode()


def ceramic_line(at: int, pairs: Iterable[tuple[str, str | int | None]]) -> bytes:
    """As js-ceramic logs; `at` in s. npm logfmt 1.x, lib/stringify.js, in Python."""
    date = datetime.fromtimestamp(at, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    text = " ".join(f"{key}={_value(value)}" for key, value in pairs)
    return f"[{date}] service=pubsub {text}".encode()


def _value(value: str | int | None) -> str:
    if value is None:
        return ""
    text = str(value)
    quoted = any(sign in text for sign in ' ="\\')
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if quoted or not text else escaped
