"""Message ids by the rule of a network: by author and sequence number, or by content.

The bridge compares these ids with those in the control messages of peers, and the tables name messages by them.

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
from kiln.schemas.wire.gossip_id import format_gossip_id, format_unknown_id, gossip_id
from kiln.schemas.wire.identity import message_id

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
        with_topic: True if the topic's name precedes the data.
        as_hex: True if the id is the digest in lower-case hex.
        length: Bytes of an id, the first of a longer digest; 0 for author and sequence number.
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
            topic: Name of its topic, which the message itself may have by index only.
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
            'four perhaps with ":hex", ":20" or ":hex20"'
        )
    algorithm, with_topic, as_hex, number = match.groups()
    full = _DIGEST_BYTES * 2 if as_hex else _DIGEST_BYTES
    length = int(number) if number else full
    if not _MIN_LENGTH <= length <= full:
        raise MessageIdRuleError(f"an id of {_MIN_LENGTH} to {full} {'hex digits' if as_hex else 'bytes'}")
    return MessageIdRule(text, algorithm, bool(with_topic), bool(as_hex), length)
