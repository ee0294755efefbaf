"""What strangers announce holds up neither geneses nor batches of others: places, turns, and the whole fetcher."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kiln.bridge.fetcher.attempts import Answer, BatchAnswer, BlockRequest, FetchFailure, GenesisAnswer, IpfsUnavailable
from kiln.bridge.fetcher.pending import FetchingOptions
from kiln.bridge.fetcher.shares import AnnouncerPlaces
from kiln.bridge.ipfs import Announcer
from kiln.schemas.kafka.records import WantedRecord
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.identity import peer_text
from kit.fetching import MODEL, NETWORK, START, UNAVAILABLE, Run, S, block_of, genesis_cid, wanted_batch, wanted_update

_ANNOUNCERS = st.builds(Announcer, st.sampled_from("abc"), st.sampled_from("xyz"))


# ---------------------------------------------------------------- places

_STEPS = st.lists(st.tuples(_ANNOUNCERS, st.sampled_from(["take", "release", "arrived", "failed"])), max_size=200)


@given(_STEPS)
def test_places_add_up_and_nobody_takes_the_last(steps: list[tuple[Announcer, str]]) -> None:
    places = AnnouncerPlaces(40, 16)
    held: dict[Announcer, deque[object]] = {}
    releases = []
    for announcer, step in steps:
        if step == "take" and places.has_room(announcer):
            place = places.take(announcer)
            releases.append(place)
            held.setdefault(announcer, deque()).append(place)
        elif step == "release" and releases:
            places.release(releases.pop(0))
        elif step in ("arrived", "failed"):
            places.record_attempt(announcer, arrived=step == "arrived")
            assert places.is_proven(announcer) or step == "failed"
            assert not (places.is_proven(announcer) and places.is_failing(announcer))
        assert places.count == len(releases)
        assert places.free >= 1
        unproven = Counter(place.announcer.peer for place in releases if not place.is_proven)
        assert unproven.total() <= 16
        assert max(unproven.values(), default=0) <= 8
    for place in releases:
        places.release(place)
    assert (places.count, places.free) == (0, 40)


def test_author_with_a_new_key_for_each_message_shares_the_places_of_its_peer() -> None:
    places = AnnouncerPlaces(100, 40)
    taken = 0
    for number in range(1_000):
        stranger = Announcer(f"key {number}", "stranger")
        if places.has_room(stranger):
            places.take(stranger)
            taken += 1
    assert taken == 20
    assert places.has_room(Announcer("newcomer", "other"))


def test_author_whose_blocks_no_longer_arrive_is_as_any_other() -> None:
    places = AnnouncerPlaces(100, 40)
    author = Announcer("a", "x")
    assert places.record_attempt(author, arrived=True)
    changes = [places.record_attempt(author, arrived=False) for _ in range(4)]
    assert changes == [False, False, True, False]
    assert places.is_failing(author)
    assert places.record_attempt(author, arrived=True)
    assert not places.is_failing(author)


# ---------------------------------------------------------------- the fetcher

_OPTIONS = FetchingOptions(NETWORK, give_up_after=600 * S, retry_after=600 * S, check_genesis=False, max_open=2_000)
_FLOOD = 2_200  # announcements: more than wait at one time
_HONEST = peer_text(b"\x00\x02\x08\x01")
_FAILED: Mapping[str, FetchFailure] = {
    "batch": FetchFailure("block_unavailable", "nobody gave it", final=False),
    "genesis": UNAVAILABLE,
}


def _stranger(number: int) -> str:
    return peer_text(b"\x00\x06\x08\x02" + number.to_bytes(4, "big"))


def _nothing(number: int) -> str:
    """The CID of a block that nobody has."""
    return cid_text(compute_cid(b"nothing %d" % number))


def announce(cid: str, author: str, peer: str, seconds: int = 1) -> WantedRecord:
    """An announcement, so long after the fetcher started."""
    record = wanted_batch(cid, message=f"{author}/{cid}")
    return structs.replace(record, peer=peer, observed_at=START + seconds * S)


def update(stream: int, message: int, author: str, peer: str) -> WantedRecord:
    record = wanted_update(stream, message)
    return structs.replace(record, message_id=f"{author}/{message}", peer=peer)


class Network:
    """A fetcher whose reader stops where there is no room, and blocks that arrive at once, or never."""

    def __init__(self, blocks: Mapping[str, Answer], attempt: int, options: FetchingOptions = _OPTIONS) -> None:
        self.run = Run(options)
        self.blocks = blocks
        self.attempt = attempt  # s that an attempt takes which finds nothing
        self.unread: deque[WantedRecord] = deque()
        self.arrived: dict[str, int] = {}  # s since the start, by CID
        self.asked: Counter[str] = Counter()
        self._ends: list[tuple[int, BlockRequest]] = []

    @property
    def seconds(self) -> int:
        return (self.run.now - START) // S

    def go(self, seconds: int, *records: WantedRecord) -> None:
        """Let so many seconds pass; the records are in Kafka at their beginning."""
        self.unread.extend(records)
        end = self.seconds + seconds
        while self.seconds < end:
            for request in [request for until, request in self._ends if until <= self.seconds]:
                self.run.answer(request, _FAILED[request.kind])
            self._ends = [each for each in self._ends if each[0] > self.seconds]
            while self._step():
                pass
            self.run.now += S

    def _step(self) -> bool:
        count = min(len(self.unread), self.run.pending.room(0, 500))
        self.run.take(*(self.unread.popleft() for _ in range(count)))
        requests = self.run.next()
        for request in requests:
            self.asked[request.cid] += 1
            if request.cid in self.blocks:
                self.arrived[request.cid] = self.seconds
                self.run.answer(request, self.blocks[request.cid])
            else:
                self._ends.append((self.seconds + self.attempt, request))
        self.run.round()
        return bool(count or requests)


def _honest_batches(numbers: Iterable[int]) -> dict[str, Answer]:
    return {cid: BatchAnswer(data, ()) for cid, data in (block_of(number) for number in numbers)}


@pytest.mark.parametrize("attempt", [1, 30])
@pytest.mark.parametrize("keys", [1, _FLOOD])
@pytest.mark.parametrize("relayed", [False, True])
def test_announcements_of_batches_that_nobody_has_hold_up_nothing(attempt: int, keys: int, relayed: bool) -> None:
    """By one key, or by one for each; heard from the stranger, or from the peer that relays what is honest, too."""
    batches = _honest_batches(range(40))
    geneses: dict[str, Answer] = {genesis_cid(number): GenesisAnswer(MODEL, None) for number in (1, 2)}
    network = Network(geneses | batches, attempt)
    honest = [announce(cid, _HONEST, "neighbour") for cid in batches]
    network.go(2, update(1, 0, _HONEST, "neighbour"), honest.pop())
    flood = [
        announce(_nothing(number), _stranger(number % keys), "neighbour" if relayed else "stranger", 2)
        for number in range(_FLOOD)
    ]
    network.go(20, *flood)
    began = network.seconds
    network.go(40, update(2, 1, _HONEST, "neighbour"), *honest)
    assert not network.unread
    assert network.arrived[genesis_cid(2)] <= began + 1
    assert {network.arrived[cid] for cid in batches} <= {0, 1, 2, began, began + 1}
    # the stranger's own have had their attempts, and the rest was refused at once
    counts = network.run.pending.counts
    assert counts["announcer_over_limit"] > _FLOOD - 200
    assert network.run.pending.waiting_count <= 50
    network.go(100)  # by then nothing is left of it
    assert network.run.pending.waiting_count == 0
    assert network.run.done_offsets.resume_offset == network.run.offset
    reasons = Counter(fault.reason for fault in network.run.faults())
    assert reasons.keys() <= {"announcer_over_limit", "block_unavailable"}


def test_updates_of_streams_that_nobody_has_hold_up_no_genesis_of_others() -> None:
    network = Network({genesis_cid(number): GenesisAnswer(MODEL, None) for number in (1, 2)}, attempt=30)
    network.go(2, update(1, 0, _HONEST, "neighbour"))
    flood = [update(10 + number, number, _stranger(number), "stranger") for number in range(_FLOOD)]
    network.go(31, *flood)  # until the first attempts have failed
    began = network.seconds
    network.go(5, update(2, 20_000, _HONEST, "neighbour"))
    assert not network.unread
    assert network.arrived[genesis_cid(2)] == began


def test_many_updates_that_wait_for_one_genesis_hold_up_no_other() -> None:
    network = Network({genesis_cid(number): GenesisAnswer(MODEL, None) for number in (1, 2)}, attempt=30)
    network.go(2, update(1, 0, _HONEST, "neighbour"))
    network.go(31, *(update(3, number, _HONEST, "neighbour") for number in range(1, _FLOOD)))
    began = network.seconds
    network.go(5, update(2, 20_000, _HONEST, "neighbour"))
    assert network.arrived[genesis_cid(2)] == began


def test_honest_backlog_of_an_outage_of_ipfs_waits_and_is_fetched_whole() -> None:
    batches = _honest_batches(range(800))
    answers: dict[str, Answer] = dict.fromkeys(batches, IpfsUnavailable("gone"))
    network = Network(answers, attempt=1)
    records = [announce(cid, _HONEST, "neighbour", number // 20) for number, cid in enumerate(batches)]
    network.go(60, *records)
    assert network.unread
    answers.update(batches)
    network.go(60)
    assert not network.unread
    assert network.run.pending.counts["blocks"] == 800
    assert network.run.faults() == []


def test_geneses_and_proven_announcers_find_a_free_fetch_at_once() -> None:
    batches = _honest_batches(range(2))
    network = Network({genesis_cid(1): GenesisAnswer(MODEL, None)} | batches, attempt=1_000)
    first, second = batches
    network.go(2, announce(first, _HONEST, "neighbour"))
    network.go(2, *(announce(_nothing(number), _stranger(number), "stranger", 2) for number in range(100)))
    assert network.run.pending.queue.in_flight == 4  # of eight
    network.go(1, update(1, 0, _stranger(1_000), "another"), announce(second, _HONEST, "neighbour"))
    assert network.arrived == {first: 0, genesis_cid(1): 4, second: 4}
