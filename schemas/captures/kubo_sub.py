"""Saved responses of Kubo's RPC `pubsub/sub`: one JSON object a line (NDJSON).

From Kubo 0.11 on, `from` is a peer id, and the other fields are multibase, of which Kubo writes base64url ("u…"):
`{"from":"12D3…","data":"u…","seqno":"u…","topicIDs":["u…"]}`. go-ipfs before wrote base64 of the raw bytes, and the
topic as it is. A line has no time, no signature, and not the peer that passed the message on.

Source: kubo core/commands/pubsub.go, at v0.22.0 and go-ipfs at v0.10.0.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec

from kiln.schemas.captures.items import LINE_MALFORMED, MAX_PEER, FileSource, Item, LoggedMessage
from kiln.schemas.captures.lines import WHOLE, FileRange, read_log
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import PeerIdError, peer_bytes

NAME: Final = "kubo-sub"


class _Line(msgspec.Struct):
    data: str
    author: str = msgspec.field(name="from")
    topics: list[str] = msgspec.field(name="topicIDs")
    seqno: str = ""


_LINES: Final = msgspec.json.Decoder(_Line)


def sniff(line: bytes) -> bool:
    """Return true if a line is one of this format."""
    return isinstance(read_line(line), LoggedMessage)


def read(file: BinaryIO, source: FileSource, part: FileRange = WHOLE) -> Iterator[Item]:
    return read_log(NAME, read_line, file, source, part)


def read_line(line: bytes) -> LoggedMessage | Rejected:
    try:
        said = _LINES.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Rejected(LINE_MALFORMED, f"no line of pubsub/sub: {error}")
    if len(said.topics) != 1:
        return Rejected(LINE_MALFORMED, f"the message has {len(said.topics)} topics, not 1")
    if len(said.author) > 2 * MAX_PEER:
        return Rejected(LINE_MALFORMED, f"`from` has {len(said.author)} characters, which no peer id has")
    try:
        author = peer_bytes(said.author)
    except PeerIdError:
        return _is_old_line(said)
    try:
        topic = _decode_multibase(said.topics[0]).decode()
        return LoggedMessage(topic, _decode_multibase(said.data), author, _decode_multibase(said.seqno), b"", b"", None)
    except ValueError as error:  # of UTF-8 too
        return Rejected(LINE_MALFORMED, f"a field is no multibase in base64url: {error}")


def _is_old_line(said: _Line) -> LoggedMessage | Rejected:
    try:
        author, data, seqno = (base64.b64decode(text, validate=True) for text in (said.author, said.data, said.seqno))
    except ValueError as error:
        return Rejected(LINE_MALFORMED, f"`from` is no peer id, and the fields are no base64: {error}")
    return LoggedMessage(said.topics[0], data, author, seqno, b"", b"", None)


def _decode_multibase(text: str) -> bytes:
    """The bytes of a multibase text in base64url; ValueError: the text is none. An empty text is no bytes."""
    if not text:
        return b""
    if text[0] != "u":
        raise ValueError(f"the prefix is {text[0]!r}, not 'u'")
    try:
        return base64.b64decode(text[1:] + "=" * (-(len(text) - 1) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
