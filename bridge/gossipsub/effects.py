"""Results of the router: RPCs to send, messages to deliver, and the state of a peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message

PeerID = bytes  # multihash bytes


@dataclass(frozen=True, slots=True)
class Send:
    """An RPC for one peer.

    Several of them may share one RPC object: never change it, and encode it once by comparing identities. With
    `priority`, a bounded queue must not drop the RPC (subscriptions, mesh control, own publications). `verdicts`: one
    for each message if the RPC publishes messages of our own, else empty.
    """

    peer: PeerID
    rpc: RPC
    priority: bool
    verdicts: bytes = b""


@dataclass(frozen=True, slots=True)
class Deliver:
    """The first valid copy of a message on a joined topic, and the peer that sent it."""

    message: Message
    topic: str
    source: PeerID


class PolicyConflict(NamedTuple):
    """Messages on a topic that are rejected for their signature, or for having none."""

    topic: str
    signed: bool
    withheld: bool
    """true if a peer rejects them, so that the node does not send them; false if the node refuses those of a peer"""


@dataclass(frozen=True, slots=True)
class PeerView:
    """A peer as shown on the screen; `topics` are those that the router stores."""

    protocol: str
    topics: frozenset[str]
    score: float
    outbound: bool
