"""Streams whose separator is only claimed, and whose genesis is to be fetched, the most active first (decision 20)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kiln.schemas.kafka.records import SeparatorRecord, UpdateRecord, WantedRecord
from kiln.schemas.wire.genesis import Claims
from kiln.schemas.wire.topics import Separator

MAX_CLAIMED: Final = 10_000
"""Maximum number of geneses that wait for a fetch or for their next attempt."""
_MAX_TRIES: Final = 6
_MAX_KINDS: Final = 4  # different claims per genesis whose first update is kept
_MAX_TIPS: Final = 32  # kept per genesis


@dataclass
class GenesisClaims:
    """Claims about the streams of one genesis."""

    count: int
    """number of claims, including the claims of geneses that this one evicted"""
    first_updates: dict[tuple[str, Claims], WantedRecord] = field(default_factory=dict)
    """the first update by stream and claims"""
    tips: dict[bytes, None] = field(default_factory=dict)
    """digests of the newest updates under the separators that they claim"""
    tries: int = 0

    def includes(self, update: UpdateRecord, separator: SeparatorRecord | None) -> bool:
        """Return whether this update is known to be in `kiln.updates` under this separator."""
        return _digest(update, separator) in self.tips


class ClaimedStreams:
    """Geneses to fetch, by CID, counted by the Space-Saving algorithm (Metwally, Agrawal, El Abbadi, 2005).

    A genesis waits, is deferred after an attempt that brought no block, or is being fetched: from `next_genesis` until
    `pop_claims`, `record_failure`, `put_back` or `defer`.
    """

    def __init__(self, most: int = MAX_CLAIMED) -> None:
        """Create an empty set.

        Args:
            most: maximum number of geneses, apart from those that are being fetched.
        """
        self._capacity = most
        self._claims: dict[str, GenesisClaims] = {}
        self._waiting: dict[int, OrderedDict[str, None]] = {}  # CIDs by count; not attempted yet
        self._deferred: OrderedDict[str, int] = OrderedDict()  # end of the wait, earliest first; 0 after `put_back`
        self.evicted = 0
        """geneses evicted since the start"""
        self.unrecorded = 0
        """claims since the start that no quarantine record will report, because their genesis already had too many"""

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, record: WantedRecord) -> None:
        """Count a claim. If there is no room, the genesis with the lowest priority is evicted."""
        claims = self._claims.get(record.cid)
        if claims is None:
            count = self._evict() if len(self._claims) >= self._capacity else 0
            claims = self._claims[record.cid] = GenesisClaims(count + 1)
            self._enqueue(record.cid, claims)
        elif self._dequeue(record.cid, claims):
            claims.count += 1
            self._enqueue(record.cid, claims)
        else:
            claims.count += 1
        update = record.update
        assert update is not None, "WantedRecord: a claim comes with its update"
        kind = update.stream, claims_of(record)
        if kind not in claims.first_updates and len(claims.first_updates) == _MAX_KINDS:
            self.unrecorded += 1
        else:
            claims.first_updates.setdefault(kind, record)
        claims.tips[_digest(update, update.separator)] = None
        if len(claims.tips) > _MAX_TIPS:
            del claims.tips[next(iter(claims.tips))]

    def next_genesis(self, now: int) -> str | None:
        """Return the genesis to fetch now, if any: the most claimed of those that wait, else one whose deferral is
        over."""
        if self._waiting:
            most = max(self._waiting)
            cid = next(iter(self._waiting[most]))
            self._dequeue(cid, self._claims[cid])
            return cid
        cid, until = next(iter(self._deferred.items()), ("", 0))
        if not cid or until > now:
            return None
        del self._deferred[cid]
        return cid

    def put_back(self, cid: str) -> None:
        """Put back a genesis that was not fetched after all."""
        claims = self._claims[cid]
        if claims.tries:
            self._deferred[cid] = 0
            self._deferred.move_to_end(cid, last=False)
        else:
            self._enqueue(cid, claims)

    def defer(self, cid: str, until: int) -> None:
        """Put back a genesis that was not fetched, and must not be fetched before `until`."""
        self._deferred[cid] = until

    def record_failure(self, cid: str, until: int, *, final: bool) -> bool:
        """Record an attempt that brought no block.

        Args:
            until: the time before which the genesis is not tried again.
            final: true if no further attempt can succeed.

        Returns:
            True if the genesis is given up.
        """
        claims = self._claims[cid]
        claims.tries += 1
        if final or claims.tries >= _MAX_TRIES:
            del self._claims[cid]
            return True
        self._deferred[cid] = until
        return False

    def pop_claims(self, cid: str) -> GenesisClaims | None:
        """Remove and return the claims about the streams of a genesis, if there are any."""
        claims = self._claims.pop(cid, None)
        if claims is not None and not self._dequeue(cid, claims):
            self._deferred.pop(cid, None)
        return claims

    def _enqueue(self, cid: str, claims: GenesisClaims) -> None:
        self._waiting.setdefault(claims.count, OrderedDict())[cid] = None

    def _dequeue(self, cid: str, claims: GenesisClaims) -> bool:
        """Remove a genesis from its queue, and return whether it was there."""
        same_count = self._waiting.get(claims.count)
        if same_count is None or cid not in same_count:
            return False
        del same_count[cid]
        if not same_count:
            del self._waiting[claims.count]
        return True

    def _evict(self) -> int:
        """Evict a genesis, and return the count that the newcomer takes over."""
        if self._deferred:
            cid, _ = self._deferred.popitem(last=False)
            del self._claims[cid]
            self.evicted += 1
            return 0
        if not self._waiting:
            return 0  # all are being fetched
        lowest = min(self._waiting)
        cid = next(iter(self._waiting[lowest]))
        self._dequeue(cid, self._claims[cid])
        del self._claims[cid]
        self.evicted += 1
        return lowest


def claims_of(record: WantedRecord) -> Claims:
    """Return the claims of the update in a record."""
    return Claims(_separator(record.topic), _separator(record.model))


def _digest(update: UpdateRecord, separator: SeparatorRecord | None) -> bytes:
    key_and_value = ("", "") if separator is None else (separator.key, separator.value)
    parts = (update.origin, *key_and_value, update.stream, update.tip)
    return blake2b("\n".join(parts).encode(), digest_size=8).digest()


def _separator(record: SeparatorRecord | None) -> Separator | None:
    return None if record is None else Separator(record.key, record.value)
