"""The tap: bytes on the wire to serialized Frames (docs/design/contracts.md, `kiln.frames`).

No I/O and no clock. All bytes become a frame, whatever they are: the tap validates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Protocol

from kiln.schemas.kafka.frames import BEP50, CUT_PAYLOAD, MAX_MESSAGES, MAX_NOTE, MAX_RPC, find_frame_fault, read_rpc
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.times import MIN_NANOS, clamp_nanos
from kiln.schemas.wire.topic_table import find_hello

Direction = Literal["IN", "OUT"]


class Sink(Protocol):
    """A sink for captured frames: kiln.bridge.capture.sink.FrameSink, or a fake in tests."""

    def put(self, connection: bytes, frame: bytes) -> None: ...
    @property
    def full(self) -> bool: ...
    def subscribe(self, callback: Callable[[], None]) -> object:
        """`callback` is called, from any thread, when the sink is no longer full."""


class ConnectionTap:
    """One peer connection (a pair of pubsub streams): numbers its frames, and stores both hellos.

    A hello is the first RPC of a direction. The frame of a hello and all later frames, of both directions, contain its
    topic table. Not thread-safe: the frames of a direction are numbered in the order of the calls.
    """

    def __init__(
        self,
        network: str,
        connection: bytes,
        local_peer: bytes,
        remote_peer: bytes,
        protocol: str,
        remote_address: bytes = b"",
    ) -> None:
        """Set the fields that all frames of the connection share.

        Args:
            connection: Id of the connection: 16 bytes, new for each connection.
            local_peer: Our peer id, as multihash bytes.
            remote_peer: The other peer's id, as multihash bytes.

        Raises:
            ValueError: A value is beyond its limit in a Frame, so no reader would accept the connection's frames.
        """
        self.id: Final = connection
        self.hello_in = b""
        self.hello_out = b""
        self.closed = False
        fields = Frame(
            network=network,
            connection=connection,
            local_peer=local_peer,
            remote_peer=remote_peer,
            protocol=protocol,
            remote_address=remote_address,
            origin=Frame.LIVE,
        )
        self._common_fields = fields.SerializeToString()
        fields.sequence, fields.observed_at = 1, MIN_NANOS
        fault = find_frame_fault(fields)
        if fault is not None:
            raise ValueError(fault.detail)
        self._has_hellos = protocol != BEP50
        self._sequence_in = 0
        self._sequence_out = 0

    def frame(
        self,
        direction: Direction,
        payload: bytes,
        observed_at: int,
        verdicts: bytes = b"",
        declared_length: int = 0,
    ) -> bytes:
        """Make the next Frame of a direction, serialized.

        The frame of an RPC over 4 MiB contains its first 64 KiB. Either the reader has cut the RPC and passes its
        `declared_length`, or the tap cuts it.

        Args:
            payload: The RPC without its length prefix.
            observed_at: Unix time, in ns, at which the RPC was on the wire.
            verdicts: One `Verdict` byte for each message.

        Raises:
            ValueError: The connection is closed.
        """
        if self.closed:
            raise ValueError(f"cannot make a frame of connection {self.id.hex()}: it is closed")
        if len(payload) > MAX_RPC and not declared_length:
            declared_length = len(payload)
        if declared_length and len(payload) > CUT_PAYLOAD:
            payload = payload[:CUT_PAYLOAD]
        if direction == "IN":
            if not self._sequence_in and self._has_hellos and not declared_length:
                self.hello_in = _read_hello(payload)
                self._common_fields += Frame(hello_in=self.hello_in).SerializeToString()
            self._sequence_in = sequence = self._sequence_in + 1
        else:
            if not self._sequence_out and self._has_hellos and not declared_length:
                self.hello_out = _read_hello(payload)
                self._common_fields += Frame(hello_out=self.hello_out).SerializeToString()
            self._sequence_out = sequence = self._sequence_out + 1
        # A Frame is its encoded fields in any order, so the common fields are encoded once. The rest is a new object
        # each time, because a reused object retains the memory of its longest payload.
        return (
            self._common_fields
            + Frame(
                direction=Frame.IN if direction == "IN" else Frame.OUT,
                observed_at=clamp_nanos(observed_at),  # the clock may be wrong
                payload=payload,
                sequence=sequence,
                verdicts=verdicts[:MAX_MESSAGES],
                declared_length=declared_length,
            ).SerializeToString()
        )

    def close(
        self, observed_at: int, agent: str | None = None, end_reason: str = "", dialled: bool = False
    ) -> list[bytes]:
        """Make the closing frame of each direction, IN first; none if the connection is closed already.

        Args:
            agent: Agent version of the remote peer, by identify; "" if unknown. If it is given, the first frame has it
                and the arguments after it, which the connection's RPCs do not contain.
            end_reason: The reason why the connection ended.
            dialled: True if our node opened the connection.
        """
        if self.closed:
            return []
        frames = [self.frame("IN", b"", observed_at), self.frame("OUT", b"", observed_at)]
        if agent is not None:
            agent, end_reason = agent[:MAX_NOTE], end_reason[:MAX_NOTE]
            frames[0] += Frame(agent=agent, end_reason=end_reason, dialled=dialled).SerializeToString()
        self.closed = True
        return frames


def _read_hello(payload: bytes) -> bytes:
    rpc = read_rpc(payload)
    return b"" if isinstance(rpc, Rejected) else find_hello(rpc)
