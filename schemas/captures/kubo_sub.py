"""Reader of saved responses of Kubo's RPC `pubsub/sub`, which have one JSON object per line.

Since Kubo 0.11, `from` is a peer id, and the other fields are multibase texts in base64url:
`{"from":"12D3…","data":"u…","seqno":"u…","topicIDs":["u…"]}`. Earlier versions (go-ipfs) wrote the topic as plain text,
and the other fields in base64. A line lacks the time, the signature, and the peer that sent the message.

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
    """Return true if a line is a response of Kubo's `pubsub/sub`."""
    return isinstance(read_line(line), LoggedMessage)


def read(file: BinaryIO, source: FileSource, part: FileRange = WHOLE) -> Iterator[Item]:
    return read_log(NAME, read_line, file, source, part)


def read_line(line: bytes) -> LoggedMessage | Rejected:
    try:
        response = _LINES.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Rejected(LINE_MALFORMED, f"not a line of pubsub/sub: {error}")
    if len(response.topics) != 1:
        return Rejected(LINE_MALFORMED, f"the message has {len(response.topics)} topics, not 1")
    if len(response.author) > 2 * MAX_PEER:
        return Rejected(LINE_MALFORMED, f"`from` has {len(response.author)} characters, which no peer id has")
    try:
        author = peer_bytes(response.author)
    except PeerIdError:
        return _parse_old_line(response)
    try:
        topic = _decode_multibase(response.topics[0]).decode()
        return LoggedMessage(
            topic, _decode_multibase(response.data), author, _decode_multibase(response.seqno), b"", b"", None
        )
    except ValueError as error:  # includes UnicodeDecodeError
        return Rejected(LINE_MALFORMED, f"a field is not multibase in base64url: {error}")


def _parse_old_line(response: _Line) -> LoggedMessage | Rejected:
    try:
        author, data, seqno = (
            base64.b64decode(text, validate=True) for text in (response.author, response.data, response.seqno)
        )
    except ValueError as error:
        return Rejected(LINE_MALFORMED, f"`from` is not a peer id, and the fields are not base64: {error}")
    return LoggedMessage(response.topics[0], data, author, seqno, b"", b"", None)


def _decode_multibase(text: str) -> bytes:
    """Decode a multibase text in base64url. An empty text gives no bytes.

    Raises:
        ValueError: The text is not multibase in base64url.
    """
    if not text:
        return b""
    if text[0] != "u":
        raise ValueError(f"the prefix is {text[0]!r}, not 'u'")
    try:
        return base64.b64decode(text[1:] + "=" * (-(len(text) - 1) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
