"""Sequence numbers of the node's own messages. They increase even over crashes and after the clock is set back.

Some peers store the highest sequence number of each author, and drop messages that do not exceed it (Kubo 0.40's
BasicSeqnoValidator). If the numbers fell, these peers would ignore the node.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kiln.conf.process.files import replace_file

RESERVE: Final = 10_000_000_000  # ns
SEQNO_BYTES: Final = 8


class SeqnoError(Exception):
    """The file of the sequence numbers cannot be used. The error text names the file, the cause and a remedy."""


class Seqno:
    """A generator of sequence numbers: the time in ns, or the previous number + 1 if that is greater.

    A file stores a mark that no used number exceeds. The mark is written 10 s (RESERVE) ahead of the numbers, so that
    not every message needs a write. After a crash, the numbers continue above the mark. After `close`, the mark is the
    last number. Only one thread of one process may use the file at a time.
    """

    def __init__(self, path: Path, clock_ns: Callable[[], int]) -> None:
        """Read the file.

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
            SeqnoError: The file cannot be written.
        """
        number = max(self._clock_ns(), self._last + 1)
        if number > self._mark:
            self._write(number + RESERVE)
        self._last = number
        return number

    def next_bytes(self) -> bytes:
        """Return the next number as it is in a message: 8 bytes, big-endian."""
        return self.next().to_bytes(SEQNO_BYTES, "big")

    def close(self) -> None:
        """Set the mark in the file to the last number.

        An error is ignored, because a mark that is too high does no harm, and a bridge with a full disk must be able to
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
                f"cannot write the sequence numbers to {self._path} ({error.strerror}). Check the free space of the "
                "disk and the permissions of the folder."
            ) from error
        self._mark = mark


def _read(path: Path) -> int:
    try:
        raw = path.read_bytes()
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
            f"cannot read the sequence numbers in {path}: {raw[:40]!r} is not a number. Restore the file. If this "
            "machine's clock was never set back, you may delete it instead: the numbers then start at the current time."
        )
    return int(text)
