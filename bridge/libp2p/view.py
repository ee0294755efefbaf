"""The state of a node at one moment, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

from multiformats import multibase

from kiln.bridge.gossipsub.effects import PolicyConflict
from kiln.conf.process.bridge_status import PeerStatus, SavingStatus


@lru_cache(maxsize=4096)
def peer_name(peer: bytes) -> str:
    """Format a peer id as base58btc of its multihash. `kiln.schemas.wire.identity.peer_text` is faster."""
    text: str = multibase.encode(peer, "base58btc")
    return text[1:]  # peer ids have no multibase prefix (libp2p specs, peer-ids.md)


def copy_savings(savings: Iterable[SavingStatus]) -> tuple[SavingStatus, ...]:
    """Copy savings, because the router keeps counting in its own objects."""
    return tuple(map(copy, savings))


@dataclass(frozen=True)
class BootstrapState:
    """A peer of `bridge.bootstrap`."""

    peer: str
    addresses: tuple[str, ...]
    connected: bool
    attempts: int
    error: str  # of the last attempt, or why a connected peer is not a pubsub peer; empty if all is well


@dataclass(frozen=True)
class NodeView:
    """The state of a node at one moment, plain data."""

    peer: str
    addresses: tuple[str, ...]  # listened on, with /p2p/<peer id>
    peers: tuple[PeerStatus, ...]
    bootstrap: tuple[BootstrapState, ...]
    connections: int
    mesh: Mapping[str, tuple[str, ...]]
    topics: tuple[str, ...]
    frames_in: int
    frames_out: int
    bytes_in: int
    bytes_out: int
    dropped: int
    paused: bool  # the node has stopped reading, because the sink is full
    counters: Mapping[str, int]  # the node's and the router's
    kept_out: int  # banned peers
    savings: tuple[SavingStatus, ...]  # over all peers so far
    policy_conflicts: tuple[PolicyConflict, ...] = ()
