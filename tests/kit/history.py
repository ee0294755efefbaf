"""Log and history files of other programs for tests: readers of whole files or parts, and lines in their formats."""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

import pyarrow as pa

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
    """Read a file, or a part of it, with the reader of the format `name`."""
    return list(FORMATS[name].read(io.BytesIO(raw), source, part))


def in_parts(name: str, raw: bytes, size: int) -> list[Item]:
    """Read a file as `items` does, but in parts of `size` bytes."""
    return [item for part in FORMATS[name].split(io.BytesIO(raw), size) for item in items(name, raw, part)]


def only_frames(found: Iterable[Item]) -> list[Frame]:
    """Return the Frames, and assert that all items are readable."""
    frames = list(found)
    assert [item for item in frames if isinstance(item, UnreadableItem)] == []
    return [item for item in frames if isinstance(item, Frame)]


def unread(found: Iterable[Item]) -> list[tuple[int, str]]:
    """Return line and reason of each unreadable item."""
    return [(item.line, item.reason) for item in found if isinstance(item, UnreadableItem)]


def message_of(frame: Frame) -> Message:
    """Return the message of a Frame that has only one."""
    (message,) = RPC.FromString(frame.payload).publish
    return message


def decoded(frame: Frame) -> DecodedMessage | RejectedMessage:
    """Decode a Frame of one message with the decoder of the live queries."""
    (found,) = FrameDecoder(DecodeConfig()).decode_frame(frame, 0, frame.sequence)
    return found


def zipped(raw: bytes) -> bytes:
    return gzip.compress(raw, mtime=0)


def multibase(data: bytes) -> str:
    return "u" + base64.urlsafe_b64encode(data).decode().rstrip("=")


def kubo_line(author: bytes, data: bytes, seqno: bytes, topic: str) -> bytes:
    """Build a line of the response to `pubsub/sub`, as Kubo 0.11 and later send it."""
    line = {
        "from": peer_text(author),
        "data": multibase(data),
        "seqno": multibase(seqno),
        "topicIDs": [multibase(topic.encode())],
    }
    return json.dumps(line, separators=(",", ":")).encode()


def ceramic_line(at: int, pairs: Iterable[tuple[str, str | int | None]]) -> bytes:
    """Build a log line of js-ceramic at the time `at` in s (npm logfmt 1.x, lib/stringify.js)."""
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


# ---------------------------------------------------------------- files as operators have them

_STAMP = "2021-07-15T13:24:35.123456789Z"
_PIECE = 16 * 1024


def _docker(line: str) -> Iterator[str]:
    """Write a line as Docker's json-file driver does: in pieces of 16 KiB, the last of which has the newline."""
    for start in range(0, len(line) + 1, _PIECE):
        end = "" if start + _PIECE <= len(line) else "\n"
        yield json.dumps({"log": line[start : start + _PIECE] + end, "stream": "stdout", "time": _STAMP})


def _cri(line: str) -> Iterator[str]:
    """Write a line as containerd and CRI-O do, in the same pieces."""
    for start in range(0, len(line) + 1, _PIECE):
        yield f"{_STAMP} stdout {'P' if start + _PIECE <= len(line) else 'F'} {line[start : start + _PIECE]}"


def _each(around: Callable[[str], str]) -> Callable[[bytes], bytes]:
    return lambda raw: "".join(f"{around(line)}\n" for line in raw.decode().splitlines()).encode()


def _pieces(split: Callable[[str], Iterator[str]]) -> Callable[[bytes], bytes]:
    return lambda raw: "".join(f"{each}\n" for line in raw.decode().splitlines() for each in split(line)).encode()


LINE_LAYERS: dict[str, Callable[[bytes], bytes]] = {
    "docker json-file": _pieces(_docker),
    "CRI": _pieces(_cri),
    "docker logs -t": _each(lambda line: f"{_STAMP} {line}"),
    "kubectl --timestamps --prefix": _each(lambda line: f"[pod/ceramic-0/js-ceramic] {_STAMP} {line}"),
    "compose": _each(lambda line: f"ceramic-1  | {line}"),
    "compose in colors, with times": _each(lambda line: f"\x1b[36mceramic-1  | \x1b[0m{_STAMP} {line}"),
    "pm2 logs": _each(lambda line: f"0|ceramic  | {line}"),
    "pm2 --time": _each(lambda line: f"2021-07-15T13:24:35: {line}"),
    "pm2 in JSON": _each(lambda line: json.dumps({"message": f"{line}\n", "timestamp": _STAMP, "type": "out"})),
    "colors": _each(lambda line: f"\x1b[32m{line}\x1b[39m"),
    "blanks": _each(lambda line: f"  \t{line}"),
    "mark": lambda raw: b"\xef\xbb\xbf" + raw,
}
"""Functions from a text file to the file as a log driver or terminal writes it, which Kiln can read."""

_SYSLOG = "Jul 15 13:24:35 node-1 ceramic[812]: "

REFUSED_LAYERS: dict[str, Callable[[bytes], bytes]] = {
    "UTF-16": lambda raw: raw.decode().encode("utf-16"),
    "UTF-16 big-endian without a mark": lambda raw: raw.decode().encode("utf-16-be"),
    "journalctl": _each(lambda line: _SYSLOG + line),
    "journalctl -o short-iso": _each(lambda line: f"2021-07-15T13:24:35+0000 node-1 ceramic[812]: {line}"),
    "journalctl -o short-unix": _each(lambda line: f"1626355475.123456 node-1 ceramic[812]: {line}"),
    "journalctl -o json": _each(lambda line: json.dumps({"MESSAGE": line, "__REALTIME_TIMESTAMP": "1626355475123456"})),
    "syslog": _each(lambda line: f"<30>{_SYSLOG}{line}"),
}
"""Functions from a text file to the file in an encoding or log format that Kiln cannot read."""

PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": zipped,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda raw: bytes(pa.Codec("zstd").compress(raw, asbytes=True)),
}
