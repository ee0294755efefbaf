"""Deduplication of history: selects the copy of a message to keep, and the UPDATEs that are new (decision 21). Pure.

In the streaming queries, the order of processing decides both (decision 5). Here, the choice of the streaming queries
takes precedence, and otherwise the order of event times decides.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from itertools import repeat
from typing import Final, Generic, NamedTuple, TypeVar

from kiln.pipelines.updates.repeats import LastTip, is_update

T = TypeVar("T")

NOWHERE: Final = -1
"""`log_partition` of an update that was never in `kiln.updates`."""


class FramePosition(NamedTuple):
    """Position of a copy in `kiln.frames`."""

    partition: int
    offset: int
    position: int


class FirstCopySelector(Generic[T]):
    """Selects from the copies of one message (network and message id) within a chunk of time.

    Add the known copies of the message, then offer the chunk's copies in the order of event times, then list the
    fallbacks. Times are µs.
    """

    def __init__(self, is_same: Callable[[int, int], bool]) -> None:
        """Create a selector without copies.

        Args:
            is_same: Returns true for two times if copies of these times, and any between them, are of one message.
        """
        self._is_same = is_same
        self._kept: list[int] = []  # sorted, as the next list
        self._awaited: list[int] = []  # times of the live tables' copies that were not offered yet
        self._live_choices: dict[FramePosition, int] = {}
        self._fallbacks: dict[int, T] = {}

    def add_known(self, at: int) -> None:
        """Record a selected copy outside the chunk."""
        insort(self._kept, at)

    def add_live_choice(self, at: int, position: FramePosition) -> None:
        """Record the copy in the chunk that the live tables keep."""
        insort(self._awaited, at)
        self._live_choices[position] = at

    def offer(self, at: int, position: FramePosition, copy: T) -> bool:
        """Offer the next copy, and return true if it is selected."""
        chosen = self._live_choices.pop(position, None)
        if chosen is not None:
            del self._awaited[bisect_left(self._awaited, chosen)]
            self._fallbacks.pop(chosen, None)
        elif self._find_same(self._kept, at) is not None:
            return False
        elif (awaited := self._find_same(self._awaited, at)) is not None:
            self._fallbacks.setdefault(awaited, copy)
            return False
        insort(self._kept, at)
        return True

    def list_fallbacks(self) -> Iterable[T]:
        """Return the first copy of each message whose copy in the live tables was not offered, because the decoder now
        rejects that copy."""
        return self._fallbacks.values()

    def _find_same(self, times: list[int], at: int) -> int | None:
        """Find a time of the same message. If there is such a time, it is one of the two nearest."""
        index = bisect_left(times, at)
        return next((other for other in times[max(0, index - 1) : index + 1] if self._is_same(at, other)), None)


def match_signed(signed_horizon: int) -> Callable[[int, int], bool]:
    """Match copies of a signed message that are less than `signed_horizon` apart, µs (decision 5)."""
    return lambda one, other: abs(one - other) < signed_horizon


def match_unsigned(horizon: int) -> Callable[[int, int], bool]:
    """Match copies of an unsigned message in one span of `horizon` µs, by either of two divisions of time.

    The divisions are as in `kiln.pipelines.decode.identities.compute_identities`.
    """
    half = horizon // 2
    return lambda one, other: one // horizon == other // horizon or (one + half) // horizon == (other + half) // horizon


class StreamHistory:
    """Updates and announcements of one stream, which decide whether the next announcement is an update (decision 5).

    First add the known updates and announcements, then offer the candidates by event time. Times are µs.
    """

    def __init__(self, signed_horizon: int) -> None:
        self._horizon = signed_horizon
        self._updates: dict[tuple[str, str], dict[Hashable | None, list[int]]] = {}
        """sorted times of the updates by origin and tip, and by separator"""
        self._last: dict[tuple[str, str], LastTip[str]] = {}
        """last tips by origin and author"""

    def add_update(self, origin: str, separator: Hashable | None, tip: str, at: int) -> None:
        """Add an update of earlier chunks or of the live tables. Its time may be after the times of the candidates."""
        insort(self._updates.setdefault((origin, tip), {}).setdefault(separator, []), at)

    def add_announcement(self, origin: str, author: str, tip: str, at: int) -> None:
        """Add an announcement before the candidates."""
        last = self._last.get((origin, author))
        if last is None or last.at <= at:
            self._last[origin, author] = LastTip(tip, at)

    def offer(
        self, at: int, origin: str, separator: Hashable | None, tip: str, author: str | None, *, is_live: bool
    ) -> bool:
        """Offer the next candidate, and return true if it is an update.

        A candidate in the live table is always an update. Any other candidate is a repeat if an update precedes it, or
        a live update follows it, within the horizon. An announcement without separator repeats an update with any
        separator.

        Args:
            at: Event time, µs.
            origin: Origin of the message.
            separator: Separator of the stream, if it has one.
            tip: CID of the tip.
            author: `None` if the message has no author, or was announced before this copy.
            is_live: True if the live table `updates` contains the candidate.
        """
        by_separator = self._updates.get((origin, tip), {})
        if separator is None:
            times = [time for time in map(self._find_newest, by_separator.values(), repeat(at)) if time is not None]
            updated_at = max(times, default=None)
        else:
            updated_at = self._find_newest(by_separator.get(separator, []), at)
        announced = LastTip(tip, at)
        last = None if author is None else self._last.get((origin, author))
        is_new = is_live or is_update(announced, updated_at, last)
        if is_new and not is_live:
            self.add_update(origin, separator, tip, at)
        if author is not None:
            self._last[origin, author] = announced
        return is_new

    def _find_newest(self, times: list[int], at: int) -> int | None:
        """Find the newest of sorted times that is within the horizon before or after `at`."""
        index = bisect_left(times, at + self._horizon) - 1
        return times[index] if index >= 0 and times[index] > at - self._horizon else None
