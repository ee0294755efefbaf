"""What the router answers with: RPCs to send, messages to deliver, and how a peer stands."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.proto.gossipsub.rpc_pb2 import (
    RPC,
    Message,
)

PeerID = bytes  # multihash bytes


@dataclass(frozen=True, slots=True)
class Send:
    """An RPC for one peer. Several Sends may hold the same object: never change it; encode it once if you compare by
    identity. `priority`: not to be dropped by a bounded queue (subscriptions, mesh upkeep, our own publications)."""

    peer: PeerID
    rpc: RPC
    priority: bool


@dataclass(frozen=True, slots=True)
class Deliver:
    """The first good copy of a message on a topic we are on, and who brought it."""

    message: Message
    topic: str
    source: PeerID


@dataclass(frozen=True, slots=True)
class PeerView:
    """A peer as the screen shows it; `topics` are those that the router remembers."""

    protocol: str
    topics: frozenset[str]
    score: float
    outbound: bool
