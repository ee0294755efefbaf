"""Run the overlay on UDP sockets, with trio. The protocol itself is in `kiln.bridge.bep50.overlay`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import trio

from kiln.bridge.bep50.core import Datagram, Event, OverlayEffects
from kiln.bridge.bep50.overlay import Overlay
from kiln.schemas.dht.items import Item
from kiln.schemas.dht.krpc import MAX_DATAGRAM, DhtAddress, Family


async def bind(host: str, port: int) -> trio.socket.SocketType:
    """Bind a UDP socket.

    Args:
        host: An IP address, not a host name.
        port: The port, or 0 for any free port.

    Raises:
        OSError: The address cannot be bound. The message has the address.
    """
    address = DhtAddress.parse(host, port)
    family = trio.socket.AF_INET if address.family == 4 else trio.socket.AF_INET6
    sock = trio.socket.socket(family, trio.socket.SOCK_DGRAM)
    try:
        if address.family == 6:  # IPv4 uses a separate socket
            sock.setsockopt(trio.socket.IPPROTO_IPV6, trio.socket.IPV6_V6ONLY, 1)
        await sock.bind((host, port))
    except OSError as error:
        sock.close()
        text = f"cannot listen on UDP {address.text} ({error.strerror}). Change bep50.listen."
        raise OSError(error.errno, text) from error
    return sock


class Endpoint:
    """Runs an overlay: gives it the received datagrams and the time, and sends the datagrams that it returns.

    Args:
        sockets: One UDP socket for each address family.
        handle: Called in the trio thread after each call to the overlay, with the events that the call returned. The
            datagrams of the call are sent only then, so that a new item can be stored before other nodes get it.
        wait_for_room: Awaited before each datagram is read. While it waits, our node does not respond to others.
    """

    def __init__(
        self,
        overlay: Overlay,
        sockets: Sequence[trio.socket.SocketType],
        handle: Callable[[Sequence[Event]], None],
        wait_for_room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._overlay = overlay
        self._sockets: dict[Family, trio.socket.SocketType] = {
            4 if opened.family == trio.socket.AF_INET else 6: opened for opened in sockets
        }
        self._handle = handle
        self._wait_for_room = wait_for_room
        self._changed = trio.Event()
        self.unsent: Counter[str] = Counter()
        """Number of datagrams that could not be sent, by the name of the error."""

    async def run(self) -> None:
        """Send and receive until cancelled, then close the sockets."""
        try:
            async with trio.open_nursery() as nursery:
                for family, sock in self._sockets.items():
                    nursery.start_soon(self._receive, family, sock)
                nursery.start_soon(self._run_timers)
        finally:
            for sock in self._sockets.values():
                sock.close()

    async def subscribe(
        self,
        key: bytes,
        salt: bytes,
        stored: Item | None = None,
        contacts: Sequence[DhtAddress] = (),
        publishing: bool = False,
    ) -> None:
        """See `Overlay.subscribe`."""
        await self._apply(self._overlay.subscribe(key, salt, trio.current_time(), stored, contacts, publishing))

    async def unsubscribe(self, target: bytes) -> None:
        """See `Overlay.unsubscribe`."""
        await self._apply(self._overlay.unsubscribe(target, trio.current_time()))

    async def publish(self, item: Item) -> None:
        """See `Overlay.publish`."""
        await self._apply(self._overlay.publish(item, trio.current_time()))

    async def _receive(self, family: Family, sock: trio.socket.SocketType) -> None:
        while True:
            if self._wait_for_room is not None:
                await self._wait_for_room()
            data, (host, port, *_) = await sock.recvfrom(MAX_DATAGRAM + 1)
            source = DhtAddress(trio.socket.inet_pton(sock.family, host.partition("%")[0]), port)
            await self._apply(self._overlay.receive(data, source, trio.current_time()))

    async def _run_timers(self) -> None:
        while True:
            deadline = self._overlay.deadline
            self._changed = trio.Event()
            with trio.move_on_at(math.inf if deadline is None else deadline):
                await self._changed.wait()
            await self._apply(self._overlay.advance(trio.current_time()))

    async def _apply(self, output: OverlayEffects) -> None:
        if output.events:
            self._handle(output.events)
        self._changed.set()
        for datagram in output.datagrams:
            await self._send(datagram)

    async def _send(self, datagram: Datagram) -> None:
        address = datagram.address
        sock = self._sockets.get(address.family)
        if sock is None:
            self.unsent["no_socket"] += 1
            return
        try:
            await sock.sendto(datagram.data, (address.host, address.port))
        except OSError as error:  # like a datagram lost on the network
            self.unsent[type(error).__name__] += 1
