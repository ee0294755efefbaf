"""Message ids: computed by the rule of a network, and read from control messages.

Networks identify messages by author and sequence number, or by a hash of the content. Implementations of gossipsub
write the same id in different forms in control messages. The column `message_id` has one form for each id.

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
"""Gossipsub's own rule: author and sequence number for signed messages, sha256 of the data for unsigned ones."""


class _Digest(Protocol):
    def digest(self) -> bytes: ...


_DIGESTS: Final[dict[str, Callable[[bytes], _Digest]]] = {
    "sha256": sha256,
    "blake2b": partial(blake2b, digest_size=32),
}
_DIGEST_BYTES: Final = 32
CONTENT_PREFIXES: Final = tuple(f"{name}/" for name in _DIGESTS)
"""Prefixes in the column `message_id` of all ids that are a hash of the content. Messages with the same content have
the same id, even if they are sent days apart."""
_MIN_LENGTH: Final = 8  # bytes; shorter ids of different messages could be equal
_RULE: Final = re.compile(rf"({'|'.join(_DIGESTS)})_(topic_)?data(?::(?=.)(hex)?([0-9]{{1,3}})?)?")


class MessageIdRuleError(ValueError):
    """The text is not a rule for message ids."""


@dataclass(frozen=True, slots=True)
class MessageIdRule:
    """The rule by which the nodes of a network identify messages.

    Attributes:
        text: The rule in the form of the setting `network.message_id`.
        algorithm: Name of the hash function; empty if author and sequence number are the id.
        with_topic: True if the topic's name is hashed before the data.
        as_hex: True if the id is the digest in lower-case hex.
        length: Number of bytes to which the digest is shortened; 0 if author and sequence number are the id.
    """

    text: str = AUTHOR_SEQNO
    algorithm: str = ""
    with_topic: bool = False
    as_hex: bool = False
    length: int = 0

    @property
    def by_content(self) -> bool:
        """True if the id is a hash of the content, so that messages of different authors can have the same id."""
        return bool(self.algorithm)

    def compute(self, message: rpc_pb2.Message, topic: str) -> bytes:
        """Compute the id of a message in the form for control messages.

        By the rule of gossipsub, it is from ‖ seqno if the message is signed, otherwise sha256(data). Source: libp2p
        specs, pubsub/README.md, Message Identification; js-libp2p for unsigned messages.

        Args:
            topic: Name of its topic, because the message may contain only the topic's index.
        """
        if not self.algorithm:
            if message.HasField("signature"):
                author: bytes = getattr(message, "from")  # a keyword in Python
                return author + message.seqno
            return sha256(message.data).digest()
        data = topic.encode() + message.data if self.with_topic else message.data
        digest = _DIGESTS[self.algorithm](data).digest()
        return (digest.hex().encode() if self.as_hex else digest)[: self.length]

    def describe(self, message: rpc_pb2.Message, topic: str) -> str:
        """Compute the id of a message in the form of the column `message_id`, such as "sha256/<hex>" for a hash."""
        return self.format(self.compute(message, topic)) if self.algorithm else message_id(message)

    def format(self, raw: bytes) -> str:
        """Convert an id in a control message to the form of the column `message_id`, or hex if it breaks the rule."""
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
    """Parse a value of the setting `network.message_id`.

    The rule is `author_seqno`, or a hash of the data or of topic and data: `sha256_data`, `sha256_topic_data`,
    `blake2b_data` or `blake2b_topic_data`. A suffix may select lower-case hex or shorten the digest: `sha256_data:20`
    means the first 20 bytes of the digest, and `sha256_data:hex20` the first 20 hex digits.

    Raises:
        MessageIdRuleError: The text is not a rule. The message describes the allowed values.
    """
    if text == AUTHOR_SEQNO:
        return MessageIdRule()
    match = _RULE.fullmatch(text)
    if match is None:
        raise MessageIdRuleError(
            f'expected "{AUTHOR_SEQNO}", "sha256_data", "sha256_topic_data", "blake2b_data" or "blake2b_topic_data", '
            'the last four optionally with a suffix such as ":hex", ":20" or ":hex20"'
        )
    algorithm, with_topic, as_hex, number = match.groups()
    full = _DIGEST_BYTES * 2 if as_hex else _DIGEST_BYTES
    length = int(number) if number else full
    if not _MIN_LENGTH <= length <= full:
        raise MessageIdRuleError(f"expected an id of {_MIN_LENGTH} to {full} {'hex digits' if as_hex else 'bytes'}")
    return MessageIdRule(text, algorithm, bool(with_topic), bool(as_hex), length)


_HASH_BYTES: Final = 32  # bytes of the id of an unsigned message; ids of signed messages are longer
_MAX_HEX: Final = 128  # maximum number of bytes that the text of an id of unknown form shows
_IDENTITY_LIMIT: Final = 42  # bytes; the peer id of a longer PublicKey is its sha2-256 (libp2p specs, peer-ids.md)
_SHA256: Final = b"\x12\x20"  # prefix of the multihash
_BASE58_LENGTHS: Final = (
    (b"12D3KooW", 52),
    (b"Qm", 46),
    (b"16Uiu2HA", 53),
)  # start of a peer id's text, and number of characters of the text
_SEQNO_BYTES: Final = 8


def canonical_id(raw: bytes) -> bytes:
    """Convert a message id from any form that peers use to the canonical form, peer id ‖ seqno.

    js-libp2p writes public key ‖ seqno. rust-libp2p writes text: peer id in base58 ‖ seqno in decimal.
    """
    end = _key_end(raw)
    if not end:
        return _from_text(raw) or raw
    key = raw[:end]
    if end <= _IDENTITY_LIMIT:
        return bytes((0, end)) + raw
    return _SHA256 + sha256(key).digest() + raw[end:]


def is_key_form(raw: bytes) -> bool:
    """Return true if a message id has the form of js-libp2p: public key ‖ seqno."""
    return _key_end(raw) > 0


def key_form(canonical: bytes) -> bytes:
    """Convert a canonical message id to the form of js-libp2p, if the peer id contains the key (ed25519, secp256k1)."""
    if len(canonical) > 2 and canonical[0] == 0 and _key_end(canonical[2:]) == canonical[1]:
        return canonical[2:]
    return canonical


def is_text_form(raw: bytes) -> bool:
    """Return true if a message id has the form of rust-libp2p: peer id in base58 ‖ seqno in decimal."""
    return _from_text(raw) is not None


def text_form(canonical: bytes) -> bytes:
    """Convert a canonical message id to the form of rust-libp2p, if it is a peer id and a seqno of 8 bytes."""
    peer, seqno = canonical[:-_SEQNO_BYTES], canonical[-_SEQNO_BYTES:]
    if len(peer) > _IDENTITY_LIMIT:
        return canonical  # base58 of long bytes is slow, and no peer id is so long
    text = b"%b%d" % (peer_text(peer).encode(), int.from_bytes(seqno, "big"))
    return text if _from_text(text) == canonical else canonical


def _from_text(raw: bytes) -> bytes | None:
    if len(raw) < 47 or raw[0] not in b"1Q":
        return None
    for start, end in _BASE58_LENGTHS:
        if raw.startswith(start):
            number = raw[end:]
            # one spelling only: no leading zeros
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
    """Return the length of the PublicKey protobuf at the start of an id; 0 if there is none, or if nothing follows."""
    if len(raw) < 37 or raw[0] != 0x08 or raw[2] != 0x12 or raw[1] > 3:
        return 0
    size, start = raw[3], 4
    if size >= 0x80:
        size, start = size & 0x7F | raw[4] << 7, 5
    end = start + size
    return end if size >= 32 and end < len(raw) else 0


def format_gossip_id(raw: bytes) -> str:
    """Convert a message id from any form that peers use to the form of the column `message_id`.

    An id of unknown form becomes hex.
    """
    if len(raw) == _HASH_BYTES:
        return f"sha256/{raw.hex()}"
    parts = split_peer(canonical_id(raw))
    if parts is not None and _HASH_BYTES < len(parts[0]) <= _MAX_HEX and len(parts[1]) <= MAX_SEQNO:
        return f"{peer_text(parts[0])}/{parts[1].hex()}"
    return format_unknown_id(raw)


def format_unknown_id(raw: bytes) -> str:
    """Format a message id of unknown form as hex. A long id is shortened, and ends in "…"."""
    return raw.hex() if len(raw) <= _MAX_HEX else f"{raw[:_MAX_HEX].hex()}…"
