"""The state of a node at one moment, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.gossip.table_side import Direction as TableDirection


@dataclass(frozen=True)
class TopicSaving:
    """References to a topic by index, one way: how many, and bytes on the wire as they went and as names."""

    topic: str
    direction: TableDirection
    references: int
    as_names: int
    as_indices: int


@dataclass(frozen=True)
class PeerInfo:
    """A peer with which pubsub is spoken, for the screen."""

    peer: str
    agent: str
    protocol: str
    address: str
    outbound: bool  # we dialled
    score: float
    topics: int
    queued: int  # bytes that wait to be sent to it
    frames_in: int
    frames_out: int
    dropped: int
    savings: tuple[TopicSaving, ...]  # since the stream opened


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
    peers: tuple[PeerInfo, ...]
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
    savings: tuple[TopicSaving, ...]  # over all peers there were
