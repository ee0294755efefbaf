"""A connected peer: the streams with the peer, and the RPCs that wait to be sent."""

from __future__ import annotations

from collections import deque

import trio
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID

from kiln.bridge.capture.tap import ConnectionTap


class SendQueue:
    """Serialized RPCs that wait to be written to one peer, in two lanes. The lane with priority goes first."""

    def __init__(self) -> None:
        self._lanes: dict[bool, deque[bytes]] = {False: deque(), True: deque()}
        self._bytes = {False: 0, True: 0}
        self.filled = trio.Event()

    @property
    def waiting_bytes(self) -> int:
        """Bytes in both lanes."""
        return self._bytes[False] + self._bytes[True]

    def put(self, payload: bytes, priority: bool, most: int) -> bool:
        """Whether there was room: at most that many bytes in a lane, or one RPC of any size."""
        size = self._bytes[priority] + len(payload)
        if size > most and self._lanes[priority]:
            return False
        self._bytes[priority] = size
        self._lanes[priority].append(payload)
        self.filled.set()
        return True

    def take(self, most: int) -> list[bytes]:
        """At least one RPC if there is any, and no more than `most` bytes of others."""
        taken: list[bytes] = []
        room = most
        for priority in (True, False):
            lane = self._lanes[priority]
            while lane and (not taken or len(lane[0]) <= room):
                payload = lane.popleft()
                room -= len(payload)
                self._bytes[priority] -= len(payload)
                taken.append(payload)
            if lane:
                return taken
        self.filled = trio.Event()
        return taken


class InboundStream:
    """A pubsub stream that a peer opened to the node. libp2p's handler waits until `done`."""

    def __init__(self, stream: NetStream) -> None:
        self.stream = stream
        self.done = trio.Event()


class PubsubSession:
    """The stream pair with a peer: the node's stream to the peer, and the peer's stream once the peer opened it."""

    def __init__(self, outbound: NetStream, connection: ConnectionTap, protocol: str) -> None:
        self.outbound = outbound
        self.connection = connection
        self.id = connection.id
        self.protocol = protocol
        self.inbound: InboundStream | None = None
        self.queue = SendQueue()
        self.scope = trio.CancelScope()
        self.dialled = False
        self.address = ""
        self.ip = ""
        self.agent = ""  # as far as the router was told
        self.frames_in = self.frames_out = self.dropped = 0
        self.bytes_in = 0  # of captured frames
        self.bytes_spent = 0  # of the peer's budget
        self.held_back = False
        self.cpu = 0.0  # seconds that reading its RPCs took, not spent of its budget yet
        self.cpu_held = False
        self.bytes_out = 0  # of captured frames
        self.sent_slowly = False
        self.end_reason = ""

    def end(self, reason: str) -> None:
        """Ends the session. `reason`: in words, for the log; the first counts."""
        self.end_reason = self.end_reason or reason
        self.scope.cancel()


class PeerLink:
    """A connected peer, whether or not it speaks pubsub."""

    def __init__(self, peer: bytes) -> None:
        self.peer = peer
        self.id = ID(peer)
        self.gone = trio.Event()  # no connection is left
        self.scope = trio.CancelScope()
        self.session: PubsubSession | None = None
        self.offered: InboundStream | None = None  # not read yet
        self.offer = trio.Event()
