"""Message ids: by the rule of a network (author and sequence number, or content), and as in control messages.

The bridge compares them with the ids in the control messages of peers, whose forms differ between implementations. The
tables name messages by their ids.

Sources: libp2p specs, pubsub/README.md, Message Identification; for ids by content Lotus (`HashMsgId`: blake2b-256 of
the data) and go-waku and nwaku (`msgIDFn`, `defaultMessageIdProvider`: sha256 of the data).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b, sha256
from typing import Final, Protocol

from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.wire.identity import MAX_SEQNO, message_id, peer_bytes, peer_text, split_peer

AUTHOR_SEQNO: Final = "author_seqno"
"""The rule of gossipsub itself: author and sequence number; sha256 of the data without a signature."""


class _Digest(Protocol):
    def digest(self) -> bytes: ...


_DIGESTS: Final[dict[str, Callable[[bytes], _Digest]]] = {
    "sha256": sha256,
    "blake2b": partial(blake2b, digest_size=32),
}
_DIGEST_BYTES: Final = 32
CONTENT_PREFIXES: Final = tuple(f"{name}/" for name in _DIGESTS)
"""Prefixes of the text of ids by content, and of no other id. Messages with the same data have the same id, however far
apart they are sent."""
_MIN_LENGTH: Final = 8  # bytes; shorter ids of different messages could be equal
_RULE: Final = re.compile(rf"({'|'.join(_DIGESTS)})_(topic_)?data(?::(?=.)(hex)?([0-9]{{1,3}})?)?")


class MessageIdRuleError(ValueError):
    """The text names no rule of message ids."""


@dataclass(frozen=True, slots=True)
class MessageIdRule:
    """The rule by which the nodes of a network identify messages.

    Attributes:
        text: The rule as `parse_message_id_rule` reads it.
        algorithm: Name of the digest; empty for author and sequence number.
        with_topic: True if the digest covers the topic's name before the data.
        as_hex: True if the id is the digest in lower-case hex.
        length: Number of bytes of an id, which are the first of the digest; 0 for author and sequence number.
    """

    text: str = AUTHOR_SEQNO
    algorithm: str = ""
    with_topic: bool = False
    as_hex: bool = False
    length: int = 0

    @property
    def by_content(self) -> bool:
        """True if messages of the same data (on the same topic) have the same id, whoever sent them."""
        return bool(self.algorithm)

    def compute(self, message: rpc_pb2.Message, topic: str) -> bytes:
        """Compute the id of a message, as in control messages.

        Args:
            message: The message.
            topic: Name of the message's topic, of which the message itself may have only the index.
        """
        if not self.algorithm:
            return gossip_id(message)
        data = topic.encode() + message.data if self.with_topic else message.data
        digest = _DIGESTS[self.algorithm](data).digest()
        return (digest.hex().encode() if self.as_hex else digest)[: self.length]

    def describe(self, message: rpc_pb2.Message, topic: str) -> str:
        """Format the id of a message as the column `message_id`: "sha256/<hex>" or "blake2b/<hex>" by content."""
        return self.format(self.compute(message, topic)) if self.algorithm else message_id(message)

    def format(self, raw: bytes) -> str:
        """Format an id of a control message as the column `message_id`, or as hex if it breaks the rule."""
        if not self.algorithm:
            return format_gossip_id(raw)
        if len(raw) == self.length:
            if not self.as_hex:
                return f"{self.algorithm}/{raw.hex()}"
            if re.fullmatch(rb"[0-9a-f]+", raw):
                return f"{self.algorithm}/{raw.decode()}"
        return format_unknown_id(raw)


@lru_cache
def parse_message_id_rule(text: str) -> MessageIdRule:
    """Parse the name of a rule, a value of the setting `network.message_id`.

    `author_seqno`, or a digest of the data, or of topic and data: `sha256_data`, `sha256_topic_data`, `blake2b_data`,
    `blake2b_topic_data`. After a colon, `hex` makes the id the digest in lower-case hex, and a number shortens it:
    `sha256_data:20` is the first 20 bytes of the digest, `sha256_data:hex20` its first 20 hex digits.

    Raises:
        MessageIdRuleError: The text names no rule.
    """
    if text == AUTHOR_SEQNO:
        return MessageIdRule()
    match = _RULE.fullmatch(text)
    if match is None:
        raise MessageIdRuleError(
            f'"{AUTHOR_SEQNO}", "sha256_data", "sha256_topic_data", "blake2b_data" or "blake2b_topic_data", the last '
            'four optionally with a suffix such as ":hex", ":20" or ":hex20"'
        )
    algorithm, with_topic, as_hex, number = match.groups()
    full = _DIGEST_BYTES * 2 if as_hex else _DIGEST_BYTES
    length = int(number) if number else full
    if not _MIN_LENGTH <= length <= full:
        raise MessageIdRuleError(f"an id of {_MIN_LENGTH} to {full} {'hex digits' if as_hex else 'bytes'}")
    return MessageIdRule(text, algorithm, bool(with_topic), bool(as_hex), length)


_HASH_BYTES: Final = 32  # bytes of the id of an unsigned message; ids of signed messages are longer
_MAX_HEX: Final = 128  # bytes of an id of unknown form that are in the id's text
_IDENTITY_LIMIT: Final = 42  # bytes; the peer id of a longer PublicKey is its sha2-256 (libp2p specs, peer-ids.md)
_SHA256: Final = b"\x12\x20"  # prefix of the multihash
_BASE58_LENGTHS: Final = (
    (b"12D3KooW", 52),
    (b"Qm", 46),
    (b"16Uiu2HA", 53),
)  # characters of a peer id, by its first ones
_SEQNO_BYTES: Final = 8


def gossip_id(message: rpc_pb2.Message) -> bytes:
    """Return the message id in control messages: from ‖ seqno if it is signed, else sha256(data).

    Source: libp2p specs, pubsub/README.md, Message Identification; js-libp2p for unsigned messages.
    """
    if message.HasField("signature"):
        author: bytes = getattr(message, "from")  # a keyword in Python
        return author + message.seqno
    return sha256(message.data).digest()


def canonical_id(raw: bytes) -> bytes:
    """Convert an id from any form that peers use to the form of `gossip_id`. js-libp2p puts the author's PublicKey
    where others put the peer id made of that key: key ‖ seqno. rust-libp2p writes text: the peer id in base58 ‖ the
    seqno in decimal.
    """
    end = _key_end(raw)
    if not end:
        return _from_text(raw) or raw
    key = raw[:end]
    if end <= _IDENTITY_LIMIT:
        return bytes((0, end)) + raw
    return _SHA256 + sha256(key).digest() + raw[end:]


def is_key_form(raw: bytes) -> bool:
    """Return whether an id is js-libp2p's key ‖ seqno."""
    return _key_end(raw) > 0


def key_form(canonical: bytes) -> bytes:
    """Convert an id to js-libp2p's form if the peer id contains the key (ed25519, secp256k1)."""
    if len(canonical) > 2 and canonical[0] == 0 and _key_end(canonical[2:]) == canonical[1]:
        return canonical[2:]
    return canonical


def is_text_form(raw: bytes) -> bool:
    """Return whether an id is rust-libp2p's base58 ‖ decimal."""
    return _from_text(raw) is not None


def text_form(canonical: bytes) -> bytes:
    """Convert an id to rust-libp2p's form if it is a peer id and a seqno of 8 bytes."""
    peer, seqno = canonical[:-_SEQNO_BYTES], canonical[-_SEQNO_BYTES:]
    if len(peer) > _IDENTITY_LIMIT:
        return canonical  # base58 of long bytes takes long, and none of `_TEXT_ENDS` is so long
    text = b"%b%d" % (peer_text(peer).encode(), int.from_bytes(seqno, "big"))
    return text if _from_text(text) == canonical else canonical


def _from_text(raw: bytes) -> bytes | None:
    if len(raw) < 47 or raw[0] not in b"1Q":
        return None
    for start, end in _BASE58_LENGTHS:
        if raw.startswith(start):
            number = raw[end:]
            # one spelling only, that of `int`
            if not number.isdigit() or len(number) > 20 or (number[0] == 0x30 and len(number) > 1):
                return None
            seqno = int(number)
            if seqno >> 8 * _SEQNO_BYTES:
                return None
            try:
                return peer_bytes(raw[:end].decode("ascii")) + seqno.to_bytes(_SEQNO_BYTES, "big")
            except ValueError:
                return None
    return None


def _key_end(raw: bytes) -> int:
    """Return the end of a PublicKey protobuf at the start of an id; 0 if there is none, or nothing after it."""
    if len(raw) < 37 or raw[0] != 0x08 or raw[2] != 0x12 or raw[1] > 3:
        return 0
    size, start = raw[3], 4
    if size >= 0x80:
        size, start = size & 0x7F | raw[4] << 7, 5
    end = start + size
    return end if size >= 32 and end < len(raw) else 0


def format_gossip_id(raw: bytes) -> str:
    """Format an id as in the column `message_id` of the table `messages`, from any form that a peer may use.

    An id of no known form is formatted as hex.
    """
    if len(raw) == _HASH_BYTES:
        return f"sha256/{raw.hex()}"
    parts = split_peer(canonical_id(raw))
    if parts is not None and _HASH_BYTES < len(parts[0]) <= _MAX_HEX and len(parts[1]) <= MAX_SEQNO:
        return f"{peer_text(parts[0])}/{parts[1].hex()}"
    return format_unknown_id(raw)


def format_unknown_id(raw: bytes) -> str:
    """Format an id of no known form as hex; of a long one, the hex of its first bytes and "…"."""
    return raw.hex() if len(raw) <= _MAX_HEX else f"{raw[:_MAX_HEX].hex()}…"
