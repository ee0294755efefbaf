"""Announcement of a batch in the BitTorrent DHT: CIP-123's BATCH_UPDATE as the bencoded value of a mutable item.

No standard defines it. Kiln's layout is a dictionary with these keys::

    batch   CID of the batch, bytes
    n       number of its tips (optional, a hint)
    prev    concatenated CIDs of earlier batches that were announced on this topic, newest first (optional)
    sep     "<key>/<value in base36>", as in BATCH_UPDATE
    ts      time of the announcement, ms since the epoch
    typ     BATCH_UPDATE's number, 3

An item keeps only its *latest* value, so ``prev`` lets a reader find batches that it missed. With the separator of a
model, 23 CIDs of the usual 36 bytes fit into MAX_ANNOUNCEMENT bytes, or 22 together with ``n``. The item's salt is the
sha2-256 of the separator's topic name, because the name itself can be longer than the 64 bytes of a salt.
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
"""Maximum number of bytes of an announcement that Kiln writes: less than BEP 44's 1000, and so few that a get response
with eight nodes still fits into one datagram."""

REASONS: Final = (
    "not_bencoded",  # not one canonical value
    "not_an_announcement",  # not a dictionary, or with another `typ`
    "bad_batch",  # `batch` is not one CID
    "bad_prev",  # `prev` is not concatenated CIDs
    "bad_separator",  # `sep` is not "<key>/<value in base36>"
    "bad_ts",  # `ts` is not a number of ms, 0 to 2^63 - 1
    "bad_n",  # `n` is not a number, 0 to 2^63 - 1
    "wrong_salt",  # the item's salt is not the salt of the separator in `sep`
    # only for datagrams:
    "not_krpc",  # not a message of the DHT
    "no_item",  # a message without a mutable item: `k`, `seq`, `sig` and `v`
    "wrong_topic",  # `c` is not the target of the item's key and salt
    "beyond_limits",  # salt, value or sequence number that no node may store
    "bad_signature",  # not signed by its key under its salt
)


class Announcement(Struct, frozen=True):
    """Announcement of a batch. CIDs are bytes. `previous`: earlier batches, newest first. `count`: number of tips."""

    separator: Separator
    batch: bytes
    time_ms: int
    previous: tuple[bytes, ...] = ()
    count: int | None = None


class PublisherKey(NamedTuple):
    """Public key of a publisher, and a separator of its batches. Each such pair has one item in the DHT."""

    key: bytes
    separator: Separator


def parse_source(text: str) -> PublisherKey:
    """Parse ``<publisher's public key in hex>/<separator key>/<separator value>``.

    Raises:
        ValueError: The text has another form.
    """
    key, _, separator = text.partition("/")
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    if len(raw) != KEY_SIZE or len(key) != 2 * KEY_SIZE:
        raise ValueError(
            f"{text[:100]!r} does not begin with a public key of {2 * KEY_SIZE} hex digits and a slash: write "
            "PUBLICKEY/KEY/VALUE"
        )
    return PublisherKey(raw, parse_separator(separator))


def compute_salt(network: str, separator: Separator) -> bytes:
    """Compute the salt (32 bytes) of the items that announce batches of a separator: sha2-256 of its topic name.

    Raises:
        TopicError: The network or separator cannot be part of a topic name.
    """
    return hashlib.sha256(format_topic(network, separator).encode()).digest()


def compute_next_sequence(now_ms: int, last: int | None) -> int:
    """Compute the sequence number of the next item: the time in ms, or `last` + 1 if that is greater."""
    return now_ms if last is None else max(now_ms, last + 1)


def write_announcement(announcement: Announcement, typ: int = BATCH_UPDATE) -> bytes:
    """Encode an announcement as the value of an item, with as many of the newest CIDs of ``previous`` as fit.

    Raises:
        TopicError: The separator is invalid.
        CidError: A CID is invalid.
        ValueError: The separator is too long for MAX_ANNOUNCEMENT bytes, even without ``previous``.
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
    """Read the announcement in the bencoded value of an item.

    The dictionary may be wrapped in a byte string, because some DHT libraries can only store byte strings. Unknown keys
    are ignored.

    Args:
        salt: Salt under which the item is stored. It must be that of the announced separator.
        typ: The network's number for BATCH_UPDATE; 3 and 4 are accepted too.

    Returns:
        The announcement, or a rejection with one of REASONS.

    Raises:
        TopicError: The network cannot be part of a topic name.
    """
    announcement = _read_value(value, typ)
    if isinstance(announcement, Rejected):
        return announcement
    claimed = compute_salt(network, announcement.separator)
    if claimed != salt:
        return Rejected("wrong_salt", f"{format_separator(announcement.separator)[:80]} has the salt {claimed.hex()}")
    return announcement


class ReceivedAnnouncement(NamedTuple):
    """An announcement, and the verified item that contains it. ``(item.target, item.sequence)`` identifies the item:
    honest publishers sign one value for each sequence number."""

    item: Item
    announcement: Announcement


def read_datagram(datagram: bytes, network: str, typ: int = BATCH_UPDATE) -> ReceivedAnnouncement | Rejected:
    """Read and verify the announcement in a captured datagram, which is a put query or a get response.

    A get response has no salt, so the salt is computed from the announced separator. If that separator is false, the
    signature or the topic ``c`` does not match. The item need not be the newest of its publisher.

    Args:
        typ: The network's number for BATCH_UPDATE; 3 and 4 are accepted too.

    Returns:
        The announcement, or a rejection with one of REASONS.

    Raises:
        TopicError: The network cannot be part of a topic name.
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
    """Batches of a publisher that a reader does not have."""

    batches: tuple[bytes, ...]
    """CIDs to fetch, oldest first"""
    gap: bool
    """true if the reader missed even more batches, which the announcement no longer lists"""


def find_missed_batches(announcement: Announcement, last: bytes | None) -> MissedBatches:
    """Find the batches in an announcement that a reader does not have.

    Args:
        last: CID of the newest batch that the reader has; `None` if it has none of this publisher and separator. Then
            all batches in the announcement are missed, but there is no gap.
    """
    if last == announcement.batch:
        return MissedBatches((), False)
    newer = announcement.previous
    gap = last is not None
    if last in newer:
        newer, gap = newer[: newer.index(last)], False
    return MissedBatches((*reversed(newer), announcement.batch), gap)
