"""The router's seen cache, and its message cache, from which it answers IWANT.

Sources: libp2p specs, pubsub/gossipsub/gossipsub-v1.0.md, Router State (message cache, seen cache), and v1.1, Spam
Protection Measures (retransmission).
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

_VERDICT_BITS: Final = 3  # low bits of an entry that have its verdict
_VERDICT_MASK: Final = (1 << _VERDICT_BITS) - 1
_EXPIRY_GRAIN: Final = 1.0  # seconds; ids added within this interval expire together


class SeenSet:
    """Ids of valid messages, each with the hash and the verdict of the copy that was verified.

    The hash is Python's hash of the copy's bytes. It is keyed per process, so that a peer cannot craft other bytes with
    the same hash.

    An id expires `horizon` to `horizon` + 1 seconds after it was added, even if further copies arrive. Beyond `cap`
    ids, the oldest ones are evicted, and `evicted` counts them.
    """

    __slots__ = ("_cap", "_entries", "_grains", "_horizon", "_order", "evicted")

    def __init__(self, horizon: float, cap: int) -> None:
        self._horizon = horizon
        self._cap = cap
        self._entries: dict[bytes, int] = {}  # hash and verdict in one number, which takes less memory than a tuple
        self._order: deque[bytes] = deque()  # a dict is slow to find its first key after many deletions at the front
        self._grains: deque[list[float]] = deque()  # [time, number of ids added in the interval that began then]
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> tuple[int, int] | None:
        """Return the hash and the verdict of the verified copy, or `None` if the id is unknown."""
        entry = self._entries.get(key)
        return None if entry is None else (entry >> _VERDICT_BITS, entry & _VERDICT_MASK)

    def add(self, key: bytes, copy: int, verdict: int, now: float) -> bool:
        """Add an id, and return true if it is new. A known id keeps its time and its copy.

        Args:
            copy: Hash of the bytes of the message.
        """
        if key in self._entries:
            return False
        self._entries[key] = copy << _VERDICT_BITS | verdict
        self._order.append(key)
        if self._grains and now - self._grains[-1][0] < _EXPIRY_GRAIN:
            self._grains[-1][1] += 1
        else:
            self._grains.append([now, 1])
        if len(self._entries) > self._cap:
            del self._entries[self._order.popleft()]
            self._grains[0][1] -= 1
            if not self._grains[0][1]:
                self._grains.popleft()
            self.evicted += 1
        return True

    def expire(self, now: float) -> None:
        """Remove the expired ids."""
        marks = self._grains
        while marks and now - marks[0][0] >= self._horizon + _EXPIRY_GRAIN:
            for _ in range(int(marks.popleft()[1])):
                del self._entries[self._order.popleft()]


class CachedMessage(NamedTuple):
    """A message in the cache: its topic, its bytes, and true if it has a signature."""

    topic: str
    data: bytes
    signed: bool


class MessageCache:
    """Messages of the last `length` heartbeats. IHAVE announces those of the last `gossip` heartbeats.

    Beyond `cap` bytes, the oldest messages are evicted, and `evicted` counts them. Messages are stored as bytes,
    because a Message object would keep its whole RPC in memory.
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
        # newest first: number of ids, and the ids of each topic
        self._windows: deque[tuple[list[int], dict[str, list[bytes]]]] = deque([([0], {})])
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def size(self) -> int:
        """Total size of the cached messages in bytes."""
        return self._bytes

    def put(self, key: bytes, topic: str, data: bytes, signed: bool) -> None:
        """Add a message if it is not cached yet."""
        if key in self._messages:
            return
        self._messages[key] = CachedMessage(topic, data, signed)
        self._order.append(key)
        self._bytes += len(data)
        count, topics = self._windows[0]
        count[0] += 1
        topics.setdefault(topic, []).append(key)
        while self._bytes > self._cap and len(self._order) > 1:
            oldest = next(window for window in reversed(self._windows) if window[0][0])
            oldest[0][0] -= 1
            self._drop_oldest()
            self.evicted += 1

    def get(self, key: bytes) -> CachedMessage | None:
        """Return the message with this id, if it is still cached."""
        return self._messages.get(key)

    def is_signed(self, key: bytes) -> bool:
        """Return whether a cached message has a signature."""
        return self._messages[key].signed

    def count(self, key: bytes, peer: bytes) -> int:
        """Count one more IWANT of a peer for a cached message, and return the number of them so far."""
        sent = self._sent.setdefault(key, {})
        times = sent.get(peer, 0) + 1
        sent[peer] = times
        return times

    def gossip_ids(self, topic: str) -> list[bytes]:
        """Return the message ids that IHAVE announces for a topic, those of the newest heartbeat first."""
        messages = self._messages
        return [
            key
            for index, (_, topics) in enumerate(self._windows)
            if index < self._gossip
            for key in topics.get(topic, ())
            if key in messages
        ]

    def shift(self) -> None:
        """Start a new heartbeat interval, and drop the messages that are older than `length` intervals."""
        if len(self._windows) >= self._length:
            count, _ = self._windows.pop()
            for _ in range(count[0]):
                self._drop_oldest()
        self._windows.appendleft(([0], {}))

    def _drop_oldest(self) -> None:
        key = self._order.popleft()
        self._bytes -= len(self._messages.pop(key).data)
        self._sent.pop(key, None)
