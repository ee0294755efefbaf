"""Results of the router: RPCs to send, messages to deliver, and the state of a peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kiln.schemas.proto.gossipsub.rpc_pb2 import RPC, Message

PeerID = bytes  # multihash bytes


@dataclass(frozen=True, slots=True)
class Send:
    """An RPC for one peer.

    Several `Send`s may share one RPC object: do not change it, and encode it once for all of them.

    Attributes:
        priority: True for subscriptions, mesh control and own publications, which a bounded queue must not drop.
        verdicts: A verdict for each message if the RPC publishes messages of our own, else empty.
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
    """Signed or unsigned messages on a topic, which one side rejects because of its signature policy."""

    topic: str
    signed: bool
    withheld: bool
    """true if a peer rejects such messages, so that the node sends none to the peer; false if the node rejects such
    messages of a peer"""


@dataclass(frozen=True, slots=True)
class PeerView:
    """A peer as shown on the screen; `topics` are the peer's subscriptions that the router stores."""

    protocol: str
    topics: frozenset[str]
    score: float
    outbound: bool
