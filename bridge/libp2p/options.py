"""The options of a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.table_agreements import SendMode
from kiln.schemas.kafka.frames import MAX_RPC
from kiln.schemas.wire.topic_table import BundleSet


@dataclass(frozen=True)
class NodeOptions:
    """Sizes in bytes, times in seconds."""

    network: str
    listen: Sequence[str] = ()  # multiaddrs; none: the node only dials
    bootstrap: Sequence[str] = ()  # multiaddrs that end in /p2p/<peer id>
    gossip: RouterOptions = field(default_factory=RouterOptions)
    bundles: BundleSet = field(default_factory=BundleSet)  # of topics that may go by index
    send_indices: SendMode = "cautious"
    agent: str = "kiln"
    max_connections: int = 300
    max_rpc: int = MAX_RPC  # longer ones are cut
    # Of RPCs that have begun and not ended, of all peers together. The node hangs up on who holds most of them.
    unfinished_bytes: int = 128 << 20
    # Bytes of frames captured in an hour of what peers send. The node reads a peer more slowly that is over.
    peer_bytes: int = 1 << 30
    all_bytes: int = 4 << 30
    # The same of what the node sends. Over that, RPCs wait, and the node drops those that find no room in the queue.
    peer_bytes_out: int = 1 << 30
    all_bytes_out: int = 4 << 30
    # CPU that reading RPCs takes, as parts of one core. The node reads a peer more slowly that is over.
    peer_cpu: float = 0.7
    all_cpu: float = 0.8
    ban: float = 3600.0  # that a peer below the graylist threshold is kept out; 0: the node does not hang up on it
    dial_timeout: float = 15.0
    redial_first: float = 1.0  # after the first failure; doubles with each
    redial_most: float = 60.0
    negotiate_timeout: float = 10.0
    # Bounds of what waits for one peer. The node drops and counts messages over queue_bytes, its own and those of
    # others apart. Subscriptions and mesh upkeep have control_bytes more; over that the node hangs up on the peer.
    queue_bytes: int = 4 * 1024 * 1024
    control_bytes: int = 1024 * 1024
    stuck_after: float = 30.0  # the node hangs up on a peer that takes nothing for so long
