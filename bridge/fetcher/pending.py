"""Records that wait for blocks, and the records to write once a block arrives or is given up. Does no I/O."""

from __future__ import annotations

from collections import ChainMap, Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec import structs

from kiln.bridge.fetcher.attempts import (
    BLOCK_UNAVAILABLE,
    OVER_LIMIT,
    Answer,
    BatchAnswer,
    BlockRequest,
    FetchFailure,
    GenesisAnswer,
    IpfsUnavailable,
)
from kiln.bridge.fetcher.claims import ClaimedStreams, GenesisClaims, claims_of
from kiln.bridge.fetcher.fetch_queue import Fetch, FetchQueue, KnownAnswers
from kiln.bridge.fetcher.offsets import MAX_RELEASING, DoneOffsets
from kiln.bridge.fetcher.wanted import (
    KafkaPosition,
    NotWantedError,
    WantedEntry,
    get_separator,
    network_order,
    read_announcer,
    read_update,
)
from kiln.conf.process.backoff import pause_after
from kiln.schemas.kafka.epoch_guard import EpochGuard
from kiln.schemas.kafka.records import (
    UNREADABLE,
    BlockRecord,
    Epoch,
    SeparatorRecord,
    StreamRecord,
    UpdateRecord,
    WaitedTip,
    WantedRecord,
    build_quarantine_key,
    build_quarantine_record_key,
    build_quarantine_records,
    build_update_key,
    decode_wanted,
    encode,
)
from kiln.schemas.wire.cid import cid_text
from kiln.schemas.wire.genesis import CONTRADICTS, describe_contradiction
from kiln.schemas.wire.streamid import StreamID, StreamIdError
from kiln.schemas.wire.topics import Interest, Separator

STAGE: Final = "fetch"
"""stage in quarantine of records that `kiln quarantine replay` can replay, because their data is a `WantedRecord`"""
MALFORMED_STAGE: Final = "wanted"
CLAIM_STAGE: Final = "separator"
MALFORMED: Final = "wanted_malformed"
RECORDS_LOST: Final = "wanted_gone"

_SECOND: Final = 1_000_000  # µs
_MAX_PAUSE: Final = 60 * _SECOND  # longest pause between two attempts for one block
_MAX_CHECKS: Final = 1_000  # unknown streams of one batch whose genesis is fetched
_MAX_READY: Final = 1_000  # releasable updates that are not released yet
_UNAVAILABLE: Final = FetchFailure(BLOCK_UNAVAILABLE, "no block of this author has arrived lately", final=False)
_OVER_LIMIT: Final = FetchFailure(OVER_LIMIT, "too many blocks of this announcer are not fetched yet", final=True)
REPLAY: Final = 10_000
"""Number of records before the committed offset that the fetcher reads again at a start. It restores from them the
claims that were only in memory, and recognises updates that the query `updates` wrote twice."""


class FetchOutput(NamedTuple):
    """A record to write to Kafka."""

    topic: str
    """`updates`, `quarantine`, `streams` or `blocks`"""
    key: bytes
    value: bytes


class StagedWrites(NamedTuple):
    """Records to write now, in stages. The broker must acknowledge a stage before the next one begins.

    Updates and quarantine come first. Streams follow: once the query `updates` knows the separator of a stream, it no
    longer sends updates of the stream to the fetcher. Blocks come last, because a reader of a block looks up its
    streams.
    """

    stages: tuple[list[FetchOutput], list[FetchOutput], list[FetchOutput]]
    releasing: dict[int, set[int]]
    """offsets, by partition, of the updates in the first stage. The caller commits them before it writes this stage."""


@dataclass(frozen=True)
class FetchingOptions:
    """Settings of the fetcher; durations in µs."""

    network: str
    max_concurrent: int = 8
    timeout: int = 30 * _SECOND
    """timeout of each block of an attempt"""
    give_up_after: int = 600 * _SECOND
    """the longest time to try one block, not counting time while IPFS is unavailable"""
    retry_after: int = 600 * _SECOND
    """the wait before a block that was given up is tried again"""
    check_genesis: bool = True
    """if true, fetch the geneses of a batch's streams before its block is written"""
    genesis_timeout: int = 10 * _SECOND
    """the longest time that a batch's block waits for the geneses"""
    max_open: int = 10_000
    """maximum number of records that wait: a quarter of this number for batches, the rest for updates"""
    implied_separator: str | None = None
    authors: Callable[[], Collection[str]] = frozenset
    """returns the peer ids, as text, under which our bridges publish; the blocks of their batches are not fetched"""


class _ReadyUpdate(NamedTuple):
    """An update whose separator is known, so that it may be released to `kiln.updates`."""

    wanted: WantedEntry
    update: UpdateRecord
    separator: SeparatorRecord | None
    claimed: GenesisClaims | None = None
    """claims about the stream that were counted before its genesis was fetched"""


class _ReadyAnswer(NamedTuple):
    """A stream to write to `kiln.streams`, queued behind the updates that waited for its genesis."""

    record: StreamRecord
    request: BlockRequest
    checks: tuple[str, ...]


@dataclass
class _BatchCheck:
    """A fetched block of a batch, in memory until the geneses of its streams are fetched."""

    batch: BatchAnswer
    until: int
    missing_geneses: set[str]  # CIDs of geneses
    waiting: deque[WantedEntry]


class PendingFetches:
    """The records that wait for blocks, and the records to write. Time comes from the caller, in µs.

    In a loop, the caller

    1. calls `add_record` while there is `room`;
    2. makes the fetches of `start_fetches`, and calls `add_answer` for each outcome;
    3. calls `stage_writes`, commits the offsets in `releasing`, and writes the stages;
    4. calls `confirm_writes`.
    """

    def __init__(self, options: FetchingOptions, known: KnownAnswers) -> None:
        self._options = options
        self._known = known
        self.offsets: dict[int, DoneOffsets] = {}
        """by partition"""
        self._guards: dict[int, EpochGuard] = {}
        self.claims = ClaimedStreams()
        self.queue = FetchQueue(options.max_concurrent, options.retry_after, options.max_open, known, self.claims)
        self._checks: dict[str, _BatchCheck] = {}  # by the CID of the batch
        self.counts: Counter[str] = Counter()
        """number of records by outcome, such as `released` and `not_of_interest`, and by reason for quarantine"""
        self._ready: dict[int, deque[_ReadyUpdate | _ReadyAnswer]] = {}  # by partition
        self._unwritten_answers: dict[str, SeparatorRecord | None] = {}  # the broker does not have them yet
        self._separators = ChainMap(self._unwritten_answers, known.streams)
        # to be written in this round
        self._stages: tuple[list[FetchOutput], list[FetchOutput], list[FetchOutput]] = ([], [], [])
        self._finished: list[KafkaPosition] = []
        self._written_streams: list[StreamRecord] = []
        self._written_blocks: list[WantedRecord] = []

    # -------- records in

    def start(self, partition: int, offsets: DoneOffsets) -> None:
        """Add a partition. The caller then passes its records to `add_record`, from at most `REPLAY` records before
        `offsets.resume_offset` on."""
        self.offsets[partition] = offsets
        self._guards[partition] = EpochGuard()
        self._ready[partition] = deque()

    def record_lost_range(self, partition: int, before: int, now: int) -> int:
        """Quarantine the loss of records that Kafka deleted before this offset, and return their number."""
        offsets = self.offsets[partition]
        first = offsets.resume_offset
        lost = offsets.record_lost_range(before)
        if lost:
            self.counts["lost"] += lost
            places = f"{partition}/{first} to {partition}/{before - 1}"
            detail = f"Kafka deleted {lost} unfinished records of wanted from {places}"
            self._quarantine(
                build_quarantine_record_key("wanted", partition, first), RECORDS_LOST, detail, b"", now, MALFORMED_STAGE
            )
        return lost

    def room(self, partition: int, limit: int) -> int:
        """Return how many more records of this partition may be added."""
        offsets = self.offsets[partition]
        limit = min(limit, self._options.max_open - self.waiting_count)
        if not offsets.is_repeating:  # a repeating run must read on: all records wait for those to repeat
            limit = min(limit, _MAX_READY - len(self._ready[partition]), self.queue.room)
        return offsets.room(max(0, limit))

    @property
    def waiting_count(self) -> int:
        """Number of records that are read and not finished."""
        return sum(offsets.waiting_count for offsets in self.offsets.values())

    @property
    def is_busy(self) -> bool:
        """Return whether there is work left even if no new record arrives."""
        return bool(self.queue or self._checks or any(self._ready.values()))

    def add_record(self, position: KafkaPosition, value: bytes | None, interests: Iterable[Interest], now: int) -> None:
        """Add the next record of a partition.

        Args:
            interests: the separators that are followed now.
        """
        if not self.offsets[position.partition].add(position.offset):
            self._recover(position, value, now)
            return
        try:
            record = decode_wanted(value or b"")
            encode(record)  # a lone surrogate can be decoded but not encoded
            if record.network != self._options.network:
                self._finish(position, "other_network")
                return
            wanted = WantedEntry(position, record, read_announcer(record))
            if record.reason == "batch":
                self._add_batch(wanted, interests, now)
            elif record.reason == "claim":
                self._add_claim_record(wanted, now)
            elif self._is_repeated(position, record):
                self._finish(position, "repeated")
            else:
                self._add_update(wanted, now)
        except (*UNREADABLE, UnicodeEncodeError, NotWantedError, StreamIdError) as error:
            detail = f"record {position.partition}/{position.offset} of wanted: {error}"
            key = build_quarantine_record_key("wanted", position.partition, position.offset)
            self._quarantine(key, MALFORMED, detail, value or b"", now, MALFORMED_STAGE)
            self._finish(position, MALFORMED)

    def _is_repeated(self, position: KafkaPosition, record: WantedRecord) -> bool:
        """Return true if this is the second copy of an update, from a micro-batch of `updates` that a crash repeated.

        The first copy may already be released under an earlier generation. Readers of `kiln.updates` would then not
        recognise the second copy as a duplicate (decision 7).
        """
        update = record.update
        if record.reason != "genesis" or update is None:
            return False
        message = f"{update.network}\n{update.origin}\n{update.message_id}"
        return self._guards[position.partition].is_duplicate(update.epoch.query, update.epoch.batch, message)

    def _add_update(self, wanted: WantedEntry, now: int) -> None:
        update = read_update(wanted.record)
        request = BlockRequest("genesis", wanted.record.cid)
        if update.stream in self._separators:
            ready = _ReadyUpdate(wanted, update, self._separators[update.stream])
            self._ready[wanted.position.partition].append(ready)
            return
        failed = self._known.recent_failure(request, now)
        if failed is not None:
            self._give_up_update(wanted, failed, now)
        elif not self._admit(wanted, request, now):
            self._give_up_update(wanted, _OVER_LIMIT, now)

    def _admit(self, wanted: WantedEntry, request: BlockRequest, now: int) -> bool:
        # an update that an earlier run has perhaps released may not be given up
        is_kept = self.offsets[wanted.position.partition].is_repeating
        return self.queue.admit(request, wanted, now, is_kept=is_kept)

    def _add_claim_record(self, wanted: WantedEntry, now: int) -> None:
        """Check the claim if the separator of the update's stream is known; otherwise count it. The record does not
        wait for the outcome."""
        record = wanted.record
        stream = read_update(record).stream
        if stream in self._separators:
            self._check_claims(record, self._separators[stream], now)
        else:
            self._add_claim(record, now)
        self._finish(wanted.position, "claims")

    def _recover(self, position: KafkaPosition, value: bytes | None, now: int) -> None:
        """Restore from a finished record what an earlier run had only in memory: a claim, or an update whose
        second copy must be recognised."""
        try:
            record = decode_wanted(value or b"")
            encode(record)
            self._is_repeated(position, record)
            known = record.reason != "claim" or read_update(record).stream in self._known.streams
        except (*UNREADABLE, UnicodeEncodeError, NotWantedError, StreamIdError):
            return  # quarantined by the earlier run
        if not known and record.network == self._options.network:
            self._add_claim(record, now)

    def _add_claim(self, record: WantedRecord, now: int) -> None:
        if self._known.recent_failure(BlockRequest("genesis", record.cid), now) is None:
            self.claims.add(record)
            self.counts["claims_dropped"] = self.claims.evicted
            self.counts["claims_unreported"] = self.claims.unrecorded

    def _add_batch(self, wanted: WantedEntry, interests: Iterable[Interest], now: int) -> None:
        record = wanted.record
        if (record.message_id or "").partition("/")[0] in self._options.authors():
            self._finish(wanted.position, "own")
            return
        announced = get_separator(record)
        separator = Separator(announced.key, announced.value)
        if not any(interest.covers(separator) for interest in interests):
            self._finish(wanted.position, "not_of_interest")
            return
        request = BlockRequest("batch", record.cid)
        if (record.cid, record.separator) in self._known.blocks:
            self._finish(wanted.position, "already_fetched")
            return
        check = self._checks.get(record.cid)
        if check is not None:
            check.waiting.append(wanted)
            return
        failed = self._known.recent_failure(request, now)
        if failed is not None:
            self._give_up_batch(wanted, failed, now)
            return
        if not self._admit(wanted, request, now):
            self._give_up_batch(wanted, _OVER_LIMIT, now)

    # -------- fetches

    def start_fetches(self, now: int) -> list[BlockRequest]:
        """Return the blocks to fetch now. The caller must call `add_answer` for each."""
        for fetch in self.queue.pop_overdue(now):
            failed = _UNAVAILABLE if fetch.tries else _OVER_LIMIT
            self._give_up_fetch(fetch, failed, now)
        return self.queue.start(now, len(self._checks))

    def add_answer(self, request: BlockRequest, answer: Answer, now: int) -> None:
        """Add the outcome of a fetch."""
        fetch = self.queue.end_attempt(request, answer, now)
        if isinstance(answer, FetchFailure):
            self._retry_or_give_up(fetch, answer, now)
        elif not isinstance(answer, IpfsUnavailable):
            self.queue.remove(fetch)
            if isinstance(answer, GenesisAnswer):
                self._answer_genesis(fetch, answer, now)
            else:
                self._answer_batch(fetch, answer, now)

    def _retry_or_give_up(self, fetch: Fetch, failed: FetchFailure, now: int) -> None:
        if fetch.for_claims:
            fetch.for_claims = False
            self.counts["claims_unchecked"] += self.claims.record_failure(
                fetch.request.cid, now + self._options.retry_after, final=failed.final
            )
            # not given up: a record that waits for the genesis later gets attempts of its own
            if not fetch.has_waiters and not failed.final:
                self.queue.remove(fetch)
                return
        for cid in fetch.checks.keys() - self._checks.keys():  # these batches wait no longer
            del fetch.checks[cid]
        is_late = fetch.waited >= self._options.give_up_after or self.queue.is_overdue(fetch, now)
        if failed.final or is_late or not fetch.has_waiters:
            self._give_up_fetch(fetch, failed, now)
        else:
            self.queue.retry_at(fetch, now + round(pause_after(fetch.tries, _SECOND, _MAX_PAUSE)))

    def _answer_genesis(self, fetch: Fetch, answer: GenesisAnswer, now: int) -> None:
        claimed = self.claims.pop_claims(fetch.request.cid)
        partitions: dict[str, int] = {}  # partitions of the waiting updates, by stream
        tips: dict[str, dict[WaitedTip, None]] = {}
        for wanted in sorted(fetch.waiting, key=network_order):
            if (update := wanted.record.update) is not None:
                tips.setdefault(update.stream, {})[WaitedTip(update.origin, update.tip)] = None
                partition = partitions[update.stream] = wanted.position.partition
                self._ready[partition].append(_ReadyUpdate(wanted, update, answer.separator, claimed))
        listed = {stream for streams in fetch.checks.values() for stream in streams}
        if claimed is not None:
            self.counts["claims_checked"] += 1
            for claim in claimed.first_updates.values():
                self._check_claims(claim, answer.separator, now)
                listed.add(read_update(claim).stream)
        for stream in (*partitions, *sorted(listed - partitions.keys())):
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
            self._unwritten_answers[stream] = answer.separator
            if stream in partitions:
                self._ready[partitions[stream]].append(ready)
            else:
                self._write_stream(ready)

    def _answer_batch(self, fetch: Fetch, batch: BatchAnswer, now: int) -> None:
        check = _BatchCheck(batch, now + self._options.genesis_timeout, set(), fetch.waiting)
        self._checks[fetch.request.cid] = check
        if not self._options.check_genesis:
            return
        unknown = (stream for stream in batch.streams if stream not in self._separators)
        for stream, _ in zip(unknown, range(_MAX_CHECKS), strict=False):
            request = BlockRequest("genesis", cid_text(StreamID.parse(stream).genesis))
            if self._known.recent_failure(request, now) is None:
                self.queue.add_check(request, fetch.announcer, fetch.request.cid, stream, now)
                check.missing_geneses.add(request.cid)

    # -------- outcomes

    def _release_update(self, release: _ReadyUpdate, now: int) -> bool:
        """Release an update.

        Returns:
            False if the update is in `kiln.updates` already, because its claim was true.
        """
        wanted, update, separator, claimed = release
        self._check_claims(wanted.record, separator, now)
        if claimed is not None and claimed.includes(update, separator):
            self._finish(wanted.position, "already_released")
            return False
        partition = wanted.position.partition
        epoch = Epoch(f"genesis/{self._options.network}/{partition}", self.offsets[partition].generation)
        released = structs.replace(update, separator=separator, separator_source="genesis", epoch=epoch)
        key = build_update_key(update.network, separator, update.stream)
        self._stages[0].append(FetchOutput("updates", key, encode(released)))
        self._finish(wanted.position, "released")
        return True

    def _check_claims(self, record: WantedRecord, separator: SeparatorRecord | None, now: int) -> None:
        """Quarantine the claim of an update if the genesis names another separator."""
        update = record.update
        if separator is None or update is None:
            return
        verified = Separator(separator.key, separator.value)
        contradicted = claims_of(record).find_contradicted(verified)
        if contradicted is not None:
            key = build_quarantine_key(update.frame.partition, update.frame.offset, update.frame.index)
            self._quarantine(
                key, CONTRADICTS, describe_contradiction(contradicted, verified), encode(record), now, CLAIM_STAGE
            )
            self.counts[CONTRADICTS] += 1

    def _write_stream(self, ready: _ReadyAnswer) -> None:
        record = ready.record
        self._stages[1].append(FetchOutput("streams", record.stream.encode(), encode(record)))
        self._written_streams.append(record)
        self.counts["streams"] += 1
        if record.without is not None:
            self.counts[record.without] += 1
        self._finish_checks(ready.request, ready.checks)

    def _finish_checks(self, request: BlockRequest, checks: Iterable[str]) -> None:
        for cid in checks:
            if (check := self._checks.get(cid)) is not None:
                check.missing_geneses.discard(request.cid)

    def _give_up_fetch(self, fetch: Fetch, failed: FetchFailure, now: int) -> None:
        self.queue.remove(fetch)
        if not failed.final:
            failed = failed._replace(
                detail=f"the block was not found in {fetch.tries} attempts over {fetch.waited / 1e6:.0f} s: "
                f"{failed.detail}"
            )
        if failed is not _OVER_LIMIT:  # over the limit, no attempt was made
            self._known.missing[fetch.request] = now + self._options.retry_after, failed
        if fetch.request.kind == "genesis":
            for wanted in fetch.waiting:
                self._give_up_update(wanted, failed, now)
            self._finish_checks(fetch.request, fetch.checks)
            return
        for wanted in fetch.waiting:
            self._known.lost_blocks.pop((wanted.record.cid, wanted.record.separator), None)
        for wanted in fetch.waiting:
            self._give_up_batch(wanted, failed, now)

    def _give_up_batch(self, wanted: WantedEntry, failed: FetchFailure, now: int) -> None:
        """Write the reason to `kiln.blocks` and to quarantine, once for each separator of the batch."""
        record = wanted.record
        if failed.reason != OVER_LIMIT:
            if (record.cid, record.separator) in self._known.lost_blocks:
                self._finish(wanted.position, "already_fetched")
                return
            self._known.lost_blocks[record.cid, record.separator] = None
        lost = BlockRecord(record.network, record.cid, now, get_separator(record), reason=failed.reason)
        self._stages[2].append(FetchOutput("blocks", record.cid.encode(), encode(lost)))
        self._quarantine(record.cid.encode(), failed.reason, failed.detail, encode(record), now)
        self._finish(wanted.position, failed.reason)

    def _give_up_update(self, wanted: WantedEntry, failed: FetchFailure, now: int) -> None:
        update = wanted.record.update
        if update is not None:
            key = build_quarantine_key(update.frame.partition, update.frame.offset, update.frame.index)
            self._quarantine(key, failed.reason, failed.detail, encode(wanted.record), now)
        self._finish(wanted.position, failed.reason)

    def _write_block(self, check: _BatchCheck, now: int) -> None:
        written: set[SeparatorRecord] = set()  # a block may have several separators
        for wanted in check.waiting:
            record, separator = wanted.record, get_separator(wanted.record)
            if is_first := separator not in written:
                written.add(separator)
                block = BlockRecord(record.network, record.cid, now, separator, block=check.batch.block)
                self._stages[2].append(FetchOutput("blocks", record.cid.encode(), encode(block)))
                self._written_blocks.append(record)
            self._finish(wanted.position, "blocks" if is_first else "already_fetched")

    def _quarantine(self, key: bytes, reason: str, detail: str, data: bytes, now: int, stage: str = STAGE) -> None:
        for fault in build_quarantine_records(stage, reason, detail, data, now):
            self._stages[0].append(FetchOutput("quarantine", key, encode(fault)))
        self.counts["quarantined"] += 1

    def _finish(self, position: KafkaPosition, outcome: str) -> None:
        self.counts[outcome] += 1
        self._finished.append(position)
        self.queue.release(position)

    # -------- rounds

    def stage_writes(self, now: int) -> StagedWrites:
        """Return the records to write now."""
        releasing = {
            partition: offsets for partition in self._ready if (offsets := self._release_ready(partition, now))
        }
        for cid in [cid for cid, check in self._checks.items() if not check.missing_geneses or check.until <= now]:
            check = self._checks.pop(cid)
            self._write_block(check, now)
            for genesis in check.missing_geneses:
                self.queue.cancel_check(BlockRequest("genesis", genesis), cid)
        return StagedWrites(self._stages, releasing)

    def _release_ready(self, partition: int, now: int) -> set[int]:
        """Release ready updates in their order, up to `MAX_RELEASING`, and return their offsets.

        The separator of a stream is written in the same call as the last update that waited for it. If it were written
        later, a crash after that update is finished would lose the separator.
        """
        offsets, ready = self.offsets[partition], self._ready[partition]
        releasing: set[int] = set()
        held_back: deque[_ReadyUpdate | _ReadyAnswer] = deque()
        blocked_streams: set[str] = set()  # streams with an update that may not be released yet
        while ready:
            item = ready[0]
            if isinstance(item, _ReadyAnswer):
                if item.record.stream in blocked_streams:
                    held_back.append(item)
                else:
                    self._write_stream(item)
            elif len(releasing) == MAX_RELEASING:
                break
            elif offsets.can_release(item.wanted.position.offset):
                if self._release_update(item, now):
                    releasing.add(item.wanted.position.offset)
            else:
                held_back.append(item)
                blocked_streams.add(item.update.stream)
            ready.popleft()
        ready.extendleft(reversed(held_back))
        return releasing

    def confirm_writes(self) -> None:
        """Record that the broker has acknowledged all records that `stage_writes` returned."""
        for stream in self._written_streams:
            self._known.streams[stream.stream] = stream.separator
            self._unwritten_answers.pop(stream.stream, None)
        for record in self._written_blocks:
            self._known.blocks[record.cid, record.separator] = None
        for position in self._finished:
            self.offsets[position.partition].mark_done(position.offset)
        self._written_streams, self._written_blocks, self._finished = [], [], []
        self._stages = ([], [], [])
