"""A connected peer: its streams, and the RPCs that wait to be sent."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection
from typing import Final, NamedTuple

import trio
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.rcmgr import Direction

from kiln.bridge.capture.tap import ConnectionTap
from kiln.bridge.libp2p.addresses import socket_address
from kiln.bridge.libp2p.budget import CaptureBudget
from kiln.schemas.kafka.frames import CONNECTION_BYTES

_CHECK_EVERY: Final = 1.0  # s between two checks whether a peer is still over its budget


class QueuedRpc(NamedTuple):
    """An RPC to send, serialized. For the capture, `verdicts` has a `Verdict` byte for each of our own messages."""

    payload: bytes
    verdicts: bytes


class SendQueue:
    """RPCs that wait to be written to one peer, in two lanes. The priority lane is written first."""

    def __init__(self) -> None:
        self._lanes: dict[bool, deque[QueuedRpc]] = {False: deque(), True: deque()}
        self._bytes = {False: 0, True: 0}
        self.filled = trio.Event()

    @property
    def waiting_bytes(self) -> int:
        """Total size of the waiting RPCs in bytes."""
        return self._bytes[False] + self._bytes[True]

    def put(self, rpc: QueuedRpc, priority: bool, limit: int) -> bool:
        """Add an RPC to its lane. Return false if a lane that is not empty would exceed `limit` bytes."""
        size = self._bytes[priority] + len(rpc.payload)
        if size > limit and self._lanes[priority]:
            return False
        self._bytes[priority] = size
        self._lanes[priority].append(rpc)
        self.filled.set()
        return True

    def pop(self, limit: int) -> list[QueuedRpc]:
        """Remove and return the next RPCs, of at most `limit` bytes in total. A longer RPC is returned alone."""
        popped: list[QueuedRpc] = []
        room = limit
        for priority in (True, False):
            lane = self._lanes[priority]
            while lane and (not popped or len(lane[0].payload) <= room):
                rpc = lane.popleft()
                room -= len(rpc.payload)
                self._bytes[priority] -= len(rpc.payload)
                popped.append(rpc)
            if lane:
                return popped
        self.filled = trio.Event()
        return popped


class InboundStream:
    """A pubsub stream that a peer has opened. Set `done` to let libp2p's handler of the stream return."""

    def __init__(self, stream: NetStream) -> None:
        self.stream = stream
        self.done = trio.Event()
        self.session: PubsubSession | None = None  # the session that reads the stream


class PeerAccount:
    """The account of one peer in a `CaptureBudget`.

    Args:
        connected: A live view of all connected peers.
    """

    def __init__(self, budget: CaptureBudget, peer: bytes, connected: Collection[bytes]) -> None:
        self._budget = budget
        self._peer = peer
        self._connected = connected
        self.is_held = False
        """true while the peer waits because it is over the budget"""

    def charge(self, size: float) -> float:
        """Charge bytes, or seconds of CPU, to the peer, and return for how many seconds it must wait."""
        return self._budget.spend(self._peer, size, self._connected, trio.current_time())

    async def wait(self, pause: float) -> None:
        """Wait until the peer is within the budget again, probably after `pause` seconds."""
        self.is_held = True
        while pause:
            await trio.sleep(min(pause, _CHECK_EVERY))
            pause = self.charge(0)
        self.is_held = False


class PeerAccounts(NamedTuple):
    """A peer's accounts of captured bytes, received and sent, and of the CPU for its received RPCs."""

    bytes_in: PeerAccount
    bytes_out: PeerAccount
    cpu: PeerAccount


class PubsubSession:
    """The pubsub streams with a peer: one opened by the node, and at most one per connection opened by the peer."""

    def __init__(
        self, peer: bytes, outbound: NetStream, connection: ConnectionTap, protocol: str, accounts: PeerAccounts
    ) -> None:
        self.peer = peer
        self.accounts = accounts
        self.outbound = outbound
        self.connection = connection
        self.id = connection.id
        self.protocol = protocol
        self.inbounds: list[InboundStream] = []
        self.nursery: trio.Nursery  # of the tasks of the session, once it runs
        self.queue = SendQueue()
        self.scope = trio.CancelScope()
        self.dialled = False
        self.address = ""
        self.ip = ""
        self.agent = ""  # agent version from identify; empty until it is known
        self.frames_in = self.frames_out = self.dropped = 0
        self.bytes_in = 0  # of captured frames, received
        self.bytes_paid = 0  # charged to the peer's account
        self.unpaid_cpu = 0.0  # s for received RPCs, not yet charged
        self.bytes_out = 0  # of captured frames, sent
        self.end_reason = ""

    def end(self, reason: str) -> None:
        """End the session. If it has ended already, the earlier reason is kept."""
        self.end_reason = self.end_reason or reason
        self.scope.cancel()


def open_session(
    network: str, own: bytes, peer: bytes, outbound: NetStream, protocol: str, accounts: PeerAccounts
) -> PubsubSession:
    """Create the session for a stream that the node has opened to a peer.

    Args:
        network: Name of the network, as in the captured frames.
        own: The node's peer id.
        peer: The peer id of the other side.
    """
    conn = outbound.swarm_conn
    assert conn is not None
    remote = outbound.get_remote_address()
    address = socket_address(remote)
    packed = address.to_bytes() if address else b""
    tap = ConnectionTap(network, os.urandom(CONNECTION_BYTES), own, peer, protocol, packed)
    session = PubsubSession(peer, outbound, tap, protocol, accounts)
    session.dialled = conn.direction == Direction.OUTBOUND
    session.address = str(address) if address else ""
    session.ip = remote[0] if remote else ""
    return session


class PeerLink:
    """A connected peer, with or without a pubsub session."""

    def __init__(self, peer: bytes) -> None:
        self.peer = peer
        self.id = ID(peer)
        self.disconnected = trio.Event()  # no connection is left
        self.scope = trio.CancelScope()
        self.session: PubsubSession | None = None
        self.unread_inbounds: list[InboundStream] = []  # not read yet
        self.inbound_opened = trio.Event()
        self.error = ""  # why there is no session although there is a connection
