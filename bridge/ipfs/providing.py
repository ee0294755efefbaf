"""Announce our blocks in the DHT of the IPFS node, so that peers find the node as a provider.

To announce a block takes a DHT walk of seconds to a minute, and batches may come faster. So threads announce the
blocks after publication, the newest first. If too many blocks wait, the oldest are never announced, only counted.
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
_REMEMBERED: Final = 10_000  # blocks that are not announced again: the publisher and BEP 50 each add a block
_THREADS: Final = 2
_TRIES: Final = 3
_PAUSE: Final = 10.0  # seconds before another try


class BlockProvider:
    """Threads that call `provide` for each added block, until `close()`."""

    def __init__(self, provide: Callable[[str], None], pause: float = _PAUSE) -> None:
        """Create the provider. The first `add` starts its threads.

        Args:
            provide: announces the block of a CID, as `Kubo.provide`.
            pause: seconds between the attempts to announce a block.
        """
        self._provide = provide
        self._pause = pause
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._waiting: deque[str] = deque()
        self._queued = BoundedDict[str, None](_REMEMBERED)
        self._started = False
        self.routes = True
        """False if the node has no content routing."""
        self.provided = 0
        self.unprovided = 0
        """Number of blocks that were not announced, because too many waited or all attempts failed."""

    def add(self, cid: str) -> None:
        """Queue a block, unless it was queued before. Returns at once."""
        with self._changed:
            if not self.routes or cid in self._queued or self._stop.is_set():
                return
            self._queued[cid] = None
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
        """Set `routes`. If it is false, drop all queued blocks, and accept none until it is true again."""
        with self._changed:
            self.routes = routes
            if not routes:
                self._waiting.clear()
                self._queued.clear()

    def close(self) -> None:
        """Stop announcing. A call of `provide` in progress continues in its daemon thread."""
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
