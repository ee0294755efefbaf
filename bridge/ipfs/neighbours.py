"""Peers that the IPFS node stays connected to in addition to `ipfs.peers`: gossip peers that speak bitswap, and
announcers.

A Ceramic node uses one libp2p node for gossip and IPFS, so a gossip peer that speaks bitswap wants the blocks of Kiln's
batches, and holds the blocks of its own batches. Time comes from the caller, in seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from kiln.conf.process.backoff import pause_after
from kiln.conf.process.bounded_dict import BoundedDict

BITSWAP: Final = ("/ipfs/bitswap/1.2.0", "/ipfs/bitswap/1.1.0", "/ipfs/bitswap/1.0.0", "/ipfs/bitswap")
"""The protocols of bitswap (https://specs.ipfs.tech/bitswap-protocol/): a peer that supports one exchanges blocks."""

MOST: Final = 64
"""Maximum number of neighbours. By default Kubo trims its connections to 32 once it has 96, and the user's own
connections need room."""
MOST_ANNOUNCERS: Final = 16  # as many as blocks are fetched at one time by default
AT_ONCE: Final = 8  # peers dialled at one time
_ANNOUNCED_FOR: Final = 600.0  # seconds that an announcer stays a neighbour: the default of `ipfs.retry_after`
_FIRST_PAUSE: Final = 5.0  # seconds after the first failed dial
_LONGEST_PAUSE: Final = 300.0  # seconds


class BitswapPeer(NamedTuple):
    """A peer, and the multiaddrs at which it may be dialled, without /p2p/. They may be empty if the IPFS node knows
    addresses of the peer."""

    peer: str
    addresses: tuple[str, ...] = ()

    @property
    def dialled(self) -> tuple[str, ...]:
        """The addresses that the node dials."""
        return tuple(f"{address}/p2p/{self.peer}" for address in self.addresses) or (f"/p2p/{self.peer}",)


class BitswapPeers:
    """Neighbours of the IPFS node and those to dial now; used by one thread at a time."""

    def __init__(self) -> None:
        self._gossip: dict[str, BitswapPeer] = {}
        self._announcers = BoundedDict[str, float](MOST_ANNOUNCERS)  # end of the time as neighbour, by peer; in order
        self._failed: dict[str, tuple[int, float]] = {}  # by peer: failures in a row, and the time of the next attempt
        self._made: set[str] = set()  # connections that exist only because of this class
        self.connected = 0
        """gossip peers that the node is connected to"""
        self.left_out = 0
        """gossip peers beyond MOST"""

    @property
    def gossip_peers(self) -> int:
        """Number of gossip peers that speak bitswap."""
        return len(self._gossip)

    def set_gossip(self, peers: Iterable[BitswapPeer]) -> bool:
        """Set the gossip peers that speak bitswap, most important first, and return whether the set changed."""
        before, self._gossip = self._gossip, {peer.peer: peer for peer in peers}
        return self._gossip.keys() != before.keys()

    def add_announcer(self, peer: str, now: float) -> bool:
        """Add the announcer of a block that is about to be fetched, and return whether it is new."""
        new = peer not in self._announcers and peer not in self._gossip
        self._announcers[peer] = now + _ANNOUNCED_FOR
        return new

    def select_to_dial(self, own: str, connected: Collection[str], now: float) -> list[BitswapPeer]:
        """Select at most AT_ONCE peers to dial now. `own` is the node itself, `connected` the connected peers."""
        while self._announcers and next(iter(self._announcers.values())) <= now:
            self._announcers.popitem(last=False)
        wanted = self._wanted(own)
        self.connected = len(self._gossip.keys() & connected)
        self.left_out = len(self._gossip.keys() - wanted.keys() - {own})
        self._failed = {peer: kept for peer, kept in self._failed.items() if peer in wanted and peer not in connected}
        due = [neighbour for neighbour in wanted.values() if neighbour.peer not in connected]
        return [neighbour for neighbour in due if self._failed.get(neighbour.peer, (0, now))[1] <= now][:AT_ONCE]

    def dialled(self, peer: str, connected: bool, now: float) -> None:
        """Record the result of a dial."""
        if connected:
            self._made.add(peer)
            self.connected += peer in self._gossip
            return
        failures = self._failed.get(peer, (0, 0.0))[0] + 1
        self._failed[peer] = failures, now + pause_after(failures, _FIRST_PAUSE, _LONGEST_PAUSE)

    def select_to_disconnect(self, own: str, connected: Collection[str]) -> list[str]:
        """Select the peers to disconnect: former neighbours that are connected only because of this class."""
        wanted = self._wanted(own)
        gone = [peer for peer in self._made if peer not in wanted]
        self._made.difference_update(gone)
        return [peer for peer in gone if peer in connected]

    def _wanted(self, own: str) -> dict[str, BitswapPeer]:
        announcers = (self._gossip.get(peer, BitswapPeer(peer)) for peer in reversed(self._announcers))
        known = {one.peer: one for one in (*announcers, *self._gossip.values()) if one.peer != own}
        return dict(list(known.items())[:MOST])
