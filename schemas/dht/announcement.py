"""The value of an item that announces a batch: CIP-123's BATCH_UPDATE as a bencoded dictionary.

There is no standard for it; this layout is Kiln's::

    batch   CID of the batch, bytes
    n       number of its tips (optional, a hint)
    prev    CIDs of the earlier batches announced under this topic, newest first, concatenated (optional)
    sep     "<key>/<value in base36>", as in BATCH_UPDATE
    ts      time of the announcement, ms since the epoch
    typ     BATCH_UPDATE's number, 3

An item is the *latest* value, not a log: ``prev`` lets a reader find the batches that it missed. With the separator of
a model, 23 CIDs of the usual 36 bytes fit in MAX_ANNOUNCEMENT bytes, or 22 together with ``n``. The salt is the
sha2-256 of the separator's topic name, which CIP-120 already uses as the topic's key in a DHT; a topic name can be
longer than the 64 bytes of a salt.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from msgspec import Struct

from kiln.schemas.dht import bencode
from kiln.schemas.dht.bencode import BencodeError, Value
from kiln.schemas.dht.items import KEY_SIZE, Item, find_exceeded_limit, is_signed, read_item
from kiln.schemas.dht.krpc import KrpcQuery, KrpcResponse, MalformedDatagram, read_message
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.cid import CidError, find_cid_end, is_cid
from kiln.schemas.wire.pubsub import BATCH_UPDATE, BATCH_UPDATE_OTHER
from kiln.schemas.wire.topics import Separator, TopicError, format_separator, format_topic, parse_separator

MAX_ANNOUNCEMENT: Final = 990
"""Largest value written, in bencoded bytes: under BEP 44's 1000, and small enough that a get response which also names
eight nodes is one datagram."""

REASONS: Final = (
    "not_bencoded",  # not one canonical value
    "not_an_announcement",  # not a dictionary, or with another `typ`
    "bad_batch",  # `batch` is not one CID
    "bad_prev",  # `prev` is not concatenated CIDs
    "bad_separator",  # `sep` is not "<key>/<value in base36>"
    "bad_ts",  # `ts` is not a number of ms, 0 to 2^63 - 1
    "bad_n",  # `n` is not a number, 0 to 2^63 - 1
    "wrong_salt",  # the item's salt is not the salt of the separator in `sep`
    # Of a datagram only:
    "not_krpc",  # no message of the DHT
    "no_item",  # a message without a mutable item: `k`, `seq`, `sig` and `v`
    "wrong_topic",  # `c` is not the target of the item's key and salt
    "beyond_limits",  # salt, value or sequence number that no node may store
    "bad_signature",  # not signed by its key under its salt
)


class Announcement(Struct, frozen=True):
    """Announcement of a batch. CIDs are bytes; ``previous`` is newest first."""

    separator: Separator
    batch: bytes
    time_ms: int
    previous: tuple[bytes, ...] = ()
    count: int | None = None


class PublisherKey(NamedTuple):
    """Key of a publisher together with a separator of its batches. Each item of the DHT belongs to one such pair."""

    key: bytes
    separator: Separator


def parse_source(text: str) -> PublisherKey:
    """Parse ``<publisher's public key in hex>/<key>/<value>``.

    Raises:
        ValueError: The text has another form.
    """
    key, _, separator = text.partition("/")
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    if len(raw) != KEY_SIZE or len(key) != 2 * KEY_SIZE:
        raise ValueError(f"{text[:100]!r} does not begin with a public key, {2 * KEY_SIZE} hex digits, and a slash")
    return PublisherKey(raw, parse_separator(separator))


def compute_salt(network: str, separator: Separator) -> bytes:
    """Compute the salt of a separator's items: sha2-256 of its topic name, 32 bytes.

    Raises:
        TopicError: No topic name can have the network or separator.
    """
    return hashlib.sha256(format_topic(network, separator).encode()).digest()


def compute_next_sequence(now_ms: int, last: int | None) -> int:
    """Compute the sequence number of the next item: it rises across restarts and after a clock is set back."""
    return now_ms if last is None else max(now_ms, last + 1)


def write_announcement(announcement: Announcement, typ: int = BATCH_UPDATE) -> bytes:
    """Write the bencoded value, with the newest CIDs of ``previous`` that fit.

    Raises:
        TopicError: The separator is invalid.
        CidError: A CID is invalid.
        ValueError: The separator is so long that the value does not fit even without ``previous``.
    """
    for cid in (announcement.batch, *announcement.previous):
        if not is_cid(cid):
            raise CidError(f"{cid[:40].hex()} is not a CID")
    sep = format_separator(announcement.separator).encode()
    fields: dict[bytes, Value] = {
        b"batch": announcement.batch,
        b"sep": sep,
        b"ts": announcement.time_ms,
        b"typ": typ,
    }
    if announcement.count is not None:
        fields[b"n"] = announcement.count
    value = bencode.encode(fields)
    if len(value) > MAX_ANNOUNCEMENT:
        raise ValueError(f"a separator of {len(sep)} bytes leaves no room to announce a batch")
    for end in range(1, len(announcement.previous) + 1):
        longer = bencode.encode(fields | {b"prev": b"".join(announcement.previous[:end])})
        if len(longer) > MAX_ANNOUNCEMENT:
            break
        value = longer
    return value


def read_announcement(value: bytes, network: str, salt: bytes, typ: int = BATCH_UPDATE) -> Announcement | Rejected:
    """Read the bencoded value of an item that was stored under ``salt``.

    A byte string that contains this dictionary is read too: libtorrent's Python binding and the crate mainline can put
    only byte strings. Unknown keys are ignored.

    Returns:
        The announcement, or a rejection with one of REASONS.

    Raises:
        TopicError: No topic name can have the network.
    """
    announcement = _read_value(value, typ)
    if isinstance(announcement, Rejected):
        return announcement
    claimed = compute_salt(network, announcement.separator)
    if claimed != salt:
        return Rejected("wrong_salt", f"{format_separator(announcement.separator)[:80]} has the salt {claimed.hex()}")
    return announcement


class ReceivedAnnouncement(NamedTuple):
    """A verified item and its announcement. ``(item.target, item.sequence)`` identifies the item, because an honest
    publisher signs only one value for each sequence number."""

    item: Item
    announcement: Announcement


def read_datagram(datagram: bytes, network: str, typ: int = BATCH_UPDATE) -> ReceivedAnnouncement | Rejected:
    """Read and verify the announcement in a captured datagram: a put query or a get response, with ``c`` or without.

    A get response has no salt, so the salt is computed from the separator in the value. If that separator is false,
    the signature or ``c`` does not match. One datagram cannot show whether its sequence number is the newest.

    Returns:
        The announcement, or a rejection with one of REASONS.

    Raises:
        TopicError: No topic name can have the network.
    """
    message = read_message(datagram)
    if not isinstance(message, KrpcQuery | KrpcResponse):
        return Rejected("not_krpc", message.reason if isinstance(message, MalformedDatagram) else "an error")
    fields = message.arguments if isinstance(message, KrpcQuery) else message.values
    unsalted = isinstance(message, KrpcResponse)
    item = read_item(fields, b"" if unsalted else None)
    if not isinstance(item, Item):
        return Rejected("no_item", item.text.decode())
    announcement = _read_value(item.value, typ)
    if isinstance(announcement, Rejected):
        return announcement
    salt = compute_salt(network, announcement.separator)
    if unsalted:
        item = Item(item.key, salt, item.sequence, item.value, item.signature)
    elif item.salt != salt:
        return Rejected("wrong_salt", f"{format_separator(announcement.separator)[:80]} has the salt {salt.hex()}")
    if message.topic is not None and message.topic != item.target:
        return Rejected("wrong_topic", f"the topic is {message.topic.hex()}, not {item.target.hex()}")
    refusal = find_exceeded_limit(item)
    if refusal is not None:
        return Rejected("beyond_limits", refusal.text.decode())
    return ReceivedAnnouncement(item, announcement) if is_signed(item) else Rejected("bad_signature")


def _read_value(value: bytes, typ: int) -> Announcement | Rejected:
    try:
        fields = bencode.decode(value)
        if isinstance(fields, bytes):
            fields = bencode.decode(fields)
    except BencodeError as error:
        return Rejected("not_bencoded", str(error))
    if not isinstance(fields, dict) or fields.get(b"typ") not in (BATCH_UPDATE, BATCH_UPDATE_OTHER, typ):
        return Rejected("not_an_announcement")
    batch, prev, sep = fields.get(b"batch"), fields.get(b"prev", b""), fields.get(b"sep")
    time_ms, count = fields.get(b"ts"), fields.get(b"n")
    if not isinstance(batch, bytes) or not is_cid(batch):
        return Rejected("bad_batch")
    previous = _read_cids(prev) if isinstance(prev, bytes) else None
    if previous is None:
        return Rejected("bad_prev")
    if not isinstance(time_ms, int) or not 0 <= time_ms < 2**63:
        return Rejected("bad_ts")
    if count is not None and (not isinstance(count, int) or not 0 <= count < 2**63):
        return Rejected("bad_n")
    try:
        separator = parse_separator(sep.decode() if isinstance(sep, bytes) else "")
    except (TopicError, UnicodeDecodeError) as error:
        return Rejected("bad_separator", str(error))
    return Announcement(separator, batch, time_ms, previous, count)


def _read_cids(joined: bytes) -> tuple[bytes, ...] | None:
    cids = []
    at = 0
    try:
        while at < len(joined):
            end = find_cid_end(joined, at)
            cids.append(joined[at:end])
            at = end
    except CidError:
        return None
    return tuple(cids)


class MissedBatches(NamedTuple):
    """Batches that a reader missed."""

    batches: tuple[bytes, ...]
    """CIDs to fetch, oldest first"""
    gap: bool
    """true if the reader missed more batches than ``prev`` lists"""


def find_missed_batches(announcement: Announcement, last: bytes | None) -> MissedBatches:
    """Find the batches after ``last``, the newest batch that the reader has, up to the one being announced.

    Without ``last``, all batches in the announcement are missed, without a gap. If ``last`` is not among them, there is
    a gap.
    """
    if last == announcement.batch:
        return MissedBatches((), False)
    newer = announcement.previous
    gap = last is not None
    if last in newer:
        newer, gap = newer[: newer.index(last)], False
    return MissedBatches((*reversed(newer), announcement.batch), gap)
