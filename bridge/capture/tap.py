"""Make serialized Frames (docs/design/contracts.md, `kiln.frames`) from the RPCs on a connection.

The payload of a Frame is the bytes that were on the wire. They are not validated, so any bytes become a Frame.
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
    """Interface of a queue for captured frames, such as `FrameSink`."""

    def put(self, connection: bytes, frame: bytes) -> None: ...
    @property
    def full(self) -> bool: ...
    def subscribe(self, callback: Callable[[], None]) -> object:
        """Call `callback`, in any thread, each time `full` becomes false."""


class ConnectionTap:
    """Makes the Frames of one connection to a peer (a pair of pubsub streams), and numbers them in each direction.

    The first RPC of a direction may contain a hello, a list of topic bundles. The tap adds the hello to the Frame of
    this RPC and to all later Frames of both directions, because their topic indices need it. Not thread-safe.
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
        """Set the fields that all Frames of the connection share.

        Args:
            connection: Id of the connection: 16 bytes, new for each connection.
            local_peer: Our peer id, as multihash bytes.
            remote_peer: The other peer's id, as multihash bytes.

        Raises:
            ValueError: A value exceeds its limit in a Frame, so no reader would accept the connection's Frames.
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
        """Return the next Frame of a direction, serialized.

        An RPC over 4 MiB is cut: its Frame contains only the first 64 KiB.

        Args:
            payload: The RPC without its length prefix. The caller may have cut an RPC over 4 MiB.
            observed_at: Unix time, in ns, at which the RPC was on the wire.
            verdicts: One `Verdict` byte for each message of the RPC.
            declared_length: Size of the whole RPC in bytes, if the caller has cut it; otherwise 0.

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
        """Return the closing Frame of each direction, IN first; no Frames if the connection is closed already.

        Args:
            observed_at: Unix time, in ns, at which the connection ended.
            agent: Agent version of the remote peer, from identify; "" if unknown. With `None`, this and the arguments
                below are not written; otherwise they are fields of the first closing Frame.
            end_reason: Text that says why the connection ended.
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
