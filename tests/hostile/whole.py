"""A whole Kiln beside hostile peers: are honest messages in the tables, and how much later do their batches come?

Honest batches are those of separators that had a batch before the attack.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chaos.check import Log, quiet, unheard
from chaos.whole_kiln import ROOT, Stack
from hostile.attack import Done
from hostile.scene import MEMORY, MIB, on_disk
from kafka import KafkaConsumer, TopicPartition
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.lake import Lake
from kit.awaiting import awaited
from kit.bridge_alone import memory_of

NETWORK = "local-test"
"""The network of those who attack."""
_WARM = 90.0  # s after all parts work: a JVM is slow at first
_RATE = 40.0  # honest messages a second
_TIMES_AS_LATE = 2.0  # batches may be
_DRAINED = 120.0  # s until all batches have a receipt


@dataclass
class Lateness:
    """Seconds from the end of a window in event time to the LogAppendTime of its batch, or to its publication."""

    seconds: list[float]

    def at(self, part: float) -> float:
        """So great a part of the batches was at most so late; infinity if there are none."""
        if not self.seconds:
            return math.inf
        return self.seconds[min(len(self.seconds) - 1, int(part * len(self.seconds)))]

    def __str__(self) -> str:
        p50, p99, most = (f"{self.at(part):.2f}" for part in (0.5, 0.99, 1.0))
        return f"p50 {p50} s, p99 {p99} s, most {most} s of {len(self.seconds)} batches"


@dataclass
class Whole:
    """Counts of honest messages and of their batches."""

    before: Lateness
    during: Lateness
    after: Lateness
    published_before: Lateness
    published_during: Lateness
    published_after: Lateness
    batches: int
    """of all separators"""
    unpublished: int
    """honest batches that reached no peer"""
    drained: float
    """seconds from the end of the attack until each batch had a receipt"""
    said: int
    unheard: int
    never_done: str
    memory: int
    """peak memory of the bridge, bytes"""
    disk: int
    """of the state folder at the end, bytes"""
    done: Done

    def __str__(self) -> str:
        return "\n".join(
            (
                f"{self.said} honest messages, {self.unheard} not in the tables",
                f"honest batches, before: {self.before}",
                f"                during: {self.during}",
                f"                 after: {self.after}",
                f"published,      before: {self.published_before}",
                f"                during: {self.published_during}",
                f"                 after: {self.published_after}",
                f"{self.batches} batches of all separators, {self.unpublished} honest ones without a peer",
                f"each had a receipt {self.drained:.0f} s after the attack",
                f"{self.never_done or 'all done in the end'}",
                f"bridge: {self.memory / MIB:.0f} MiB of memory at most; state folder: {self.disk / MIB:.0f} MiB",
                f"attackers came: {self.done.came}",
                f"attackers said, bytes: {self.done.said}",
            )
        )

    def wrong(self) -> list[str]:
        """What is promised and did not hold."""
        later = self.during.at(0.5) / self.before.at(0.5)
        published_later = self.published_during.at(0.5) / self.published_before.at(0.5)
        return [
            text
            for text, bad in (
                (f"{self.unheard} honest messages are not in the tables", self.unheard > 0),
                (self.never_done, bool(self.never_done)),
                (f"batches came {later:.1f} times as late", later > _TIMES_AS_LATE),
                (f"they were published {published_later:.1f} times as late", published_later > _TIMES_AS_LATE),
                (f"{self.unpublished} honest batches were not published", self.unpublished > 0),
                (f"batches had no receipt for {self.drained:.0f} s after the attack", self.drained > _DRAINED),
                (f"{self.memory / MIB:.0f} MiB of memory", self.memory > MEMORY),
            )
            if bad
        ]


def whole(
    folder: Path,
    before: float,
    seconds: float,
    seed: int,
    settings: dict[str, str],
    attack: Sequence[object],
    also: Callable[[Stack], AbstractContextManager[object]] = nullcontext,
) -> Whole:
    """A Kiln runs between two honest peers for `before` s, and for `seconds` s while others attack its bridge.

    `attack`: options of `hostile.attack`. `also`: what else lasts as long as the attack.
    """
    stack = Stack(folder, seed, isolated=False, rate=_RATE, network=NETWORK, settings=settings)
    try:
        stack.build()
        stack.start()
        stack.speak("go")
        stack.until_well(240)
        time.sleep(_WARM)  # what is measured begins warm
        began = time.time()
        time.sleep(before)  # what is measured
        status = stack.status()
        assert status is not None
        bridge = stack.pid("bridge")
        with _attacked(status.addresses[0], "--seed", seed, *attack) as done, also(stack):
            turned = time.time()
            time.sleep(seconds)  # what is measured
            ended = time.time()
        memory = memory_of(bridge)
        drained = _drain(stack, ended)
        time.sleep(max(0.0, ended + before - time.time()))  # what is measured
        stack.speak("hush")
        never_done = quiet(stack, Log(stack), 180)
        lake = Lake(str(stack.kiln.lake))
        honest = {row[1:] for row in query_lake(lake, _SEPARATORS).rows() if float(str(row[0])) < turned}
        batches = [(_seconds(row[:2]), row[2:]) for row in query_lake(lake, _BATCHES).rows()]
        publications = [(_seconds(row[:2]), row[3:], row[2]) for row in query_lake(lake, _PUBLICATIONS).rows()]
        came = [times for times, separator in batches if separator in honest]
        sent = [times for times, separator, peers in publications if separator in honest and peers]
        return Whole(
            _lateness(came, began, turned),
            _lateness(came, turned, ended),
            _lateness(came, ended, math.inf),
            _lateness(sent, began, turned),
            _lateness(sent, turned, ended),
            _lateness(sent, ended, math.inf),
            len(batches),
            sum(separator in honest and not peers and began <= times[1] for times, separator, peers in publications),
            drained,
            sum(bool(entry.said) for entry in stack.ledger()),
            sum(1 for _ in unheard(stack)),
            never_done,
            memory,
            on_disk(stack.state),
            done[0],
        )
    finally:
        stack.stop()


_SEPARATORS = "SELECT epoch(min(closed_at)), separator_key, separator_value FROM batches GROUP BY ALL"
_BATCHES = "SELECT epoch_us(emitted_at), epoch_us(closed_at), separator_key, separator_value FROM batches"
_PUBLICATIONS = """SELECT epoch_us(published_at), epoch_us(closed_at), peer_count, separator_key, separator_value
FROM publications AS p ASOF JOIN batches AS b ON p.batch_cid = b.batch_cid AND p.published_at >= b.closed_at"""


def _seconds(times: Sequence[object]) -> tuple[float, float]:
    later, earlier = (int(str(each)) / 1e6 for each in times)
    return later, earlier


def _drain(stack: Stack, since: float) -> float:
    """Wait until each batch has a receipt, and return the seconds from `since` until then; infinity if never."""
    consumer = KafkaConsumer(**stack.client_options())

    def counts() -> list[int]:
        sums = []
        for name in ("batches", "publications"):
            topic = stack.settings.broker.topic(name)
            parts = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]
            sums.append(sum(consumer.end_offsets(parts).values()))
        return sums

    def has_drained() -> bool:
        batches, receipts = counts()
        # the feeding peers still speak: a second of their batches is always on its way
        return batches - receipts <= _RATE

    try:
        return time.time() - since if awaited(has_drained, 4 * _DRAINED) else math.inf
    finally:
        consumer.close()


def _lateness(came: list[tuple[float, float]], since: float, until: float) -> Lateness:
    """Of the windows that closed in this time."""
    return Lateness(sorted(emitted - closed for emitted, closed in came if since <= closed < until))


@contextmanager
def _attacked(address: str, *options: object) -> Iterator[list[Done]]:
    """While others attack, with these options of `hostile.attack`. Afterwards the list has what they did."""
    done: list[Done] = []
    process = subprocess.Popen(
        [sys.executable, "-m", "hostile.attack", address, *map(str, options)],
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.read(1) == b"\n"
        yield done
        done.append(msgspec.json.decode(process.communicate(timeout=60)[0], type=Done))
    finally:
        process.kill()
        process.wait()
