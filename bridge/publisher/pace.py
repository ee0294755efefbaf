"""Rate limit of published messages, per author and in total. The caller passes the time.

Kubo 0.40 and later ignores a message that it validates after a later message of the same author (go-libp2p-pubsub,
BasicSeqnoValidator), and never fetches again what it ignored. It validates several messages at once, and messages
overtake each other on their way over relays. Two messages of one author are therefore sent with a gap between them that
is longer than any reordering in the network. Several authors take turns for a higher rate.

Kubo drops messages that arrive while 32 wait to be validated (go-libp2p-pubsub, defaultValidateQueueSize). The messages
of all authors are therefore spread as well: at most half as many are sent in `BURST_SPAN`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_BURST: Final = 16
"""Maximum number of messages, of all authors, sent in `BURST_SPAN`."""
BURST_SPAN: Final = 100_000
"""span of a burst, in µs"""


class AuthorPacer:
    """Rate limiter that keeps `gap` µs between two messages of each of `authors` authors, and spreads all messages.

    The author of the next message is the author whose last message is oldest. A gap of 0 disables all limits.
    """

    def __init__(self, gap: int, authors: int) -> None:
        self._gap = gap
        self._ready = deque((0, index) for index in range(authors))
        self._next = 0  # for any author

    @property
    def author_index(self) -> int:
        """Index, from 0, of the author that sends the next message."""
        return self._ready[0][1]

    @property
    def ready_at(self) -> int:
        """Time, in µs, from which the next message may be sent."""
        return max(self._next, self._ready[0][0])

    def record_message(self, now: int) -> None:
        """Record that the author at `author_index` has sent a message."""
        _, index = self._ready.popleft()
        self._ready.append((now + self._gap, index))
        self._next = now + min(self._gap, BURST_SPAN) // MAX_BURST
