"""A fast path for received yamux data frames, from TCP to the buffers of streams.

py-libp2p passes each frame through twenty coroutines, four locks and four formatted debug lines (docs/performance.md
gives the CPU of a frame). Frames of other types, or with flags, still take py-libp2p's path.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import trio
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.io import NoiseTransportReadWriter
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, HEADER_SIZE, Yamux

from kiln.bridge.libp2p.patches import change_class

READ_BYTES: Final = 256 * 1024

_CHECKPOINT_INTERVAL: Final = 32  # yamux frames
_PLAIN_DATA: Final = bytes(4)  # start of the header: version 0, type data, no flags
_STREAM_AND_LENGTH: Final = Struct(">4xII")


class BufferedTCP(TrioTCPStream):
    """A TCP stream that reads ahead, because each read is a system call.

    Noise needs two reads for each of its messages: one for the 2 bytes of the length, and one for the message.
    """

    _ahead = b""
    _at = 0

    async def read(self, n: int | None = None) -> bytes:
        if n == 0:
            return b""
        ahead, start = self._ahead, self._at
        if start >= len(ahead):
            ahead, start = await super().read(READ_BYTES), 0
            self._ahead = ahead
        end = len(ahead) if n is None else min(start + n, len(ahead))
        self._at = end
        return ahead[start:end]

    def next_noise_message(self) -> bytes | None:
        """Return the next noise message without its length, or `None` if it is not yet buffered completely."""
        ahead, start = self._ahead, self._at + 2
        if start > len(ahead):
            return None
        end = start + (ahead[start - 2] << 8 | ahead[start - 1])
        if end > len(ahead):
            return None
        self._at = end
        return ahead[start:end]


class InflowSession(SecureSession):
    """A noise session that moves yamux data frames directly into the buffers of their streams.

    This happens when yamux reads a header. The read consumes data frames that have no flags and belong to an open
    stream, and returns the header of the first other frame.
    """

    _yamux: Yamux | None = None
    _tcp: BufferedTCP | None = None
    _plain = b""
    _at = 0  # read position in `_plain`

    def attach(self, yamux: Yamux) -> None:
        """Set the yamux connection that owns the streams. From now on, the received bytes must be its frames."""
        self._yamux = yamux
        noise = self.conn
        raw = noise.read_writer.read_write_closer if isinstance(noise, NoiseTransportReadWriter) else None
        stream = raw.stream if isinstance(raw, RawConnection) else None
        self._tcp = stream if isinstance(stream, BufferedTCP) else None

    async def read(self, n: int | None = None) -> bytes:
        """Read `n` bytes. If a yamux connection is attached and `n` is HEADER_SIZE, read the next yamux header."""
        if n == HEADER_SIZE and self._yamux is not None:
            return await self._read_header(self._yamux)
        if n is not None:
            return await self.read_body(n)
        first = await self.read_body(1)
        rest, self._plain, self._at = self._plain[self._at :], b"", 0
        return first + rest

    async def read_body(self, n: int) -> bytes:
        """Read `n` bytes, which are not a yamux header. Return fewer only if the connection ends.

        Raises:
            ConnectionClosedError: The connection ends before the first byte.
        """
        start = self._at
        end = start + n
        if end <= len(self._plain):
            self._at = end
            return self._plain[start:end]
        parts = [self._plain[start:]]
        size = len(parts[0])
        self._plain, self._at = b"", 0
        noise, tcp = self.conn, self._tcp
        while size < n:
            encrypted = tcp.next_noise_message() if tcp is not None else None
            try:
                if encrypted is not None and isinstance(noise, NoiseTransportReadWriter):
                    part = noise.decrypt(encrypted)
                else:
                    part = await noise.read_msg()
                if not part:  # to py-libp2p, an empty message is the end of the connection
                    raise ConnectionClosedError("Connection closed")
            except ConnectionClosedError:
                if not size:
                    raise
                return b"".join(parts)
            size += len(part)
            parts.append(part)
        surplus = size - n
        if surplus:
            self._plain = parts[-1]
            self._at = len(self._plain) - surplus
            parts[-1] = self._plain[: self._at]
        return b"".join(parts)

    async def _read_header(self, yamux: Yamux) -> bytes:
        streams, buffers, events = yamux.streams, yamux.stream_buffers, yamux.stream_events
        frames = 0
        while True:
            header = await self.read_body(HEADER_SIZE)
            if not header.startswith(_PLAIN_DATA) or len(header) != HEADER_SIZE:
                return header
            number, length = _STREAM_AND_LENGTH.unpack(header)
            stream = streams.get(number)
            if stream is None or stream.closed or length > DEFAULT_WINDOW_SIZE:
                return header
            data = await self.read_body(length) if length else b""
            if len(data) != length:
                raise IncompleteReadError(
                    "the connection ended inside a yamux frame", expected_bytes=length, received_bytes=len(data)
                )
            # nothing awaits up to the checkpoint, so no lock is needed; the stream may have ended during the read
            buffer, event = buffers.get(number), events.get(number)
            if buffer is not None and event is not None:
                buffer += data
                stream.recv_window -= length
                if len(buffer) > DEFAULT_WINDOW_SIZE:
                    raise trio.TooSlowError  # ends the connection; py-libp2p only logs that a peer exceeds its window
                event.set()
            frames += 1
            if not frames % _CHECKPOINT_INTERVAL:
                await trio.lowlevel.checkpoint()


class InflowNoise(NoiseTransport):
    """A noise transport whose sessions are `InflowSession`s."""

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        return _as_inflow_session(await super().secure_inbound(conn))

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        return _as_inflow_session(await super().secure_outbound(conn, peer_id))


def _as_inflow_session(session: ISecureConn) -> ISecureConn:
    return change_class(session, InflowSession) if type(session) is SecureSession else session
