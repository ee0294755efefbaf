"""Which records wait for which block, and what is written once a block came or was given up. No Kafka, no IPFS."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from msgspec import structs

from kiln.bridge.fetcher.attempts import Answer, BatchAnswer, BlockRequest, FetchFailure, GenesisAnswer, IpfsUnavailable
from kiln.bridge.fetcher.claims import ClaimedStreams, GenesisClaims, claims_of
from kiln.bridge.fetcher.offsets import MOST_GOING, DoneOffsets
from kiln.bridge.kafka.position import KafkaPosition
from kiln.conf.process.backoff import pause_after
from kiln.schemas.kafka.records import (
    UNREADABLE,
    BlockRecord,
    Epoch,
    SeparatorRecord,
    StreamRecord,
    UpdateRecord,
    WaitedTip,
    WantedRecord,
    decode_wanted,
    encode,
    quarantine_key,
    quarantine_record_key,
    quarantine_records,
    update_key,
)
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.claims import CONTRADICTS, contradiction
from kiln.schemas.wire.identity import author_of
from kiln.schemas.wire.streamid import StreamID, StreamIdError
from kiln.schemas.wire.topics import Interest, Separator

STAGE: Final = "fetch"
"""of what can be asked for again: its data is a WantedRecord"""
MALFORMED_STAGE: Final = "wanted"
CLAIM_STAGE: Final = "separator"
MALFORMED: Final = "wanted_malformed"
GONE: Final = "wanted_gone"

_SECOND: Final = 1_000_000  # µs
_LONGEST_PAUSE: Final = 60 * _SECOND  # between two tries of one block
_PROBE_EVERY: Final = 2 * _SECOND  # while IPFS is away
_KEPT_ANSWERS: Final = 200_000  # streams whose answer is remembered
_KEPT_BLOCKS: Final = 10_000  # batches that are remembered as had
_KEPT_MISSING: Final = 50_000
_MOST_CHECKS: Final = 1_000  # unknown streams of one batch whose genesis is asked for
_MOST_READY: Final = 1_000  # updates that may go on, and have not yet
CLAIMS_AGAIN: Final = 10_000
"""Records before its place that a fetcher reads again when it begins: claims that were only counted."""
_MOST_BLOCKS: Final = 16  # blocks in memory while the geneses of their streams are asked for


class FetchOutput(NamedTuple):
    """A record to write."""

    topic: str
    """`updates`, `quarantine`, `streams` or `blocks`"""
    key: bytes
    value: bytes


class StagedWrites(NamedTuple):
    """What is to be written now, in stages. The broker must have all of a stage before the next stage begins.

    First updates and quarantine. Then streams: whoever reads a stream there sends later updates past the fetcher. Then
    blocks: whoever reads a block looks for its streams.
    """

    stages: tuple[list[FetchOutput], list[FetchOutput], list[FetchOutput]]
    going: dict[int, set[int]]
    """by partition, offsets of the updates in the first stage: committed before that stage is written"""


@dataclass(frozen=True)
class FetchingOptions:
    """Times in µs."""

    network: str
    at_most: int = 8
    """fetches at once"""
    timeout: int = 30 * _SECOND
    """of one try"""
    give_up: int = 600 * _SECOND
    """how long the fetcher tries one block; only the time that IPFS is there counts"""
    forget: int = 600 * _SECOND
    """how long the fetcher does not ask again for a block that it gave up"""
    check_genesis: bool = True
    """whether the fetcher asks for the geneses of a batch's streams before the batch's block goes on"""
    check_for: int = 10 * _SECOND
    """how long the block waits for them at most"""
    max_open: int = 10_000
    """records that wait"""
    implied_separator: str | None = None
    authors: Callable[[], Collection[str]] = frozenset
    """peer ids of our own messages, as text, those of our other bridges too: the fetcher leaves the batches of these
    messages alone"""


class _WantedEntry(NamedTuple):
    place: KafkaPosition
    record: WantedRecord


class _ReadyUpdate(NamedTuple):
    """An update whose separator is known: it may go on to `kiln.updates`."""

    wanted: _WantedEntry
    update: UpdateRecord
    separator: SeparatorRecord | None
    claimed: GenesisClaims | None = None
    """what was claimed of the stream before the answer"""


class _ReadyAnswer(NamedTuple):
    """An answer for `kiln.streams`. It stands in line behind the updates that waited for it."""

    record: StreamRecord
    request: BlockRequest
    checks: tuple[str, ...]


@dataclass
class _Fetch:
    """A block to fetch, and the records that wait for the block."""

    request: BlockRequest
    number: int
    due: int
    waiting: deque[_WantedEntry] = field(default_factory=deque)
    checks: dict[str, set[str]] = field(default_factory=dict)  # streams by CID of the batch that lists them
    tries: int = 0
    under_way: bool = False
    since: int | None = None  # by the clock of the time that IPFS was there
    claimed: bool = False  # ClaimedStreams named it, and is to hear how it ended

    @property
    def real(self) -> bool:
        """Whether something waits for the block. A claim does not."""
        return bool(self.waiting or self.checks)


@dataclass
class _BatchCheck:
    """A batch's block that waits for the geneses of its streams."""

    batch: BatchAnswer
    until: int
    asked: set[str]  # CIDs of geneses
    waiting: deque[_WantedEntry]


class KnownAnswers:
    """What the fetcher need not ask for: streams in `kiln.streams`, blocks that came, blocks given up of late.

    It outlives a loss of Kafka.
    """

    def __init__(self) -> None:
        self.streams: OrderedDict[str, SeparatorRecord | None] = OrderedDict()
        self.missing: OrderedDict[BlockRequest, tuple[int, FetchFailure]] = OrderedDict()  # until when
        self.blocks: OrderedDict[tuple[str, SeparatorRecord | None], None] = OrderedDict()

    def add_stream(self, stream: str, separator: SeparatorRecord | None) -> None:
        """`kiln.streams` has the separator of this stream; None: the stream has none."""
        self.streams[stream] = separator
        self.streams.move_to_end(stream)
        if len(self.streams) > _KEPT_ANSWERS:
            self.streams.popitem(last=False)

    def add_block(self, record: WantedRecord) -> None:
        """`kiln.blocks` has the block of this batch, under this separator."""
        self.blocks[record.cid, record.separator] = None
        if len(self.blocks) > _KEPT_BLOCKS:
            self.blocks.popitem(last=False)

    def add_missing(self, request: BlockRequest, failed: FetchFailure, until: int) -> None:
        self.missing[request] = (until, failed)
        self.missing.move_to_end(request)
        if len(self.missing) > _KEPT_MISSING:
            self.missing.popitem(last=False)

    def why_missing(self, request: BlockRequest, now: int) -> FetchFailure | None:
        """Why the fetcher gave the block up of late; None: it did not."""
        found = self.missing.get(request)
        if found is None:
            return None
        if found[0] <= now:
            del self.missing[request]
            return None
        return found[1]


class PendingFetches:
    """Which records wait for which blocks, and what is to be written. Pure: time comes from the caller, in µs.

    The caller, in a loop: `take` records while there is `room`; begin the fetches that `next` names; hand in each
    `answer`; commit what `next_writes` says is going; write its stages; say `written`.
    """

    def __init__(self, options: FetchingOptions, known: KnownAnswers) -> None:
        self._options = options
        self._known = known
        self._offsets: dict[int, DoneOffsets] = {}
        self._fetches: dict[BlockRequest, _Fetch] = {}
        self._checks: dict[str, _BatchCheck] = {}  # by the CID of the batch
        self._claimed = ClaimedStreams()
        self._under_way = 0
        self._number = 0
        self._there = 0  # µs that IPFS was there, up to _there_at
        self._there_at: int | None = None
        self._probe_at = 0
        self.away: str | None = None
        """why IPFS cannot be asked"""
        self.counts: Counter[str] = Counter()
        """what became of records: `released`, `blocks`, `not_of_interest`, …, and reasons"""
        self._ready: dict[int, deque[_ReadyUpdate | _ReadyAnswer]] = {}  # by partition
        self._answered: dict[str, SeparatorRecord | None] = {}  # the broker does not have them yet
        # of this round
        self._stages: tuple[list[FetchOutput], list[FetchOutput], list[FetchOutput]] = ([], [], [])
        self._finished: list[KafkaPosition] = []
        self._told: list[StreamRecord] = []
        self._had: list[WantedRecord] = []

    # -------- records in

    def start(self, partition: int, offsets: DoneOffsets) -> None:
        """Records of this partition come from the place of its offsets on."""
        self._offsets[partition] = offsets
        self._ready[partition] = deque()

    def gone(self, partition: int, before: int, now: int) -> int:
        """Kafka has nothing before this offset any more. How many records are lost so."""
        offsets = self._offsets[partition]
        first = offsets.place
        lost = offsets.gone(before)
        if lost:
            self.counts["lost"] += lost
            detail = f"{lost} records out of {partition}/{first} to {partition}/{before - 1} of wanted"
            self._quarantine(quarantine_record_key("wanted", partition, first), GONE, detail, b"", now, MALFORMED_STAGE)
        return lost

    def room(self, partition: int, at_most: int) -> int:
        """How many more records of this partition may be taken."""
        offsets = self._offsets[partition]
        at_most = min(at_most, self._options.max_open - self.waiting)
        if not offsets.repeating:  # what is to be repeated may be behind what waits for it
            at_most = min(at_most, _MOST_READY - len(self._ready[partition]))
        return offsets.room(max(0, at_most))

    @property
    def waiting(self) -> int:
        """How many records wait."""
        return sum(offsets.waiting for offsets in self._offsets.values())

    @property
    def under_way(self) -> int:
        """How many fetches are."""
        return self._under_way

    @property
    def claimed(self) -> int:
        """How many geneses are to be held against claims."""
        return len(self._claimed)

    @property
    def busy(self) -> bool:
        """Whether something is to be done soon without a new record."""
        return bool(self._fetches or self._checks or any(self._ready.values()))

    def take(self, place: KafkaPosition, value: bytes | None, interests: Iterable[Interest], now: int) -> str | None:
        """The next record of a partition. `interests`: the separators that are followed now.

        Where a batch is to be fetched now, the peer id of who announced it, as text, if that is known.
        """
        if not self._offsets[place.partition].take(place.offset):
            self._claimed_before(value, now)
            return None
        try:
            record = decode_wanted(value or b"")
            encode(record)  # half a character can be read and not written
            if record.network != self._options.network:
                self._end(place, "other_network")
                return None
            wanted = _WantedEntry(place, record)
            if record.reason == "batch":
                return self._take_batch(wanted, interests, now)
            if record.reason == "claim":
                self._take_claim(wanted, now)
            else:
                self._take_update(wanted, now)
        except (*UNREADABLE, UnicodeEncodeError, _NotWantedError, StreamIdError) as error:
            detail = f"record {place.partition}/{place.offset} of wanted: {error}"
            key = quarantine_record_key("wanted", place.partition, place.offset)
            self._quarantine(key, MALFORMED, detail, value or b"", now, MALFORMED_STAGE)
            self._end(place, MALFORMED)
        return None

    def _take_update(self, wanted: _WantedEntry, now: int) -> None:
        update = _update_of(wanted.record)
        request = BlockRequest("genesis", wanted.record.cid)
        for known in (self._answered, self._known.streams):
            if update.stream in known:
                self._ready[wanted.place.partition].append(_ReadyUpdate(wanted, update, known[update.stream]))
                return
        failed = self._known.why_missing(request, now)
        if failed is not None:
            self._give_up_update(wanted, failed, now)
            return
        self._fetch_for(request, now).waiting.append(wanted)

    def _take_claim(self, wanted: _WantedEntry, now: int) -> None:
        """Nothing waits with a claim: the record is done."""
        record = wanted.record
        stream = _update_of(record).stream
        for known in (self._answered, self._known.streams):
            if stream in known:
                self._weigh(record, known[stream], now)
                break
        else:
            self._claim(record, now)
        self._end(wanted.place, "claims")

    def _claimed_before(self, value: bytes | None, now: int) -> None:
        """An earlier run was done with the record. What that run had counted is forgotten, if it was a claim."""
        try:
            record = decode_wanted(value or b"")
            encode(record)
            known = record.reason != "claim" or _update_of(record).stream in self._known.streams
        except (*UNREADABLE, UnicodeEncodeError, _NotWantedError, StreamIdError):
            return  # the earlier run has put it into quarantine
        if not known and record.network == self._options.network:
            self._claim(record, now)

    def _claim(self, record: WantedRecord, now: int) -> None:
        if self._known.why_missing(BlockRequest("genesis", record.cid), now) is None:
            self._claimed.add(record)
            self.counts["claims_dropped"] = self._claimed.dropped
            self.counts["claims_untold"] = self._claimed.unkept

    def _take_batch(self, wanted: _WantedEntry, interests: Iterable[Interest], now: int) -> str | None:
        record = wanted.record
        if (record.message or "").partition("/")[0] in self._options.authors():
            self._end(wanted.place, "own")
            return None
        announced = _announced(record)
        separator = Separator(announced.key, announced.value)
        if not any(interest.covers(separator) for interest in interests):
            self._end(wanted.place, "not_of_interest")
            return None
        request = BlockRequest("batch", record.cid)
        if (record.cid, record.separator) in self._known.blocks:
            self._end(wanted.place, "again")
            return None
        check = self._checks.get(record.cid)
        if check is not None:
            check.waiting.append(wanted)
            return None
        self._fetch_for(request, now).waiting.append(wanted)
        return author_of(record.message or "")

    def _fetch_for(self, request: BlockRequest, now: int) -> _Fetch:
        fetch = self._fetches.get(request)
        if fetch is None:
            self._number += 1
            fetch = self._fetches[request] = _Fetch(request, self._number, now)
        return fetch

    # -------- fetches

    def next(self, now: int) -> list[BlockRequest]:
        """What to fetch now. The caller hands in an `answer` for each."""
        if self.away is not None:
            if now < self._probe_at or self._under_way:
                return []
            self._probe_at = now + _PROBE_EVERY
            probes = [self._begin(fetch, now) for fetch in sorted(self._idle(), key=_turn)[:1]]
            return probes or self._begin_claimed(1, now)
        free = self._options.at_most - self._under_way
        if free <= 0:
            return []
        running = [fetch for fetch in self._fetches.values() if fetch.under_way]
        blocks = _MOST_BLOCKS - len(self._checks) - sum(fetch.request.kind == "batch" for fetch in running)
        # retries of blocks that never come leave room for first tries
        again = max(1, self._options.at_most // 2) - sum(fetch.tries > 1 for fetch in running)
        chosen: list[BlockRequest] = []
        for fetch in sorted((fetch for fetch in self._idle() if fetch.due <= now), key=_turn):
            if len(chosen) == free:
                break
            if (fetch.request.kind == "batch" and blocks <= 0) or (fetch.tries and again <= 0):
                continue
            blocks -= fetch.request.kind == "batch"
            again -= fetch.tries > 0
            chosen.append(self._begin(fetch, now))
        checking = sum(not fetch.real for fetch in running)
        at_most = max(1, self._options.at_most // 2) - checking
        return chosen + self._begin_claimed(min(free - len(chosen), at_most), now)

    def _begin_claimed(self, at_most: int, now: int) -> list[BlockRequest]:
        """Fetches for which nothing waits."""
        chosen: list[BlockRequest] = []
        while len(chosen) < at_most and (cid := self._claimed.next(now)) is not None:
            request = BlockRequest("genesis", cid)
            if request in self._fetches or self._known.why_missing(request, now) is not None:
                self._claimed.rest(cid, now + self._options.forget)
                continue
            fetch = self._fetch_for(request, now)
            fetch.claimed = True
            chosen.append(self._begin(fetch, now))
        return chosen

    def _claim_failed(self, cid: str, now: int, *, final: bool) -> None:
        self.counts["claims_unchecked"] += self._claimed.failed(cid, now + self._options.forget, final=final)

    def _idle(self) -> Iterator[_Fetch]:
        return (fetch for fetch in self._fetches.values() if not fetch.under_way)

    def _begin(self, fetch: _Fetch, now: int) -> BlockRequest:
        fetch.under_way = True
        fetch.tries += 1
        self._under_way += 1
        if fetch.since is None:
            fetch.since = self._present(now)
        return fetch.request

    def _present(self, now: int) -> int:
        """How long IPFS was there so far, in µs."""
        if self._there_at is not None and self.away is None:
            self._there += max(0, now - self._there_at)
        self._there_at = now
        return self._there

    def answer(self, request: BlockRequest, answer: Answer, now: int) -> None:
        """How a fetch ended."""
        fetch = self._fetches[request]
        fetch.under_way = False
        self._under_way -= 1
        present = self._present(now)
        if isinstance(answer, IpfsUnavailable):
            self.away = answer.why
            fetch.tries -= 1
            if fetch.claimed:
                self._claimed.put_back(request.cid)
                fetch.claimed = False
                if not fetch.real:
                    del self._fetches[request]
            return
        self.away = None
        if isinstance(answer, FetchFailure):
            if fetch.claimed:
                self._claim_failed(request.cid, now, final=answer.final)
                fetch.claimed = False
                if not fetch.real and not answer.final:  # one try is too little for what may come to wait
                    del self._fetches[request]
                    return
            waited = present - (present if fetch.since is None else fetch.since)
            for cid in fetch.checks.keys() - self._checks.keys():  # they waited long enough
                del fetch.checks[cid]
            if answer.final or waited >= self._options.give_up or not (fetch.waiting or fetch.checks):
                self._give_up(fetch, answer, waited, now)
            else:
                fetch.due = now + round(pause_after(fetch.tries, _SECOND, _LONGEST_PAUSE))
            return
        del self._fetches[request]
        if isinstance(answer, GenesisAnswer):
            self._answer_genesis(fetch, answer, now)
        else:
            self._answer_batch(fetch, answer, now)

    def _answer_genesis(self, fetch: _Fetch, answer: GenesisAnswer, now: int) -> None:
        claimed = self._claimed.came(fetch.request.cid)
        waited: dict[str, int] = {}  # in which partition, by stream
        tips: dict[str, dict[WaitedTip, None]] = {}
        for wanted in sorted(fetch.waiting, key=_heard):
            if (update := wanted.record.update) is not None:
                tips.setdefault(update.stream, {})[WaitedTip(update.origin, update.tip)] = None
                partition = waited[update.stream] = wanted.place.partition
                self._ready[partition].append(_ReadyUpdate(wanted, update, answer.separator, claimed))
        listed = {stream for streams in fetch.checks.values() for stream in streams}
        if claimed is not None:
            self.counts["claims_checked"] += 1
            for claim in claimed.first.values():
                self._weigh(claim, answer.separator, now)
                listed.add(_update_of(claim).stream)
        for stream in (*waited, *sorted(listed - waited.keys())):
            record = StreamRecord(
                self._options.network,
                stream,
                answer.separator,
                now,
                without=answer.without,
                waited=tuple(tips.get(stream, ())),
            )
            checks = tuple(cid for cid, streams in fetch.checks.items() if stream in streams)
            ready = _ReadyAnswer(record, fetch.request, checks)
            self._answered[stream] = answer.separator
            if stream in waited:
                self._ready[waited[stream]].append(ready)
            else:
                self._tell(ready)

    def _answer_batch(self, fetch: _Fetch, batch: BatchAnswer, now: int) -> None:
        check = _BatchCheck(batch, now + self._options.check_for, set(), fetch.waiting)
        self._checks[fetch.request.cid] = check
        if not self._options.check_genesis:
            return
        unknown = (s for s in batch.streams if s not in self._known.streams and s not in self._answered)
        for stream, _ in zip(unknown, range(_MOST_CHECKS), strict=False):
            request = BlockRequest("genesis", cid_text(StreamID.parse(stream).genesis))
            if self._known.why_missing(request, now) is None:
                self._fetch_for(request, now).checks.setdefault(fetch.request.cid, set()).add(stream)
                check.asked.add(request.cid)

    # -------- what becomes of them

    def _release(self, release: _ReadyUpdate, now: int) -> bool:
        """False: the update is in `kiln.updates` already, as its claim was true."""
        wanted, update, separator, claimed = release
        self._weigh(wanted.record, separator, now)
        if claimed is not None and claimed.has(update, separator):
            self._end(wanted.place, "claimed_already")
            return False
        partition = wanted.place.partition
        epoch = Epoch(f"genesis/{self._options.network}/{partition}", self._offsets[partition].generation)
        released = structs.replace(update, separator=separator, separator_source="genesis", epoch=epoch)
        key = update_key(update.network, separator, update.stream)
        self._stages[0].append(FetchOutput("updates", key, encode(released)))
        self._end(wanted.place, "released")
        return True

    def _weigh(self, record: WantedRecord, separator: SeparatorRecord | None, now: int) -> None:
        """Puts what an update claims into quarantine, if the genesis names another separator."""
        update = record.update
        if separator is None or update is None:
            return
        verified = Separator(separator.key, separator.value)
        false = claims_of(record).contradicted(verified)
        if false is not None:
            key = quarantine_key(update.frame.partition, update.frame.offset, update.frame.index)
            self._quarantine(key, CONTRADICTS, contradiction(false, verified), encode(record), now, CLAIM_STAGE)
            self.counts[CONTRADICTS] += 1

    def _tell(self, ready: _ReadyAnswer) -> None:
        record = ready.record
        self._stages[1].append(FetchOutput("streams", record.stream.encode(), encode(record)))
        self._told.append(record)
        self.counts["streams"] += 1
        if record.without is not None:
            self.counts[record.without] += 1
        self._checked(ready.request, ready.checks)

    def _checked(self, request: BlockRequest, checks: Iterable[str]) -> None:
        for cid in checks:
            if (check := self._checks.get(cid)) is not None:
                check.asked.discard(request.cid)

    def _give_up(self, fetch: _Fetch, failed: FetchFailure, waited: int, now: int) -> None:
        del self._fetches[fetch.request]
        if not failed.final:
            failed = failed._replace(
                detail=f"not had in {fetch.tries} tries over {waited / 1e6:.0f} s: {failed.detail}"
            )
        self._known.add_missing(fetch.request, failed, now + self._options.forget)
        if fetch.request.kind == "genesis":
            for wanted in fetch.waiting:
                self._give_up_update(wanted, failed, now)
            self._checked(fetch.request, fetch.checks)
            return
        for wanted, first in _by_separator(fetch.waiting):
            if first:
                record = wanted.record
                lost = BlockRecord(record.network, record.cid, now, _announced(record), reason=failed.reason)
                self._stages[2].append(FetchOutput("blocks", record.cid.encode(), encode(lost)))
                self._quarantine(record.cid.encode(), failed.reason, failed.detail, encode(record), now)
            self._end(wanted.place, failed.reason if first else "again")

    def _give_up_update(self, wanted: _WantedEntry, failed: FetchFailure, now: int) -> None:
        update = wanted.record.update
        if update is not None:
            key = quarantine_key(update.frame.partition, update.frame.offset, update.frame.index)
            self._quarantine(key, failed.reason, failed.detail, encode(wanted.record), now)
        self._end(wanted.place, failed.reason)

    def _pass_on(self, check: _BatchCheck, now: int) -> None:
        for wanted, first in _by_separator(check.waiting):
            record = wanted.record
            if first:
                block = BlockRecord(record.network, record.cid, now, _announced(record), block=check.batch.block)
                self._stages[2].append(FetchOutput("blocks", record.cid.encode(), encode(block)))
                self._had.append(record)
            self._end(wanted.place, "blocks" if first else "again")

    def _quarantine(self, key: bytes, reason: str, detail: str, data: bytes, now: int, stage: str = STAGE) -> None:
        for fault in quarantine_records(stage, reason, detail, data, now):
            self._stages[0].append(FetchOutput("quarantine", key, encode(fault)))
        self.counts["quarantined"] += 1

    def _end(self, place: KafkaPosition, what: str) -> None:
        self.counts[what] += 1
        self._finished.append(place)

    # -------- rounds

    def next_writes(self, now: int) -> StagedWrites:
        """What to write now."""
        going = {partition: offsets for partition in self._ready if (offsets := self._let_go(partition, now))}
        for cid in [cid for cid, check in self._checks.items() if not check.asked or check.until <= now]:
            check = self._checks.pop(cid)
            self._pass_on(check, now)
            for genesis in check.asked:
                self._uncheck(BlockRequest("genesis", genesis), cid)
        return StagedWrites(self._stages, going)

    def _let_go(self, partition: int, now: int) -> set[int]:
        """Releases ready updates in their order, as many as can be going at a time. The offsets of the released ones.

        An answer goes with the last update that waited for it: once that update is done, nothing would bring the answer
        back after a crash.
        """
        offsets, ready = self._offsets[partition], self._ready[partition]
        going: set[int] = set()
        later: deque[_ReadyUpdate | _ReadyAnswer] = deque()
        behind: set[str] = set()  # streams of which an update may not go yet
        while ready:
            item = ready[0]
            if isinstance(item, _ReadyAnswer):
                if item.record.stream in behind:
                    later.append(item)
                else:
                    self._tell(item)
            elif len(going) == MOST_GOING:
                break
            elif offsets.may_go(item.wanted.place.offset):
                if self._release(item, now):
                    going.add(item.wanted.place.offset)
            else:
                later.append(item)
                behind.add(item.update.stream)
            ready.popleft()
        ready.extendleft(reversed(later))
        return going

    def _uncheck(self, request: BlockRequest, cid: str) -> None:
        fetch = self._fetches.get(request)
        # a fetch that is under way goes on: its answer is of use later
        if fetch is not None and not fetch.under_way:
            fetch.checks.pop(cid, None)
            if not fetch.checks and not fetch.waiting:
                del self._fetches[request]

    def written(self) -> None:
        """The broker has all that `next_writes` gave."""
        for told in self._told:
            self._known.add_stream(told.stream, told.separator)
            self._answered.pop(told.stream, None)
        for record in self._had:
            self._known.add_block(record)
        for place in self._finished:
            self._offsets[place.partition].done(place.offset)
        self._told, self._had, self._finished = [], [], []
        self._stages = ([], [], [])


class _NotWantedError(ValueError):
    """A record that asks for nothing that can be given."""


def _update_of(record: WantedRecord) -> UpdateRecord:
    """The update that a genesis is wanted for. _NotWantedError: it is not the genesis of the update's stream."""
    update = record.update
    assert update is not None, "WantedRecord: a genesis is wanted with an update"
    if cid_text(StreamID.parse(update.stream).genesis) != record.cid:
        raise _NotWantedError(f"{record.cid} is not the genesis of {update.stream}")
    return update


def _announced(record: WantedRecord) -> SeparatorRecord:
    """The separator that a wanted batch was announced under."""
    assert record.separator is not None, "WantedRecord: a batch is wanted with its separator"
    return record.separator


def _heard(wanted: _WantedEntry) -> tuple[int, int, int, int]:
    """The order of the network. The records of one micro-batch come in any order."""
    frame = wanted.record.update.frame if wanted.record.update is not None else None
    return wanted.record.observed_at, *((frame.partition, frame.offset, frame.index) if frame else (0, 0, 0))


def _turn(fetch: _Fetch) -> tuple[bool, int, int, int]:
    """The order of fetches: blocks that updates wait for before checks, then the least tried, then the oldest."""
    return not fetch.waiting, fetch.tries, fetch.due, fetch.number


def _by_separator(waiting: Iterable[_WantedEntry]) -> Iterator[tuple[_WantedEntry, bool]]:
    """Each, and whether it is the first with its separator: one block may be announced under several."""
    seen: set[SeparatorRecord | None] = set()
    for wanted in waiting:
        yield wanted, wanted.record.separator not in seen
        seen.add(wanted.record.separator)
