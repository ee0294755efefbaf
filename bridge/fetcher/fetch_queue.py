"""The blocks to fetch, and when to attempt each. No Kafka, no IPFS."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kiln.bridge.fetcher.attempts import Answer, BlockRequest, FetchFailure, IpfsUnavailable
from kiln.bridge.fetcher.claims import ClaimedStreams
from kiln.schemas.kafka.records import SeparatorRecord, WantedRecord

_PROBE_EVERY: Final = 2_000_000  # µs, while IPFS is unavailable
_MAX_KNOWN_STREAMS: Final = 200_000  # streams with a cached separator
_MAX_KNOWN_BLOCKS: Final = 10_000  # batches whose block was fetched
_MAX_KNOWN_MISSING: Final = 50_000
_MAX_BLOCKS_IN_MEMORY: Final = 16  # blocks in memory while the geneses of their streams are fetched


class KafkaPosition(NamedTuple):
    """The position of a record of `kiln.wanted`."""

    partition: int
    offset: int


class WantedEntry(NamedTuple):
    """A record of `kiln.wanted`."""

    position: KafkaPosition
    record: WantedRecord


@dataclass
class Fetch:
    """A block to fetch, and the records that wait for the block."""

    request: BlockRequest
    number: int
    due: int
    waiting: deque[WantedEntry] = field(default_factory=deque)
    checks: dict[str, set[str]] = field(default_factory=dict)
    """streams by CID of the batch that lists them"""
    tries: int = 0
    in_flight: bool = False
    started_at: int | None = None
    """when the first attempt began, in uptime of IPFS"""
    waited: int = 0
    """uptime of IPFS from then to the end of the last attempt, µs"""
    for_claims: bool = False
    """started by ClaimedStreams, which must learn the outcome"""

    @property
    def has_waiters(self) -> bool:
        """Return whether a record or a check waits for the block; a claim does not wait."""
        return bool(self.waiting or self.checks)

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """Sort key: blocks with waiting updates before checks, then fewest attempts, then age."""
        return not self.waiting, self.tries, self.due, self.number


class KnownAnswers:
    """Blocks that need no fetch: streams in `kiln.streams`, fetched blocks, and blocks given up recently.

    It outlives a session with Kafka.
    """

    def __init__(self) -> None:
        self.streams: OrderedDict[str, SeparatorRecord | None] = OrderedDict()
        self.missing: OrderedDict[BlockRequest, tuple[int, FetchFailure]] = OrderedDict()
        """with the time until which it counts"""
        self.blocks: OrderedDict[tuple[str, SeparatorRecord | None], None] = OrderedDict()

    def add_stream(self, stream: str, separator: SeparatorRecord | None) -> None:
        """Add a stream of `kiln.streams` and its separator, if it has one."""
        self.streams[stream] = separator
        self.streams.move_to_end(stream)
        if len(self.streams) > _MAX_KNOWN_STREAMS:
            self.streams.popitem(last=False)

    def add_block(self, record: WantedRecord) -> None:
        """Add a batch whose block is in `kiln.blocks` under this separator."""
        self.blocks[record.cid, record.separator] = None
        if len(self.blocks) > _MAX_KNOWN_BLOCKS:
            self.blocks.popitem(last=False)

    def add_missing(self, request: BlockRequest, failed: FetchFailure, until: int) -> None:
        self.missing[request] = (until, failed)
        self.missing.move_to_end(request)
        if len(self.missing) > _MAX_KNOWN_MISSING:
            self.missing.popitem(last=False)

    def recent_failure(self, request: BlockRequest, now: int) -> FetchFailure | None:
        """Return the failure of a block that was given up recently."""
        until, failure = self.missing.get(request, (now, None))
        if failure is not None and until <= now:
            del self.missing[request]
            return None
        return failure


class UnansweredGeneses(NamedTuple):
    """Geneses that no peer had in at least one attempt."""

    streams: int = 0
    updates: int = 0
    """number of records that wait for them"""


class FetchQueue:
    """The blocks to fetch, by request. Time comes from the caller, in µs."""

    def __init__(self, max_concurrent: int, retry_after: int, known: KnownAnswers, claims: ClaimedStreams) -> None:
        self._max_concurrent = max_concurrent
        self._retry_after = retry_after
        self._known = known
        self._claims = claims
        self._fetches: dict[BlockRequest, Fetch] = {}
        self._number = 0
        self._ipfs_uptime = 0  # µs that IPFS was available, up to _uptime_at
        self._uptime_at: int | None = None
        self._probe_at = 0
        self.in_flight = 0
        """number of fetches in flight"""
        self.ipfs_error: str | None = None
        """the reason why IPFS is unavailable"""

    def __len__(self) -> int:
        return len(self._fetches)

    def add(self, request: BlockRequest, now: int) -> Fetch:
        """Return the fetch of a block, which is new and due if there is none."""
        fetch = self._fetches.get(request)
        if fetch is None:
            self._number += 1
            fetch = self._fetches[request] = Fetch(request, self._number, now)
        return fetch

    def count_unanswered(self) -> UnansweredGeneses:
        """Count the geneses that no peer had so far, and for which records wait."""
        waiting = [
            len(fetch.waiting)
            for fetch in self._fetches.values()
            if fetch.request.kind == "genesis" and fetch.waiting and fetch.tries > fetch.in_flight
        ]
        return UnansweredGeneses(len(waiting), sum(waiting))

    def remove(self, fetch: Fetch) -> None:
        """Remove a fetch that is not in flight."""
        del self._fetches[fetch.request]

    def cancel_check(self, request: BlockRequest, cid: str) -> None:
        """Cancel the check of a batch that no longer waits for this block."""
        fetch = self._fetches.get(request)
        # a fetch in flight continues, because its answer is useful later
        if fetch is not None and not fetch.in_flight:
            fetch.checks.pop(cid, None)
            if not fetch.has_waiters:
                self.remove(fetch)

    def start(self, now: int, blocks_in_memory: int) -> list[BlockRequest]:
        """Start the fetches that are due; the caller must call `end_attempt` for each."""
        if self.ipfs_error is not None:
            if now < self._probe_at or self.in_flight:
                return []
            self._probe_at = now + _PROBE_EVERY
            probe = min(self._fetches.values(), key=lambda fetch: fetch.order, default=None)
            return self._start_claims(1, now) if probe is None else [self._start(probe, now)]
        free = self._max_concurrent - self.in_flight
        if free <= 0:
            return []
        running = [fetch for fetch in self._fetches.values() if fetch.in_flight]
        blocks = _MAX_BLOCKS_IN_MEMORY - blocks_in_memory - sum(fetch.request.kind == "batch" for fetch in running)
        # retries of blocks that never arrive leave room for first attempts
        retries = max(1, self._max_concurrent // 2) - sum(fetch.tries > 1 for fetch in running)
        started: list[BlockRequest] = []
        for fetch in sorted(self._find_due(now), key=lambda fetch: fetch.order):
            if len(started) == free:
                break
            if (fetch.request.kind == "batch" and blocks <= 0) or (fetch.tries and retries <= 0):
                continue
            blocks -= fetch.request.kind == "batch"
            retries -= fetch.tries > 0
            started.append(self._start(fetch, now))
        checks_in_flight = sum(not fetch.has_waiters for fetch in running)
        limit = max(1, self._max_concurrent // 2) - checks_in_flight
        return started + self._start_claims(min(free - len(started), limit), now)

    def end_attempt(self, request: BlockRequest, answer: Answer, now: int) -> Fetch:
        """Record that an attempt has ended, and if IPFS is available. The fetch stays in the queue."""
        fetch = self._fetches[request]
        assert fetch.started_at is not None
        fetch.in_flight = False
        self.in_flight -= 1
        fetch.waited = self._update_ipfs_uptime(now) - fetch.started_at
        if not isinstance(answer, IpfsUnavailable):
            self.ipfs_error = None
            return fetch
        self.ipfs_error = answer.reason
        fetch.tries -= 1
        if fetch.for_claims:
            self._claims.put_back(request.cid)
            fetch.for_claims = False
            if not fetch.has_waiters:
                self.remove(fetch)
        return fetch

    def _find_due(self, now: int) -> Iterator[Fetch]:
        return (fetch for fetch in self._fetches.values() if not fetch.in_flight and fetch.due <= now)

    def _start_claims(self, limit: int, now: int) -> list[BlockRequest]:
        """Start fetches of geneses that are only claimed, so that no record waits for them."""
        started: list[BlockRequest] = []
        while len(started) < limit and (cid := self._claims.next_genesis(now)) is not None:
            request = BlockRequest("genesis", cid)
            if request in self._fetches or self._known.recent_failure(request, now) is not None:
                self._claims.defer(cid, now + self._retry_after)
                continue
            fetch = self.add(request, now)
            fetch.for_claims = True
            started.append(self._start(fetch, now))
        return started

    def _start(self, fetch: Fetch, now: int) -> BlockRequest:
        fetch.in_flight = True
        fetch.tries += 1
        self.in_flight += 1
        if fetch.started_at is None:
            fetch.started_at = self._update_ipfs_uptime(now)
        return fetch.request

    def _update_ipfs_uptime(self, now: int) -> int:
        """Return the total time that IPFS was available, in µs."""
        if self._uptime_at is not None and self.ipfs_error is None:
            self._ipfs_uptime += max(0, now - self._uptime_at)
        self._uptime_at = now
        return self._ipfs_uptime
