"""Offsets of the finished records of a partition, stored in the metadata of the committed offset.

Records finish out of order, so one offset does not tell which records are finished. The metadata also makes delivery
exactly-once. To release a record is to write its update to `kiln.updates`. Before the fetcher releases some records, it
commits their offsets and a new number, their generation. After a crash it first releases all of them again, under the
same generation. So a reader of `kiln.updates` recognises a repeat by its generation and message (decision 7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import pairwise
from typing import Final

import msgspec

from kiln.bridge.kafka.number_sets import decode_numbers, encode_numbers, encode_steps
from kiln.schemas.kafka.records import UNREADABLE


class CommittedPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of the committed offset, as JSON. The committed offset is that of the first unfinished record.

    `kiln.bridge.kafka.number_sets` encodes the two sets of numbers.
    """

    generation: int
    """generation of the records in `releasing`"""
    read: int
    """offset after the last record that was read"""
    unfinished: str = ""
    """set of the unfinished offsets before `read`, relative to the committed offset"""
    releasing: str = ""
    """set of the records that are being released, as indexes in `unfinished`, from 0"""


_POSITION: Final = msgspec.json.Decoder(CommittedPosition)

MAX_RELEASING: Final = 300
"""Maximum number of records released at a time. Each takes two bytes of the metadata, which must also have room for
the unfinished records."""

_MAX_OPEN_BYTES: Final = 2_100  # bytes of `unfinished` before base85
_MAX_SPAN: Final = 8 * (_MAX_OPEN_BYTES - 1)  # offsets that a bitmap can span
_MAX_STEP_BYTES: Final = 4  # bytes of one varint: 268 million finished records between two open ones


class DoneOffsets:
    """The finished and unfinished records of one partition, by offset.

    The metadata always fits in `MAX_METADATA` bytes. Finishing a record never makes the encoding longer, and `room`
    limits the number of records that may be added.
    """

    def __init__(self, offset: int, metadata: str, fresh_generation: int) -> None:
        """Load the committed `offset` and `metadata`.

        If the metadata is missing or unreadable, for example after a user set the offset, every record from `offset` on
        counts as unfinished.

        Args:
            fresh_generation: generation to continue from if the metadata is unreadable; it must be greater than all
                earlier generations.
        """
        committed = _read_metadata(offset, metadata)
        position, offsets, releasing = committed or (CommittedPosition(fresh_generation, offset), [], set[int]())
        self._generation = position.generation
        self.read = position.read
        """offset after the last record that this run or an earlier one has read"""
        self._open = dict.fromkeys(offsets)  # unfinished offsets, in order
        self._reread = deque(offsets)  # left open by an earlier run, and not read again yet
        self._next_offset = offset
        self._releasing = releasing  # possibly released by an earlier run
        self.changed = False
        """true if there is something to commit: since the last commit, a record was finished or lost"""

    # -------- records

    def add(self, offset: int) -> bool:
        """Add the next record.

        Returns:
            False if an earlier run has finished the record.
        """
        self._next_offset = offset + 1
        self._skip_unread(offset)
        if self._reread and self._reread[0] == offset:
            self._reread.popleft()
            return True
        if offset < self.read:
            return False
        self.read = offset + 1
        self._open[offset] = None
        return True

    def record_lost_range(self, before: int) -> int:
        """Record that Kafka has deleted everything before this offset.

        Returns:
            The number of lost records: those that an earlier run left open, and those that were never read.
        """
        unread = max(0, before - self.read)
        if unread:
            self.read = before
            self.changed = True
        self._next_offset = max(self._next_offset, before)
        return self._skip_unread(before) + unread

    def _skip_unread(self, before: int) -> int:
        lost = 0
        while self._reread and self._reread[0] < before:
            self.mark_done(self._reread.popleft())
            lost += 1
        return lost

    def mark_done(self, offset: int) -> None:
        if offset in self._open:
            del self._open[offset]
            self._releasing.discard(offset)
            self.changed = True

    @property
    def waiting_count(self) -> int:
        """Number of records that are added and unfinished."""
        return len(self._open) - len(self._reread)

    def room(self, limit: int) -> int:
        """Return how many more records may be added."""
        if self._next_offset < self.read:
            return min(limit, self.read - self._next_offset)
        by_span = _MAX_SPAN - (self.read - self.resume_offset)
        if by_span >= limit:
            return limit
        by_steps = (_MAX_OPEN_BYTES - len(encode_steps(self._open, self.resume_offset))) // _MAX_STEP_BYTES
        return max(0, min(limit, max(by_span, by_steps)))

    # -------- generations

    @property
    def is_repeating(self) -> bool:
        """True while this run releases again what an earlier run may have released. Until that is done, no other record
        is released, and no new offset is committed."""
        return bool(self._releasing)

    def can_release(self, offset: int) -> bool:
        """Return whether this record may be released now."""
        return not self._releasing or offset in self._releasing

    @property
    def generation(self) -> int:
        """Generation under which updates are written to `kiln.updates` now."""
        return self._generation if self._releasing else self._generation + 1

    # -------- to commit, before the records being released are written

    @property
    def resume_offset(self) -> int:
        """The offset to resume from after a crash."""
        return next(iter(self._open), self.read)

    def metadata(self, releasing: Collection[int] = ()) -> str:
        """Return the metadata to commit with `resume_offset`.

        Args:
            releasing: the offsets to release next, under `generation`.
        """
        numbers = [number for number, offset in enumerate(self._open) if offset in releasing] if releasing else []
        position = CommittedPosition(
            self.generation, self.read, encode_numbers(self._open, self.resume_offset), encode_numbers(numbers, 0)
        )
        return msgspec.json.encode(position).decode()

    def mark_committed(self) -> None:
        """Record that `resume_offset` and `metadata` are committed. The caller must not commit while `is_repeating`."""
        self._generation += 1
        self.changed = False


def _read_metadata(offset: int, metadata: str) -> tuple[CommittedPosition, list[int], set[int]] | None:
    """Return the committed position, its unfinished offsets, and those being released; `None` if unreadable."""
    try:
        position = _POSITION.decode(metadata)
        offsets = decode_numbers(position.unfinished, offset)
        releasing = {offsets[number] for number in decode_numbers(position.releasing, 0)}
    except (*UNREADABLE, ValueError, IndexError):
        return None
    in_order = all(before < after for before, after in pairwise([*offsets, position.read]))
    is_valid = in_order and position.generation >= 0 and position.read >= offset
    return (position, offsets, releasing) if is_valid else None
