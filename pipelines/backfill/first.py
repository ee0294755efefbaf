"""Which copy of a message is kept, and which UPDATE is a new update, in history: pure, group by group (decision 21).

Live, the order of processing decides both (decision 5). Here live's choice counts where there is one, and else the
order of hearing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

NOWHERE: Final = -1
"""`log_partition` of an update that was never in `kiln.updates`."""


class FramePosition(NamedTuple):
    """Where a copy stands in the log of frames."""

    partition: int
    offset: int
    position: int


class FirstCopySelector(Generic[T]):
    """Chooses among the copies of one message (network and message id) within a chunk of time.

    To be told first what is known of the message, then its copies, in the order of hearing; then `rest` says what
    `keep` still owes. Times are µs.
    """

    def __init__(self, same: Callable[[int, int], bool]) -> None:
        """`same`: whether copies that were heard at these two times are copies of one message. Then copies that were
        heard between the two are, too."""
        self._same = same
        self._kept: list[int] = []  # in order, as the next list
        self._awaited: list[int] = []  # of the copies that live chose, and that are still to come
        self._chosen: dict[FramePosition, int] = {}
        self._instead: dict[int, T] = {}

    def known_elsewhere(self, at: int) -> None:
        """A copy is kept that was heard at a time outside the chunk."""
        insort(self._kept, at)

    def chosen_by_live(self, at: int, place: FramePosition) -> None:
        """Live keeps the copy at a place in the chunk."""
        insort(self._awaited, at)
        self._chosen[place] = at

    def keep(self, at: int, place: FramePosition, copy: T) -> bool:
        """Whether the next copy is kept."""
        chosen = self._chosen.pop(place, None)
        if chosen is not None:
            del self._awaited[bisect_left(self._awaited, chosen)]
            self._instead.pop(chosen, None)
        elif self._near(self._kept, at) is not None:
            return False
        elif (awaited := self._near(self._awaited, at)) is not None:
            self._instead.setdefault(awaited, copy)
            return False
        insort(self._kept, at)
        return True

    def rest(self) -> Iterable[T]:
        """The first copy of each message whose copy of live's choice did not come: by what is known today it is no
        good copy."""
        return self._instead.values()

    def _near(self, times: list[int], at: int) -> int | None:
        """One of these times at which a copy of the same message was heard. It is among the two nearest."""
        place = bisect_left(times, at)
        return next((each for each in times[max(0, place - 1) : place + 1] if self._same(at, each)), None)


def same_signed(remembered: int) -> Callable[[int, int], bool]:
    """Copies of a signed message within `remembered` are one message (decision 5). µs."""
    return lambda one, other: abs(one - other) < remembered


def same_unsigned(horizon: int) -> Callable[[int, int], bool]:
    """An unsigned message is one within spans of `horizon`, cut in two ways, as in `identities` of
    `kiln.pipelines.decode.decoder`. µs."""
    half = horizon // 2
    return lambda one, other: one // horizon == other // horizon or (one + half) // horizon == (other + half) // horizon


class UpdateCandidate(NamedTuple):
    """An UPDATE message, as far as it matters whether it is new. `heard`: µs. `claim`: origin and separator; the rest
    of what makes an update one (stream, tip) is the group's."""

    heard: int
    claim: Hashable
    stamped: bool
    """whether live has it in the table `updates`"""


def new_updates(
    known: Iterable[tuple[int, Hashable]], announced: Iterable[tuple[UpdateCandidate, T]], remembered: int
) -> Iterator[T]:
    """Those UPDATEs of one stream and tip that are new, in order: what live stamped, and of the others what nobody
    announced within `remembered` µs before, and live did not stamp within `remembered` either way.

    `known`: (heard, claim) of updates that are new, in the run's earlier chunks and in live. `announced`: in the order
    of hearing.
    """
    taken: dict[Hashable, list[int]] = {}
    for heard, claim in known:
        insort(taken.setdefault(claim, []), heard)
    for each, what in announced:
        times = taken.setdefault(each.claim, [])
        if not each.stamped:
            place = bisect_left(times, each.heard)
            if any(abs(each.heard - at) < remembered for at in times[max(0, place - 1) : place + 1]):
                continue
            times.insert(place, each.heard)
        yield what
