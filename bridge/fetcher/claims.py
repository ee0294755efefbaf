"""Streams whose separator is only claimed, and whose genesis is to be asked for: the most active first (decision 20).

Pure: no Kafka, no IPFS, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from kiln.schemas.kafka.records import SeparatorRecord, UpdateRecord, WantedRecord
from kiln.schemas.wire.claims import Claims
from kiln.schemas.wire.topics import Separator

MOST_CLAIMED: Final = 10_000
"""Geneses that wait to be asked for, and those that rest between two tries."""
_TRIES: Final = 6
_MOST_KINDS: Final = 4  # different claims of which one genesis remembers the first update
_MOST_TIPS: Final = 32  # that one genesis remembers


@dataclass
class GenesisClaims:
    """What is claimed of the streams of one genesis."""

    count: int
    """claims, and those of the streams that gave way to this one"""
    first: dict[tuple[str, Claims], WantedRecord] = field(default_factory=dict)
    """by stream and claims, the first update with them"""
    tips: dict[bytes, None] = field(default_factory=dict)
    """digests of the newest updates under the separators that they claim"""
    tries: int = 0

    def has(self, update: UpdateRecord, separator: SeparatorRecord | None) -> bool:
        """Whether this update is in `kiln.updates` under this separator, as far as is remembered."""
        return _digest(update, separator) in self.tips


class ClaimedStreams:
    """Geneses to be asked for, by CID: the algorithm Space-Saving (Metwally, Agrawal, El Abbadi, 2005).

    A genesis waits, or rests after a try that brought no block, or is being asked for: since `next` named it, and until
    `came`, `failed`, `put_back` or `rest` is called.
    """

    def __init__(self, most: int = MOST_CLAIMED) -> None:
        """`most`: geneses that are remembered, beside those that are being asked for."""
        self._most = most
        self._claimed: dict[str, GenesisClaims] = {}
        self._waiting: dict[int, OrderedDict[str, None]] = {}  # by count; not tried yet
        self._resting: OrderedDict[str, int] = OrderedDict()  # until when; all rest for as long
        self.dropped = 0
        """geneses that gave way since the start"""
        self.unkept = 0
        """claims since the start that are told in no quarantine, as too many others of one genesis came first"""

    def __len__(self) -> int:
        return len(self._claimed)

    def add(self, record: WantedRecord) -> None:
        """Counts a claim. Where there is no room, the genesis that is least worth a try gives way."""
        claimed = self._claimed.get(record.cid)
        if claimed is None:
            count = self._give_way() if len(self._claimed) >= self._most else 0
            claimed = self._claimed[record.cid] = GenesisClaims(count + 1)
            self._wait(record.cid, claimed)
        elif self._leave(record.cid, claimed):
            claimed.count += 1
            self._wait(record.cid, claimed)
        else:
            claimed.count += 1
        update = record.update
        assert update is not None, "WantedRecord: a claim comes with its update"
        kind = update.stream, claims_of(record)
        if kind not in claimed.first and len(claimed.first) == _MOST_KINDS:
            self.unkept += 1
        else:
            claimed.first.setdefault(kind, record)
        claimed.tips[_digest(update, update.separator)] = None
        if len(claimed.tips) > _MOST_TIPS:
            del claimed.tips[next(iter(claimed.tips))]

    def next(self, now: int) -> str | None:
        """The genesis to ask for now; None: none. First those that were not tried, the most claimed of them first."""
        if self._waiting:
            most = max(self._waiting)
            cid = next(iter(self._waiting[most]))
            self._leave(cid, self._claimed[cid])
            return cid
        cid, until = next(iter(self._resting.items()), ("", 0))
        if not cid or until > now:
            return None
        del self._resting[cid]
        return cid

    def put_back(self, cid: str) -> None:
        """It was not asked for after all."""
        claimed = self._claimed[cid]
        if claimed.tries:
            self._resting[cid] = 0
            self._resting.move_to_end(cid, last=False)
        else:
            self._wait(cid, claimed)

    def rest(self, cid: str, until: int) -> None:
        """It was not asked for, and is not to be before `until`."""
        self._resting[cid] = until

    def failed(self, cid: str, until: int, *, final: bool) -> bool:
        """A try brought no block. It rests `until`. True: it is given up: that was the last try, or `final`."""
        claimed = self._claimed[cid]
        claimed.tries += 1
        if final or claimed.tries >= _TRIES:
            del self._claimed[cid]
            return True
        self._resting[cid] = until
        return False

    def came(self, cid: str) -> GenesisClaims | None:
        """What was claimed of its streams, which is forgotten now. None: nothing was."""
        claimed = self._claimed.pop(cid, None)
        if claimed is not None and not self._leave(cid, claimed):
            self._resting.pop(cid, None)
        return claimed

    def _wait(self, cid: str, claimed: GenesisClaims) -> None:
        self._waiting.setdefault(claimed.count, OrderedDict())[cid] = None

    def _leave(self, cid: str, claimed: GenesisClaims) -> bool:
        """Whether it was waiting; it is not any more."""
        alike = self._waiting.get(claimed.count)
        if alike is None or cid not in alike:
            return False
        del alike[cid]
        if not alike:
            del self._waiting[claimed.count]
        return True

    def _give_way(self) -> int:
        """The count that the newcomer takes over."""
        if self._resting:
            cid, _ = self._resting.popitem(last=False)
            del self._claimed[cid]
            self.dropped += 1
            return 0
        if not self._waiting:
            return 0  # all are being asked for
        least = min(self._waiting)
        cid = next(iter(self._waiting[least]))
        self._leave(cid, self._claimed[cid])
        del self._claimed[cid]
        self.dropped += 1
        return least


def claims_of(record: WantedRecord) -> Claims:
    """What the update in a record claims."""
    return Claims(_separator(record.topic), _separator(record.model))


def _digest(update: UpdateRecord, separator: SeparatorRecord | None) -> bytes:
    named = ("", "") if separator is None else (separator.key, separator.value)
    parts = (update.origin, *named, update.stream, update.tip)
    return blake2b("\n".join(parts).encode(), digest_size=8).digest()


def _separator(record: SeparatorRecord | None) -> Separator | None:
    return None if record is None else Separator(record.key, record.value)
