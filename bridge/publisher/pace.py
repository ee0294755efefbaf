"""When an author may speak again. Pure: time comes from the caller.

Kubo 0.40 and later validates several messages at once, and ignores a message that it validates after a later message of
the same author (go-libp2p-pubsub, BasicSeqnoValidator). A peer never fetches again what it ignored. So two messages of
one author leave with a gap between them, whatever their topics are. Several authors may speak within one gap. Each
topic has one of them.

Kubo drops what comes while 32 messages wait to be validated (go-libp2p-pubsub, defaultValidateQueueSize). So the
messages of all authors are spread, too: no more than half as many leave in one gap.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

IN_A_GAP: Final = 16
"""Messages of all authors that leave in one gap at most."""


class AuthorPacer:
    """Keeps `gap` µs between two messages of one of `authors` authors."""

    def __init__(self, gap: int, authors: int) -> None:
        self._gap = gap
        self._ready = [0] * authors
        self._next = 0  # for any author

    def author(self, topic: str) -> int:
        """Which author speaks on this topic, also after a restart: from 0."""
        return int.from_bytes(blake2b(topic.encode(), digest_size=8).digest()) % len(self._ready)

    def ready_at(self, topic: str) -> int:
        """From when on a message may go out on this topic, µs."""
        return max(self._next, self._ready[self.author(topic)])

    def spoke(self, topic: str, now: int) -> None:
        """A message went out on this topic."""
        self._ready[self.author(topic)] = now + self._gap
        self._next = now + self._gap // IN_A_GAP
