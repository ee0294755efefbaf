"""The user's Kubo node as a block store. A thread checks the node, and keeps it connected to peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from kiln.bridge.ipfs.blocks import Announcer, BlockStoreUnavailableError
from kiln.bridge.ipfs.folder import FolderBlockStore
from kiln.bridge.ipfs.kubo import Kubo, KuboError
from kiln.bridge.ipfs.neighbours import AT_ONCE, BitswapPeer, BitswapPeers
from kiln.bridge.ipfs.providing import BlockProvider
from kiln.conf.process.bridge_status import IpfsStatus
from kiln.schemas.wire.batch_block import MAX_BLOCK
from kiln.schemas.wire.identity import parse_author

_EVERY: Final = 10.0  # seconds between two checks of the node
_SHORTEST_PAUSE: Final = 1.0  # seconds between two checks after the gossip peers changed
_HELLO: Final = 5.0  # seconds for a response of the node, or a connection to a peer


class KuboBlockStore:
    """The `BlockStore` of a Kubo node that the user runs.

    Until `close()`, a thread checks the node every few seconds, and reconnects it to the configured peers, to gossip
    peers and to announcers.
    """

    def __init__(self, kubo: Kubo, marks: FolderBlockStore, peers: Sequence[str] = (), every: float = _EVERY) -> None:
        """Start the thread.

        Args:
            marks: has a file for each pinned block, so that the block is unpinned later.
            peers: multiaddrs of the configured peers (`ipfs.peers`).
            every: seconds between two checks.
        """
        self._kubo = kubo
        self._marks = marks
        self._peers = tuple(peers)
        self._every = every
        self._about = f"the IPFS node at {kubo.url} is not checked yet"
        self._routes: bool | None = None  # unknown
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()  # for `_neighbours`
        self._neighbours = BitswapPeers()
        self._connections = 0
        self._pool = ThreadPoolExecutor(AT_ONCE, "ipfs-dial")
        self._providing = BlockProvider(kubo.provide)
        self._thread = threading.Thread(target=self._run_checks, name="ipfs", daemon=True)
        self._thread.start()

    def put(self, cid: str, data: bytes) -> None:
        """Implement `BlockStore.put`."""
        self._kubo.put(cid, data)
        self._marks.mark(cid)
        self._kubo.pin(cid)
        self._providing.add(cid)

    def get(self, cid: str, timeout: float, limit: int = MAX_BLOCK, announcers: Sequence[Announcer] = ()) -> bytes:
        """Implement `BlockStore.get`, and let the thread connect the node to the authors of the announcements."""
        with self._lock:
            for announcer in reversed(announcers):
                author = parse_author(announcer.author)
                if author is not None and self._neighbours.add_announcer(author, time.monotonic()):
                    self._wake.set()
        return self._kubo.get(cid, timeout, limit)

    def remove_older(self, before: int) -> bool:
        """Implement `BlockStore.remove_older` by unpinning. Kubo's garbage collection then deletes the blocks."""
        return self._marks.remove_older(before, self._kubo.unpin)

    def connect_gossip_peers(self, peers: Sequence[BitswapPeer]) -> None:
        """Keep the node connected to these gossip peers, which speak bitswap. The most important ones come first."""
        with self._lock:
            changed = self._neighbours.set_gossip(peers)
        if changed:
            self._wake.set()

    def status(self) -> IpfsStatus:
        """Implement `BlockStore.status`."""
        near, providing = self._neighbours, self._providing
        return IpfsStatus(
            connections=self._connections,
            gossip_peers=near.gossip_peers,
            gossip_connected=near.connected,
            gossip_left_out=near.left_out,
            provided=providing.provided,
            unprovided=providing.unprovided,
        )

    def describe(self) -> str:
        """Implement `BlockStore.describe`."""
        return self._about

    def close(self) -> None:
        """Implement `BlockStore.close`."""
        self._stop.set()
        self._wake.set()
        self._providing.close()
        self._thread.join(30)
        self._kubo.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run_checks(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self._wake.clear()
            self._about = self._check_node()
            self._wake.wait(self._every)
            # strangers can make the set of peers change at any rate
            self._stop.wait(min(self._every, _SHORTEST_PAUSE) - (time.monotonic() - began))

    def _check_node(self) -> str:
        try:
            node = self._kubo.identity(_HELLO)
            if self._routes is None:  # a node that did not answer may return with another configuration
                self._routes = self._kubo.routes()
                self._providing.set_routes(self._routes)
        except BlockStoreUnavailableError as away:
            self._clear_connected()
            self._routes = None
            return str(away)
        near = self._dial_neighbours(node.peer)
        routing = "" if self._providing.routes else ", without content routing"
        return f"{node.name} at {self._kubo.url}{routing}{near}{self._dial_configured()}"

    def _clear_connected(self) -> None:
        self._connections = self._neighbours.connected = 0

    def _dial_neighbours(self, own: str) -> str:
        """Dial the selected peers, and disconnect those no longer selected. Return a part of the text of `describe`.

        Args:
            own: peer id of the node itself.
        """
        near = self._neighbours
        try:
            connected = self._kubo.connected()
        except (KuboError, BlockStoreUnavailableError) as error:
            # the RPC's authorizations may allow only the calls for blocks
            self._clear_connected()
            return f", gossip peers are not connected: {error}" if near.gossip_peers else ""
        with self._lock:
            leave = self._neighbours.select_to_disconnect(own, connected)
            dial = self._neighbours.select_to_dial(own, connected, time.monotonic())
        self._connections = len(connected) - len(leave)
        for peer in leave:
            with suppress(KuboError, BlockStoreUnavailableError):  # it may be disconnected already
                self._kubo.disconnect(peer)
        for neighbour, problem in zip(dial, self._dial([neighbour.dialled for neighbour in dial]), strict=True):
            self._connections += not problem
            with self._lock:
                self._neighbours.dialled(neighbour.peer, not problem, time.monotonic())
        return f", {near.connected} of {near.gossip_peers} gossip peers connected" if near.gossip_peers else ""

    def _dial_configured(self) -> str:
        """Connect the node to the peers of `ipfs.peers`. Return a part of the text of `describe`."""
        if not self._peers:
            return ""
        problems = self._dial([(peer,) for peer in self._peers])
        problem = next((f"; {text}" for text in problems if text), "")
        return f", {problems.count('')} of {len(problems)} peers of ipfs.peers connected{problem}"

    def _dial(self, peers: Sequence[tuple[str, ...]]) -> list[str]:
        """Connect the node to each peer, given its multiaddrs. Return for each peer the error, or "" if connected."""
        return list(self._pool.map(self._connect, peers))

    def _connect(self, addresses: tuple[str, ...]) -> str:
        if self._stop.is_set():
            return "the bridge is stopping"
        try:
            self._kubo.connect(*addresses, timeout=_HELLO)
        except (KuboError, BlockStoreUnavailableError) as error:
            return str(error)
        return ""
