"""The tap: bytes on the wire to serialized Frames (docs/design/contracts.md, `kiln.frames`).

Pure: no I/O and no clock. All bytes become a frame, whatever they are; the tap judges nothing.
"""

from __future__ import annotations

from typing import Final, Literal

from kiln.schemas.kafka.frames import BEP50, CUT_PAYLOAD, MAX_MESSAGES, MAX_RPC, frame_fault, read_rpc
from kiln.schemas.proto.kiln.frame_pb2 import Frame
from kiln.schemas.reject import Rejected
from kiln.schemas.wire.topic_table import find_hello

Direction = Literal["IN", "OUT"]


class ConnectionTap:
    """One peer connection (a pair of pubsub streams): numbers its frames, and knows both hellos.

    A hello is the first RPC of a direction. Its topic table part travels in that frame and all later ones, of both
    directions. Not thread-safe: the frames of a direction are numbered in the order of the calls.
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
        """`connection`: 16 bytes, new for each connection; peers as multihash bytes. ValueError: a value is beyond its
        bound in a Frame, so that no reader would take a frame of the connection."""
        self.id: Final = connection
        self.hello_in = b""
        self.hello_out = b""
        self.closed = False
        same = Frame(
            network=network,
            connection=connection,
            local_peer=local_peer,
            remote_peer=remote_peer,
            protocol=protocol,
            remote_address=remote_address,
            origin=Frame.LIVE,
        )
        self._same = same.SerializeToString()
        same.sequence = 1
        fault = frame_fault(same)
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
        """The next Frame of a direction, serialized.

        `payload`: the RPC without its length prefix; `observed_at`: unix nanoseconds; `verdicts`: one byte a message.
        Of an RPC over 4 MiB the frame keeps the first 64 KiB. Either the reader has cut the RPC already and gives its
        `declared_length`, or the tap cuts it. ValueError: the connection is closed.
        """
        if self.closed:
            raise ValueError(f"connection {self.id.hex()} is closed: its last frame of each direction is made")
        if len(payload) > MAX_RPC and not declared_length:
            declared_length = len(payload)
        if declared_length and len(payload) > CUT_PAYLOAD:
            payload = payload[:CUT_PAYLOAD]
        if direction == "IN":
            if not self._sequence_in and self._has_hellos and not declared_length:
                self.hello_in = _hello(payload)
                self._same += Frame(hello_in=self.hello_in).SerializeToString()
            self._sequence_in = sequence = self._sequence_in + 1
        else:
            if not self._sequence_out and self._has_hellos and not declared_length:
                self.hello_out = _hello(payload)
                self._same += Frame(hello_out=self.hello_out).SerializeToString()
            self._sequence_out = sequence = self._sequence_out + 1
        # A Frame is its encoded fields in any order, so fields that never change are encoded once. A new object each
        # time: an object that is used again keeps the memory of its longest payload.
        return (
            self._same
            + Frame(
                direction=Frame.IN if direction == "IN" else Frame.OUT,
                observed_at=max(observed_at, 0),  # a clock that stands before 1970
                payload=payload,
                sequence=sequence,
                verdicts=verdicts[:MAX_MESSAGES],
                declared_length=declared_length,
            ).SerializeToString()
        )

    def close(self, observed_at: int) -> list[bytes]:
        """The closing frame of each direction, IN first; nothing when closed already."""
        if self.closed:
            return []
        frames = [self.frame("IN", b"", observed_at), self.frame("OUT", b"", observed_at)]
        self.closed = True
        return frames


def _hello(payload: bytes) -> bytes:
    rpc = read_rpc(payload)
    return b"" if isinstance(rpc, Rejected) else find_hello(rpc)
