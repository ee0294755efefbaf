"""What the router answers with: RPCs to send, messages to deliver, and how a peer stands."""

from __future__ import annotations

from dataclasses import dataclass

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message

PeerID = bytes  # multihash bytes


@dataclass(frozen=True, slots=True)
class Send:
    """An RPC for one peer. Several Sends may share one RPC object: never change the object, and encode it once by
    comparing identities. `priority`: a bounded queue must not drop the RPC (subscriptions, mesh upkeep, own
    publications)."""

    peer: PeerID
    rpc: RPC
    priority: bool


@dataclass(frozen=True, slots=True)
class Deliver:
    """The first good copy of a message on a joined topic, and the peer that brought the copy."""

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
