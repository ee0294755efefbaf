"""Events that the demo network writes to stdout as lines of JSON, and counts of its messages."""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio

from kiln.schemas.reject import Rejected
from kiln.schemas.wire.pubsub import read_message

BATCHES_KEPT: Final = 50
_ERRORS: Final = 20

_T = TypeVar("_T")


class Events:
    """Buffer of events for stdout, so that a slow reader of stdout does not delay the network.

    If the reader is slow, the oldest events of kind `batch` are dropped. Of each other kind, only the newest is kept.
    """

    def __init__(self) -> None:
        self._batches: deque[bytes] = deque(maxlen=BATCHES_KEPT)
        self._state: dict[str, bytes] = {}  # the newest event of each other kind
        self._filled = trio.Event()

    def batch(self, event: Mapping[str, object]) -> None:
        self._batches.append(event_line(event))
        self._filled.set()

    def state(self, event: Mapping[str, object]) -> None:
        self._state[str(event["event"])] = event_line(event)
        self._filled.set()

    async def write(self, fd: int) -> None:
        """Write events to a file descriptor until its reader closes the pipe."""
        while True:
            await self._filled.wait()
            self._filled = trio.Event()
            lines = b"".join([*self._state.values(), *self._batches])
            self._state.clear()
            self._batches.clear()
            try:
                await in_thread(write_all, fd, lines)
            except OSError:
                return


@dataclass
class EventCounts:
    """Counts by node, and the newest distinct errors."""

    published: Counter[str] = field(default_factory=Counter)
    """messages that the node has published"""
    batches: Counter[str] = field(default_factory=Counter)
    """BATCH_UPDATEs that the node has received"""
    fetched: Counter[str] = field(default_factory=Counter)
    """blocks of batches that the node has fetched"""
    failed: int = 0
    """messages of all nodes that had no peer or that Kubo rejected"""
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=_ERRORS))

    def error(self, text: str) -> None:
        if text not in self.errors:
            self.errors.append(text)

    def count_received(self, node: str, data: bytes) -> str | None:
        """Count a received message if it is a BATCH_UPDATE, and return the CID of its batch, else `None`."""
        message = read_message(data)
        if isinstance(message, Rejected) or message.type != "BATCH_UPDATE":
            return None
        self.batches[node] += 1
        return message.batch


async def in_thread(call: Callable[..., _T], *arguments: object) -> _T:
    """Run a blocking call in a thread. If the task is cancelled, the thread continues in the background."""
    return await trio.to_thread.run_sync(call, *arguments, abandon_on_cancel=True)  # type: ignore[call-arg]  # stubs older than trio


def event_line(event: Mapping[str, object]) -> bytes:
    """Encode an event as a line of JSON."""
    return json.dumps(event).encode() + b"\n"


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
