"""Batches of many separators of strangers beside honest ones."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from kiln.bridge.ipfs import BlockRefusedError
from kiln.bridge.publisher.pace import AuthorPacer
from kiln.bridge.publisher.transition import BOTH, BY_NETWORK, BY_SEPARATOR, TopicScheme
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Publish
from kit.batches_run import (
    START,
    Node,
    Run,
    S,
    batch,
    network_topic,
    topic_of,
)


@pytest.mark.parametrize("on", [BY_SEPARATOR, BY_NETWORK], ids=["topics of separators", "topic of the network"])
def test_a_thousand_new_separators_a_second_delay_no_honest_batch_by_more_than_a_fifth_of_a_second(
    on: TopicScheme,
) -> None:
    """On topics of separators, those of the strangers have no peer; on that of the network all have."""
    honest_topics = {network_topic(), *(topic_of(batch(0, model)) for model in range(10))}

    def subscribers(topics: Collection[str]) -> dict[str, list[str]]:
        return {topic: ["peer"] for topic in honest_topics & set(topics)}

    pace = AuthorPacer(micros(Publish().min_interval), Publish().author_keys)
    node = Node(peers=0)
    node.peers = dict.fromkeys(honest_topics, 1)
    run = Run(node, pace=pace, subscribers=subscribers)
    came: dict[str, int] = {}
    delays: list[int] = []
    for tick in range(50):
        now = START + tick * S // 10
        if tick > 10:  # each honest separator has had a batch
            for number in range(tick * 100, tick * 100 + 100):
                run.take(batch(number, model=1_000 + number), now)
        record = batch(1_000_000 + tick, model=tick % 10)
        came[record.batch_cid] = now
        run.take(record, now)
        while now < START + (tick + 1) * S // 10:
            delays += [now - came[each.batch_cid] for each in run.step(now, on=on) if each.batch_cid in came]
            now += max(1, run.pending.time_to_next_attempt(now, S // 10))
    assert len(delays) >= 48
    assert max(delays) <= S // 5


def test_a_batch_without_a_peer_is_neither_stored_nor_handed_to_the_node() -> None:
    run = Run(Node(), subscribers=lambda topics: {})
    for number in range(100):
        run.take(batch(number, model=number))
    receipts = [receipt for at in range(0, 12 * S, S) for receipt in run.step(START + at)]
    assert [each.error for each in receipts] == ["no peer on the topic for 10 s"] * 100
    assert (run.node.asked, run.ipfs.asked, run.pending.block_bytes) == (0, 0, 0)


def test_what_ipfs_refuses_has_one_receipt_on_two_topics() -> None:
    run = Run(Node())
    run.ipfs.error = BlockRefusedError("block_cid_mismatch", "kept under another CID")
    for number in range(40):
        run.take(batch(number, model=number))
    receipts = [receipt for at in range(6) for receipt in run.step(START + at * S, on=BOTH)]
    assert len({each.batch_cid for each in receipts}) == len(receipts) == 40
    for output in run.outputs:
        run.pending.acknowledge(output.record)
    assert (run.place(), run.pending.waiting_count, run.pending.block_bytes) == (40, 0, 0)
