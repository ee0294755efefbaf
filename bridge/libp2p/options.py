"""Options of a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kiln.bridge.gossipsub.options import RouterOptions
from kiln.bridge.gossipsub.table_agreements import SendMode
from kiln.schemas.kafka.frames import MAX_RPC
from kiln.schemas.wire.topic_table import BundleSet


@dataclass(frozen=True)
class NodeOptions:
    """Options of a node. Sizes are in bytes and times in seconds."""

    network: str
    listen: Sequence[str] = ()  # multiaddrs; if empty, the node only dials
    bootstrap: Sequence[str] = ()  # multiaddrs that end in /p2p/<peer id>
    gossip: RouterOptions = field(default_factory=RouterOptions)
    bundles: BundleSet = field(default_factory=BundleSet)  # of topics that may be sent by index
    send_indices: SendMode = "cautious"
    agent: str = "kiln"
    max_connections: int = 300  # inbound; at the limit, `InboundSlots` selects one to close
    max_rpc_bytes: int = MAX_RPC  # longer RPCs are cut
    # Bytes of incomplete RPCs of all peers. Above it, the session of the peer with the most bytes ends.
    unfinished_bytes: int = 128 << 20
    # Bytes per hour of frames captured from peers. The node reads more slowly from a peer that exceeds them.
    max_peer_bytes_per_hour: int = 1 << 30
    max_bytes_per_hour: int = 4 << 30
    # The same for sent frames. RPCs over the limit wait; RPCs without room in the queue are dropped.
    max_peer_bytes_per_hour_out: int = 1 << 30
    max_bytes_per_hour_out: int = 4 << 30
    # CPU for reading RPCs, as parts of one core. The node reads more slowly from a peer that exceeds it.
    peer_cpu: float = 0.7
    all_cpu: float = 0.8
    ban: float = 3600.0  # ban of a peer below the graylist threshold; with 0 the node stays connected
    dial_timeout: float = 15.0
    redial_first: float = 1.0  # after the first failure; doubles with each
    redial_most: float = 60.0
    negotiate_timeout: float = 10.0
    # A bootstrap peer that opens no pubsub stream in this time is disconnected and dialled again. Doubles each time.
    inbound_timeout: float = 30.0
    # Send queue of one peer. queue_bytes applies to the node's own and to forwarded messages separately; the node drops
    # and counts messages beyond it. Subscriptions and mesh control may use control_bytes more; beyond that, the node
    # disconnects the peer.
    queue_bytes: int = 4 * 1024 * 1024
    control_bytes: int = 1024 * 1024
    stuck_after: float = 30.0  # the node disconnects a peer that accepts no bytes for this long
