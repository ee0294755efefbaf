"""Verification of claimed separators: the geneses to fetch, those with most claims first (decision 20).

The topic and the field `model` of an update claim a separator for its stream. The stream's genesis shows whether the
claim is true.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kiln.schemas.kafka.records import SeparatorRecord, UpdateRecord, WantedRecord
from kiln.schemas.wire.genesis import Claims
from kiln.schemas.wire.topics import Separator

MAX_CLAIMED: Final = 10_000
"""Maximum number of geneses to fetch because of claims."""
_MAX_TRIES: Final = 6
_MAX_KINDS: Final = 4  # different claims per genesis whose first update is kept
_MAX_TIPS: Final = 32  # kept per genesis


@dataclass
class GenesisClaims:
    """The separators that updates claim for the streams of one genesis."""

    count: int
    """number of claims, plus the count of the genesis that this one replaced (Space-Saving)"""
    first_updates: dict[tuple[str, Claims], WantedRecord] = field(default_factory=dict)
    """the first update for each stream and each claim, at most `_MAX_KINDS` updates"""
    tips: dict[bytes, None] = field(default_factory=dict)
    """digests of the newest updates; a digest covers the update and its claimed separator"""
    tries: int = 0
    """number of failed attempts to fetch the genesis"""

    def includes(self, update: UpdateRecord, separator: SeparatorRecord | None) -> bool:
        """Return whether this update is known to be in `kiln.updates` under this separator."""
        return _digest(update, separator) in self.tips


class ClaimedStreams:
    """Geneses to fetch because of claims, by CID.

    The number of claims decides which genesis is fetched first. It is counted by the Space-Saving algorithm (Metwally,
    Agrawal, El Abbadi, 2005). A genesis waits, is deferred until a later time, or is being fetched. The last
    state begins with `next_genesis`, and ends with `pop_claims`, `record_failure`, `put_back` or `defer`.
    """

    def __init__(self, most: int = MAX_CLAIMED) -> None:
        """Create an empty set.

        Args:
            most: maximum number of geneses. Above it, another genesis is evicted, unless all are being fetched.
        """
        self._capacity = most
        self._claims: dict[str, GenesisClaims] = {}
        self._waiting: dict[int, OrderedDict[str, None]] = {}  # CIDs by count; not attempted yet
        self._deferred: OrderedDict[str, int] = OrderedDict()  # end of the wait, earliest first; 0 after `put_back`
        self.evicted = 0
        """number of geneses evicted since the start, because there were too many"""
        self.unrecorded = 0
        """number of claims since the start that are counted but not stored, because the genesis already has
        `_MAX_KINDS` others. Quarantine does not report such a claim, even if it is false."""

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
        assert update is not None, "WantedRecord: a claim must have an update"
        kind = update.stream, claims_of(record)
        if kind not in claims.first_updates and len(claims.first_updates) == _MAX_KINDS:
            self.unrecorded += 1
        else:
            claims.first_updates.setdefault(kind, record)
        claims.tips[_digest(update, update.separator)] = None
        if len(claims.tips) > _MAX_TIPS:
            del claims.tips[next(iter(claims.tips))]

    def next_genesis(self, now: int) -> str | None:
        """Return the CID of the genesis to fetch now, if any.

        This is the waiting genesis with most claims. If none waits, it is a genesis whose deferral is over.

        Args:
            now: the time in µs.
        """
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
        """Put back a genesis whose attempt could not be made."""
        claims = self._claims[cid]
        if claims.tries:
            self._deferred[cid] = 0
            self._deferred.move_to_end(cid, last=False)
        else:
            self._enqueue(cid, claims)

    def defer(self, cid: str, until: int) -> None:
        """Put back a genesis, to be fetched at `until` or later."""
        self._deferred[cid] = until

    def record_failure(self, cid: str, until: int, *, final: bool) -> bool:
        """Record a failed attempt, and defer the genesis or give it up.

        Args:
            until: earliest time of the next attempt, in µs.
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
        """Evict a genesis, and return the initial count of its replacement (Space-Saving)."""
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
    """Return the separators that the update in a record claims."""
    return Claims(_separator(record.topic), _separator(record.model))


def _digest(update: UpdateRecord, separator: SeparatorRecord | None) -> bytes:
    key_and_value = ("", "") if separator is None else (separator.key, separator.value)
    parts = (update.origin, *key_and_value, update.stream, update.tip)
    return blake2b("\n".join(parts).encode(), digest_size=8).digest()


def _separator(record: SeparatorRecord | None) -> Separator | None:
    return None if record is None else Separator(record.key, record.value)
