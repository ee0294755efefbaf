"""An IPFS node: kept running, kept connected to its peers, and asked now and then how it is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from bridge.ipfs.blocks import BlocksAwayError
from bridge.ipfs.helia import Helia, HeliaError
from bridge.ipfs.kubo import Kubo, KuboError
from conf.backoff import pause_after
from schemas.batch import MAX_BLOCK

_EVERY: Final = 10.0  # s between two looks at the node
_LONGEST_PAUSE: Final = 60.0  # s between two tries to start one of our own
_HELLO: Final = 5.0  # s for a word from the node, or a connection to a peer


class NodeBlocks:
    """`Blocks` of an IPFS node: one that runs already, at the URL of `kubo`, or a Helia of our own.

    A thread of its own starts Helia, starts it again when it has ended, connects the node to `peers` again and again,
    and learns what `about` says. `close()` ends both.
    """

    def __init__(
        self, kubo: Kubo, peers: Sequence[str] = (), helia: Helia | None = None, every: float = _EVERY
    ) -> None:
        self._kubo = kubo
        self._peers = tuple(peers)
        self._helia = helia
        self._every = every
        self._up = helia is None
        self._about = "Helia is starting" if helia else f"{kubo.url} was not spoken with yet"
        self._looked = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="ipfs", daemon=True)
        self._thread.start()

    def put(self, cid: str, data: bytes) -> None:
        """As `Blocks.put`."""
        self._need_node()
        self._kubo.put(cid, data)

    def get(self, cid: str, timeout: float, limit: int = MAX_BLOCK) -> bytes:
        """As `Blocks.get`."""
        self._need_node()
        return self._kubo.get(cid, timeout, limit)

    def pin(self, cid: str) -> None:
        """As `Blocks.pin`."""
        self._need_node()
        self._kubo.pin(cid)

    def unpin(self, cid: str) -> None:
        """As `Blocks.unpin`."""
        self._need_node()
        self._kubo.unpin(cid)

    def about(self) -> str:
        """As `Blocks.about`."""
        return self._about

    def close(self) -> None:
        """As `Blocks.close`."""
        self._stop.set()
        if self._helia is not None:
            self._helia.stop()  # first: what waits for it ends, the thread included
        self._thread.join(30)
        self._kubo.close()

    def wait_for_a_look(self, timeout: float) -> bool:
        """Wait until the node was looked at for the first time: it is up by then, or `about` says why not."""
        return self._looked.wait(timeout)

    def _need_node(self) -> None:
        if not self._up:
            raise BlocksAwayError(self._about)

    def _look_after(self) -> None:
        failures = 0
        while not self._stop.is_set():
            if self._ready():
                self._about = self._look()
                failures = 0
            else:
                failures += 1
            self._looked.set()
            self._stop.wait(pause_after(1 + failures, self._every, _LONGEST_PAUSE))

    def _ready(self) -> bool:
        """Whether there is a node to look at; our own is started if it does not run."""
        if self._helia is None or self._helia.running:
            return True
        self._up = False
        if self._looked.is_set():
            self._about = "Helia has ended and is started again"
        try:
            url = self._helia.start()
        except (HeliaError, OSError) as error:
            self._about = str(error)
            return False
        self._kubo.url = url
        self._up = True
        return True

    def _look(self) -> str:
        try:
            node = self._kubo.identity(_HELLO)
        except BlocksAwayError as away:
            return str(away)
        # Of Kiln's own node the address for peers; of the user's node the address of its RPC.
        where = f"{node.name} at {self._kubo.url if self._helia is None else ' '.join(node.addresses) or 'no address'}"
        if not self._peers:
            return where
        connected, problem = 0, ""
        for peer in self._peers:
            if self._stop.is_set():
                return self._about
            try:
                self._kubo.connect(peer, _HELLO)
                connected += 1
            except (KuboError, BlocksAwayError) as error:
                problem = problem or f"; {error}"
        return f"{where}, {connected} of {len(self._peers)} peers connected{problem}"
