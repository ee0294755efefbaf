"""Sequence numbers of our own messages, monotonic over restarts, crashes and clocks set back.

A message's id is its author and its seqno. Some peers store the highest seqno of each author and drop messages
whose seqno is not above it (Kubo 0.40's BasicSeqnoValidator). If the numbers went back, these peers would ignore the
node.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kiln.conf.process.files import read_small_file, replace_file

RESERVE: Final = 10_000_000_000  # ns
SEQNO_BYTES: Final = 8


class SeqnoError(Exception):
    """The file of the sequence numbers cannot be used; the message names the file, the cause and the fix."""


class Seqno:
    """seqno = max(time in ns, last + 1), with a high-water mark in a file: no number above the mark was used.

    The mark is written RESERVE ahead of the numbers, so there is one write for each RESERVE and not one for every
    message. After a crash, the numbers continue from the mark. After `close`, they continue from the last number, or
    from the mark if the last number could not be written. Only one thread of one process may use the file at a time.
    """

    def __init__(self, path: Path, clock_ns: Callable[[], int]) -> None:
        """Read the mark.

        Args:
            clock_ns: Returns Unix time in ns.

        Raises:
            SeqnoError: The file exists and cannot be read.
        """
        self._path = path
        self._clock_ns = clock_ns
        self._last = self._mark = _read(path)

    def next(self) -> int:
        """Return the next number, an unsigned 64-bit integer.

        Raises:
            SeqnoError: The mark cannot be written.
        """
        number = max(self._clock_ns(), self._last + 1)
        if number > self._mark:
            self._write(number + RESERVE)
        self._last = number
        return number

    def next_bytes(self) -> bytes:
        """Return the next number in its wire form: 8 bytes, big-endian."""
        return self.next().to_bytes(SEQNO_BYTES, "big")

    def close(self) -> None:
        """Release the unused reserve.

        A failed write is ignored: a mark that is too high does no harm, and a bridge with a full disk must be able to
        stop.
        """
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
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, b"%d\n" % mark)
        except OSError as error:
            raise SeqnoError(
                f"cannot write the sequence numbers to {self._path} ({error.strerror}). Check the disk."
            ) from error
        self._mark = mark


def _read(path: Path) -> int:
    try:
        raw = read_small_file(path)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise SeqnoError(
            f"cannot read the sequence numbers in {path} ({error.strerror}). Check the file's owner and permissions."
        ) from error
    text = raw.strip()
    # isdigit, because int() would accept signs, underscores and spaces
    if not text.isdigit() or len(text) > 20 or int(text) >= 1 << 64:
        raise SeqnoError(
            f"cannot read the sequence numbers in {path}: {raw[:40]!r} is not a number. Restore the file, or delete it "
            "if this machine's clock was never set back: the numbers then start at the clock."
        )
    return int(text)
