"""Which records of a partition are done. Records are done out of order, so the metadata of the committed offset says
which ones.

Exactly once rests on two rules. The fetcher commits which records are going to `kiln.updates`, under a generation of
their own, before it writes the first of them. After a crash the fetcher writes all these records again, under the same
generation, before anything else. So a reader of the log knows each repeat by generation and message (decision 7).
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Final

import msgspec

from kiln.schemas.kafka.records import UNREADABLE
from kiln.schemas.wire.cid import read_varint, write_varint


class CommittedPosition(msgspec.Struct, frozen=True):
    """What is committed beside the offset of the first record that is not done: JSON of this.

    `generation`: of what is going. `read`: the offset up to which records were read. `open`: those before it that are
    not done. `going`: which of these, counted from 0, are on their way to `kiln.updates`.

    Each of the two is a set of numbers from a base on, the offset committed and 0: "" for none, else base85 of a bitmap
    ("b…": bit i % 8, lowest first, of byte i // 8 is base + i) or of varints ("g…": the step from the base to the
    first, then from each to the next).
    """

    generation: int
    read: int
    open: str = ""
    going: str = ""


_KEPT_PLACE: Final = msgspec.json.Decoder(CommittedPosition)

MAX_METADATA: Final = 3_500
"""Longest metadata written, in bytes: brokers refuse more than 4,096 (`offset.metadata.max.bytes`)."""
MOST_GOING: Final = 300
"""Records going at a time: two bytes each, so that they can be written with any others that are open."""

_MOST_BYTES: Final = 2_100  # of `open` before base85
_WIDEST: Final = 8 * (_MOST_BYTES - 1)  # offsets that a bitmap can span
_MOST_OF_A_STEP: Final = 4  # bytes of one varint, to be reckoned with: 268 million records done between two open ones


class DoneOffsets:
    """Which records of one partition are done. Pure.

    The metadata always fits in `MAX_METADATA` bytes: as records are done, the steps never grow longer in sum, and the
    span of the bitmap grows only by what is taken. `room` says how many more records may be taken.
    """

    def __init__(self, offset: int, metadata: str, fresh_generation: int) -> None:
        """`offset`, `metadata`: as committed. `fresh_generation`: taken where the metadata has none; greater than any
        before.

        Metadata that cannot be read was set by hand. Then every record from `offset` on counts as not done.
        """
        found = _read_metadata(offset, metadata)
        kept, offsets, going = found or (CommittedPosition(fresh_generation, offset), [], set[int]())
        self._generation = kept.generation
        self.read = kept.read
        """the offset up to which records were read, by an earlier run too"""
        self._open = dict.fromkeys(offsets)  # in their order
        self._again = deque(offsets)  # of an earlier run, and not read again yet
        self._at = offset
        self._repeat = going  # let go by an earlier run, perhaps
        self.changed = False
        """whether something is done that is not committed"""

    # -------- records

    def take(self, offset: int) -> bool:
        """Takes the next record. False: an earlier run has done it."""
        self._at = offset + 1
        self._pass_over(offset)
        if self._again and self._again[0] == offset:
            self._again.popleft()
            return True
        if offset < self.read:
            return False
        self.read = offset + 1
        self._open[offset] = None
        return True

    @property
    def next(self) -> int:
        """The offset of the next record, if Kafka has left out none."""
        return self._at

    def gone(self, before: int) -> int:
        """Kafka has nothing before this offset any more. How many records are lost so: those that an earlier run left
        open, and those that were never read."""
        unread = max(0, before - self.read)
        if unread:
            self.read = before
            self.changed = True
        self._at = max(self._at, before)
        return self._pass_over(before) + unread

    def _pass_over(self, before: int) -> int:
        lost = 0
        while self._again and self._again[0] < before:
            self.done(self._again.popleft())
            lost += 1
        return lost

    def done(self, offset: int) -> None:
        if offset in self._open:
            del self._open[offset]
            self._repeat.discard(offset)
            self.changed = True

    @property
    def waiting(self) -> int:
        """How many records are taken and not done."""
        return len(self._open) - len(self._again)

    def room(self, at_most: int) -> int:
        """How many more records may be taken."""
        if self._at < self.read:
            return min(at_most, self.read - self._at)
        by_span = _WIDEST - (self.read - self.place)
        if by_span >= at_most:
            return at_most
        by_steps = (_MOST_BYTES - len(_steps(self._open, self.place))) // _MOST_OF_A_STEP
        return max(0, min(at_most, max(by_span, by_steps)))

    # -------- generations

    @property
    def repeating(self) -> bool:
        """Whether records that an earlier run let go come first. Until all of these are done, nothing is committed."""
        return bool(self._repeat)

    def may_go(self, offset: int) -> bool:
        """Whether this record may be let go now."""
        return not self._repeat or offset in self._repeat

    @property
    def generation(self) -> int:
        """The generation of records that are let go now."""
        return self._generation if self._repeat else self._generation + 1

    # -------- to be committed, before what is going is written

    @property
    def place(self) -> int:
        """The offset to go on from after a crash."""
        return next(iter(self._open), self.read)

    def metadata(self, going: Collection[int] = ()) -> str:
        """What to commit beside `place`. `going`: the offsets that are let go next, under `generation`."""
        numbers = [number for number, offset in enumerate(self._open) if offset in going] if going else []
        kept = CommittedPosition(self.generation, self.read, _text(self._open, self.place), _text(numbers, 0))
        return msgspec.json.encode(kept).decode()

    def committed(self) -> None:
        """The broker has `place` and `metadata`. Never called while `repeating`."""
        self._generation += 1
        self.changed = False


def _steps(numbers: Iterable[int], base: int) -> bytes:
    out = bytearray()
    for number in numbers:
        out += write_varint(number - base)
        base = number
    return bytes(out)


def _text(numbers: Collection[int], base: int) -> str:
    """A set of numbers, given in their order."""
    if not numbers:
        return ""
    steps = _steps(numbers, base)
    width = (max(numbers) - base) // 8 + 1
    if len(steps) < width:
        return "g" + base64.b85encode(steps).decode()
    bits = bytearray(width)
    for number in numbers:
        bits[(number - base) // 8] |= 1 << (number - base) % 8
    return "b" + base64.b85encode(bits).decode()


def _numbers(text: str, base: int) -> list[int]:
    """The reverse of `_text`. ValueError."""
    raw = base64.b85decode(text[1:])
    if text.startswith("b"):
        return [base + 8 * at + bit for at, byte in enumerate(raw) for bit in range(8) if byte >> bit & 1]
    numbers, at = list[int](), 0
    while at < len(raw):
        step, at = read_varint(raw, at)
        base += step
        numbers.append(base)
    return numbers


def _read_metadata(offset: int, metadata: str) -> tuple[CommittedPosition, list[int], set[int]] | None:
    """What was committed, which offsets are not done, and which of these were going. None: unreadable."""
    try:
        kept = _KEPT_PLACE.decode(metadata)
        offsets = _numbers(kept.open, offset)
        going = {offsets[number] for number in _numbers(kept.going, 0)}
    except (*UNREADABLE, ValueError, IndexError):
        return None
    in_order = all(before < after for before, after in pairwise([*offsets, kept.read]))
    return (kept, offsets, going) if in_order and kept.generation >= 0 and kept.read >= offset else None
