"""A whole Kiln beside hostile peers: are honest messages in the tables, and how much later do their batches come?"""

from __future__ import annotations

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
from kiln.deploy.query.ask import query_lake
from kiln.pipelines.delta.lake import Lake
from kit.bridge_alone import memory_of

NETWORK = "local-test"
"""The network of those who attack."""
_WARM = 90.0  # s after all parts work: a JVM is slow at first
_RATE = 40.0  # honest messages a second
_TIMES_AS_LATE = 2.0  # batches may be


@dataclass
class Lateness:
    """Seconds from the end of a window in event time to the LogAppendTime of its batch."""

    seconds: list[float]

    def at(self, part: float) -> float:
        """So great a part of the batches was at most so late."""
        return self.seconds[min(len(self.seconds) - 1, int(part * len(self.seconds)))]

    def __str__(self) -> str:
        p50, p99, most = (f"{self.at(part):.2f}" for part in (0.5, 0.99, 1.0))
        return f"p50 {p50} s, p99 {p99} s, most {most} s of {len(self.seconds)} batches"


@dataclass
class Whole:
    """Counts of honest messages and of their batches."""

    before: Lateness
    during: Lateness
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
                f"batches, before: {self.before}",
                f"         during: {self.during}",
                f"{self.never_done or 'all done in the end'}",
                f"bridge: {self.memory / MIB:.0f} MiB of memory at most; state folder: {self.disk / MIB:.0f} MiB",
                f"attackers came: {self.done.came}",
                f"attackers said, bytes: {self.done.said}",
            )
        )

    def wrong(self) -> list[str]:
        """What is promised and did not hold."""
        later = self.during.at(0.5) / self.before.at(0.5)
        return [
            text
            for text, bad in (
                (f"{self.unheard} honest messages are not in the tables", self.unheard > 0),
                (self.never_done, bool(self.never_done)),
                (f"batches came {later:.1f} times as late", later > _TIMES_AS_LATE),
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
        stack.speak("hush")
        never_done = quiet(stack, Log(stack), 180)
        rows = query_lake(
            Lake(str(stack.kiln.lake)), "SELECT epoch_us(emitted_at), epoch_us(closed_at) FROM batches"
        ).rows()
        came = [(int(str(emitted)) / 1e6, int(str(closed)) / 1e6) for emitted, closed in rows]
        return Whole(
            _lateness(came, began, turned),
            _lateness(came, turned, ended),
            sum(bool(entry.said) for entry in stack.ledger()),
            sum(1 for _ in unheard(stack)),
            never_done,
            memory,
            on_disk(stack.state),
            done[0],
        )
    finally:
        stack.stop()


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
