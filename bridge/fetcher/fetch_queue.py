"""Queue of the blocks to fetch: the order and the times of the attempts. Does no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import product
from typing import Final, NamedTuple

from kiln.bridge.fair_queue import FairQueue, Path
from kiln.bridge.fetcher.attempts import Answer, BlockRequest, FetchFailure, IpfsUnavailable
from kiln.bridge.fetcher.claims import ClaimedStreams
from kiln.bridge.fetcher.shares import AnnouncerPlaces, Place
from kiln.bridge.fetcher.wanted import KafkaPosition, WantedEntry
from kiln.bridge.ipfs import Announcer
from kiln.conf.process.bounded_dict import BoundedDict
from kiln.schemas.kafka.records import SeparatorRecord

_PROBE_EVERY: Final = 2_000_000  # time in µs between attempts while IPFS is unavailable
_MAX_KNOWN_STREAMS: Final = 200_000  # streams with a cached separator
_MAX_KNOWN_BLOCKS: Final = 10_000  # batches whose block was fetched
_MAX_KNOWN_MISSING: Final = 50_000
_UNPROVEN_WAIT: Final = 60_000_000  # longest wait for a batch of an unproven announcer, in µs of IPFS uptime
_MAX_BLOCKS_IN_MEMORY: Final = 16  # blocks in memory while the geneses of their streams are fetched


class Lane(NamedTuple):
    """The priority of a fetch that is due: lanes with smaller values are served first."""

    rank: int
    """0 for a genesis that updates wait for, 1 for the block of a batch, 2 for a genesis that only serves to check a
    batch or a claim"""
    is_retry: bool
    is_unproven: bool
    """true if the announcer is not proven (`AnnouncerPlaces`)"""


_LANES: Final = [Lane(*lane) for lane in product((0, 1, 2), (False, True), (False, True))]


@dataclass
class Fetch:
    """A block to fetch, and the records that wait for the block.

    Some times are given as IPFS uptime: the time in µs that IPFS was available since the start.
    """

    request: BlockRequest
    number: int
    due: int
    """time in µs of the next attempt"""
    announcer: Announcer
    lane: Lane
    """the lane in which the fetch is queued, or was queued when the last attempt began"""
    added_at: int
    """IPFS uptime when the fetch was added"""
    is_queued: bool = False
    waiting: deque[WantedEntry] = field(default_factory=deque)
    checks: dict[str, set[str]] = field(default_factory=dict)
    """streams of this genesis whose separator is to be checked, by CID of the batch that lists them"""
    tries: int = 0
    in_flight: bool = False
    started_at: int | None = None
    """IPFS uptime when the first attempt began"""
    waited: int = 0
    """IPFS uptime from the start of the first attempt to the end of the last one, in µs"""
    for_claims: bool = False
    """true if `ClaimedStreams` selected the genesis; the outcome must be recorded there"""

    @property
    def has_waiters(self) -> bool:
        """True if a record, or the check of a batch, waits for the block. Claims do not wait."""
        return bool(self.waiting or self.checks)

    @property
    def turn(self) -> Path:
        """Path in the lane's `FairQueue`: the peers take turns, and the authors of a peer take turns."""
        return self.announcer.peer, self.announcer.author, self.request

    @property
    def order(self) -> tuple[bool, int, int, int]:
        """Sort key: first the blocks that records wait for, then by fewest attempts, earliest `due`, first added."""
        return not self.waiting, self.tries, self.due, self.number


class KnownAnswers:
    """Results of earlier fetches, which make another fetch unnecessary."""

    def __init__(self) -> None:
        self.streams = BoundedDict[str, SeparatorRecord | None](_MAX_KNOWN_STREAMS)
        """separator of each stream in `kiln.streams`; `None` if the stream has no separator"""
        self.missing = BoundedDict[BlockRequest, tuple[int, FetchFailure]](_MAX_KNOWN_MISSING)
        """blocks given up recently: the time in µs at which they may be fetched again, and the last failure"""
        self.blocks = BoundedDict[tuple[str, SeparatorRecord | None], None](_MAX_KNOWN_BLOCKS)
        """CID and separator of each batch whose block is in `kiln.blocks`"""
        self.lost_blocks = BoundedDict[tuple[str, SeparatorRecord | None], None](_MAX_KNOWN_MISSING)
        """CID and separator of each batch in quarantine because its block was given up"""

    def recent_failure(self, request: BlockRequest, now: int) -> FetchFailure | None:
        """Return the last failure of a block that was given up and may not be fetched again yet."""
        until, failure = self.missing.get(request, (now, None))
        if failure is not None and until <= now:
            del self.missing[request]
            return None
        return failure


class FetchQueue:
    """Queue of the blocks to fetch. The caller passes the time, in µs.

    Within a lane, announcers take turns. Part of the concurrent fetches is reserved: for first attempts, for geneses,
    and for proven announcers (`AnnouncerPlaces`). So blocks that no peer has do not delay the others.
    """

    def __init__(
        self,
        max_concurrent: int,
        retry_after: int,
        max_open: int,
        known: KnownAnswers,
        claims: ClaimedStreams,
    ) -> None:
        """Create an empty queue.

        Args:
            retry_after: the wait before a block that was given up is tried again, in µs.
            max_open: maximum number of records that wait: a quarter for batches, the rest for geneses.
        """
        self._max_concurrent = max_concurrent
        self._retry_after = retry_after
        self._known = known
        self._claims = claims
        batches = max_open // 4
        self._places = {
            "genesis": AnnouncerPlaces(max_open - batches, max_open // 4),
            # unproven announcers get few: a record may be open for `give_up_after`, and the metadata of the committed
            # offset holds all open records (`MAX_METADATA`)
            "batch": AnnouncerPlaces(batches, max_open // 20),
        }
        self._held: dict[KafkaPosition, tuple[AnnouncerPlaces, Place]] = {}
        self._blocking: tuple[BlockRequest, WantedEntry] | None = None  # accepted beyond the share of its announcer
        self._fetches: dict[BlockRequest, Fetch] = {}
        self._lanes = {lane: FairQueue[BlockRequest]() for lane in _LANES}  # fetches that are due
        self._later: list[tuple[int, int, BlockRequest]] = []  # heap of fetches due later; some are already removed
        self._running: dict[BlockRequest, Fetch] = {}
        self._batches: deque[Fetch] = deque()  # added in the last _UNPROVEN_WAIT, in their order
        self._number = 0
        self._ipfs_uptime = 0  # time in µs that IPFS was available, up to _uptime_at
        self._uptime_at: int | None = None
        self._probe_at = 0
        self._available_since: int | None = None  # None if IPFS is unavailable, or no fetch was started yet
        self.ipfs_error: str | None = None
        """reason why IPFS is unavailable; `None` while it is available"""

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def in_flight(self) -> int:
        """Number of fetches in flight."""
        return len(self._running)

    @property
    def room(self) -> int:
        """Number of further records that may be read from Kafka.

        If `admit` has accepted a record although its announcer had no free place, the number is 0 until the announcer
        has a free place, or until `admit` would refuse this record.
        """
        if self._blocking is not None:
            request, wanted = self._blocking
            if not self._places[request.kind].has_room(wanted.announcer) and not self._is_refusable(request, wanted):
                return 0
            self._blocking = None
        return self._places["genesis"].free

    def admit(self, request: BlockRequest, wanted: WantedEntry, now: int, *, is_kept: bool) -> bool:
        """Add a record that waits for a block. It holds one of its announcer's places until `release`.

        A record is refused if its announcer has no free place, and one of these is true:

        - it announces a batch, and IPFS has been available since the announcement;
        - a fetch of this block has failed, or the announcer is failing (`AnnouncerPlaces.is_failing`).

        Args:
            is_kept: true if the record must not be refused.

        Returns:
            False if the record is refused.
        """
        places = self._places[request.kind]
        if not places.has_room(wanted.announcer):
            if not is_kept and self._is_refusable(request, wanted):
                return False
            self._blocking = request, wanted
        self._held[wanted.position] = places, places.take(wanted.announcer)
        self._add_waiter(request, wanted, now)
        return True

    def release(self, position: KafkaPosition) -> None:
        """Release the place that a record holds, if any."""
        if position in self._held:
            places, place = self._held.pop(position)
            places.release(place)

    def _is_refusable(self, request: BlockRequest, wanted: WantedEntry) -> bool:
        since = self._available_since
        if request.kind == "batch" and since is not None and wanted.record.observed_at >= since:
            return True
        fetch = self._fetches.get(request)
        has_failed = fetch is not None and fetch.tries > fetch.in_flight
        return has_failed or self._places[request.kind].is_failing(wanted.announcer)

    def _add_waiter(self, request: BlockRequest, wanted: WantedEntry, now: int) -> None:
        fetch = self._get_or_add(request, wanted.announcer, now)
        fetch.waiting.append(wanted)
        is_proven = self._places[request.kind].is_proven
        if len(fetch.waiting) == 1 or (is_proven(wanted.announcer) and not is_proven(fetch.announcer)):
            self._dequeue(fetch)
            fetch.announcer = wanted.announcer
        if not fetch.is_queued and not fetch.in_flight and fetch.due <= now:
            self._enqueue(fetch)

    def add_check(self, request: BlockRequest, announcer: Announcer, cid: str, stream: str, now: int) -> None:
        """Queue the genesis of a stream that a batch lists, to check the separator of the stream.

        Args:
            cid: CID of the batch.
        """
        fetch = self._get_or_add(request, announcer, now)
        fetch.checks.setdefault(cid, set()).add(stream)
        if not fetch.is_queued and not fetch.in_flight and fetch.due <= now:
            self._enqueue(fetch)

    def is_overdue(self, fetch: Fetch, now: int) -> bool:
        """Return true for a batch of an unproven announcer that has waited for `_UNPROVEN_WAIT` of IPFS uptime."""
        is_unproven = fetch.request.kind == "batch" and not self._places["batch"].is_proven(fetch.announcer)
        return is_unproven and fetch.added_at + _UNPROVEN_WAIT <= self._update_ipfs_uptime(now)

    def pop_overdue(self, now: int) -> list[Fetch]:
        """Return the fetches of batches that have become overdue since the last call, except those in flight."""
        overdue: list[Fetch] = []
        while self._batches and self._batches[0].added_at + _UNPROVEN_WAIT <= self._update_ipfs_uptime(now):
            fetch = self._batches.popleft()
            if self._fetches.get(fetch.request) is fetch and not fetch.in_flight and self.is_overdue(fetch, now):
                overdue.append(fetch)
        return overdue

    def retry_at(self, fetch: Fetch, due: int) -> None:
        """Schedule the next attempt of a fetch."""
        fetch.due = due
        heappush(self._later, (due, fetch.number, fetch.request))

    def count_unanswered(self) -> tuple[int, int]:
        """Count the geneses that updates wait for and that at least one attempt failed to fetch.

        Returns:
            The number of these geneses, and the number of updates that wait for them.
        """
        waiting = [
            len(fetch.waiting)
            for fetch in self._fetches.values()
            if fetch.request.kind == "genesis" and fetch.waiting and fetch.tries > fetch.in_flight
        ]
        return len(waiting), sum(waiting)

    def remove(self, fetch: Fetch) -> None:
        """Remove a fetch that is not in flight."""
        self._dequeue(fetch)
        del self._fetches[fetch.request]

    def cancel_check(self, request: BlockRequest, cid: str) -> None:
        """Cancel the check of a batch that no longer waits for this genesis."""
        fetch = self._fetches.get(request)
        # a fetch in flight continues, because its answer is useful later
        if fetch is not None and not fetch.in_flight:
            fetch.checks.pop(cid, None)
            if not fetch.has_waiters:
                self.remove(fetch)

    def start(self, now: int, blocks_in_memory: int) -> list[BlockRequest]:
        """Return the blocks to fetch now. The caller must call `end_attempt` for each.

        Args:
            blocks_in_memory: number of fetched batches that wait for the geneses of their streams.
        """
        if self.ipfs_error is not None:
            if now < self._probe_at or self.in_flight:
                return []
            self._probe_at = now + _PROBE_EVERY
            probe = min(self._fetches.values(), key=lambda fetch: fetch.order, default=None)
            return self._start_claims(1, now) if probe is None else [self._start(probe, now)]
        if self._available_since is None:
            self._available_since = now
        self._enqueue_due(now)
        started: list[BlockRequest] = []
        for lane, queue in self._lanes.items():
            while queue and self._has_slot(lane, blocks_in_memory):
                fetch = self._fetches[queue.pop()]
                fetch.is_queued = False
                started.append(self._start(fetch, now))
        checks_in_flight = sum(not fetch.has_waiters for fetch in self._running.values())
        limit = max(1, self._max_concurrent // 2) - checks_in_flight
        return started + self._start_claims(min(self._max_concurrent - self.in_flight, limit), now)

    def list_announcers(self, request: BlockRequest) -> list[Announcer]:
        """Return the announcers of a batch that is being fetched, first a proven one if there is any."""
        fetch = self._fetches[request]
        if request.kind != "batch":
            return []
        return list(dict.fromkeys((fetch.announcer, *(wanted.announcer for wanted in fetch.waiting))))

    def _has_slot(self, lane: Lane, blocks_in_memory: int) -> bool:
        most, half = self._max_concurrent, max(1, self._max_concurrent // 2)
        running = [fetch.lane for fetch in self._running.values()]
        if len(running) >= most:
            return False
        if lane.is_retry and sum(other.is_retry for other in running) >= half:
            return False
        if lane.is_unproven and any(places.has_proven for places in self._places.values()):
            unproven = sum(other.is_unproven for other in running)
            if unproven >= most - most // (2 if lane.rank else 4):
                return False
        if lane.rank == 0:
            return True
        if sum(other.rank > 0 for other in running) >= most - most // 4:
            return False
        batches = sum(fetch.request.kind == "batch" for fetch in self._running.values())
        return lane.rank > 1 or blocks_in_memory + batches < _MAX_BLOCKS_IN_MEMORY

    def end_attempt(self, request: BlockRequest, answer: Answer, now: int) -> Fetch:
        """Record the outcome of an attempt, and whether IPFS is available.

        Returns:
            The fetch. The caller must remove or retry it, unless IPFS is unavailable.
        """
        fetch = self._fetches[request]
        assert fetch.started_at is not None
        fetch.in_flight = False
        del self._running[request]
        fetch.waited = self._update_ipfs_uptime(now) - fetch.started_at
        if not isinstance(answer, IpfsUnavailable):
            if self.ipfs_error is not None:
                self._available_since = now
            self.ipfs_error = None
            self._record_evidence(fetch, arrived=not isinstance(answer, FetchFailure))
            return fetch
        self.ipfs_error, self._available_since = answer.reason, None
        fetch.tries -= 1
        if fetch.for_claims:
            self._claims.put_back(request.cid)
            fetch.for_claims = False
        if fetch.has_waiters:
            self._enqueue(fetch)
        else:
            self.remove(fetch)
        return fetch

    def _record_evidence(self, fetch: Fetch, *, arrived: bool) -> None:
        """Record for all announcers of a block that the block arrived, or that its first attempt failed."""
        if not arrived and fetch.tries > 1:
            return
        kind = fetch.request.kind
        for announcer in dict.fromkeys(wanted.announcer for wanted in fetch.waiting):
            if not self._places[kind].record_attempt(announcer, arrived=arrived):
                continue
            for other in self._fetches.values():
                is_own = other.announcer.author == announcer.author
                if is_own and other.is_queued and (other.lane.rank == 0) == (kind == "genesis"):
                    self._dequeue(other)
                    self._enqueue(other)

    def _get_or_add(self, request: BlockRequest, announcer: Announcer, now: int) -> Fetch:
        fetch = self._fetches.get(request)
        if fetch is None:
            self._number += 1
            uptime = self._update_ipfs_uptime(now)
            fetch = self._fetches[request] = Fetch(request, self._number, now, announcer, Lane(2, False, False), uptime)
            if request.kind == "batch":
                self._batches.append(fetch)
        return fetch

    def _enqueue(self, fetch: Fetch) -> None:
        rank = 1 if fetch.request.kind == "batch" else 0 if fetch.waiting else 2
        places = self._places["batch" if rank else "genesis"]  # a check is for a batch
        fetch.lane = Lane(rank, fetch.tries > 0, not places.is_proven(fetch.announcer))
        fetch.is_queued = True
        self._lanes[fetch.lane].extend(fetch.turn, [fetch.request])

    def _dequeue(self, fetch: Fetch) -> None:
        if fetch.is_queued:
            fetch.is_queued = False
            self._lanes[fetch.lane].remove(fetch.turn)

    def _enqueue_due(self, now: int) -> None:
        while self._later and self._later[0][0] <= now:
            due, number, request = heappop(self._later)
            fetch = self._fetches.get(request)
            if fetch is None or (fetch.due, fetch.number) != (due, number):
                continue
            if not fetch.is_queued and not fetch.in_flight:
                self._enqueue(fetch)

    def _start_claims(self, limit: int, now: int) -> list[BlockRequest]:
        """Start up to `limit` fetches of geneses that only serve to check claims."""
        started: list[BlockRequest] = []
        while len(started) < limit and (cid := self._claims.next_genesis(now)) is not None:
            request = BlockRequest("genesis", cid)
            if request in self._fetches or self._known.recent_failure(request, now) is not None:
                self._claims.defer(cid, now + self._retry_after)
                continue
            fetch = self._get_or_add(request, Announcer("", ""), now)
            fetch.for_claims = True
            started.append(self._start(fetch, now))
        return started

    def _start(self, fetch: Fetch, now: int) -> BlockRequest:
        self._dequeue(fetch)
        fetch.in_flight = True
        fetch.tries += 1
        self._running[fetch.request] = fetch
        if fetch.started_at is None:
            fetch.started_at = self._update_ipfs_uptime(now)
        return fetch.request

    def _update_ipfs_uptime(self, now: int) -> int:
        """Return the IPFS uptime: the time in µs that IPFS was available since the start."""
        if self._uptime_at is not None and self.ipfs_error is None:
            self._ipfs_uptime += max(0, now - self._uptime_at)
        self._uptime_at = now
        return self._ipfs_uptime
