"""Own messages and a Kubo that ignores what it validates after a later message of the same author (0.40 and later).

KILN_TEST_PACE_MESSAGES: number of messages, 200 by default. To try the limits with more:

    KILN_TEST_KUBO=… KILN_TEST_PACE_MESSAGES=1000 .venv/bin/python -m pytest -rP tests/network/test_pace_kubo.py
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import httpx
import pytest
import trio

from kiln.bridge.publisher.pace import AuthorPacer
from kiln.conf.settings.durations import micros
from kiln.conf.settings.model import Publish
from kit.foreign_peer import ForeignPeer, NewPeer
from kit.jitter import JitteryNode
from kit.kubo_daemon import Daemon, program
from kit.node_town import OPTIONS, Running, Town, in_town

pytest_plugins = ["kit.foreign_fixtures"]
pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]

COUNT = int(os.environ.get("KILN_TEST_PACE_MESSAGES", "200"))
TOPICS = [f"/ceramic/local-test/sep/model/k{number}" for number in range(50)]
AUTHORS = Publish().author_keys
GAP = micros(Publish().min_interval)

Heard = dict[str, list[bytes]]


class Hearer(Protocol):
    """A Kubo that says what it hears."""

    @property
    def address(self) -> str: ...

    def hear(self, topic: str) -> AsyncIterator[bytes]: ...


class Wheel:
    """The Kubo 0.22 of the wheel, which speaks no HTTP."""

    def __init__(self, peer: ForeignPeer) -> None:
        self._peer = peer
        self.address = peer.address

    async def hear(self, topic: str) -> AsyncIterator[bytes]:
        await trio.to_thread.run_sync(self._peer.subscribe, topic)
        told = 0
        while True:
            data = [each.data for each in self._peer.received if each.topic == topic]
            for each in data[told:]:
                yield each
            told = len(data)
            await trio.sleep(0.2)  # a file tells nobody that it grew


@pytest.fixture
def near_and_far(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """Two daemons; the second one knows the first one alone."""
    near, far = Daemon(program(), tmp_path / "near"), Daemon(program(), tmp_path / "far")
    for daemon in (near, far):
        daemon.start().close()
    far.connect(near.address)
    yield near, far
    for daemon in (near, far):
        daemon.stop()


async def said(one: Running, pace: AuthorPacer) -> Heard:
    """Says COUNT messages over TOPICS as fast as the pace lets it."""
    sent: Heard = defaultdict(list)
    for number in range(COUNT):
        topic, data = TOPICS[number % len(TOPICS)], b"%d" % number
        await trio.sleep_until(pace.ready_at / 1e6)
        assert one.node.publish(topic, data, pace.author_index) == 1
        pace.record_message(round(trio.current_time() * 1e6))
        sent[topic].append(data)
    return sent


def heard_over(
    folder: Path, kubos: tuple[Hearer, Hearer], pace: AuthorPacer, patience: float, relays: int = 0
) -> tuple[Heard, list[Heard]]:
    """Publish batches, and return them and those that each Kubo receives within `patience` seconds.

    The first of the `relays` knows the first Kubo, each of the others the one before, and the speaker the last.
    """
    heard: list[Heard] = [defaultdict(list), defaultdict(list)]
    sent: Heard = {}

    async def listen(which: int, topic: str, town: Town) -> None:
        with suppress(httpx.HTTPError):
            async for data in kubos[which].hear(topic):
                heard[which][topic].append(data)
                town.bell.ring()

    async def run(town: Town) -> None:
        address, between = kubos[0].address, []
        for _ in range(relays):
            between.append(await town.node(replace(OPTIONS, bootstrap=(address,)), kind=JitteryNode))
            address = between[-1].address
        one = await town.node(replace(OPTIONS, bootstrap=(address,)), authors=AUTHORS)
        for topic in TOPICS:
            for node in (*between, one):
                node.node.join(topic)
            for which in range(2):
                town.nursery.start_soon(listen, which, topic, town)
        await town.bell.until(lambda: all(len(one.node.router.mesh[topic]) == 1 for topic in TOPICS))
        # the far one is in the near one's mesh once what is said on every topic comes through
        before = [(topic, b"before") for topic in TOPICS]
        while any(not heard[which][topic] for which in range(2) for topic in TOPICS):
            for author_index, (topic, data) in enumerate(before):
                if not all(heard[which][topic] for which in range(2)):
                    one.node.publish(topic, data, author_index % AUTHORS)
                    await trio.sleep(0.06)  # the pace itself
            await trio.sleep(1)  # the pace of repeats
        for each in heard:
            each.clear()
        sent.update(await said(one, pace))
        with suppress(trio.TooSlowError):
            await town.bell.until(lambda: all(sum(map(len, each.values())) >= COUNT for each in heard), patience)

    in_town(folder, run)
    print(f"said {COUNT}, heard {[sum(d != b'before' for said in each.values() for d in said) for each in heard]}")
    return sent, [{topic: [d for d in said if d != b"before"] for topic, said in each.items()} for each in heard]


def in_no_order(said: Heard) -> Heard:
    return {topic: sorted(data) for topic, data in said.items()}


def test_kubo_hears_all_that_keeps_the_pace_in_order_over_one_and_two_hops(
    near_and_far: tuple[Daemon, Daemon], tmp_path: Path
) -> None:
    sent, (near, far) = heard_over(tmp_path, near_and_far, AuthorPacer(GAP, AUTHORS), 60)
    assert sum(map(len, sent.values())) == COUNT
    assert near == sent
    assert far == sent


def test_kubo_hears_all_over_relays_on_which_messages_overtake_each_other(
    near_and_far: tuple[Daemon, Daemon], tmp_path: Path
) -> None:
    """Two relays with jitter before the near one."""
    sent, heard = heard_over(tmp_path, near_and_far, AuthorPacer(GAP, AUTHORS), 60, relays=2)
    assert [in_no_order(each) for each in heard] == [in_no_order(sent)] * 2


def test_an_old_kubo_hears_all_too(go_peer: NewPeer, tmp_path: Path) -> None:
    near, far = go_peer(), go_peer()
    far.connect(near)
    sent, heard = heard_over(tmp_path, (Wheel(near), Wheel(far)), AuthorPacer(GAP, AUTHORS), 60)
    assert sum(map(len, sent.values())) == COUNT
    # it validates side by side and tells what is valid first, so a busy machine changes the order
    assert [in_no_order(each) for each in heard] == [in_no_order(sent)] * 2


def test_without_the_pace_kubo_ignores_some(near_and_far: tuple[Daemon, Daemon], tmp_path: Path) -> None:
    """This is why there is a pace; the day it fails, `publish.min_interval` may be 0."""
    _, (near, _) = heard_over(tmp_path, near_and_far, AuthorPacer(0, 1), 10)
    assert sum(map(len, near.values())) < COUNT
