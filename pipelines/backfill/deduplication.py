"""Deduplication in a backfill run: which copy of a message to keep, and which UPDATE messages are new. Pure.

A backfill run makes the choice that the live tables show. Where they show none, the earliest copy or UPDATE by event
time is kept (decision 21). The streaming queries keep the first one that they process (decision 5).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from itertools import repeat
from typing import Final, Generic, NamedTuple, TypeVar

from kiln.pipelines.updates.repeats import LastTip, is_update

T = TypeVar("T")

NOWHERE: Final = -1
"""Value of the column `log_partition` for an update that was never in the topic `kiln.updates`"""


class FramePosition(NamedTuple):
    """Position of a copy: partition and offset of its frame in `kiln.frames`, and index of the message in the frame."""

    partition: int
    offset: int
    position: int


class FirstCopySelector(Generic[T]):
    """Selector of the copies to keep of one message (network and message id) in a chunk of a backfill run.

    First add what is known about the message. Then offer the chunk's copies in the order of their times. Then list the
    fallbacks. Several copies are kept if no two of them are close in time (`is_same`). Times are µs.
    """

    def __init__(self, is_same: Callable[[int, int], bool]) -> None:
        """Create a selector without copies.

        Args:
            is_same: Returns true if two copies with these times are so close that only one is kept.
        """
        self._is_same = is_same
        self._kept: list[int] = []  # sorted, like the next list
        self._awaited: list[int] = []  # times of the live tables' copies that were not offered yet
        self._live_choices: dict[FramePosition, int] = {}
        self._fallbacks: dict[int, T] = {}

    def add_known(self, at: int) -> None:
        """Add the time of a copy that is kept already and is not in the chunk."""
        insort(self._kept, at)

    def add_live_choice(self, at: int, position: FramePosition) -> None:
        """Add a copy in the chunk that the live table `messages` has, so that it is preferred."""
        insort(self._awaited, at)
        self._live_choices[position] = at

    def offer(self, at: int, position: FramePosition, copy: T) -> bool:
        """Offer the next copy in the order of times, and return true if it is to be kept."""
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
        """Return replacements for copies of the live table that were not offered, because decoding now rejects them.

        The replacement is the first offered copy that is close in time.
        """
        return self._fallbacks.values()

    def _find_same(self, times: list[int], at: int) -> int | None:
        """Find, in sorted times, the time of a copy so close to `at` that only one of the two is kept."""
        index = bisect_left(times, at)
        return next((other for other in times[max(0, index - 1) : index + 1] if self._is_same(at, other)), None)


def match_signed(signed_horizon: int) -> Callable[[int, int], bool]:
    """Build a function that is true for two times (µs) less than `signed_horizon` apart.

    Copies of a signed message with such times count as one message (decision 5).
    """
    return lambda one, other: abs(one - other) < signed_horizon


def match_unsigned(horizon: int) -> Callable[[int, int], bool]:
    """Build a function that is true for two times (µs) in the same interval of length `horizon`.

    Time is divided into intervals in two ways, the second one shifted by half an interval. It is enough that the times
    share an interval of either division. Copies of an unsigned message with such times count as one message, as in
    `kiln.pipelines.decode.identities.compute_identities`.
    """
    half = horizon // 2
    return lambda one, other: one // horizon == other // horizon or (one + half) // horizon == (other + half) // horizon


class StreamHistory:
    """Updates and announcements of one stream, to decide which UPDATE messages are updates and which are repeats.

    First add the known updates and announcements. Then offer the candidates in the order of event times. Times are µs.
    Source: decision 5.
    """

    def __init__(self, signed_horizon: int) -> None:
        self._horizon = signed_horizon
        self._updates: dict[tuple[str, str], dict[Hashable | None, list[int]]] = {}
        """sorted times of the updates by origin and tip, and by separator"""
        self._last: dict[tuple[str, str], LastTip[str]] = {}
        """last tips by origin and author"""

    def add_update(self, origin: str, separator: Hashable | None, tip: str, at: int) -> None:
        """Add an update from an earlier chunk or a live table. It may be later than the candidates."""
        insort(self._updates.setdefault((origin, tip), {}).setdefault(separator, []), at)

    def add_announcement(self, origin: str, author: str, tip: str, at: int) -> None:
        """Add an announcement of a tip that is earlier than the candidates."""
        last = self._last.get((origin, author))
        if last is None or last.at <= at:
            self._last[origin, author] = LastTip(tip, at)

    def offer(
        self, at: int, origin: str, separator: Hashable | None, tip: str, author: str | None, *, is_live: bool
    ) -> bool:
        """Offer the next candidate, and return true if it is an update, false if it is a repeat.

        A candidate in the live table is an update. Any other candidate is a repeat if there is an update of the same
        tip and separator shortly before it, or a live one shortly after it, unless its author has announced another tip
        since that update. A candidate without separator is also a repeat of an update with a separator.

        Args:
            at: Event time, µs.
            separator: Separator of the stream, if it has one.
            author: Author of the message; `None` if it has none, or if an earlier copy counts as the announcement.
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
        """Find, in sorted times, the newest one that differs from `at` by less than the horizon."""
        index = bisect_left(times, at + self._horizon) - 1
        return times[index] if index >= 0 and times[index] > at - self._horizon else None
