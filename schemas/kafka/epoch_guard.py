"""Guard against a micro-batch of the query `updates` that is in `kiln.updates` or `kiln.wanted` twice (decision 7). No
clock, no I/O.

An epoch is one micro-batch of the query, or the records that the bridge's fetcher released between two commits: after a
crash Kafka may have them twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from kiln.schemas.kafka.topics import MAX_EPOCH_WRITERS


class SavedEpoch(NamedTuple):
    """The newest epoch of a writer, in the state."""

    writer: str
    number: int
    digests: list[bytes]
    """digests of the messages of this epoch so far (`compute_message_digest`), sorted"""


class EpochGuard:
    """Messages of the newest epoch of each of the last few writers. A new query id is a new writer."""

    def __init__(self, epochs: Iterable[SavedEpoch] = ()) -> None:
        """Load the epochs, in the order of their last write."""
        self._epochs = {epoch.writer: (epoch.number, set(epoch.digests)) for epoch in epochs}

    def is_duplicate(self, writer: str, number: int, message: str) -> bool:
        """Add a message, and return true if its writer's newest epoch already had it.

        Args:
            writer: Query id, or name of the bridge's fetcher.
            number: Number of the epoch.
            message: Network, origin and message id.
        """
        digests, digest = self.load_epoch(writer, number), compute_message_digest(message)
        if digests is None or digest in digests:
            return digests is not None
        digests.add(digest)
        return False

    def load_epoch(self, writer: str, number: int) -> set[bytes] | None:
        """Return the digests of an epoch's messages so far, and mark its writer as the last to write.

        Returns:
            A set, to which the caller adds the digests of new messages; `None` if the writer has begun a newer epoch.
        """
        newest, digests = self._epochs.pop(writer, (number, set[bytes]()))
        if newest < number:
            newest, digests = number, set()
        self._epochs[writer] = newest, digests
        while len(self._epochs) > MAX_EPOCH_WRITERS:
            del self._epochs[next(iter(self._epochs))]
        return digests if newest == number else None

    def save(self) -> list[SavedEpoch]:
        """Return the epochs, in the order of their last write."""
        return [SavedEpoch(writer, number, sorted(digests)) for writer, (number, digests) in self._epochs.items()]


def compute_message_digest(message: str) -> bytes:
    """Compute the digest of a message.

    Args:
        message: Network, origin and message id, in a line each.
    """
    return blake2b(message.encode(), digest_size=16).digest()
