"""What the router remembers of messages: which it has seen, and the last few to answer IWANT with.

Sources: libp2p specs, pubsub/gossipsub/gossipsub-v1.0.md, Router State (message cache, seen cache), and v1.1, Spam
Protection Measures (retransmission).
"""

from __future__ import annotations

from collections import deque
from hashlib import sha256
from typing import Final, NamedTuple

from kiln.schemas.proto.gossipsub import rpc_pb2
from kiln.schemas.wire.identity import peer_bytes, peer_text

_VERDICT_BITS: Final = 3  # of a `mark`; the rest tells one copy's bytes from another's
_GRAIN: Final = 1.0  # seconds; what was seen within it expires together
_IDENTITY_LIMIT: Final = 42  # bytes; the peer id of a longer PublicKey is its sha2-256 (libp2p specs, peer-ids.md)
_SHA256: Final = b"\x12\x20"  # how the multihash begins
_TEXT_ENDS: Final = ((b"12D3KooW", 52), (b"Qm", 46), (b"16Uiu2HA", 53))  # where a peer id in base58 ends, by its start
_SEQNO_BYTES: Final = 8


def gossip_id(message: rpc_pb2.Message) -> bytes:
    """The id that control messages call a message by: from ‖ seqno if it is signed, else sha256(data).

    libp2p specs, pubsub/README.md, Message Identification, and what js-libp2p does where nothing is signed.
    """
    if message.HasField("signature"):
        author: bytes = getattr(message, "from")  # a keyword in Python
        return author + message.seqno
    return sha256(message.data).digest()


def canonical_id(raw: bytes) -> bytes:
    """The id as `gossip_id` makes it, from any form that peers use.

    js-libp2p puts the author's PublicKey where others put the peer id made of that key: key ‖ seqno. rust-libp2p writes
    both as text: the peer id in base58, the seqno in decimal.
    """
    end = _key_end(raw)
    if not end:
        return _from_text(raw) or raw
    key = raw[:end]
    if end <= _IDENTITY_LIMIT:
        return bytes((0, end)) + raw
    return _SHA256 + sha256(key).digest() + raw[end:]


def is_key_form(raw: bytes) -> bool:
    """Whether an id is js-libp2p's key ‖ seqno."""
    return _key_end(raw) > 0


def key_form(canonical: bytes) -> bytes:
    """An id as js-libp2p makes it, where the peer id holds the key (ed25519, secp256k1); else as it is."""
    if len(canonical) > 2 and canonical[0] == 0 and _key_end(canonical[2:]) == canonical[1]:
        return canonical[2:]
    return canonical


def is_text_form(raw: bytes) -> bool:
    """Whether an id is rust-libp2p's base58 ‖ decimal."""
    return _from_text(raw) is not None


def text_form(canonical: bytes) -> bytes:
    """An id as rust-libp2p makes it, where it is a peer id and a seqno of 8 bytes; else as it is."""
    peer, seqno = canonical[:-_SEQNO_BYTES], canonical[-_SEQNO_BYTES:]
    if len(peer) > _IDENTITY_LIMIT:
        return canonical  # base58 of long bytes takes long, and none of `_TEXT_ENDS` is so long
    text = b"%b%d" % (peer_text(peer).encode(), int.from_bytes(seqno, "big"))
    return text if _from_text(text) == canonical else canonical


def _from_text(raw: bytes) -> bytes | None:
    if len(raw) < 47 or raw[0] not in b"1Q":
        return None
    for start, end in _TEXT_ENDS:
        if raw.startswith(start):
            number = raw[end:]
            # one spelling only: as `int` would write it
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
    """Where a PublicKey protobuf at the start of an id ends; 0 if there is none, or nothing after it."""
    if len(raw) < 37 or raw[0] != 0x08 or raw[2] != 0x12 or raw[1] > 3:
        return 0
    size, start = raw[3], 4
    if size >= 0x80:
        size, start = size & 0x7F | raw[4] << 7, 5
    end = start + size
    return end if size >= 32 and end < len(raw) else 0


class SeenSet:
    """Ids of messages known to be good, each with a small number to tell an exact copy by.

    An id is held for `horizon` seconds (up to one more) from when it was added, however often it comes again. Over
    `cap` ids, the oldest go first: `evicted` counts them.
    """

    __slots__ = ("_cap", "_horizon", "_known", "_marks", "_order", "evicted")

    def __init__(self, horizon: float, cap: int) -> None:
        self._horizon = horizon
        self._cap = cap
        self._known: dict[bytes, int] = {}
        self._order: deque[bytes] = deque()  # a dict is slow to find its first key after many deletions at the front
        self._marks: deque[list[float]] = deque()  # [time, how many were added in the grain that began then]
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def get(self, key: bytes) -> int | None:
        """The number given with an id, or None if the id is not held."""
        return self._known.get(key)

    def add(self, key: bytes, number: int, now: float) -> bool:
        """Hold an id; False, and nothing changed, if it is held."""
        if key in self._known:
            return False
        self._known[key] = number
        self._order.append(key)
        if self._marks and now - self._marks[-1][0] < _GRAIN:
            self._marks[-1][1] += 1
        else:
            self._marks.append([now, 1])
        if len(self._known) > self._cap:
            del self._known[self._order.popleft()]
            self._marks[0][1] -= 1
            if not self._marks[0][1]:
                self._marks.popleft()
            self.evicted += 1
        return True

    def expire(self, now: float) -> None:
        """Let go of what is past the horizon."""
        marks = self._marks
        while marks and now - marks[0][0] >= self._horizon + _GRAIN:
            for _ in range(int(marks.popleft()[1])):
                del self._known[self._order.popleft()]


class CachedMessage(NamedTuple):
    """A message as kept for IWANT: its topic and its bytes."""

    topic: str
    data: bytes


class MessageCache:
    """The messages of the last `length` heartbeats; those of the last `gossip` are told of in IHAVE.

    Over `cap` bytes of messages the oldest go first: `evicted` counts them. Bytes are kept, not Message objects: one
    of those keeps the whole RPC alive that it came in.
    """

    __slots__ = ("_bytes", "_cap", "_gossip", "_length", "_messages", "_order", "_sent", "_windows", "evicted")

    def __init__(self, length: int, gossip: int, cap: int) -> None:
        self._length = length
        self._gossip = gossip
        self._cap = cap
        self._bytes = 0
        self._messages: dict[bytes, CachedMessage] = {}
        self._sent: dict[bytes, dict[bytes, int]] = {}  # id -> peer -> times sent for IWANT
        self._order: deque[bytes] = deque()
        # newest first: how many ids, and which of each topic
        self._windows: deque[tuple[list[int], dict[str, list[bytes]]]] = deque([([0], {})])
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def size(self) -> int:
        """Bytes of the messages held."""
        return self._bytes

    def put(self, key: bytes, topic: str, data: bytes) -> None:
        """Keep a message; nothing if it is kept already."""
        if key in self._messages:
            return
        self._messages[key] = CachedMessage(topic, data)
        self._order.append(key)
        self._bytes += len(data)
        count, topics = self._windows[0]
        count[0] += 1
        topics.setdefault(topic, []).append(key)
        while self._bytes > self._cap and len(self._order) > 1:
            oldest = next(window for window in reversed(self._windows) if window[0][0])
            oldest[0][0] -= 1
            self._drop()
            self.evicted += 1

    def get(self, key: bytes) -> CachedMessage | None:
        """The message with this id, if it is still kept."""
        return self._messages.get(key)

    def count(self, key: bytes, peer: bytes) -> int:
        """Note that a kept message is about to be sent to a peer for its IWANT: how often that makes it."""
        sent = self._sent.setdefault(key, {})
        times = sent.get(peer, 0) + 1
        sent[peer] = times
        return times

    def gossip_ids(self, topic: str) -> list[bytes]:
        """Ids of a topic's messages in the windows that are told of, newest window first."""
        messages = self._messages
        return [
            key
            for index, (_, topics) in enumerate(self._windows)
            if index < self._gossip
            for key in topics.get(topic, ())
            if key in messages
        ]

    def shift(self) -> None:
        """Begin a new window and let go of the oldest: once a heartbeat."""
        if len(self._windows) >= self._length:
            count, _ = self._windows.pop()
            for _ in range(count[0]):
                self._drop()
        self._windows.appendleft(([0], {}))

    def _drop(self) -> None:
        key = self._order.popleft()
        self._bytes -= len(self._messages.pop(key).data)
        self._sent.pop(key, None)


def mark(data: bytes, verdict: int) -> int:
    """A number for a message's bytes, keyed by the interpreter's own secret, with the verdict in its low bits."""
    return hash(data) << _VERDICT_BITS | verdict
