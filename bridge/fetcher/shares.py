"""Fair shares of the places for waiting records, by announcer. No Kafka, no IPFS."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from kiln.conf.process.bounded_dict import BoundedDict

_MAX_MISSES: Final = 3  # misses in a row after which an author is no longer proven
_MAX_KNOWN: Final = 10_000  # announcers that are remembered


class Announcer(NamedTuple):
    """The parties of one announcement."""

    author: str
    """peer id of the author, or "" of a message without one"""
    peer: str
    """the peer that sent the message, or "" if unknown; new keys cost nothing, but connections do"""


class Place(NamedTuple):
    """A place that a waiting record holds."""

    announcer: Announcer
    is_proven: bool


class AnnouncerPlaces:
    """Places for records that wait for blocks.

    An author is proven while blocks that it announced arrive. A proven author may hold as many places as are free.
    Everyone else shares `unproven` of the places: each author, and each peer, may hold as many of them as are free, so
    none takes the last one (dynamic thresholds: Choudhury and Hahne, 1998).
    """

    def __init__(self, capacity: int, unproven: int) -> None:
        self._capacity = capacity
        self._max_unproven = unproven
        self._held: Counter[tuple[bool, str, str]] = Counter()  # places by class, party and id of the party
        self._unproven = 0
        self._proven_misses = BoundedDict[str, int](_MAX_KNOWN)  # in a row, by author
        self._failing = BoundedDict[tuple[str, str], None](_MAX_KNOWN)  # party and its id
        self.count = 0
        """places that are held"""

    @property
    def free(self) -> int:
        """Number of free places; negative if the caller took more than there are."""
        return self._capacity - self.count

    @property
    def has_proven(self) -> bool:
        """Return whether any author is proven."""
        return bool(self._proven_misses)

    def has_room(self, announcer: Announcer) -> bool:
        """Return whether this announcer may hold one more place."""
        is_proven = self.is_proven(announcer)
        free = self.free if is_proven else min(self.free, self._max_unproven - self._unproven)
        return all(self._held[party] < free for party in _list_holders(Place(announcer, is_proven)))

    def take(self, announcer: Announcer) -> Place:
        """Take a place, even if there is no room."""
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
        """Return whether a block that this author announced was fetched, with few misses since."""
        return announcer.author in self._proven_misses

    def is_failing(self, announcer: Announcer) -> bool:
        """Return whether the author is not proven, and the last block of this author or this peer failed."""
        return not self.is_proven(announcer) and any(party in self._failing for party in _list_parties(announcer))

    def record_attempt(self, announcer: Announcer, *, arrived: bool) -> bool:
        """Record the first attempt for a block, or that a block arrived.

        Returns:
            True if this made the author proven, or unproven again.
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
