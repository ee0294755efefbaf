"""Announcement of our blocks in the routing system of the IPFS node (the DHT), so that peers find a provider.

A DHT walk takes seconds to a minute, and batches may come faster than that. So separate threads announce blocks after
they are published, the newest first. Blocks beyond the limit are left out and counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from kiln.bridge.ipfs.blocks import BlockStoreUnavailableError
from kiln.bridge.ipfs.kubo import KuboError, NoRoutingError
from kiln.conf.process.bounded_dict import BoundedDict

MOST: Final = 1_000  # waiting blocks: at a few seconds each, a later one would be announced only after an hour
_REMEMBERED: Final = 10_000  # announced blocks that are not announced again: the publisher and BEP 50 each add a block
_THREADS: Final = 2
_TRIES: Final = 3
_PAUSE: Final = 10.0  # seconds before another try


class BlockProvider:
    """Calls `provide` for each block, in threads of its own, until `close()`."""

    def __init__(self, provide: Callable[[str], None], pause: float = _PAUSE) -> None:
        """Create the provider. The first `add` starts the threads."""
        self._provide = provide
        self._pause = pause
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._waiting: deque[str] = deque()
        self._told = BoundedDict[str, None](_REMEMBERED)
        self._started = False
        self.routes = True
        """false once the node has answered that it has no routing system"""
        self.provided = 0
        self.unprovided = 0
        """number of blocks that were left out or could not be announced"""

    def add(self, cid: str) -> None:
        """Queue a block that is not yet announced. Returns at once."""
        with self._changed:
            if not self.routes or cid in self._told or self._stop.is_set():
                return
            self._told[cid] = None
            self._waiting.append(cid)
            if len(self._waiting) > MOST:
                self._waiting.popleft()
                self.unprovided += 1
            if not self._started:
                self._started = True
                for _ in range(_THREADS):
                    threading.Thread(target=self._run, name="provide", daemon=True).start()
            self._changed.notify()

    def set_routes(self, routes: bool) -> None:
        """Set whether the node has a routing system. Without one, nothing is announced, and nothing waits."""
        with self._changed:
            self.routes = routes
            if not routes:
                self._waiting.clear()
                self._told.clear()

    def close(self) -> None:
        """Stop without waiting for calls in progress: their threads end with the process, or with the calls."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stop.is_set())
                if self._stop.is_set():
                    return
                cid = self._waiting.pop()
            done = self._try(cid)
            with self._changed:
                self.provided += done
                self.unprovided += not done and self.routes

    def _try(self, cid: str) -> bool:
        for number in range(_TRIES):
            if number and self._stop.wait(self._pause):
                return False
            try:
                self._provide(cid)
            except NoRoutingError:
                self.set_routes(False)
                return False
            except (KuboError, BlockStoreUnavailableError):
                continue
            return True
        return False
