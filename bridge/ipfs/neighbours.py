"""Selection of the peers that the user's Kubo node connects to, in addition to those of `ipfs.peers`.

Two kinds of peers are selected:

- Gossip peers that speak bitswap. A Ceramic node uses one libp2p node for gossip and IPFS. So these peers request the
  blocks of Kiln's batches, and have the blocks of their own batches.
- Announcers: authors of announcements of blocks that Kiln is about to fetch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from kiln.conf.process.backoff import pause_after
from kiln.conf.process.bounded_dict import BoundedDict

BITSWAP: Final = ("/ipfs/bitswap/1.2.0", "/ipfs/bitswap/1.1.0", "/ipfs/bitswap/1.0.0", "/ipfs/bitswap")
"""Protocol ids of all bitswap versions (https://specs.ipfs.tech/bitswap-protocol/)."""

MOST: Final = 64
"""Maximum number of selected peers. Above 96 connections, Kubo closes all but 32 by default, and the node's other
connections need room too."""
MOST_ANNOUNCERS: Final = 16  # as many as blocks are fetched at one time by default
AT_ONCE: Final = 8  # peers dialled at one time
_ANNOUNCED_FOR: Final = 600.0  # seconds that an announcer stays selected: the default of `ipfs.retry_after`
_FIRST_PAUSE: Final = 5.0  # seconds after the first failed dial
_LONGEST_PAUSE: Final = 300.0  # seconds


class BitswapPeer(NamedTuple):
    """A peer to connect to, and its multiaddrs without the suffix /p2p/PEER.

    Without multiaddrs, the IPFS node looks up addresses of the peer.
    """

    peer: str
    addresses: tuple[str, ...] = ()

    @property
    def dialled(self) -> tuple[str, ...]:
        """Multiaddrs to dial, with the suffix /p2p/PEER."""
        return tuple(f"{address}/p2p/{self.peer}" for address in self.addresses) or (f"/p2p/{self.peer}",)


class BitswapPeers:
    """The peers that the IPFS node should be connected to. Not thread-safe.

    Times are seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self._gossip: dict[str, BitswapPeer] = {}
        self._announcers = BoundedDict[str, float](MOST_ANNOUNCERS)  # end of the selection by peer, earliest first
        self._failed: dict[str, tuple[int, float]] = {}  # by peer: failures in a row, and the time of the next attempt
        self._made: set[str] = set()  # connections that exist only because of this class
        self.connected = 0
        """Number of gossip peers that the node is connected to."""
        self.left_out = 0
        """Number of gossip peers that are not selected, because of the limit `MOST`."""

    @property
    def gossip_peers(self) -> int:
        """Number of gossip peers that speak bitswap."""
        return len(self._gossip)

    def set_gossip(self, peers: Iterable[BitswapPeer]) -> bool:
        """Replace the gossip peers that speak bitswap.

        Args:
            peers: most important first.

        Returns:
            True if a peer was added or removed.
        """
        before, self._gossip = self._gossip, {peer.peer: peer for peer in peers}
        return self._gossip.keys() != before.keys()

    def add_announcer(self, peer: str, now: float) -> bool:
        """Add the author who announced a block that is about to be fetched.

        Returns:
            True if the peer was not selected before.
        """
        new = peer not in self._announcers and peer not in self._gossip
        self._announcers[peer] = now + _ANNOUNCED_FOR
        return new

    def select_to_dial(self, own: str, connected: Collection[str], now: float) -> list[BitswapPeer]:
        """Select at most AT_ONCE peers to dial now.

        Args:
            own: peer id of the IPFS node itself.
            connected: ids of the peers that the node is connected to.
        """
        while self._announcers and next(iter(self._announcers.values())) <= now:
            self._announcers.popitem(last=False)
        wanted = self._wanted(own)
        self.connected = len(self._gossip.keys() & connected)
        self.left_out = len(self._gossip.keys() - wanted.keys() - {own})
        self._failed = {peer: kept for peer, kept in self._failed.items() if peer in wanted and peer not in connected}
        due = [each for each in wanted.values() if each.peer not in connected]
        return [each for each in due if self._failed.get(each.peer, (0, now))[1] <= now][:AT_ONCE]

    def dialled(self, peer: str, connected: bool, now: float) -> None:
        """Record that a dial of a peer succeeded (`connected`) or failed. A failed dial is repeated with back-off."""
        if connected:
            self._made.add(peer)
            self.connected += peer in self._gossip
            return
        failures = self._failed.get(peer, (0, 0.0))[0] + 1
        self._failed[peer] = failures, now + pause_after(failures, _FIRST_PAUSE, _LONGEST_PAUSE)

    def select_to_disconnect(self, own: str, connected: Collection[str]) -> list[str]:
        """Select the peers to disconnect: those that were connected only because of `select_to_dial`, and are no longer
        selected. The arguments are those of `select_to_dial`."""
        wanted = self._wanted(own)
        gone = [peer for peer in self._made if peer not in wanted]
        self._made.difference_update(gone)
        return [peer for peer in gone if peer in connected]

    def _wanted(self, own: str) -> dict[str, BitswapPeer]:
        announcers = (self._gossip.get(peer, BitswapPeer(peer)) for peer in reversed(self._announcers))
        known = {one.peer: one for one in (*announcers, *self._gossip.values()) if one.peer != own}
        return dict(list(known.items())[:MOST])
