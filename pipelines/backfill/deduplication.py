"""Deduplication of history: selects the copy of a message to keep, and the UPDATEs that are new (decision 21). Pure.

In the streaming queries, the order of processing decides both (decision 5). Here, their choice takes precedence, and
otherwise the order of event times decides.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

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
        """
        Args:
            is_same: If true for two times, copies of these times, and any between them, are of one message.
        """
        self._is_same = is_same
        self._kept: list[int] = []  # sorted, as the next list
        self._awaited: list[int] = []  # of copies that live chose and that were not offered yet
        self._live_choices: dict[FramePosition, int] = {}
        self._fallbacks: dict[int, T] = {}

    def add_known(self, at: int) -> None:
        """Record a selected copy outside the chunk."""
        insort(self._kept, at)

    def add_live_choice(self, at: int, position: FramePosition) -> None:
        """Record the copy in the chunk that live keeps."""
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
        """Return the first copy of each message whose live copy was not offered, because it is no longer a valid
        copy."""
        return self._fallbacks.values()

    def _find_same(self, times: list[int], at: int) -> int | None:
        """Find a time of the same message. If there is one, it is among the two nearest."""
        index = bisect_left(times, at)
        return next((each for each in times[max(0, index - 1) : index + 1] if self._is_same(at, each)), None)


def match_signed(signed_horizon: int) -> Callable[[int, int], bool]:
    """Match copies of a signed message that are less than `signed_horizon` apart, µs (decision 5)."""
    return lambda one, other: abs(one - other) < signed_horizon


def match_unsigned(horizon: int) -> Callable[[int, int], bool]:
    """Match copies of an unsigned message in one span of `horizon` µs, by either of two divisions of time.

    The divisions are those of `kiln.pipelines.decode.decoder.compute_identities`.
    """
    half = horizon // 2
    return lambda one, other: one // horizon == other // horizon or (one + half) // horizon == (other + half) // horizon


class UpdateCandidate(NamedTuple):
    """The facts that decide whether an UPDATE is new, next to the stream and tip of its group."""

    event_time: int
    """µs"""
    claim: Hashable
    """origin and separator"""
    is_live: bool
    """true if live has it in the table `updates`"""


def select_new_updates(
    known: Iterable[tuple[int, Hashable]], announced: Iterable[tuple[UpdateCandidate, T]], signed_horizon: int
) -> Iterator[T]:
    """Select the new UPDATEs of one stream and tip.

    These are the updates of the live table, and those that were not announced in the `signed_horizon` µs before and
    that the live table does not have within `signed_horizon` before or after.

    Args:
        known: Event time and claim of the new updates in the run's earlier chunks and in live.
        announced: Candidates with their updates, by event time.
    """
    times_by_claim: dict[Hashable, list[int]] = {}
    for event_time, claim in known:
        insort(times_by_claim.setdefault(claim, []), event_time)
    for each, update in announced:
        times = times_by_claim.setdefault(each.claim, [])
        if not each.is_live:
            index = bisect_left(times, each.event_time)
            if any(abs(each.event_time - at) < signed_horizon for at in times[max(0, index - 1) : index + 1]):
                continue
            times.insert(index, each.event_time)
        yield update
