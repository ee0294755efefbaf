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
    """16-byte digests of its messages so far, sorted"""


class EpochGuard:
    """Messages of the newest epoch of each of the last few writers. A new query id is a new writer."""

    def __init__(self, epochs: Iterable[SavedEpoch] = ()) -> None:
        """Load the epochs, in the order of their last write."""
        self._epochs = {epoch.writer: Epoch(epoch.number, epoch.digests) for epoch in epochs}

    def is_duplicate(self, writer: str, number: int, message: str) -> bool:
        """Add a message, and return true if its writer's newest epoch already had it.

        Args:
            writer: Query id, or name of the bridge's fetcher.
            number: Number of the epoch.
            message: Network, origin and message id.
        """
        epoch = self.load_epoch(writer, number)
        return epoch is not None and not epoch.add(message)

    def save(self) -> list[SavedEpoch]:
        """Return the epochs, in the order of their last write."""
        return [SavedEpoch(writer, epoch.number, epoch.list_digests()) for writer, epoch in self._epochs.items()]

    def load_epoch(self, writer: str, number: int) -> Epoch | None:
        """Return this epoch of a writer, which becomes the last to have written; None if the writer has begun a newer
        epoch."""
        epoch = self._epochs.pop(writer, None)
        if epoch is None or epoch.number < number:
            epoch = Epoch(number)
        self._epochs[writer] = epoch
        while len(self._epochs) > MAX_EPOCH_WRITERS:
            del self._epochs[next(iter(self._epochs))]
        return epoch if epoch.number == number else None


class Epoch:
    """The newest epoch of a writer, and its messages so far."""

    def __init__(self, number: int, digests: Iterable[bytes] = ()) -> None:
        self.number = number
        self._digests = set(digests)  # of the messages in the state
        # Messages added since the state was loaded. Digests can wait: few epochs live to the end of a micro-batch.
        self._messages: set[str] = set()

    def add(self, message: str) -> bool:
        """Add a message.

        Returns:
            False if the message came before.
        """
        count = len(self._messages)
        self._messages.add(message)
        return len(self._messages) > count and not (self._digests and _digest(message) in self._digests)

    def list_digests(self) -> list[bytes]:
        return sorted(self._digests.union(map(_digest, self._messages)))


def _digest(message: str) -> bytes:
    return blake2b(message.encode(), digest_size=16).digest()
