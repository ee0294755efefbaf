"""Rate limits of authors. Time comes from the caller.

Kubo 0.40 and later validates several messages at once, and ignores a message that it validates after a later message of
the same author (go-libp2p-pubsub, BasicSeqnoValidator). A peer never fetches again what it ignored. Two messages of one
author are therefore sent with a gap between them, whatever their topics are. Several authors may send within one gap;
each topic has one author.

Kubo drops messages that arrive while 32 wait to be validated (go-libp2p-pubsub, defaultValidateQueueSize). The messages
of all authors are therefore spread as well: at most half as many are sent in one gap.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

MAX_MESSAGES_PER_GAP: Final = 16
"""Most messages of all authors sent in one gap."""


class AuthorPacer:
    """Rate limiter that keeps `gap` µs between two messages of each of `authors` authors."""

    def __init__(self, gap: int, authors: int) -> None:
        self._gap = gap
        self._ready = [0] * authors
        self._next = 0  # for any author

    def author_index(self, topic: str) -> int:
        """Return the index, from 0, of the author of a topic; it stays the same after a restart."""
        return int.from_bytes(blake2b(topic.encode(), digest_size=8).digest()) % len(self._ready)

    def ready_at(self, topic: str) -> int:
        """Return the time, in µs, from which a message may be sent on this topic."""
        return max(self._next, self._ready[self.author_index(topic)])

    def record_message(self, topic: str, now: int) -> None:
        """Record a message sent on this topic."""
        self._ready[self.author_index(topic)] = now + self._gap
        self._next = now + self._gap // MAX_MESSAGES_PER_GAP
