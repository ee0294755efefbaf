"""The overlay on real sockets: UDP, by trio. All that is decided is decided in `kiln.bridge.bep50.overlay`."""

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
    """A UDP socket on an IP address (no name); port 0: any that is free. Raises OSError, which names the address."""
    address = DhtAddress.parse(host, port)
    family = trio.socket.AF_INET if address.family == 4 else trio.socket.AF_INET6
    sock = trio.socket.socket(family, trio.socket.SOCK_DGRAM)
    try:
        if address.family == 6:  # IPv4 has a socket of its own
            sock.setsockopt(trio.socket.IPPROTO_IPV6, trio.socket.IPV6_V6ONLY, 1)
        await sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on UDP {address.text}: {error.strerror}") from error
    return sock


class Endpoint:
    """Carries datagrams between an overlay and its sockets, one for each address family, and tells it the time.

    ``handle`` is given the events of each step *before* the datagrams of that step are sent: an item that it has kept
    by then is one that no restart can take back. It is a plain function, called in the trio thread.
    """

    def __init__(
        self,
        overlay: Overlay,
        sockets: Sequence[trio.socket.SocketType],
        handle: Callable[[Sequence[Event]], None],
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``room`` is awaited before each datagram is read: where it waits, others find us silent."""
        self._overlay = overlay
        self._sockets: dict[Family, trio.socket.SocketType] = {
            4 if each.family == trio.socket.AF_INET else 6: each for each in sockets
        }
        self._handle = handle
        self._room = room
        self._changed = trio.Event()
        self.unsent: Counter[str] = Counter()
        """Datagrams that the system did not take, by the name of the error. UDP may lose any."""

    async def run(self) -> None:
        """Serve until cancelled; the sockets are closed then."""
        try:
            async with trio.open_nursery() as nursery:
                for family, sock in self._sockets.items():
                    nursery.start_soon(self._receive, family, sock)
                nursery.start_soon(self._keep_time)
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
        await self._carry(self._overlay.subscribe(key, salt, trio.current_time(), stored, contacts, publishing))

    async def unsubscribe(self, target: bytes) -> None:
        """See `Overlay.unsubscribe`."""
        await self._carry(self._overlay.unsubscribe(target, trio.current_time()))

    async def publish(self, item: Item) -> None:
        """See `Overlay.publish`."""
        await self._carry(self._overlay.publish(item, trio.current_time()))

    async def _receive(self, family: Family, sock: trio.socket.SocketType) -> None:
        while True:
            if self._room is not None:
                await self._room()
            data, (host, port, *_) = await sock.recvfrom(MAX_DATAGRAM + 1)
            source = DhtAddress(trio.socket.inet_pton(sock.family, host.partition("%")[0]), port)
            await self._carry(self._overlay.receive(data, source, trio.current_time()))

    async def _keep_time(self) -> None:
        while True:
            deadline = self._overlay.deadline
            self._changed = trio.Event()
            with trio.move_on_at(math.inf if deadline is None else deadline):
                await self._changed.wait()
            await self._carry(self._overlay.advance(trio.current_time()))

    async def _carry(self, output: OverlayEffects) -> None:
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
        except OSError as error:  # as if it were lost on its way
            self.unsent[type(error).__name__] += 1
