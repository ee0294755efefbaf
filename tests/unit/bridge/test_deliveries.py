"""Batches that wait for a peer, and turns of the others."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping

import pytest

from kiln.bridge.publisher.deliveries import (
    MIN_PATIENCE,
    NO_PEER,
    DeliveryQueue,
    OpenRecord,
    PendingPublication,
    TopicDelivery,
)
from kiln.schemas.kafka.records import BatchRecord, SeparatorRecord
from kiln.schemas.wire.cid import cid_text, compute_cid
from kiln.schemas.wire.topics import encode_separator_value, format_topic

S = 1_000_000
PATIENCE = 60 * S
PARTITION = 0
NETWORK_TOPIC = format_topic("local-test", None)
_CID = cid_text(compute_cid(b"block"))


def delivery(model: int, offset: int = 0, topic: str | None = None) -> TopicDelivery:
    separator = SeparatorRecord("model", encode_separator_value(b"\1" + model.to_bytes(4)))
    record = BatchRecord("local-test", "LIVE", separator, _CID, b"block", 0, S)
    publication = PendingPublication(OpenRecord(PARTITION, offset), record, 3)
    return TopicDelivery(publication, topic or publication.topic)


class Peers:
    """Peers on topics; counts the topics that were looked up."""

    def __init__(self) -> None:
        self.on: dict[str, list[Hashable]] = {}
        self.looked_up = 0

    def __call__(self, topics: Collection[str]) -> Mapping[str, Collection[Hashable]]:
        self.looked_up += len(topics)
        return {topic: self.on[topic] for topic in topics if topic in self.on}

    def join(self, peer: str, deliveries: Iterable[TopicDelivery]) -> None:
        for each in deliveries:
            self.on.setdefault(each.topic, []).append(peer)


def make_queue(peers: Peers | None) -> DeliveryQueue:
    queue = DeliveryQueue(PATIENCE, S, peers)
    queue.advance(0)
    return queue


def test_a_delivery_without_a_peer_has_no_turn_until_a_peer_comes() -> None:
    peers = Peers()
    queue = make_queue(peers)
    waiting = [delivery(1, offset) for offset in range(3)]
    queue.add(waiting)
    assert (queue.check(S), queue.take(10), len(queue)) == ([], [], 3)
    peers.join("peer", waiting[:1])
    queue.advance(2 * S)
    assert queue.check(2 * S) == []
    assert queue.take(10) == waiting


def test_without_a_peer_for_too_long_it_is_given_up_but_not_while_publishing_is_paused() -> None:
    queue = make_queue(Peers())
    waiting = delivery(1)
    queue.add([waiting])
    queue.advance(59 * S)
    assert queue.check(59 * S) == []
    queue.pause()
    queue.advance(1_000 * S)
    assert queue.check(1_000 * S) == []
    queue.advance(1_001 * S)
    ((given_up, error),) = queue.check(1_001 * S)
    assert (given_up, error, len(queue)) == (waiting, f"{NO_PEER} for 60 s", 0)


def test_topics_of_one_peer_delay_the_one_of_another_peer_by_one_turn() -> None:
    peers = Peers()
    queue = make_queue(peers)
    strangers, honest = [delivery(number) for number in range(2_000)], delivery(9_999)
    peers.join("stranger", [*strangers, honest])  # on the honest topic, too
    peers.join("honest", [honest])
    queue.add(strangers)
    queue.add([honest])
    assert honest in queue.take(2)


def test_new_separators_on_a_topic_of_all_leave_every_other_turn_to_the_known_ones() -> None:
    peers = Peers()
    queue = make_queue(peers)
    known = [delivery(number, topic=NETWORK_TOPIC) for number in range(10)]
    peers.join("peer", known[:1])
    queue.add(known)
    for each in queue.take(10):
        queue.record_reached(each)
    strangers = [delivery(100 + number, topic=NETWORK_TOPIC) for number in range(2_000)]
    queue.add(strangers)
    again = [delivery(number, 1, NETWORK_TOPIC) for number in range(10)]
    queue.add(again)
    assert set(again) <= set(queue.take(20))


@pytest.mark.parametrize("have_peers", [False, True])
def test_if_too_many_wait_those_that_never_reached_a_peer_are_given_up_early_and_no_others(have_peers: bool) -> None:
    peers = Peers()
    queue = make_queue(peers)
    known = delivery(0)
    peers.join("honest", [known])
    queue.add([known])
    queue.record_reached(*queue.take(1))
    if not have_peers:
        peers.on.clear()
    strangers = [delivery(number + 1) for number in range(100)]
    if have_peers:
        peers.join("stranger", strangers)
    later = [delivery(0, offset) for offset in range(1, 4)]
    queue.add([*strangers, *later])
    early = MIN_PATIENCE
    queue.advance(early - 2)
    queue.record_reached(delivery(5_000))  # other batches are sent
    queue.advance(early - 1)
    assert queue.check(early - 1, is_full=True) == []
    queue.advance(early + S)
    assert [each.delivery for each in queue.check(early + S, is_full=True)] == strangers
    if not have_peers:
        peers.join("honest", later[:1])
        queue.advance(early + 2 * S)
        assert queue.check(early + 2 * S) == []
    assert queue.take(10) == later


def test_while_nothing_reaches_a_peer_none_is_given_up_early() -> None:
    queue = make_queue(Peers())
    waiting = [delivery(number) for number in range(10)]
    queue.add(waiting)
    for at in range(0, PATIENCE, S):
        queue.advance(at)
        assert queue.check(at, is_full=True) == []
    queue.advance(PATIENCE)
    assert [each.delivery for each in queue.check(PATIENCE, is_full=True)] == waiting


def test_looking_for_peers_costs_one_look_up_a_topic_a_second() -> None:
    peers = Peers()
    queue = make_queue(peers)
    queue.add([delivery(number % 50, number) for number in range(1_000)])
    assert peers.looked_up == 50
    for at in range(0, 5 * S, S // 10):
        queue.advance(at)
        queue.check(at)
    assert peers.looked_up == 50 + 5 * 50


def test_without_a_look_up_what_reached_a_peer_before_takes_every_other_turn() -> None:
    queue = make_queue(None)
    known = delivery(0)
    queue.add([known])
    queue.record_reached(*queue.take(1))
    queue.add([delivery(number + 1) for number in range(2_000)])
    again = delivery(0, 1)
    queue.add([again])
    assert again in queue.take(2)
