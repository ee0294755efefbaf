"""Recognition of records that a writer wrote twice to `kiln.updates` or `kiln.wanted` because of a crash (decision 7).

Each record names its writer and its epoch. An epoch is one micro-batch of the query `updates`, or the records that the
bridge's fetcher writes between two commits of its offsets. After a crash, a writer repeats its newest epoch at most, so
a record is compared with that epoch alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from kiln.schemas.kafka.topics import MAX_EPOCH_WRITERS


class SavedEpoch(NamedTuple):
    """The newest epoch of a writer, as the state of a reader stores it."""

    writer: str
    number: int
    digests: list[bytes]
    """digests of the messages read in this epoch so far (`compute_message_digest`), sorted"""


class EpochGuard:
    """Recognizes repeated messages: keeps digests of those read in the newest epoch of each writer."""

    def __init__(self, epochs: Iterable[SavedEpoch] = ()) -> None:
        """Load saved epochs, in the order that `save` returns."""
        self._epochs = {epoch.writer: (epoch.number, set(epoch.digests)) for epoch in epochs}

    def is_duplicate(self, writer: str, number: int, message: str) -> bool:
        """Add a message, and return true if the newest epoch of its writer already has it.

        Args:
            writer: Id of the streaming query, or name of the bridge's fetcher. A new query id is a new writer.
            number: Number of the epoch, which rises with each epoch of the writer.
            message: Network, origin and message id, each on its own line.
        """
        digests, digest = self.load_epoch(writer, number), compute_message_digest(message)
        if digests is None or digest in digests:
            return digests is not None
        digests.add(digest)
        return False

    def load_epoch(self, writer: str, number: int) -> set[bytes] | None:
        """Return the digests of the messages read in an epoch so far.

        The writer becomes the most recent one. Beyond `MAX_EPOCH_WRITERS`, the least recent writer is dropped.

        Returns:
            A set to which the caller adds digests of new messages. `None` if the epoch is older than the writer's
            newest: its messages cannot be checked, and count as new.
        """
        newest, digests = self._epochs.pop(writer, (number, set[bytes]()))
        if newest < number:
            newest, digests = number, set()
        self._epochs[writer] = newest, digests
        while len(self._epochs) > MAX_EPOCH_WRITERS:
            del self._epochs[next(iter(self._epochs))]
        return digests if newest == number else None

    def save(self) -> list[SavedEpoch]:
        """Return the epochs for the state, that of the most recent writer last."""
        return [SavedEpoch(writer, number, sorted(digests)) for writer, (number, digests) in self._epochs.items()]


def compute_message_digest(message: str) -> bytes:
    """Compute the digest by which an epoch recognizes a message.

    Args:
        message: Network, origin and message id, each on its own line.
    """
    return blake2b(message.encode(), digest_size=16).digest()
