"""The state of a node at one moment, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.status import PeerStatus, SavingStatus


@dataclass(frozen=True)
class BootstrapInfo:
    """A peer that we were told to dial."""

    peer: str
    addresses: tuple[str, ...]
    connected: bool
    attempts: int
    error: str  # of the last attempt; empty if it was well


@dataclass(frozen=True)
class NodeView:
    """The state of a node at one moment, plain data."""

    peer: str
    addresses: tuple[str, ...]  # listened on, with /p2p/<peer id>
    peers: tuple[PeerStatus, ...]
    bootstrap: tuple[BootstrapInfo, ...]
    connections: int
    mesh: Mapping[str, tuple[str, ...]]
    topics: tuple[str, ...]
    frames_in: int
    frames_out: int
    bytes_in: int
    bytes_out: int
    dropped: int
    paused: bool  # reading has stopped: the sink is full
    counters: Mapping[str, int]  # the node's and the router's
    savings: tuple[SavingStatus, ...]  # over all peers there were
