"""Reader of service logs of js-ceramic, which have a line of logfmt for each message received or published.

`[<date>] service=pubsub peer=… event=received topic=… message.from=… message.seqno=<hex> message.typ=0 …`

Console and log file have the same lines. Since js-ceramic 2.26, the fields of the gossipsub message are
`message.type=signed message.from=… message.sequenceNumber=<decimal> message.topic=…`. Before 2021-04, the fields of
Ceramic's message had the prefix `message.data.`. The log has these fields, not the bytes, so the data is rebuilt from
the fields, in their order, as compact JSON. The bytes may differ from the original.

A `received` line has a message of another node. A `published` line has a message of the node that wrote the log,
without seqno; a backfill takes the seqno from the log of another node that received the message. Both become Frames of
direction IN. Lines of other events and other services have no message.

Source: js-ceramic packages/common/src/loggers.ts and packages/core/src/pubsub/pubsub.ts; npm logfmt 1.x,
lib/stringify.js.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from typing import BinaryIO, Final

from kiln.schemas.captures.items import LINE_MALFORMED, MAX_PEER, NO_MESSAGE, FileSource, Item, LoggedMessage
from kiln.schemas.captures.lines import WHOLE, FileRange, read_log
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.identity import PeerIdError, peer_bytes

NAME: Final = "ceramic-log"

_LINE: Final = re.compile(r"\[([^\]]{1,40})\] service=(\S+)(?: (.*))?", re.DOTALL)
_PAIR: Final = re.compile(r'([^\s=]+)=(?:"((?:[^"\\]|\\.)*)"|([^ "]*))(?: +|$)', re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
# Date.toUTCString of ECMAScript
_DATE: Final = re.compile(r"\w{3}, (\d\d) (\w{3}) (\d{4}) (\d\d):(\d\d):(\d\d) GMT", re.ASCII)
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_NUMBER: Final = re.compile(r"-?(0|[1-9]\d{0,15})", re.ASCII)
_DECIMALS: Final = re.compile(r"\d{1,3}(,\d{1,3})*", re.ASCII)
_SEQUENCE_NUMBER: Final = re.compile(r"\d{1,20}", re.ASCII)
_EMPTY_OBJECT: Final = "[object Object]"
_NUMBERS: Final = frozenset({"typ", "ts"})
_ENVELOPE: Final = frozenset({"from", "seqno", "receivedFrom", "topicIDs", "data", "key", "signature"})
"""Names of the fields of the gossipsub message; all other fields after `message.` belong to Ceramic's message."""
_TYPED_ENVELOPE: Final = _ENVELOPE | {"type", "sequenceNumber", "topic"}
"""Names of the fields of the gossipsub message since js-ceramic 2.26."""

_Pairs = dict[str, str | None]


def sniff(line: bytes) -> bool:
    """Return true if a line is from the log of any js-ceramic service."""
    match = _LINE.fullmatch(line[:4096].decode(errors="replace"))
    return match is not None and _parse_time(match[1]) is not None


def read(file: BinaryIO, source: FileSource, part: FileRange = WHOLE) -> Iterator[Item]:
    return read_log(NAME, read_line, file, source, part)


def read_line(line: bytes) -> LoggedMessage | Rejected:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return Rejected(LINE_MALFORMED, f"not UTF-8: {error.reason} at byte {error.start}")
    match = _LINE.fullmatch(text.rstrip(" "))  # the log file has a space before the line's end
    if match is None:
        return Rejected(LINE_MALFORMED, "not a line of a service: it does not begin with [date] service=…")
    date, service, rest = match.groups()
    if service != "pubsub":
        return Rejected(NO_MESSAGE, f"a line of the service {service[:40]!r}, not pubsub")
    at = _parse_time(date)
    if at is None:
        return Rejected(LINE_MALFORMED, f"{date!r} is not a date")
    pairs = _read_pairs(rest or "")
    if pairs is None:
        return Rejected(LINE_MALFORMED, "not in the form key=value key=value …")
    event = pairs.get("event")
    if event not in ("received", "published"):
        return Rejected(NO_MESSAGE, f"event {str(event)[:40]!r} carries no message")
    try:
        return _parse_message(pairs, event == "published", at)
    except ValueError as error:
        return Rejected(LINE_MALFORMED, str(error))


def _parse_message(pairs: _Pairs, published: bool, at: int) -> LoggedMessage:
    """Build the message of a line from its fields.

    Raises:
        ValueError: The line lacks a required field, or a field cannot be read.
    """
    topic = pairs.get("topic")
    if not topic:
        raise ValueError("the line has no topic")
    node = _parse_peer(pairs, "peer")
    if published:
        return LoggedMessage(topic, _parse_data(pairs, _ENVELOPE), node, b"", node, node, at)
    is_typed = _has_typed_envelope(pairs)
    data = _parse_data(pairs, _TYPED_ENVELOPE if is_typed else _ENVELOPE)
    author, sender = _parse_peer(pairs, "message.from"), _parse_peer(pairs, "message.receivedFrom")
    seqno = _parse_sequence_number(pairs) if is_typed else _parse_seqno(pairs)
    return LoggedMessage(topic, data, author, seqno, node, sender, at)


def _has_typed_envelope(pairs: _Pairs) -> bool:
    """Return true if js-ceramic 2.26 or later wrote the line.

    The fields of the gossipsub message come first. A field of Ceramic's message may have any name, even `type`.
    """
    return next((key for key in pairs if key in ("message.type", "message.from")), "") == "message.type"


def _parse_data(pairs: _Pairs, envelope: frozenset[str]) -> bytes:
    whole = pairs.get("message.data")
    if whole is not None and _DECIMALS.fullmatch(whole):
        return _decode_bytes(whole)  # the exact bytes: a Uint8Array as JavaScript prints it
    before_2021_04 = "message.data.typ" in pairs
    start = "message.data." if before_2021_04 else "message."
    content: dict[str, object] = {}
    for key, value in pairs.items():
        name = key.removeprefix(start)
        head, _, rest = name.partition(".")
        if name == key or value is None or (not before_2021_04 and head in envelope):
            continue  # JSON leaves out fields that are undefined in JavaScript
        if head == "tips" and rest:
            tips = content.setdefault("tips", {})
            if isinstance(tips, dict):
                tips[rest] = value
        elif name == "tips" and value == _EMPTY_OBJECT:
            content["tips"] = {}
        elif name in _NUMBERS and _NUMBER.fullmatch(value):
            content[name] = int(value)
        else:
            content[name] = value
    if "typ" not in content:
        raise ValueError("the line has no message.typ")
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def _parse_seqno(pairs: _Pairs) -> bytes:
    """Parse a seqno in hex, or in decimals, as JavaScript prints a Uint8Array. Any other text gives no seqno."""
    text = pairs.get("message.seqno") or ""
    if "," in text and _DECIMALS.fullmatch(text):
        return _decode_bytes(text)
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _parse_sequence_number(pairs: _Pairs) -> bytes:
    """Parse the seqno in a line of js-ceramic 2.26 or later: the decimal form of 8 bytes, big-endian."""
    text = pairs.get("message.sequenceNumber") or ""
    return int(text).to_bytes(8) if _SEQUENCE_NUMBER.fullmatch(text) and int(text) < 2**64 else b""


def _decode_bytes(decimals: str) -> bytes:
    """Decode bytes written as decimals with commas between them.

    Raises:
        ValueError: A number is over 255.
    """
    return bytes(map(int, decimals.split(",")))


def _parse_peer(pairs: _Pairs, key: str) -> bytes:
    """Parse the peer id in a field. Return b"" if the field is missing or empty.

    Raises:
        ValueError: The value is not a peer id.
    """
    text = pairs.get(key)
    if not text:
        return b""
    if len(text) > 2 * MAX_PEER:
        raise ValueError(f"{key} has {len(text)} characters, which no peer id has")
    try:
        return peer_bytes(text)
    except PeerIdError as error:
        raise ValueError(f"{key}: {error}") from error


def _read_pairs(text: str) -> _Pairs | None:
    """Read the fields of a logfmt line. An empty value becomes `None`. If a key repeats, its last value counts.

    Returns:
        The fields, or `None` if the text is not logfmt.
    """
    pairs: _Pairs = {}
    position = 0
    while position < len(text):
        match = _PAIR.match(text, position)
        if match is None:
            return None
        key, quoted, bare = match.groups()
        pairs[key] = _ESCAPE.sub(r"\1", quoted) if quoted is not None else bare or None
        position = match.end()
    return pairs


@lru_cache(maxsize=1024)
def _parse_time(date: str) -> int | None:
    """Parse a date such as "Thu, 15 Jul 2021 13:24:33 GMT".

    Returns:
        Time in ns since the epoch, or `None` if the text is not a date or is before 1970.
    """
    match = _DATE.fullmatch(date)
    if match is None or match[2] not in _MONTHS:
        return None
    day, year, hour, minute, second = (int(match[group]) for group in (1, 3, 4, 5, 6))
    try:
        moment = datetime(year, _MONTHS.index(match[2]) + 1, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    at = int(moment.timestamp()) * 1_000_000_000
    return at if 0 <= at < 2**63 else None
