"""A libp2p host with subclasses of py-libp2p's streams, connections and swarm. Each override states its reason.

inflow.py has the overrides for reading, and patches.py the changes that no subclass can make. docs/performance.md gives
the CPU of a frame with and without them.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p import new_host
from libp2p.abc import (
    IMuxedConn,
    IMuxedStream,
    INetConn,
    INetStream,
    INetwork,
    INotifee,
    IRawConnection,
    ISecureConn,
)
from libp2p.crypto import ed25519 as libp2p_ed25519
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as new_noise_key
from libp2p.custom_types import THandler, TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IncompleteReadError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import (
    DEFAULT_WINDOW_SIZE,
    GO_AWAY_NORMAL,
    HEADER_SIZE,
    MAX_MESSAGE_SIZE,
    TYPE_DATA,
    YAMUX_HEADER_FORMAT,
    Yamux,
    YamuxStream,
)
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.transport.tcp.tcp import TCP, TCPListener
from multiaddr import Multiaddr

from kiln.bridge.libp2p.closing import shielded
from kiln.bridge.libp2p.inflow import BufferedTCP, InflowNoise, InflowSession
from kiln.bridge.libp2p.patches import change_class, keep_own_key, patch_process
from kiln.bridge.libp2p.slots import InboundSlots

CREDIT_BYTES: Final = 64 * 1024  # read bytes after which a window update is sent
MAX_STREAMS: Final = 256  # of one connection; go-libp2p allows a peer fewer

_WINDOW_POLL: Final = 0.02  # s
_CLOSE_TIMEOUT: Final = 5.0  # s from the end of a connection until its socket is closed in any case
_NO_LIMIT: Final = 1 << 30  # connections


class _BufferedListener(TCPListener):
    def __init__(self, handler: THandler) -> None:
        async def handle_buffered(stream: ReadWriteCloser) -> None:
            if type(stream) is TrioTCPStream:
                stream = BufferedTCP(stream.stream)
            await handler(stream)

        super().__init__(handle_buffered)


class BufferedTCPTransport(TCP):
    """A TCP transport whose connections are `BufferedTCP`s."""

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        raw = await super().dial(maddr)
        if isinstance(raw, RawConnection) and type(raw.stream) is TrioTCPStream:
            raw.stream = BufferedTCP(raw.stream.stream)
        return raw

    def create_listener(self, handler_function: THandler) -> TCPListener:
        return _BufferedListener(handler_function)


class GossipStream(YamuxStream):
    """A yamux stream without these faults of py-libp2p:

    * When the connection ends, received bytes that were not read yet are discarded.
    * Each read takes a lock and sends a window update. Here, an update follows after CREDIT_BYTES.
    * The receive window grows to 16 MiB, so each peer can make the node buffer that much while it does not read.
    * A write is aborted after 5 s without window, in the middle of a message. This ends the stream of any peer that
      pauses.
    """

    _unacknowledged = 0  # bytes read, for which no window update was sent
    _unread = b""  # received bytes that were not read when the connection ended

    def retain_unread(self) -> None:
        """Keep the unread bytes of this stream readable after its connection has ended."""
        buffer = self.conn.stream_buffers.get(self.stream_id)
        if buffer:
            self._unread += bytes(buffer)
            buffer.clear()

    def take_unread(self) -> bytes:
        """Read all received bytes at once, without waiting and without a window update."""
        self.retain_unread()
        unread, self._unread = self._unread, b""
        return unread

    async def read(self, n: int | None = -1) -> bytes:
        """Read at most `n` received bytes, or all of them if `n` is negative or `None`. Wait if there are none.

        After the connection has ended, all remaining bytes are returned at once.

        Raises:
            MuxedStreamEOF: The stream has ended.
            MuxedStreamReset: The stream was reset.
        """
        conn, number = self.conn, self.stream_id
        while True:
            buffer = conn.stream_buffers.get(number)
            if buffer:
                if n is None or n < 0 or n >= len(buffer):
                    data = bytes(buffer)
                    buffer.clear()
                else:
                    data = bytes(buffer[:n])
                    del buffer[:n]
                self._unacknowledged += len(data)
                if self.closed and not buffer:
                    await conn._finalize_stream(self, fully_closed=True)
                elif self._unacknowledged >= CREDIT_BYTES and not self.recv_closed:
                    credit, self._unacknowledged = self._unacknowledged, 0
                    self.recv_window += credit
                    await self.send_window_update(credit)
                return data
            if self._unread:
                return self.take_unread()
            event = conn.stream_events.get(number)
            if self.reset_received:
                raise MuxedStreamReset("the stream was reset")
            if buffer is None or event is None or self.recv_closed or self.closed or conn.event_shutting_down.is_set():
                raise MuxedStreamEOF("the stream has ended")
            await event.wait()
            if number in conn.stream_events:
                conn.stream_events[number] = trio.Event()

    async def wait_for_window(self) -> None:
        """Wait until the send window has room.

        Raises:
            MuxedStreamError: The stream is closed.
        """
        while self.send_window <= 0:
            if self.closed or self.send_closed:
                raise MuxedStreamError("the stream is closed")
            await trio.sleep(_WINDOW_POLL)

    async def write(self, data: bytes) -> None:
        """Write all bytes, and wait for window as long as the caller's cancel scope allows.

        A cancelled write may have sent a part of a frame, so the connection cannot be used any more.

        Raises:
            MuxedStreamError: The stream is closed.
        """
        view, sent, total = memoryview(data), 0, len(data)
        while sent < total:
            if self.closed or self.send_closed:
                raise MuxedStreamError("the stream is closed")
            size = min(self.send_window, MAX_MESSAGE_SIZE - HEADER_SIZE, total - sent)
            if size <= 0:
                await trio.sleep(_WINDOW_POLL)
                continue
            self.send_window -= size
            header = struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_DATA, 0, self.stream_id, size)
            await self.conn._write_frame(header + view[sent : sent + size])
            sent += size


class GossipYamux(Yamux):
    """A yamux connection of `GossipStream`s. It ends if the peer opens more than MAX_STREAMS or exceeds a window."""

    async def open_stream(self) -> YamuxStream:
        return change_class(await super().open_stream(), GossipStream)

    async def accept_stream(self) -> IMuxedStream:
        stream = await super().accept_stream()
        if len(self.streams) > MAX_STREAMS:
            await self.secured_conn.close()
        return change_class(stream, GossipStream) if isinstance(stream, YamuxStream) else stream

    async def close(self, error_code: int = GO_AWAY_NORMAL) -> None:
        self._retain_unread()
        await super().close(error_code)

    async def _cleanup_on_error(self) -> None:
        self._retain_unread()
        await super()._cleanup_on_error()

    def _retain_unread(self) -> None:
        for stream in self.streams.values():
            if isinstance(stream, GossipStream):
                stream.retain_unread()

    async def handle_incoming(self) -> None:
        if isinstance(self.secured_conn, InflowSession):
            self.secured_conn.attach(self)
        await super().handle_incoming()

    async def _read_data_body(self, length: int) -> bytes:
        # py-libp2p accepts a frame of up to 16 MiB, and buffers bytes beyond the window
        if length > DEFAULT_WINDOW_SIZE or any(
            len(buffer) > DEFAULT_WINDOW_SIZE for buffer in self.stream_buffers.values()
        ):
            raise trio.TooSlowError  # the receive loop treats it as the end of the connection
        # py-libp2p has a timeout around each body, which costs CPU; a peer that stalls only stalls its own connection
        secured = self.secured_conn
        data = await (secured.read_body(length) if isinstance(secured, InflowSession) else secured.read(length))
        if len(data) != length:
            raise IncompleteReadError(
                "the connection ended inside a yamux frame", expected_bytes=length, received_bytes=len(data)
            )
        return data


class _Muxer(MuxerMultistream):
    """Muxer selection that creates the registered class. py-libp2p always creates its own Yamux."""

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        protocol, muxer = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return self._annotate_connection(muxer(conn, peer_id), conn, protocol)


class _Swarm(Swarm):
    """A swarm whose inbound connections take one of `InboundSlots` each, and free it when they end.

    py-libp2p frees slots only when the swarm ends. So it accepts `max_connections` inbound connections in the whole
    life of the node, and then refuses all others.
    """

    slots: InboundSlots

    async def _handle_inbound_connection(self, read_write_closer: ReadWriteCloser, maddr: Multiaddr) -> None:
        remote = read_write_closer.get_remote_address()
        evicted = self.slots.take(read_write_closer, remote[0] if remote else "")
        try:
            if evicted is not None:
                with shielded(_CLOSE_TIMEOUT):
                    await evicted.stream.close()
                if evicted.stream is read_write_closer:
                    return
            await super()._handle_inbound_connection(read_write_closer, maddr)
        finally:
            self.slots.release(read_write_closer)

    async def upgrade_inbound_raw_conn(self, raw_conn: IRawConnection, maddr: Multiaddr) -> IMuxedConn:
        """Upgrade an inbound connection, wait until it ends, and then raise an exception.

        The caller then frees the connection's slot and task. Without an exception, it waits until the swarm ends.

        Raises:
            SwarmException: The handshake has failed, or the connection has ended.
        """
        try:
            muxed = await super().upgrade_inbound_raw_conn(raw_conn, maddr)
        except SwarmException:
            self.slots.counters["handshakes_failed"] += 1
            raise
        if isinstance(raw_conn, RawConnection):
            self.slots.identify(raw_conn.stream, muxed.peer_id.to_bytes())
        if isinstance(muxed, Yamux):
            await muxed.event_shutting_down.wait()
            with trio.move_on_after(_CLOSE_TIMEOUT):
                await muxed.event_closed.wait()
        raise SwarmException("the connection has ended")


class ConnectionEvents(INotifee):
    """Passes libp2p's events of connections to two callbacks, which must not block because libp2p waits for them."""

    def __init__(self, connected: Callable[[INetConn], None], disconnected: Callable[[bytes], None]) -> None:
        """Set the callbacks. `disconnected` gets the peer id, each time that a connection with the peer has ended."""
        self._connected = connected
        self._disconnected = disconnected

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._connected(conn)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._disconnected(conn.muxed_conn.peer_id.to_bytes())

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


class _NoDialling(AutoConnector):
    """An auto-connector that never dials. py-libp2p's own dials addresses that peers advertise."""

    async def maybe_connect(self) -> None:
        return


def make_host(key: Ed25519PrivateKey, agent: str, slots: InboundSlots) -> BasicHost:
    """Create a host on TCP, noise and yamux that never dials by itself. It answers ping, identify and identify/push.

    Unlike py-libp2p's default host, it has no plaintext and secio (no or old encryption), no mplex (no flow control),
    no TLS, mDNS, UPnP or bootstrap list, and no resource manager, whose limits are not reported.

    Args:
        slots: Limits the inbound connections. Outbound ones are limited by the code that dials.
    """
    # py-libp2p clears its handlers, so its warnings about peers would reach stderr through logging.lastResort
    libp2p_log = logging.getLogger("libp2p")
    if not libp2p_log.handlers:
        libp2p_log.addHandler(logging.NullHandler())
    patch_process(agent)
    private = libp2p_ed25519.Ed25519PrivateKey.from_bytes(key.private_bytes_raw())
    pair = KeyPair(private, private.get_public_key())
    host = new_host(
        key_pair=pair,
        sec_opt={NOISE: InflowNoise(pair, noise_privkey=new_noise_key().private_key)},
        transports=[BufferedTCPTransport()],
        connection_config=ConnectionConfig(
            max_connections=_NO_LIMIT, min_connections=0, low_watermark=0, high_watermark=_NO_LIMIT
        ),
        disable_identify_address_discovery=True,
    )
    assert isinstance(host, BasicHost)
    keep_own_key(host)
    swarm = change_class(get_swarm(host), _Swarm)
    swarm.slots = slots
    swarm.upgrader.muxer_multistream = _Muxer({TProtocol(YAMUX): GossipYamux})
    swarm.set_resource_manager(None)
    swarm.retry_config = RetryConfig(max_retries=0)
    swarm.auto_connector = _NoDialling(swarm)
    return host


def get_swarm(host: BasicHost) -> Swarm:
    """Return the network of a host, typed as a Swarm."""
    network = host.get_network()
    assert isinstance(network, Swarm)
    return network
