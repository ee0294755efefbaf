"""Limit on the number of waiting records, divided fairly between announcers. Does no I/O.

Limits apply to author and peer, because anyone can create many authors, but each peer needs a connection.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from kiln.bridge.ipfs import Announcer
from kiln.conf.process.bounded_dict import BoundedDict

_MAX_MISSES: Final = 3  # misses in a row after which an author is no longer proven
_MAX_KNOWN: Final = 10_000  # announcers that are remembered


class Place(NamedTuple):
    """The place of a waiting record, charged to its announcer."""

    announcer: Announcer
    is_proven: bool


class AnnouncerPlaces:
    """Places for records that wait for blocks: each waiting record holds one.

    An author is *proven* while the blocks that it announces can be fetched. A proven author has room for one more
    record while it holds fewer places than are free. The other authors share `unproven` of the places. Each has room
    while the author and its peer each hold fewer of these shared places than are free. So some places stay free for
    other announcers (dynamic thresholds: Choudhury and Hahne, 1998).
    """

    def __init__(self, capacity: int, unproven: int) -> None:
        self._capacity = capacity
        self._max_unproven = unproven
        self._held: Counter[tuple[bool, str, str]] = Counter()  # places by class, party and id of the party
        self._unproven = 0
        self._proven_misses = BoundedDict[str, int](_MAX_KNOWN)  # in a row, by author
        self._failing = BoundedDict[tuple[str, str], None](_MAX_KNOWN)  # party and its id
        self.count = 0
        """number of places that are held"""

    @property
    def free(self) -> int:
        """Number of free places; negative if more are taken than there are."""
        return self._capacity - self.count

    @property
    def has_proven(self) -> bool:
        """True if an author is proven."""
        return bool(self._proven_misses)

    def has_room(self, announcer: Announcer) -> bool:
        """Return whether this announcer may hold one more place."""
        is_proven = self.is_proven(announcer)
        free = self.free if is_proven else min(self.free, self._max_unproven - self._unproven)
        return all(self._held[party] < free for party in _list_holders(Place(announcer, is_proven)))

    def take(self, announcer: Announcer) -> Place:
        """Take a place for a record of this announcer, even if the announcer has no room."""
        place = Place(announcer, self.is_proven(announcer))
        self._held.update(_list_holders(place))
        self._unproven += not place.is_proven
        self.count += 1
        return place

    def release(self, place: Place) -> None:
        """Release a place."""
        for party in _list_holders(place):
            self._held[party] -= 1
            if not self._held[party]:
                del self._held[party]
        self._unproven -= not place.is_proven
        self.count -= 1

    # -------- evidence

    def is_proven(self, announcer: Announcer) -> bool:
        """Return whether a block of this author was fetched, and fewer than `_MAX_MISSES` in a row failed since."""
        return announcer.author in self._proven_misses

    def is_failing(self, announcer: Announcer) -> bool:
        """Return whether the author is not proven, and the last fetch for this author or this peer failed."""
        return not self.is_proven(announcer) and any(party in self._failing for party in _list_parties(announcer))

    def record_attempt(self, announcer: Announcer, *, arrived: bool) -> bool:
        """Record that a block arrived, or that the first attempt to fetch it failed.

        Returns:
            True if the call changed whether the announcer is proven.
        """
        was_proven = self.is_proven(announcer)
        if arrived:
            for party in _list_parties(announcer):
                self._failing.pop(party, None)
            self._proven_misses[announcer.author] = 0
            return not was_proven
        if was_proven:
            self._proven_misses[announcer.author] += 1
            if self._proven_misses[announcer.author] < _MAX_MISSES:
                return False
            del self._proven_misses[announcer.author]
        for party in _list_parties(announcer):
            self._failing[party] = None
        return was_proven


def _list_parties(announcer: Announcer) -> tuple[tuple[str, str], ...]:
    author, peer = announcer
    return (("author", author), *((("peer", peer),) if peer else ()))


def _list_holders(place: Place) -> tuple[tuple[bool, str, str], ...]:
    if place.is_proven:
        return ((True, "author", place.announcer.author),)
    return tuple((False, *party) for party in _list_parties(place.announcer))
