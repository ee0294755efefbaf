"""Results of the router: RPCs to send, messages to deliver, and status records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message

PeerID = bytes  # multihash bytes


@dataclass(frozen=True, slots=True)
class Send:
    """An RPC for one peer.

    Several `Send`s may share one RPC object. Do not change that object, and encode it once for all of them.

    Attributes:
        priority: True for subscriptions, GRAFT, PRUNE, IDONTWANT and the node's own messages. They overtake other RPCs
            in the peer's send queue.
        verdicts: If the RPC publishes the node's own messages, one `Verdict` byte for each; else empty.
    """

    peer: PeerID
    rpc: RPC
    priority: bool
    verdicts: bytes = b""


@dataclass(frozen=True, slots=True)
class Deliver:
    """The first valid copy of a message on a joined topic, and the peer from which it was received."""

    message: Message
    topic: str
    source: PeerID


class PolicyConflict(NamedTuple):
    """A topic on which the node and a peer have different signature policies.

    Attributes:
        signed: True if signed messages are rejected, false if unsigned ones are.
        withheld: True if a peer rejects these messages, so the node does not send them to it. False if the node rejects
            them when a peer sends them.
    """

    topic: str
    signed: bool
    withheld: bool


@dataclass(frozen=True, slots=True)
class PeerView:
    """State of a connected peer. `topics` are its subscriptions, up to the router's limit."""

    protocol: str
    topics: frozenset[str]
    score: float
    outbound: bool
