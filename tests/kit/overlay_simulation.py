"""Many overlays in one process, in simulated time, over a network with delay and loss.

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

Responder = Callable[[bytes, DhtAddress, float], Iterable[Datagram]]
"""A peer that is no overlay: takes a datagram, its source and the time, and returns its response datagrams."""


class Network:
    """UDP between overlays.

    Args:
        loss: The share of datagrams that never arrive.
        delays: The shortest and the longest delay in seconds; datagrams overtake one another.
    """

    def __init__(self, seed: int, loss: float = 0.0, delays: tuple[float, float] = (0.01, 0.1)) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.overlays: dict[DhtAddress, Overlay] = {}
        self.responders: dict[DhtAddress, Responder] = {}
        self.events: dict[DhtAddress, list[Event]] = {}
        self.sent = 0
        self._loss = loss
        self._delays = delays
        self._in_flight: list[tuple[float, int, DhtAddress, Datagram]] = []
        self._wakeups: list[tuple[float, int, DhtAddress]] = []
        self._count = 0

    def add(
        self, address: DhtAddress, settings: OverlaySettings | None = None, bootstrap: Iterable[DhtAddress] = ()
    ) -> Overlay:
        """Start a node. It replaces a node at the same address."""
        random = Random(self.random.getrandbits(64))
        overlay = Overlay(random.randbytes(20), address.port, random, self.now, settings, bootstrap)
        self.overlays[address] = overlay
        self.events.setdefault(address, [])
        return overlay

    def stop(self, address: DhtAddress) -> None:
        """Stop a node without notice to the others."""
        del self.overlays[address]

    def apply(self, source: DhtAddress, output: OverlayEffects) -> None:
        """Record the events of a node's call, and send its datagrams."""
        self.events[source] += output.events
        self._send(source, output.datagrams)
        self._schedule_wakeup(source)

    def run(self, seconds: float) -> None:
        """Advance the simulated time."""
        end = self.now + seconds
        while True:
            arrival = self._in_flight[0][0] if self._in_flight else end
            wakeup = self._wakeups[0][0] if self._wakeups else end
            if min(arrival, wakeup) >= end:
                self.now = end
                return
            if wakeup <= arrival:
                due, _, address = heapq.heappop(self._wakeups)
                overlay = self.overlays.get(address)
                if overlay is not None and overlay.deadline is not None and overlay.deadline <= due:
                    self.now = max(self.now, due)
                    self.apply(address, overlay.advance(self.now))
            else:
                self.now, _, source, datagram = heapq.heappop(self._in_flight)
                self._deliver(source, datagram)

    def _deliver(self, source: DhtAddress, datagram: Datagram) -> None:
        address = datagram.address
        if address in self.responders:
            self._send(address, self.responders[address](datagram.data, source, self.now))
        elif address in self.overlays:
            self.apply(address, self.overlays[address].receive(datagram.data, source, self.now))

    def _send(self, source: DhtAddress, datagrams: Iterable[Datagram]) -> None:
        for datagram in datagrams:
            self.sent += 1
            if self.random.random() >= self._loss:
                self._count += 1
                arrival = self.now + self.random.uniform(*self._delays)
                heapq.heappush(self._in_flight, (arrival, self._count, source, datagram))

    def _schedule_wakeup(self, address: DhtAddress) -> None:
        deadline = self.overlays[address].deadline if address in self.overlays else None
        if deadline is not None:
            self._count += 1
            heapq.heappush(self._wakeups, (deadline, self._count, address))
