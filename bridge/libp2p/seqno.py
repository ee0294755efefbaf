"""Sequence numbers of our own messages: never lower than any before, over restarts, crashes and clocks set back.

A message's id is its author and its seqno, and some peers keep the highest one per author on disk and drop what is not
above it (Kubo 0.40's BasicSeqnoValidator), so one step back makes a node mute.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

RESERVE: Final = 10_000_000_000  # ns
SEQNO_BYTES: Final = 8


class SeqnoError(Exception):
    """The file of the sequence numbers cannot be used: says which, why, and what to do."""


class Seqno:
    """seqno = max(time in ns, last + 1), with a high-water mark in a file: no number above it was given out.

    The mark is written `reserve` ahead, so a write comes once in that time and not with every message. After a crash
    the numbers go on from the mark; after `close` from the last number, or from the mark where the disk took no write.
    One owner at a time, one thread.
    """

    def __init__(self, path: Path, clock_ns: Callable[[], int], reserve: int = RESERVE) -> None:
        """`clock_ns`: unix time in nanoseconds. SeqnoError if the file is there and unreadable."""
        self._path = path
        self._clock_ns = clock_ns
        self._reserve = reserve
        self._last = self._mark = _read(path)

    def next(self) -> int:
        """The next number, an unsigned 64-bit integer.

        SeqnoError if the mark cannot be written: no number is given out then.
        """
        number = max(self._clock_ns(), self._last + 1)
        if number > self._mark:
            self._write(number + self._reserve)
        self._last = number
        return number

    def next_bytes(self) -> bytes:
        """The next number as it is on the wire: 8 bytes, big-endian."""
        return self.next().to_bytes(SEQNO_BYTES, "big")

    def close(self) -> None:
        """Give back what was reserved and not used, if the disk takes the write: a mark that is too high does no harm,
        and a bridge whose disk is full must end in peace."""
        if self._last < self._mark:
            with suppress(SeqnoError):
                self._write(self._last)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, mark: int) -> None:
        new = self._path.with_name(self._path.name + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(new, "w", encoding="ascii") as file:
                file.write(f"{mark}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
        except OSError as error:
            raise SeqnoError(f"{self._path}: cannot be written: {error.strerror}") from error
        self._mark = mark


def _read(path: Path) -> int:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise SeqnoError(f"{path}: cannot be read: {error.strerror}") from error
    text = raw.strip()
    # isdigit: int() would take signs, underscores and spaces
    if not text.isdigit() or len(text) > 20 or int(text) >= 1 << 64:
        raise SeqnoError(
            f"{path}: holds no sequence number but {raw[:40]!r}; without the file numbers start at the clock again, "
            "which is right if this machine's clock was never set back"
        )
    return int(text)
