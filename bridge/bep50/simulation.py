"""Many overlays in one process, in simulated time, over a network that delays and loses: for tests and measurements.

The clock jumps from one datagram or timer to the next, so a minute of a hundred nodes takes seconds, and a seed gives
the same minute each time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from random import Random

from kiln.bridge.bep50.core import Datagram, Event, OverlayEffects, OverlaySettings
from kiln.bridge.bep50.overlay import Overlay
from kiln.schemas.dht.krpc import DhtAddress

Plain = Callable[[bytes, DhtAddress, float], Iterable[Datagram]]
"""Something else that has an address: given a datagram, its source and the time, it answers."""


class Network:
    """UDP between overlays. ``loss`` is the share of datagrams that never arrive; the others take between ``delays``
    seconds each, so that they overtake one another."""

    def __init__(self, seed: int, loss: float = 0.0, delays: tuple[float, float] = (0.01, 0.1)) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.overlays: dict[DhtAddress, Overlay] = {}
        self.others: dict[DhtAddress, Plain] = {}
        self.events: dict[DhtAddress, list[Event]] = {}
        self.sent = 0
        self._loss = loss
        self._delays = delays
        self._flying: list[tuple[float, int, DhtAddress, Datagram]] = []
        self._wakeups: list[tuple[float, int, DhtAddress]] = []
        self._count = 0

    def add(
        self,
        address: DhtAddress,
        settings: OverlaySettings | None = None,
        bootstrap: Iterable[DhtAddress] = (),
        node_id: bytes | None = None,
    ) -> Overlay:
        """Start a node, with an id of chance if none is given. One at the same address is replaced."""
        random = Random(self.random.getrandbits(64))
        own_id = node_id or random.randbytes(20)
        overlay = Overlay(own_id, address.port, random, self.now, settings, bootstrap)
        self.overlays[address] = overlay
        self.events.setdefault(address, [])
        return overlay

    def stop(self, address: DhtAddress) -> None:
        """End a node, without a word."""
        del self.overlays[address]

    def carry(self, source: DhtAddress, output: OverlayEffects) -> None:
        """Take what a call of a node resulted in."""
        self.events[source] += output.events
        self._send(source, output.datagrams)
        self._wake(source)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while True:
            arrival = self._flying[0][0] if self._flying else end
            wakeup = self._wakeups[0][0] if self._wakeups else end
            if min(arrival, wakeup) >= end:
                self.now = end
                return
            if wakeup <= arrival:
                due, _, address = heapq.heappop(self._wakeups)
                overlay = self.overlays.get(address)
                if overlay is not None and overlay.deadline is not None and overlay.deadline <= due:
                    self.now = max(self.now, due)
                    self.carry(address, overlay.advance(self.now))
            else:
                self.now, _, source, datagram = heapq.heappop(self._flying)
                self._deliver(source, datagram)

    def _deliver(self, source: DhtAddress, datagram: Datagram) -> None:
        address = datagram.address
        if address in self.others:
            self._send(address, self.others[address](datagram.data, source, self.now))
        elif address in self.overlays:
            self.carry(address, self.overlays[address].receive(datagram.data, source, self.now))

    def _send(self, source: DhtAddress, datagrams: Iterable[Datagram]) -> None:
        for datagram in datagrams:
            self.sent += 1
            if self.random.random() >= self._loss:
                self._count += 1
                arrival = self.now + self.random.uniform(*self._delays)
                heapq.heappush(self._flying, (arrival, self._count, source, datagram))

    def _wake(self, address: DhtAddress) -> None:
        deadline = self.overlays[address].deadline if address in self.overlays else None
        if deadline is not None:
            self._count += 1
            heapq.heappush(self._wakeups, (deadline, self._count, address))
